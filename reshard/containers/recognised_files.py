"""Files of ranks that are alike: torch.save files that differ from an earlier rank's only where the rank stands are recognised, not parsed.

A rank's file of an FSDP run has a pickle of some 400 kB, and those of two ranks differ in a few bytes: the number of the rank, and its
coordinates on the mesh. A file is recognised if

- its pickle is, byte for byte, the known pickle with this rank's numbers in those places;
- the directory of its zip differs from that of the known file only in times, checksums, the root folder's name and the members' places.

Then it holds the tensors of the known file, with the boxes that follow from the rank's coordinates. Anything else is parsed in full, and
may become a known form itself: numbers above 255 take two bytes, and the last ranks may hold fewer rows.

The files of ZeRO's ranks do not even hold the rank: their pickles are equal (`EqualFiles`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor, UnlocatedTensor
from reshard.containers.zip_directory import Directory, Range, content, members_of, read_records
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.sections import Columns
from reshard.geometry.value import mutable, value
from reshard.storage.files import Files

T = TypeVar("T")
Entry = tuple[Any, LocalTensor]
"""A tensor of a file, with any key that tells what it is."""
Parse = Callable[[int, str], Sequence[Entry]]
"""(rank, path) -> the tensors of the rank's file, parsed in full."""

_Number = str | int
"""A number that depends on the rank: "rank", or a dimension of the mesh, which stands for the rank's coordinate."""

# A byte of a number in a pickle: (the opcode before the number, the bytes of the number, those of them before this one).
_NUMBERS = tuple((opcode, width, before) for opcode, width in ((0x4B, 1), (0x4D, 2), (0x4A, 4)) for before in range(width))
# Forms that are remembered; files that are parsed in a row before it is given up to recognise the others.
_MOST_FORMS, _PATIENCE = 32, 24
_LONGEST_PICKLE = 1 << 28


@mutable
class AlikeRanks:
    """Ranks whose files hold the same tensors in the same places, and differ only in the ranks' coordinates."""

    entries: Sequence[Entry]
    """The tensors of the first of them."""
    ranks: list[int] = field(default_factory=list)
    """The ranks."""
    paths: list[str] = field(default_factory=list)
    """The file of each rank."""
    members: list[Columns] = field(default_factory=list)
    """For each rank: [number of entries], the byte offset of the local header of the zip member that holds each tensor; -1: none."""


def boxes_of_ranks(local: LocalTensor, ranks: Sequence[int]) -> Sequence[Box]:
    """The box of a tensor that each rank holds."""
    if local.distribution is None:
        return [local.shards[0][0]] * len(ranks)
    return [local.distribution.box(local.shape, coordinates(local, rank)) for rank in ranks]


