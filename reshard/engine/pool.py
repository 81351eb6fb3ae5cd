"""Effort: how much of the machine may be used. Jobs on threads: each worker has its own buffers, results come in the order of completion,
and an interruption stops all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

from reshard.errors import RequestError
from reshard.geometry.boxes import BLOCK_ELEMENTS
from reshard.geometry.value import value

Job = TypeVar("Job")
Result = TypeVar("Result")

DEFAULT_MEMORY = 256 << 20
"""Bytes of buffers, if the caller sets no limit."""


@value
class Effort:
    """How much of the machine a verb may use."""

    workers: int | None = None
    """Threads; None: one per processor, at most 8."""
    memory: int | None = None
    """The most bytes of all buffers; None: `DEFAULT_MEMORY`."""
    progress: Callable[[int], None] | None = None
    """Called with the number of bytes done since the last call."""
    source_checksums: bool = True
    """Whether what is read is compared with the CRC-32 that the source holds of it."""
    verify_source: bool = False
    """Whether files are first read whole and compared with recorded SHA-256."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise RequestError(f"`workers={self.workers}`: at least one thread is needed", do="Leave it out for one per processor")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Effort:
        """The effort of the keywords EffortOptions, in which sizes are numbers: `checked_keywords` has read texts such as 1GiB."""
        return cls(**options)

    def report(self, nbytes: int) -> None:
        """Tell the caller that `nbytes` more bytes are done."""
        if self.progress:
            self.progress(nbytes)

    def threads(self, itemsize: int, *, buffers: int) -> int:
        """The number of threads: `workers` (default: one per processor, at most 8), or fewer if their buffers do not fit into the memory.

        itemsize: the bytes of the widest element. buffers: the blocks of such elements that each thread needs.

        Raises: RequestError if the buffers of one thread do not fit.
        """
        per_worker = buffers * BLOCK_ELEMENTS * itemsize
        most = (DEFAULT_MEMORY if self.memory is None else self.memory) // per_worker
        if most < 1 and self.memory is not None:
            raise RequestError(
                f"`memory=` of {self.memory:,} bytes is too little: one worker needs {per_worker:,}",
                do=f"Use `memory=` {per_worker >> 20}MiB or more",
            )
        return max(1, min(self.workers or min(os.cpu_count() or 1, 8), max(most, 1)))


NO_LIMITS = Effort()


def run_jobs(jobs: Iterable[Job], make_worker: Callable[[], Callable[[Job], Result]], workers: int) -> Iterator[Result]:
    """The results of all jobs, in the order in which they are finished. The first error stops all workers and is raised here.

    Jobs are taken from the iterable one at a time, so it may be long. If the caller stops early, for example by an interruption, running
    jobs are finished, no other job is started, and all threads have ended before the exception continues.

    make_worker: called once in each thread; returns the function that performs a job.
    """
    source, lock, stop = iter(jobs), threading.Lock(), threading.Event()
    results: SimpleQueue[tuple[str, object]] = SimpleQueue()

    def work() -> None:
        try:
            perform = make_worker()
            while not stop.is_set():
                with lock:
                    job = next(source, _END)
                if job is _END:
                    break
                results.put(("done", perform(job)))  # type: ignore[arg-type]
        except BaseException as error:
            results.put(("error", error))
        else:
            results.put(("end", None))

    threads = [threading.Thread(target=work, name=f"reshard-{i}", daemon=True) for i in range(workers)]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            kind, value = results.get()
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            if kind == "end":
                running -= 1
            else:
                yield value  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


_END = object()
