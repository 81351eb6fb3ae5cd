"""Which files of a checkpoint are like each other, and which parts of them hold metadata.

Files whose names differ in numbers only, such as those of the ranks, have headers and directories of about the same length. What the
reader asks for of the first one that it reads tells what it will ask for of the others.

    start  asked from the first byte on    safetensors headers, the pickle of torch.save
    end    asked up to the last byte       the directory of a zip
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from reshard.geometry.value import mutable
from reshard.storage.stores.store import Entry

END = 64 << 10
"""Most headers fit into so many bytes: a safetensors header has about 120 bytes per tensor, a zip's directory about 100 per storage."""
# What a reader asks for at the start or end of a file is metadata up to this length.
_LONGEST_HEADER = 64 << 20
# The first file of a kind is read with more room, so that what it needs is known after fewer requests.
_ROOM_OF_FIRST = 4
_DIGITS = re.compile(r"\d+")


@mutable
class Kind:
    """Files like each other, and what was asked for of them."""

    entries: list[Entry]
    """The files, in the order of the numbers in their paths."""
    first: str = ""
    """The path of the one that is read first, which tells what the others need. Small files tell nothing: they are read whole."""
    start: int = 0
    """How many of a file's first bytes were asked for."""
    end: int = 0
    """How many of a file's last bytes were asked for."""
    alone: bool = False
    """Whether only the first file is being read: the others follow when it is known what it needs."""

    def note(self, nbytes: int, at: int, stop: int) -> bool:
        """Take note that bytes [at, stop) of a file were asked for. Returns whether they are at its start or end."""
        if at <= self.start + END and stop <= _LONGEST_HEADER:
            self.start = max(self.start, stop)
        elif nbytes - stop <= END and nbytes - at <= _LONGEST_HEADER:
            self.end = max(self.end, nbytes - at)
        else:
            return False
        return True

    def parts(self, entry: Entry) -> list[tuple[int, int]]:
        """The parts of a file that are metadata, as far as is known."""
        room = END * (_ROOM_OF_FIRST if entry.path == self.first else 1)
        start, end = (max(room, asked + asked // 8) if asked else 0 for asked in (self.start, self.end))
        if _is_small(entry) or start + end >= entry.nbytes:
            return [(0, entry.nbytes)]
        return [part for part in ((0, start), (entry.nbytes - end, entry.nbytes)) if part[0] < part[1]]

    def others(self, entry: Entry) -> Sequence[Entry]:
        """The files that are read now besides one: those after it, then those before it."""
        if self.alone:
            return ()
        place = self.entries.index(entry)
        return [*self.entries[place + 1 :], *self.entries[:place]]


class SimilarFiles:
    """The files of a checkpoint by kind."""

    def __init__(self, entries: Callable[[], Iterable[Entry]]) -> None:
        """entries: lists all files. Called when the first file is read."""
        self._entries = entries
        self._kinds: dict[tuple[int, str], Kind] = {}
        self._first: dict[str, Kind] = {}

    def asked(self, entry: Entry, at: int, stop: int) -> Kind | None:
        """The files like this one, of which bytes [at, stop) are asked for; None if these are in the middle, which says nothing about the
        others."""
        kind = self._kind(entry)
        if not _is_small(entry):
            if not kind.note(entry.nbytes, at, stop):
                return None
            kind.alone = kind.first == entry.path
            if not kind.first:
                kind.first = entry.path
                self._first[entry.path] = kind
        return kind

    def asked_again(self, entry: Entry, at: int, stop: int) -> None:
        """Take note of what is asked for of a file whose bytes were fetched already, if it is the first of its kind."""
        if kind := self._first.get(entry.path):
            kind.note(entry.nbytes, at, stop)

    def _kind(self, entry: Entry) -> Kind:
        if not self._kinds:
            for other in sorted(self._entries(), key=lambda listed: _numbers(listed.path)):
                self._kinds.setdefault(_form(other.path), Kind([])).entries.append(other)
        kind = self._kinds.setdefault(_form(entry.path), Kind([]))
        if entry not in kind.entries:  # it was not listed
            kind.entries.append(entry)
        return kind


def _is_small(entry: Entry) -> bool:
    """Whether a file is read whole, because that is as soon done as reading its two ends."""
    return entry.nbytes <= 2 * END


def _form(path: str) -> tuple[int, str]:
    """What files like each other have in common: the depth of their folder, and the name without its numbers."""
    return path.count("/"), _DIGITS.sub("#", path.rpartition("/")[2])


def _numbers(path: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in _DIGITS.findall(path)), path
