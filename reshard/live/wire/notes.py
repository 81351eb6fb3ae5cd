"""Notes: what ranks of a channel leave for each other in the meeting (meeting.py), beside the transport. They outlive connections that are
broken.

    stop        why source rank 0 has stopped the update, for the other source ranks
    end         how the update ended, for source ranks that have stopped
    read N      source rank N has read the end
    taken N     who has taken over the engine whose first rank is target rank N, by this rank
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from reshard.live.wire.meeting import Guest


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

    def is_there(self) -> bool:
        """Whether source rank 0 is there, without waiting for an answer of it: a process that is stopped is there."""
        return self._guest.is_heard()
