"""The safetensors container: a length, a JSON header, and the tensors' bytes without a gap.

    | 8 bytes: N, little endian | N bytes: JSON, may end in spaces | tensors, row-major, little endian |

The header is a claim, the length of the file is a fact: `read_header` checks the claim against the fact, and no caller checks again.
Rules: safetensors 0.8 (README, "Format"; tensor.rs, Metadata::validate). The tensors may start at any byte: torch's consolidation of
Hugging Face files does not pad its headers (a header of 1411 bytes was seen with torch 2.13).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from sys import intern
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np

from reshard.containers import magic_bytes
from reshard.errors import CheckpointError, TruncatedFile, UnsupportedError
from reshard.geometry.dtypes import DType, from_safetensors, is_in_safetensors
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.storage.files import Files, missing, read_range

# safetensors refuses longer headers (tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER = 100_000_000
# No file is as long, and sums of two smaller numbers fit into 64 bits.
_TOO_LARGE = 1 << 62


class TensorEntry(NamedTuple):
    """One tensor of a file: its row-major elements are bytes [byte_offset, byte_offset + nbytes)."""

    name: str
    """Its name in the header."""
    dtype: DType
    """Its element type."""
    shape: tuple[int, ...]
    """Its shape."""
    byte_offset: int
    """Where its first element starts, counted from the start of the file."""
    nbytes: int
    """Its length in bytes: the number of its elements times the size of an element."""


class TensorForm(NamedTuple):
    """What tensors of one element type and shape have in common."""

    dtype: DType
    """Their element type."""
    shape: tuple[int, ...]
    """Their shape."""
    nbytes: int
    """The length of each in bytes."""


@value(eq=False)
class Header:
    """What a file says about its content. The tensors are columns, in the order of their bytes: a file may hold many thousands."""

    names: tuple[str, ...]
    """[n]: the name of each tensor."""
    forms: tuple[TensorForm, ...]
    """The element types and shapes that occur."""
    form_numbers: Columns
    """[n]: the form of each tensor, as an index into `forms`."""
    byte_offsets: Columns
    """[n]: where each tensor starts, counted from the start of the file."""
    metadata: dict[str, str]
    """The strings under `__metadata__`."""
    nbytes: int
    """The length of the file in bytes."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors one by one."""
        forms = map(self.forms.__getitem__, self.form_numbers.tolist())
        rows = zip(self.names, forms, self.byte_offsets.tolist(), strict=True)
        return tuple(TensorEntry(name, form.dtype, form.shape, start, form.nbytes) for name, form, start in rows)

    def __repr__(self) -> str:
        return f"Header({plural(len(self.names), 'tensor')}, {plural(self.nbytes, 'byte')})"


@value
class Frame:
    """The layout of a file to be written, without the bytes of its tensors."""

    header: bytes
    """The first bytes of the file: the length and the JSON header."""
    entries: tuple[TensorEntry, ...]
    """The tensors, in the order in which they were given."""
    nbytes: int
    """The length of the file in bytes."""

    def __repr__(self) -> str:
        return f"Frame({plural(len(self.entries), 'tensor')}, {plural(self.nbytes, 'byte')})"


def read_header(files: Files, path: str, *, header_only: bool = False) -> Header:
    """The tensors and the metadata of a file. Takes two reads: the length of the header, and the header.

    The result is checked: every entry lies in the file and is as long as its dtype and shape say, entries neither overlap nor leave a
    hole, and the last entry ends where the file ends.

    header_only: the header is enough. The file may end anywhere after the header, so entries may lie beyond its end.

    Raises: CheckpointError with the numbers found and expected.
    """
    size = files.size(path)
    if size is None:
        raise missing(files, path)
    length = _header_length(files, path, size)
    claims = _parse(read_range(files, path, 8, length), path)
    metadata = _metadata(claims.pop("__metadata__", None), path)
    return _checked(claims, metadata, path, 8 + length, size, header_only)


