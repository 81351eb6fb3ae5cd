"""Notes: what ranks of a channel leave for each other at source rank 0, beside the transport. They outlive connections that are broken.

stop        why source rank 0 has stopped the update, for the other source ranks
end         how the update ended, for source ranks that have stopped
read N      source rank N has read the end
turn N      whose turn the engine is whose first rank is target rank N: BUSY while source rank 0 updates it; who has taken it over, and
            when; or nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BUSY = "busy"


def turn_of(offset: int) -> str:
    """The note that says whose turn an engine is. offset: the number of its first rank."""
    return f"turn {offset}"


class Notes:
    """A rank's way to the notes."""

    def __init__(self, store: Any, visit: Callable[[], object]) -> None:
        """store: that of source rank 0. visit: connects to where it listens as long as its end is not closed; OSError if it does not."""
        self._store, self._visit = store, visit

    def leave(self, name: str, text: str) -> None:
        """Leave a note. Raises an exception if source rank 0 is not there."""
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        """A note; None: there is none yet. Raises an exception if source rank 0 is not there."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else None

    def turn(self, name: str, before: str, after: str) -> str:
        """Change a note, if it says `before`; returns what it says then. One that nobody has left says nothing."""
        return str(self._store.compare_set(name, before, after).decode())

    def is_there(self) -> bool:
        """Whether source rank 0 is there, without waiting for an answer of it: a process that is stopped is there."""
        try:
            self._visit()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave. With the end of source rank 0 the notes are gone."""
        self._store = None
