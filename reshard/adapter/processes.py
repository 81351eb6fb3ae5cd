"""CPU-bound Python work, such as reading ten thousand pickles, on several processors.

The work runs in forked processes, because the interpreter lock lets only one thread run Python code at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")

# Fewest jobs per process. Starting a process and fetching its result costs as much as reading a few dozen pickles.
_FEWEST = 64


def in_processes(jobs: Sequence[J], perform: Callable[[Sequence[J]], R]) -> list[R]:
    """The results of `perform` for consecutive batches of the jobs, in the order of the jobs.

    All jobs are one batch in this process if there are few jobs, if there is only one processor, if the process has another thread (threads
    do not survive a fork), and on systems other than Linux.

    Raises: what `perform` raises for the first batch that fails.
    """
    count = min(os.cpu_count() or 1, 8, max(1, len(jobs) // _FEWEST))
    if count == 1 or threading.active_count() > 1 or not sys.platform.startswith("linux"):
        return [perform(jobs)]
    batches = [jobs[len(jobs) * i // count : len(jobs) * (i + 1) // count] for i in range(count)]
    fork = multiprocessing.get_context("fork")
    pipes, children = [], []
    for batch in batches[1:]:
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=_perform, args=(sender, perform, batch), daemon=True)
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    try:
        return [perform(batches[0]), *(_result(pipe) for pipe in pipes)]
    finally:
        for pipe, child in zip(pipes, children, strict=True):
            pipe.close()
            child.terminate()
            child.join()


def _perform(sender: object, perform: Callable[[Sequence[J]], R], batch: Sequence[J]) -> None:
    try:
        answer = True, perform(batch)
    except Exception as error:
        answer = False, error  # type: ignore[assignment]
    sender.send_bytes(pickle.dumps(answer, protocol=5))  # type: ignore[attr-defined]


def _result(pipe: object) -> R:  # type: ignore[type-var]
    try:
        succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[attr-defined]
    except EOFError:
        raise RuntimeError("a process that read a part of the files died; the system may have run out of memory") from None
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]
