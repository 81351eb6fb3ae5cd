"""Notes: what ranks of a channel leave for each other in the meeting (meeting.py), beside the transport. They outlive connections that are
broken.

stop        why source rank 0 has stopped the update, for the other source ranks
end         how the update ended, for source ranks that have stopped
read N      source rank N has read the end
turn N      whose turn the engine is whose first rank is target rank N: BUSY while source rank 0 updates it; who has taken it over, and
            when; or nothing
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from reshard.live.wire.meeting import Guest

BUSY = "busy"


def turn_of(offset: int) -> str:
    """The note that says whose turn an engine is. offset: the number of its first rank."""
    return f"turn {offset}"


class Notes:
    """A rank's way to the notes."""

    def __init__(self, guest: Guest, end: Callable[[], None]) -> None:
        """end: ends the way; that of source rank 0 ends the meeting. It is called when nobody has this object any more, too."""
        self._guest, self.close = guest, weakref.finalize(self, end)

    def leave(self, name: str, text: str) -> None:
        """Leave a note. Raises an exception if source rank 0 is not there."""
        self._guest.ask(name, text)

    def read(self, name: str) -> str | None:
        """A note; None: there is none yet. Raises an exception if source rank 0 is not there."""
        return self._guest.ask(name)

    def turn(self, name: str, before: str, after: str) -> str:
        """Change a note, if it says `before`; returns what it says then. One that nobody has left says nothing."""
        return self._guest.ask(name, after, before=before) or ""

    def is_there(self) -> bool:
        """Whether source rank 0 is there, without waiting for an answer of it: a process that is stopped is there."""
        return self._guest.is_heard()