def coordinates(local: LocalTensor, rank: int) -> tuple[int, ...]:
    """The coordinates of a rank on the mesh of a distributed tensor, if the mesh numbers its ranks row by row."""
    assert local.distribution is not None
    sizes = local.distribution.mesh.sizes
    return tuple(rank // step % size for step, size in zip(row_major(sizes), sizes, strict=True))


def read_ranks(files: Files, ranks: Sequence[tuple[int, str]], parse: Parse) -> tuple[list[AlikeRanks], Sequence[tuple[int, str]]]:
    """The ranks whose files are recognised, and the ranks that are left for the caller to parse, if their files turn out to differ.

    ranks: (rank, path) of each. parse: parses a file that is not recognised, for the caller too.
    """
    forms: list[_Form] = []
    failures = 0
    left = ranks[len(ranks) :]
    for number, (rank, path) in enumerate(ranks):
        raw = _raw(files, path)
        if raw is not None and any(form.recognise(raw, rank, path) for form in forms):
            failures = 0
            continue
        if failures == _PATIENCE:
            left = ranks[number:]
            break
        failures += 1
        entries = parse(rank, path)
        if raw is None or any(form.learn(raw, rank, entries) for form in forms):
            continue
        if (form := _Form.of(raw, rank, entries)) and len(forms) < _MOST_FORMS:
            forms.append(form)
    return [form.alike for form in forms if form.alike.ranks], left


Move = Callable[[AnyTensor], AnyTensor]
"""A tensor of a known file -> the same tensor in another file."""


class EqualFiles(Generic[T]):
    """Files whose pickles are equal byte for byte: one of them is parsed, and the others hold the same values in their own members."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[tuple[bytes, bytes], tuple[_Directories, T]] = {}
        self._failures = 0

    def read(self, path: str, parse: Callable[[str], T], moved: Callable[[T, str, Move], T | None]) -> T:
        """What a file holds.

        parse: reads a file that is equal to none so far. moved: (what an equal file holds, this path, where its tensors are here) -> what
        this file holds, or None to have it parsed.
        """
        raw = _raw(self._files, path) if self.is_useful else None
        known = self._known.get((raw.pickle, raw.order)) if raw else None
        offsets = known[0].offsets_in(raw) if raw and known else None
        if known and offsets is not None and (value := moved(known[1], path, known[0].move(path, offsets))) is not None:
            self._failures = 0
            return value
        self._failures += 1
        value = parse(path)
        if raw and known is None and len(self._known) < _MOST_FORMS:
            self._known[raw.pickle, raw.order] = _Directories(raw), value
        return value

    @property
    def is_useful(self) -> bool:
        """Whether it is worth while to compare more files. If not, they are parsed, best in several processes."""
        return self._failures < _PATIENCE


@value
class _Raw:
    """What two files are compared by."""

    source: Range
    """The file."""
    pickle: bytes
    """The content of data.pkl."""
    order: bytes
    """The content of byteorder."""
    count: int
    """The number of members of the zip."""
    directory: bytes
    """The central directory of the zip."""
    directory_offset: int
    """Where it starts in the file."""
    root: bytes
    """The folder inside the zip, with a slash at its end."""


def _raw(files: Files, path: str) -> _Raw | None:
    """The parts of a file that tell its form; None if it is not an ordinary file of torch.save, which the parser then reads or refuses."""
    try:
        source = Range(files, path)
        count, start, directory = read_records(source)
        first = {member.name.rpartition("/")[2]: member for member in islice(members_of(source, directory, count), 8)}
        parts = {
            name: content(source, Directory({}, start), first[name])
            for name in ("data.pkl", "byteorder")
            if name in first and first[name].nbytes < _LONGEST_PICKLE
        }
    except CheckpointError:
        return None
    if len(parts) < 2:
        return None
    root = first["data.pkl"].name.removesuffix("data.pkl").encode()
    return _Raw(source, parts["data.pkl"], parts["byteorder"], count, directory, start, root)


def numbered_bytes(known: bytes, number: int, others: Mapping[int, bytes]) -> Callable[[int], bytes] | None:
    """A function from the number of a rank to its pickle, given that of rank `number` and those of some other ranks; None if pickles differ
    in anything but this number.

    others: by rank. The first tells where the number stands; the function gives all of them exactly.
    """
    own, places = np.frombuffer(known, np.uint8), dict[tuple[int, int], set[_Number]]()
    for rank, pickle in others.items():
        if len(pickle) != len(known):
            return None
        differing = _differing_numbers(own, np.frombuffer(pickle, np.uint8), {"rank": number}, {"rank": rank})
        if differing is None:
            return None
        places |= differing

    def of(rank: int) -> bytes:
        pickle = bytearray(known)
        for position, width in places:
            pickle[position : position + width] = rank.to_bytes(width, "little")
        return bytes(pickle)

    return of if all(of(rank) == pickle for rank, pickle in others.items()) else None


class _Form:
    """A known file, and where another rank's file may differ from it."""

    def __init__(self, raw: _Raw, rank: int, entries: Sequence[Entry]) -> None:
        self.alike = AlikeRanks(entries)
        self._raw, self._rank = raw, rank
        self._pickle = np.frombuffer(raw.pickle, np.uint8)
        # (position of a number in the pickle, its bytes) -> the numbers of a rank that it may be: "rank", or a dimension of the mesh.
        self._fields: dict[tuple[int, int], set[_Number]] = {}
        self._directories = _Directories(raw)
        self._rows = np.array([self._directories.rows.get(_member(local), -1) for _, local in entries], np.int64)
        self._mesh = next(local for _, local in entries if local.distribution is not None)

    @classmethod
    def of(cls, raw: _Raw, rank: int, entries: Sequence[Entry]) -> _Form | None:
        """The form of a file that was parsed; None if its boxes do not follow from the rank alone."""
        meshes = set()
        for _, local in entries:
            if len(local.shards) != 1 or not isinstance(local.shards[0][1], UnlocatedTensor):
                return None
            if local.distribution is not None:
                meshes.add(local.distribution.mesh)
            elif local.rank is not None or local.shards[0][0] != Box.whole(local.shape):
                return None
        if len(meshes) != 1 or rank >= next(iter(meshes)).ranks:
            return None
        return cls(raw, rank, entries)

    def recognise(self, raw: _Raw, rank: int, path: str) -> bool:
        """Whether this file has the form; then it is added to `alike`."""
        if not self._fields or len(raw.pickle) != len(self._pickle) or raw.order != self._raw.order:
            return False
        expected, numbers = self._pickle.copy(), self._numbers(rank)
        if numbers is None or not self._tells(numbers):
            return False
        for (position, width), candidates in self._fields.items():
            values = {numbers[name] for name in candidates}
            if len(values) > 1 or (value := values.pop()) >= 1 << 8 * width:
                return False
            expected[position : position + width] = list(value.to_bytes(width, "little"))
        if expected.tobytes() != raw.pickle:
            return False
        offsets = self._directories.offsets_in(raw)
        if offsets is None:
            return False
        self.alike.ranks.append(rank)
        self.alike.paths.append(path)
        self.alike.members.append(np.where(self._rows < 0, -1, offsets[self._rows]))
        return True

    def learn(self, raw: _Raw, rank: int, entries: Sequence[Entry]) -> bool:
        """Take over from a file that was parsed what may differ. Whether it has this form."""
        numbers = self._numbers(rank)
        if len(raw.pickle) != len(self._pickle) or numbers is None or not self._predicts(rank, entries):
            return False
        fields = _differing_numbers(self._pickle, np.frombuffer(raw.pickle, np.uint8), self._numbers(self._rank) or {}, numbers)
        if fields is None or self._directories.offsets_in(raw) is None:
            return False
        for place, candidates in fields.items():
            known = self._fields.get(place)
            self._fields[place] = candidates if known is None else known & candidates
        return all(self._fields.values())

    def _numbers(self, rank: int) -> dict[_Number, int] | None:
        """What a rank's file has where its rank stands; None if the mesh does not have the rank."""
        assert self._mesh.distribution is not None
        if rank >= self._mesh.distribution.mesh.ranks:
            return None
        return {"rank": rank, **dict(enumerate(coordinates(self._mesh, rank)))}

    def _tells(self, numbers: dict[_Number, int]) -> bool:
        """Whether every coordinate that differs from the known file's stands in the pickle at a known place."""
        own = self._numbers(self._rank) or {}
        told = set().union(*self._fields.values())
        return all(name in told for name, number in numbers.items() if number != own[name])

    def _predicts(self, rank: int, entries: Sequence[Entry]) -> bool:
        """Whether the tensors of a rank's file are those of the known file at the coordinates of the rank."""
        known = self.alike.entries
        if len(known) != len(entries):
            return False
        for (key, local), (other_key, other) in zip(known, entries, strict=True):
            if key != other_key or len(other.shards) != 1 or not isinstance(other.shards[0][1], UnlocatedTensor):
                return False
            (_, stored), (box, other_stored) = local.shards[0], other.shards[0]
            assert isinstance(stored, UnlocatedTensor) and isinstance(other_stored, UnlocatedTensor)
            same = (local.dtype, local.shape, local.distribution, stored.skipped, stored.shape, stored.strides, stored.storage)
            others = other_stored.skipped, other_stored.shape, other_stored.strides, other_stored.storage
            if same != (other.dtype, other.shape, other.distribution, *others) or boxes_of_ranks(local, [rank])[0] != box:
                return False
            if local.rank is not None and other.rank != rank:
                return False
        return True


def _differing_numbers(
    known: npt.NDArray[np.uint8], pickle: npt.NDArray[np.uint8], own: Mapping[_Number, int], numbers: Mapping[_Number, int]
) -> dict[tuple[int, int], set[_Number]] | None:
    """The numbers in which two pickles of one length differ: (position, bytes) -> which of the ranks' numbers each can be. None if they
    differ in anything else. own, numbers: those of the known pickle's rank and of the other's."""
    fields: dict[tuple[int, int], set[_Number]] = {}
    for at in np.flatnonzero(pickle != known).tolist():
        for opcode, width, before in _NUMBERS:
            position = at - before
            if position < 1 or known[position - 1] != opcode or pickle[position - 1] != opcode:
                continue
            mine, its = (int.from_bytes(data[position : position + width].tobytes(), "little") for data in (known, pickle))
            candidates = {name for name in numbers if (own[name], numbers[name]) == (mine, its)}
            if candidates:
                fields[position, width] = candidates
                break
        else:
            return None
    return fields


class _Directories:
    """The directories of a known file and of files with the same members."""

    def __init__(self, raw: _Raw) -> None:
        self._raw = raw
        records = _Records(raw)
        # By the lengths of the directory and of the root folder's name, which has the rank's number in it.
        self._records = {(len(raw.directory), len(raw.root)): records}
        self.rows = {offset: row for row, offset in enumerate(records.own.tolist())}
        """Place of a member in the known file -> its row."""

    def move(self, path: str, offsets: Columns) -> Move:
        """Where the tensors of the known file are in a file with its members at these offsets."""

        def moved(tensor: AnyTensor) -> AnyTensor:
            if not isinstance(tensor, UnlocatedTensor):
                return tensor
            return replace(tensor, path=path, member=int(offsets[self.rows[tensor.member]]))

        return moved

    def offsets_in(self, raw: _Raw) -> Columns | None:
        """[members]: the places of the members' local headers in a file, if it has the members of the known file; otherwise None."""
        lengths = len(raw.directory), len(raw.root)
        known = self._records.get(lengths)
        offsets = known.offsets_in(raw) if known else None
        if offsets is not None or len(self._records) > _MOST_FORMS:
            return offsets
        sizes = _sizes_by_name(raw)
        if sizes is None or len(sizes) < raw.count or sizes != _sizes_by_name(self._raw):
            return None
        self._records[lengths] = records = _Records(raw)
        return records.offsets_in(raw)


class _Records:
    """The records of a known file's directory, and which of their bytes may differ in another rank's: times, the checksum, the name of
    the root folder (of the same length), and the place of the member."""

    def __init__(self, raw: _Raw) -> None:
        directory, at = raw.directory, 0
        starts, name_lengths = [], []
        for _ in range(raw.count):
            name_length, extra_length, comment_length = struct.unpack_from("<HHH", directory, at + 28)
            starts.append(at)
            name_lengths.append(name_length)
            at += 46 + name_length + extra_length + comment_length
        self._starts, self._root = np.array(starts, np.int64), len(raw.root)
        self._stops = self._starts + 46 + np.array(name_lengths, np.int64)
        self._bytes = np.frombuffer(directory, np.uint8)
        self._is_wide = self._numbers(self._bytes, self._starts + 42, 4) == 0xFFFFFFFF
        fixed = np.ones(len(directory), np.bool_)
        for first, last in ((12, 20), (42, 46), (46, 46 + self._root)):
            fixed[(self._starts[:, None] + np.arange(first, last)).reshape(-1)] = False
        fixed[(self._stops[self._is_wide][:, None] + np.arange(4, 12)).reshape(-1)] = False
        self._mask = np.where(fixed, 255, 0).astype(np.uint8)
        self._fixed = self._bytes & self._mask
        self._roots = self._starts[:, None] + np.arange(46, 46 + self._root)
        self._sizes = self._numbers(self._bytes, self._starts + 24, 4)
        self.own = self._places(self._bytes)
        """[members]: the places of the members' local headers in the known file."""

    def offsets_in(self, raw: _Raw) -> Columns | None:
        """[members]: the places of their local headers in a file with the same records; None if more differs than may.

        Every member has been checked to lie before the directory.
        """
        directory = np.frombuffer(raw.directory, np.uint8)
        if raw.count != len(self._starts) or len(directory) != len(self._bytes) or len(raw.root) != self._root:
            return None
        if not np.array_equal(directory & self._mask, self._fixed):
            return None
        if not (directory[self._roots] == np.frombuffer(raw.root, np.uint8)).all():
            return None
        is_wide = self._numbers(directory, self._starts + 42, 4) == 0xFFFFFFFF
        if not np.array_equal(is_wide, self._is_wide) or (self._sizes == 0xFFFFFFFF).any():
            return None
        # A 64-bit field of one number, which is the place.
        if (self._numbers(directory, self._stops[is_wide], 4) != 0x00080001).any():
            return None
        offsets = self._places(directory)
        return offsets if (offsets >= 0).all() and (offsets + 30 + self._sizes <= raw.directory_offset).all() else None

    def _places(self, directory: npt.NDArray[np.uint8]) -> Columns:
        offsets = self._numbers(directory, self._starts + 42, 4)
        offsets[self._is_wide] = self._numbers(directory, self._stops[self._is_wide] + 4, 8)
        return offsets

    @staticmethod
    def _numbers(directory: npt.NDArray[np.uint8], starts: Columns, width: int) -> Columns:
        """The little-endian numbers of `width` bytes that start at these bytes."""
        rows = np.ascontiguousarray(directory[starts[:, None] + np.arange(width)])
        return rows.view(f"<u{width}").reshape(-1).astype(np.int64)


def _sizes_by_name(raw: _Raw) -> list[tuple[str, int]] | None:
    """Of each member, in order: its name in the root folder, and its size; None if the directory is damaged."""
    root = raw.root.decode("utf-8", "replace")
    try:
        members = list(members_of(raw.source, raw.directory, raw.count))
    except CheckpointError:
        return None
    return [(member.name.removeprefix(root), member.nbytes) for member in members if member.name.startswith(root)]


def _member(local: LocalTensor) -> int:
    """The byte offset of the local header of the member that holds a tensor; -1 if it has no shard."""
    stored = local.shards[0][1]
    assert isinstance(stored, UnlocatedTensor)
    return stored.member
