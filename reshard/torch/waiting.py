"""Waiting: the ranks of a save meet at marks in the work folder of the target, which all of them see.

    TARGET/.reshard/ranks/3          held with flock while rank 3 works, from before it appears until the rank ends
    TARGET/.reshard/ranks/3.written  rank 3 has come to this mark

A rank that has ended without its mark has failed or died: its file is no longer held. torch's collectives are not used: they belong to the
trainer, whose forward pass may run them while a save goes on in another thread.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard.errors import SystemRefusal

_STEP = 0.005


class Waiting:
    """One rank of a save. seconds: how long it waits for others."""

    def __init__(self, work: Path, rank: int, ranks: int, seconds: float) -> None:
        self._folder, self._rank, self._ranks, self._seconds = work / "ranks", rank, ranks, seconds

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside this context, the other ranks see that this one works."""
        self._folder.mkdir(exist_ok=True)
        made = self._folder / f"{self._rank}.made"
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.rename(made, self._folder / str(self._rank))
            yield
        finally:
            os.close(descriptor)

    def meet(self, mark: str) -> None:
        """Come to a mark, and wait until all ranks have. Raises SystemRefusal if one has ended before, or does not come in time."""
        (self._folder / f"{self._rank}.{mark}").touch()
        missing, ends_at = {*range(self._ranks)} - {self._rank}, time.monotonic() + self._seconds
        while missing:
            for rank in sorted(missing):
                has_ended = self._has_ended(rank)  # asked first: a rank that ends after its mark has come
                if (self._folder / f"{rank}.{mark}").exists():
                    missing.discard(rank)
                elif has_ended:
                    raise self._refusal(f"rank {rank} ended before it had {mark} its part")
            if missing and time.monotonic() > ends_at:
                raise self._refusal(f"rank {min(missing)} has not {mark} its part in {self._seconds:,.0f} s")
            time.sleep(_STEP if missing else 0)

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank has come and works no more."""
        try:
            descriptor = os.open(self._folder / str(rank), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _refusal(self, what: str) -> SystemRefusal:
        return SystemRefusal(
            what,
            where=str(self._folder.parent.parent),
            why="Its bytes are missing, so nothing was completed",
            do="Look at the log of that rank, then save again; all ranks need to see one file system",
        )
