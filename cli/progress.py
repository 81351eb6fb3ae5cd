"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, what: str, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes that have been done since the last call. `shown` decides for or against a bar."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda nbytes: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, smoothing=0.1) as progress:

        def advance(nbytes: int) -> None:
            progress.update(nbytes)

        yield advance