def frame(tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]) -> Frame:
    """The layout of a file that holds those tensors (name, dtype, shape) in the order given, the first at a multiple of 8 bytes.

    Every tensor is aligned to its dtype if the tensors with wider dtypes come first.

    Raises: RequestError if the header becomes longer than readers accept, or for a dtype that safetensors does not have; ValueError for a
    name that occurs twice.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: list[tuple[str, DType, tuple[int, ...], int, int]] = []
    stop = 0
    for name, dtype, shape in tensors:
        if name in header or name == "__metadata__":
            raise ValueError(f"{name!r} cannot be the name of another tensor of the file")
        if not is_in_safetensors(dtype):
            raise UnsupportedError(f"safetensors has no element type {dtype}", where=name, do="Leave the tensor out with `exclude=`")
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [start, stop]}
        placed.append((name, dtype, tuple(shape), start, stop))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(
            f"the header of one file with {len(placed):,} tensors would have {len(text):,} bytes, readers accept {MAX_HEADER:,}",
            do="Write smaller files, for example with `max_shard_size=`",
        )
    data = 8 + len(text)
    entries = tuple(TensorEntry(name, dtype, shape, data + start, stop - start) for name, dtype, shape, start, stop in placed)
    return Frame(struct.pack("<Q", len(text)) + text, entries, data + stop)


def _header_length(files: Files, path: str, size: int) -> int:
    if size < 10:
        _refuse(path, f"the file has {size} bytes, the shortest safetensors file has 10", do="Copy the file again")
    length: int = struct.unpack("<Q", read_range(files, path, 0, 8))[0]
    if 2 <= length <= min(size - 8, MAX_HEADER):
        return length
    head = read_range(files, path, 0, min(size, 262))
    if head[8:9] != b"{":
        _refuse(path, f"this is not a safetensors file; it looks like {magic_bytes.describe(head)}", do="Get the file again")
    if not 2 <= length <= MAX_HEADER:
        _refuse(path, f"the header claims {length:,} bytes; between 2 and {MAX_HEADER:,} are allowed", do="Get the file again")
    raise TruncatedFile(
        f"the header claims {length:,} bytes, the file has {size:,}",
        where=path,
        why="The file was cut short, or is still being written",
        do="Copy the file again",
    )


def _parse(raw: bytes, path: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        claims = dict(pairs)
        if len(claims) < len(pairs):
            _refuse_name_twice(pairs, path)
        return claims

    try:
        text = raw.decode()
        claims = json.loads(text)
        if b"\\" in raw or raw.count(b'"') != 2 * _strings(claims):
            claims = json.loads(text, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        _refuse(path, f"the header is not UTF-8: byte {8 + error.start} of the file is 0x{raw[error.start]:02x}", do="Get the file again")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"the header is not JSON: {error}; it starts with {raw[:20]!r}", do="Get the file again")
    if not isinstance(claims, dict):
        _refuse(path, f"the header is a JSON {type(claims).__name__}, not an object", do="Get the file again")
    return claims


def _strings(claims: object) -> int:
    """How many strings a header without repeated keys has, if each entry has its three keys: a name, the keys, an element type. If the text
    has as many, no key is repeated."""
    if not isinstance(claims, dict):
        return 0
    metadata = claims.get("__metadata__")
    return 5 * len(claims) + (2 * len(metadata) - 4 if isinstance(metadata, dict) else 0)


def _refuse_name_twice(pairs: list[tuple[str, object]], path: str) -> NoReturn:
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    _refuse(path, f"the header names {twice!r} twice", why="Nothing tells which of the two is meant", do="Get the file again")


def _metadata(claim: object, path: str) -> dict[str, str]:
    if claim is None:
        return {}
    if not isinstance(claim, dict) or not all(isinstance(value, str) for value in claim.values()):
        _refuse(path, f"__metadata__ is {_short(claim)}, not an object of strings")
    return dict(claim)


def _checked(claims: Mapping[str, object], metadata: dict[str, str], path: str, data: int, size: int, header_only: bool) -> Header:
    """The header that makes these claims, after a check of each.

    data: the byte where the header ends and the tensors start. size: the length of the file.
    """
    names = tuple(map(intern, claims))
    for name in names if not all(map(str.isascii, names)) else ():
        _check_unicode(name, path)
    entries: Iterable[Any] = claims.values()
    try:
        parts = list(map(itemgetter("dtype", "shape", "data_offsets"), entries))
    except (TypeError, KeyError, IndexError):
        _refuse_incomplete(claims, path)
    # Element type and shape as text, which tells 1 from true and 1.0 -> the number of their form. They are checked once.
    numbers: dict[str, int] = {}
    forms: list[TensorForm] = []
    number_of_row: list[int] = []
    for row, (claimed, shape, _) in enumerate(parts):
        number = numbers.setdefault(f"{claimed!r}{shape!r}", len(forms))
        if number == len(forms):
            forms.append(_form(claimed, shape, f"{path}: {names[row]}"))
        number_of_row.append(number)
    form_numbers = np.array(number_of_row, np.int64)
    nbytes = np.array([min(form.nbytes, _TOO_LARGE) for form in forms], np.int64)[form_numbers]
    bounds = _bounds([offsets for _, _, offsets in parts])
    if bounds is None or (bounds[:, 1] - bounds[:, 0] != nbytes).any():
        for row, (_, _, offsets) in enumerate(parts):
            form = forms[number_of_row[row]]
            if not _are_bounds(offsets) or offsets[1] - offsets[0] != form.nbytes:
                _refuse_offsets(offsets, form, f"{path}: {names[row]}")
    assert bounds is not None, "one of them is refused"
    starts = bounds[:, 0]
    order = np.lexsort((nbytes, starts))
    names = tuple(map(names.__getitem__, order.tolist()))
    header = Header(names, tuple(forms), form_numbers[order], starts[order] + data, metadata, size)
    _check_tiling(header, data, None if header_only else size, path)
    return header


def _refuse_incomplete(claims: Mapping[str, object], path: str) -> NoReturn:
    """Raises CheckpointError for the first claim that lacks a key."""
    for name, claim in claims.items():
        if not isinstance(claim, dict) or not claim.keys() >= {"dtype", "shape", "data_offsets"}:
            _refuse(f"{path}: {name}", f"the entry is {_short(claim)}, not an object with dtype, shape and data_offsets")
    raise AssertionError("every claim has its keys")


def _bounds(claims: Sequence[Any]) -> Columns | None:
    """The start and the stop of each tensor: [n, 2]; None if a claim is something else."""
    if not (set(map(type, claims)) <= {list} and set(map(len, claims)) <= {2}):
        return None
    numbers = list(chain.from_iterable(claims))
    if not set(map(type, numbers)) <= {int} or not 0 <= min(numbers, default=0) <= max(numbers, default=0) < _TOO_LARGE:
        return None
    return np.array(numbers, np.int64).reshape(-1, 2)


def _are_bounds(claim: Any) -> bool:
    """Whether a claim is a start and a stop."""
    if type(claim) is not list or len(claim) != 2:
        return False
    start, stop = claim
    return type(start) is int and type(stop) is int and 0 <= start < _TOO_LARGE and 0 <= stop < _TOO_LARGE


def _refuse_offsets(offsets: Any, form: TensorForm, where: str) -> NoReturn:
    if not _are_bounds(offsets):
        _refuse(where, f"data_offsets is {_short(offsets)}, not two non-negative integers")
    start, stop = offsets
    _refuse(
        where,
        f"data_offsets {start:,}..{stop:,} hold {stop - start:,} bytes, "
        f"the shape {_short(list(form.shape))} of {form.dtype} needs {_number(form.nbytes)}",
        do="Get the file again",
    )


def _form(claimed: Any, shape: object, where: str) -> TensorForm:
    """The form that a claim names."""
    if not _are_counts(shape):
        _refuse(where, f"the shape is {_short(shape)}, not a list of non-negative integers")
    dtype = from_safetensors(claimed, where=where)
    return TensorForm(dtype, tuple(shape), math.prod(shape) * dtype.itemsize)


def _check_tiling(header: Header, data: int, size: int | None, path: str) -> None:
    """Raises CheckpointError unless the tensors, in order, fill the bytes from `data` to the end of the file.

    size: the length of the file; None if its end is not checked.
    """
    starts, names = header.byte_offsets, header.names
    stops = starts + np.array([form.nbytes for form in header.forms], np.int64)[header.form_numbers]
    ends = np.concatenate([[data], stops])
    for row in np.flatnonzero(starts != ends[:-1]).tolist():
        kind = "overlap" if starts[row] < ends[row] else "leave a hole"
        before = names[row - 1] if row else "the header"
        _refuse(
            f"{path}: {names[row]}",
            f"the tensor starts at byte {starts[row]:,} of the file, {before} ends at {ends[row]:,}: they {kind}",
            do="Get the file again",
        )
    stop = int(ends[-1])
    if size is None or stop == size:
        return
    incomplete = np.flatnonzero(stops > size).tolist()
    if not incomplete:
        _refuse(
            path,
            f"the tensors end at byte {stop:,}, the file has {size:,}: {size - stop:,} bytes belong to no tensor",
            do="Get the file again",
        )
    raise TruncatedFile(
        f"the tensor's bytes are {starts[incomplete[0]]:,}..{stops[incomplete[0]]:,}, "
        f"the file ends at {size:,}; {len(incomplete)} of {len(names)} tensors are incomplete, {stop:,} bytes are expected",
        where=f"{path}: {names[incomplete[0]]}",
        why="The file was cut short, or is still being written",
        do="Copy the file again",
    )


def _are_counts(claim: object) -> TypeGuard[list[int]]:
    """Whether a claim is a list of at most 64 non-negative integers below 2**62. JSON's true and false are not integers."""
    if not isinstance(claim, list) or len(claim) > 64:
        return False
    return all(type(number) is int and 0 <= number < _TOO_LARGE for number in claim)


def _check_unicode(name: str, path: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in name):
        _refuse(path, f"the tensor name {name!r} is not valid Unicode")


def _short(claim: object) -> str:
    text = json.dumps(claim)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: int) -> str:
    return f"{value:,}" if value < 1 << 64 else "more than any file has"


def _refuse(where: str, what: str, *, why: str | None = None, do: str | None = None) -> NoReturn:
    raise CheckpointError(what, where=where, why=why, do=do)
