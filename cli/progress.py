"""Progress on stderr: a bar on a terminal, and elsewhere, as in the log of a nightly job, one line every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .tables import nbytes_text

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bar(total: int, what: str, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes that have been done since the last call. `shown` forces or forbids progress."""
    if shown is False:
        yield lambda nbytes: None
    elif shown or sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, smoothing=0.1) as progress:

            def advance(nbytes: int) -> None:
                progress.update(nbytes)

            yield advance
    else:
        yield lines(total, what)


def lines(total: int, what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """Prints a line at most every 30 seconds; a shorter run prints nothing."""
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
        left = f"{(total - done) / rate:.0f} s left" if rate else "time left unknown"
        percent = 100 * done // max(total, 1)
        amount = f"{nbytes_text(done)} of {nbytes_text(total)}, {nbytes_text(int(rate))}/s"
        print(f"{what}: {percent} %, {amount}, {left}", file=sys.stderr, flush=True)

    return advance
