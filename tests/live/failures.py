"""The long check of updates that fail: a real vLLM server on the CPU at TP 2, trainers and servers that are killed, pairs of trainers.

    python tests/live/failures.py [--reshard PATH] [--python PATH] [--long]

1. of two trainer ranks, which send slowly, one is killed at 5, 25, 50, 75 and 95 % of an update: the other one is told within 15 s, what it
   is told about the server is true, and the server holds the old weights;
2. pairs of trainers that come at the same time: one is refused by the name of the other one, or takes over; the server's workers raise
   nothing;
3. a worker, the engine's process or the API process is killed at 5 to 95 % of an update (one of each; --long: ten): every rank is told
   within 15 s, and not that the server answers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import LONG, installed, run_checks  # noqa: E402
from live.check import BACKEND, ROOT, TP, VLLM, Check, made, same  # noqa: E402
from live.served import served  # noqa: E402
from live.source_rank import SourceRanks, source_ranks  # noqa: E402

SLOW = 2.0
"""Seconds of what a rank sends at once: an update of the tiny llama, which is sent at twice, takes four."""
PERCENT = (5, 25, 50, 75, 95)
TOLD = 15.0
RAISED = re.compile(r"Worker failed with error|RuntimeError.*weight_update")
VICTIMS = (("VLLM::Worker_TP1", 25), ("VLLM::EngineCore", 50), ("api_server", 75))
MORE_VICTIMS = (("VLLM::Worker_TP0", 5), ("VLLM::Worker_TP0", 50), ("VLLM::Worker_TP0", 95), ("VLLM::Worker_TP1", 75),
                ("api_server", 5), ("api_server", 25), ("api_server", 95))  # fmt: skip


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    old, new = (made(python, ROOT / "fixtures" / "hf" / "llama", work / name, turns) for name, turns in (("old", 0), ("new", 1)))
    with served(python, old, TP, site, work / "kills.log", *BACKEND) as server:
        before = server.answers()
        tensors = updated(server, new)
        after = server.answers()
        yield "the new weights give other answers", before != after, str(before)
        updated(server, old)
        for who in (1, 0):
            for percent in PERCENT:
                yield from killed(server, new, old, who, percent, tensors[who], before)
        yield from paired(server, old, new, before, after)
        raised = RAISED.findall((work / "kills.log").read_text())
        yield "no worker of the server has raised", not raised, str(raised[:3])
    for number, (victim, percent) in enumerate((*VICTIMS, *(MORE_VICTIMS if LONG else ()))):
        log = work / f"victim-{number}.log"
        with served(python, old, TP, site, log, *BACKEND) as server:
            yield from ended(server, new, victim, percent)


def updated(server: Any, weights: Path) -> list[int]:
    """Update the server; returns how many tensors each rank has sent."""
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(weights))
        trainer.ask("open", engine=server.address, tp=TP)
        return [report["tensors"] for report in trainer.ask("update", slow=0.001)]


def killed(server: Any, new: Path, old: Path, who: int, percent: int, tensors: int, before: object) -> Iterator[Check]:
    """A rank of the trainer is killed."""
    what = f"rank {who} killed at {percent} %"
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        killed_at = killed_later(trainer.processes[who].pid, percent / 100 * tensors * SLOW)
        said = trainer.ask("update", slow=SLOW)
        seconds = time.monotonic() - killed_at[0]
        error = (said[1 - who] or {}).get("error", "")
        yield f"{what}: told after {seconds:.1f} s", seconds < TOLD and said[who] is None and bool(error), str(said)
        is_paused = server.asked("/is_paused")["is_paused"]
        if who:
            true = "holds the old weights and answers" in error and not is_paused
        else:
            true = "The engine's log says" in error and is_paused
            server.asked("/resume", {})
        yield f"{what}: what is said is true", true, f"{error} paused: {is_paused}"
        yield f"{what}: the server holds the old weights", *same(server, before)
    updated(server, old)
    yield f"{what}: a new trainer goes on", *same(server, before)


def killed_later(pid: Any, seconds: float) -> list[float]:
    """When a process was killed, after so many seconds; at first: when it will be."""
    killed_at = [time.monotonic() + seconds]

    def kill() -> None:
        killed_at[0] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    threading.Timer(seconds, kill).start()
    return killed_at


def paired(server: Any, old: Path, new: Path, before: object, after: object) -> Iterator[Check]:
    """Two trainers, each of one rank, at the same time."""
    for number in range(10):
        takes_over = number % 2 == 1
        with source_ranks(1) as one, source_ranks(1) as two:
            said: dict[int, list[Any]] = {}

            def run(trainer: SourceRanks, i: int, weights: Path, answers: dict[int, list[Any]] = said, take: bool = takes_over) -> None:
                trainer.ask("load", files=str(weights), copies=True)
                answers[i] = [trainer.ask("join", engine=server.address, take_over=take and i == 1)[0]]
                answers[i].append(trainer.ask("update", slow=0.05)[0] if "error" not in answers[i][0] else None)

            threads = [threading.Thread(target=run, args=(each, i, path)) for i, (each, path) in enumerate(((one, old), (two, new)))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pids = [each.processes[0].pid for each in (one, two)]
            answers = server.answers()
            whole = [i for i in (0, 1) if said[i][1] and "error" not in said[i][1]]
            errors = [joined.get("error") or (update or {}).get("error", "") for joined, update in (said[0], said[1])]
            named = all(f"process {pids[1 - i]})" in errors[i] for i in (0, 1) if i not in whole)
            is_whole = answers in (before, after) and bool(whole) and answers in [(before, after)[i] for i in whole]
            what = f"pair {number}{', the second takes over' if takes_over else ''}: "
            yield what + f"{len(whole)} updated, the other is told by whom", named and bool(whole), str(said)
            yield what + "the server has the weights of one", is_whole and not server.asked("/is_paused")["is_paused"], str(answers)


def ended(server: Any, new: Path, victim: str, percent: int) -> Iterator[Check]:
    """A process of the server is killed while ranks send slowly."""
    what = f"{victim} killed at {percent} %"
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        killed_at = killed_later(pid_of(server, victim), percent / 100 * 2 * SLOW)
        said = trainer.ask("update", slow=SLOW)
        seconds = time.monotonic() - killed_at[0]
        errors = [(each or {}).get("error", "") for each in said]
        yield f"{what}: every rank is told after {seconds:.1f} s", 0 < seconds < TOLD and all(errors) and len(set(errors)) == 1, str(said)
        is_true = "could not be asked" in errors[0] or "stays paused" in errors[0]
        yield f"{what}: nobody says that the server answers", is_true and "and answers" not in errors[0], errors[0]


def pid_of(server: Any, name: str) -> int:
    """The process of the server with this in its command or title."""
    lines = subprocess.run(["ps", "-o", "pid=,args=", "-g", str(server._process.pid)], capture_output=True, text=True).stdout.splitlines()
    return next(int(line.split()[0]) for line in lines if name in line)


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
