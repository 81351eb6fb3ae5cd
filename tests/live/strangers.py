"""The slow check of strangers: real vLLM on the CPU at TP 2 is updated by a Sender and by a push among strangers, and by nobody else.

    python tests/live/strangers.py [--reshard PATH] [--python PATH]

Strangers connect to the port of the update before and while others do: silent, with garbage, with a huge length, with torch's store. The
server then answers as one that was started from the new weights. A sender with another token, and one without the secret, is refused.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import installed, run_checks  # noqa: E402
from live.check import TP, VLLM, Check, same, served_llama  # noqa: E402
from live.source_rank import free_port, source_ranks  # noqa: E402

SAID = (b"", os.urandom(300), bytes(16) + b"\xff" * 4, b"\x00" * 9 + b"go")


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    with served_llama(python, installed(python, work), work) as (server, old, new, expected):
        before = server.answers()
        yield "the new weights give other answers", before != expected, ""
        with source_ranks(2) as trainer, strangers() as (port, counted):
            trainer.ask("load", files=str(new))
            trainer.ask("open", engine=server.address, tp=TP, verify=True, reach={"port": port})
            reports = trainer.ask("update")
            yield f"a Sender among {len(counted)} strangers: the server has the new weights", *same(server, expected, reports)
            trainer.ask("close")
        with strangers() as (port, counted):
            done = pushed(reshard, old, server.address, "--port", port)
            yield f"a push among {len(counted)} strangers: the server has the old weights again", *same(server, before, done.stderr)
        done = pushed(reshard, new, server.address, token="another")
        yield (
            "a push with a token that the server does not have is refused",
            done.returncode == 5 and "did not join" in done.stderr,
            done.stderr,
        )
        yield "a push that is refused: the server answers as before", *same(server, before)
        ends_at = time.monotonic() + 20
        while "RESHARD_LIVE_TOKEN is not set here" not in (log := (work / "llama.log").read_text()) and time.monotonic() < ends_at:
            time.sleep(0.5)  # workers write through a pipe
        lines = [line for line in log.splitlines() if "reshard:" in line]
        yield "the server's log says why", "RESHARD_LIVE_TOKEN is not set here" in log, "\n".join(lines[-5:])
        yield "no token and no file is left", "another" not in log and not [*Path("/dev/shm").glob("reshard-*")], ""


@contextmanager
def strangers() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port, and those who connect to it all the time."""
    port, is_over, counted = free_port(), threading.Event(), list[socket.socket]()

    def strange(said: bytes) -> None:
        while not is_over.is_set():
            with suppress(OSError):
                counted.append(socket.create_connection(("127.0.0.1", port), 5))
                counted[-1].sendall(said)
            time.sleep(0.05)

    threads = [threading.Thread(target=strange, args=(said,), daemon=True) for said in SAID]
    for each in threads:
        each.start()
    try:
        yield port, counted
    finally:
        is_over.set()
        for each in threads:
            each.join()
        for connection in counted:
            connection.close()


def pushed(reshard: Path, source: Path, address: str, *options: object, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"RESHARD_LIVE_TOKEN": token} if token else {})}
    command = [str(reshard), "push", str(source), address, *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
