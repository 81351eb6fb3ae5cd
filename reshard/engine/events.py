"""Events: what a verb does, on the logger `reshard` of Python's `logging`, for whoever listens.

The library installs no handler and sets no level, and its events have the levels INFO and DEBUG: where nobody listens, nothing is printed.
An event is a log record with two more attributes: `event`, its name, and `fields`, its values. docs/reference/logs.md lists the events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from reshard.secrets import masked, masked_in

LOGGER = logging.getLogger("reshard")
_MOST = 1000
"""Events of one list, such as the files of a checkpoint, that are logged one by one."""


def event(name: str, message: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log what has happened. fields: its values, which JSON can express.

    Credentials in them are masked, and bytes of names that are not UTF-8 are escaped, so that every handler can write the record.
    """
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, _recordable(message), extra={"event": name, "fields": masked_in(fields, _recordable)}, stacklevel=2)


def _recordable(text: str) -> str:
    """A text without credentials, as valid Unicode."""
    text = masked(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def details(name: str, items: Callable[[], Iterable[tuple[str, dict[str, Any]]]]) -> None:
    """Log an event of the level DEBUG for each (message, fields), the first thousand of them. They are made only if somebody listens."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        for _, (message, fields) in zip(range(_MOST), items(), strict=False):
            event(name, message, level=logging.DEBUG, **fields)
