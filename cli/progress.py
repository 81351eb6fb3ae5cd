"""Progress on stderr: a bar on a terminal, and elsewhere, as in the log of a nightly job, one line every 30 seconds, also in the log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import INFO
from typing import TYPE_CHECKING, Any

from reshard.engine.events import event
from reshard.geometry.quantities import nbytes_text
from reshard.opening.keywords import EffortOptions, take

from .invocation import current
from .logs import NOTICE

if TYPE_CHECKING:
    from reshard.opening.checkpoint import Checkpoint

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bar(total: int, what: str, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes that have been done since the last call. `shown` forces or forbids progress."""
    log = current().log
    if shown is False:
        yield lambda nbytes: None
    elif shown or (sys.stderr.isatty() and not (log.quiet or log.verbose or log.as_json)):
        from tqdm import tqdm

        # On a terminal it begins after half a second and leaves nothing behind; asked for by --progress, it is kept.
        kept = {"leave": True, "delay": 0} if shown else {"leave": False, "delay": 0.5}
        with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, smoothing=0.1, **kept) as progress:
            advance_lines = lines(total, what, level=INFO)

            def advance(nbytes: int) -> None:
                progress.update(nbytes)
                advance_lines(nbytes)

            yield advance
    else:
        yield lines(total, what)


@contextmanager
def working(what: str, total: int, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The keywords of effort, taken out of what a command was given, with progress that is shown."""
    with bar(total, what, given.pop("show_progress")) as advance:
        yield {**take(given, EffortOptions), "progress": advance}


def weight_bytes(checkpoint: Checkpoint) -> int:
    """The bytes of a checkpoint's weights, which a verb reads."""
    return sum(tensor.nbytes for tensor in checkpoint.index.by_kind("weight").values())


def lines(total: int, what: str, *, level: int = NOTICE, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """Logs a line at most every 30 seconds; a shorter run logs nothing."""
    began = printed = clock()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, printed
        done += nbytes
        now = clock()
        if now - printed < SECONDS_BETWEEN_LINES:
            return
        printed = now
        rate = done / (now - began)
        seconds_left = round((total - done) / rate) if rate else None
        left = f"{seconds_left} s left" if seconds_left is not None else "time left unknown"
        percent = 100 * done // max(total, 1)
        amount = f"{nbytes_text(done)} of {nbytes_text(total)}, {nbytes_text(int(rate))}/s"
        fields = {"percent": percent, "bytes": done, "total": total, "bytes_per_second": int(rate), "seconds_left": seconds_left}
        event("progress", f"{what}: {percent} %, {amount}, {left}", level=level, **fields)

    return advance
