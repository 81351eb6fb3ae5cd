"""Notes: what ranks of a channel leave for each other at source rank 0, beside the transport. They outlive connections that are broken.

stop        why source rank 0 has stopped the update, for the other source ranks
end         how the update ended, for source ranks that have stopped
read N      source rank N has read the end
taken N     who has taken over the engine whose first rank is target rank N, by this rank
"""

from __future__ import annotations

import socket
from typing import Any

_SECONDS = 3.0


class Notes:
    """A rank's way to the notes."""

    def __init__(self, store: Any, host: str, port: int) -> None:
        """store: that of source rank 0, which listens at this address as long as its end is not closed."""
        self._store, self._address = store, (host, port)

    def leave(self, name: str, text: str) -> None:
        """Leave a note. Raises an exception if source rank 0 is not there."""
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        """A note; None: there is none yet. Raises an exception if source rank 0 is not there."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else None

    def is_there(self) -> bool:
        """Whether source rank 0 is there, without waiting for an answer of it: a process that is stopped is there."""
        try:
            socket.create_connection(self._address, _SECONDS).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave. With the end of source rank 0 the notes are gone."""
        self._store = None
