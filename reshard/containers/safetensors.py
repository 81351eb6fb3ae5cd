"""The safetensors container: a length, a JSON header, and the tensors' bytes without a gap.

    | 8 bytes: N, little endian | N bytes: JSON, may end in spaces | tensors, row-major, little endian |

The header is a claim, the file's length a fact: `read_header` checks the one against the other, and nobody checks again.
Rules: safetensors 0.8 (README, "Format"; tensor.rs, Metadata::validate). Data may start at any byte: torch's HF consolidation
does not pad its headers (seen: 1411 bytes, torch 2.13).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from reshard.containers import magic_bytes
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import DType, from_safetensors, is_in_safetensors
from reshard.storage.files import Files, missing, read_range

# safetensors refuses longer headers (tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: where in the file its row-major elements lie."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors in the order of their bytes, its free text, and its length."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the tensors of a file to be written: its first bytes, where each tensor goes, and its length."""

    header: bytes
    entries: tuple[Entry, ...]
    nbytes: int


def read_header(files: Files, path: str, *, alone: bool = False) -> Header:
    """The file's tensors and metadata, in two small reads. alone: the header is enough, the file may end anywhere after it.

    From here on they are facts: every entry lies in the file and is as long as its dtype and shape say, entries neither
    overlap nor leave a hole, and the last one ends where the file ends.

    Raises: CheckpointError with the number found and the number expected.
    """
    size = files.size(path)
    if size is None:
        raise missing(files, path)
    length = _header_length(files, path, size)
    claims = _parse(read_range(files, path, 8, length), path)
    metadata = _metadata(claims.pop("__metadata__", None), path)
    entries = [_entry(name, claim, 8 + length, path) for name, claim in claims.items()]
    entries.sort(key=lambda entry: (entry.byte_offset, entry.nbytes))
    _check_tiling(entries, 8 + length, None if alone else size, path)
    return Header(tuple(entries), metadata, size)


def frame(tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]) -> Frame:
    """The header of a file that holds those tensors one after the other in the order given, the first at a multiple of 8.

    Every tensor is aligned to its dtype if the wider ones come first. Raises: RequestError if the header becomes longer than
    readers accept, or for a dtype that safetensors does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: list[tuple[str, DType, tuple[int, ...], int, int]] = []
    stop = 0
    for name, dtype, shape in tensors:
        if name in header or name == "__metadata__":
            raise ValueError(f"{name!r} cannot be the name of one more tensor of the file")
        if not is_in_safetensors(dtype):
            raise RequestError(f"safetensors has no {dtype}", where=name, do="Leave the tensor out with --exclude")
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [start, stop]}
        placed.append((name, dtype, tuple(shape), start, stop))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise RequestError(
            f"the header of one file with {len(placed):,} tensors would have {len(text):,} bytes, readers accept {MAX_HEADER:,}",
            do="Write smaller files",
        )
    data = 8 + len(text)
    entries = tuple(Entry(name, dtype, shape, data + start, stop - start) for name, dtype, shape, start, stop in placed)
    return Frame(struct.pack("<Q", len(text)) + text, entries, data + stop)


def _header_length(files: Files, path: str, size: int) -> int:
    if size < 10:
        _refuse(path, f"the file has {size} bytes, the shortest safetensors file has 10", do="Copy the file again")
    length: int = struct.unpack("<Q", read_range(files, path, 0, 8))[0]
    if 2 <= length <= min(size - 8, MAX_HEADER):
        return length
    head = read_range(files, path, 0, min(size, 262))
    if head[8:9] != b"{":
        _refuse(path, f"this is no safetensors file; it looks like {magic_bytes.describe(head)}", do="Get the file again")
    if not 2 <= length <= MAX_HEADER:
        _refuse(path, f"the header claims {length:,} bytes; between 2 and {MAX_HEADER:,} are allowed", do="Get the file again")
    raise CheckpointError(
        f"the header claims {length:,} bytes, the file has {size:,}",
        where=path,
        why="The file was cut short, or is still being written",
        do="Copy the file again",
    )


def _parse(raw: bytes, path: str) -> dict[str, object]:
    try:
        claims = json.loads(raw.decode(), object_pairs_hook=lambda pairs: _unique(pairs, path))
    except UnicodeDecodeError as error:
        _refuse(path, f"the header is not UTF-8: byte {8 + error.start} of the file is 0x{raw[error.start]:02x}", do="Get the file again")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"the header is not JSON: {error}; it starts with {raw[:20]!r}", do="Get the file again")
    if not isinstance(claims, dict):
        _refuse(path, f"the header is a JSON {type(claims).__name__}, not an object", do="Get the file again")
    return claims


def _unique(pairs: list[tuple[str, object]], path: str) -> dict[str, object]:
    claims = dict(pairs)
    if len(claims) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        _refuse(path, f"the header names {twice!r} twice", why="Which of the two is meant, nobody can tell", do="Get the file again")
    return claims


def _metadata(claim: object, path: str) -> dict[str, str]:
    if claim is None:
        return {}
    if not isinstance(claim, dict) or not all(isinstance(value, str) for value in claim.values()):
        _refuse(path, f"__metadata__ is {_short(claim)}, not an object of strings")
    return dict(claim)


def _entry(name: str, claim: object, data: int, path: str) -> Entry:
    """One tensor's claim, checked for itself; `data` is where the header ends."""
    where = f"{path}: {_printable(name, path)}"
    if not isinstance(claim, dict) or not {"dtype", "shape", "data_offsets"} <= claim.keys():
        _refuse(where, f"the entry is {_short(claim)}, not an object with dtype, shape and data_offsets")
    shape, offsets = claim["shape"], claim["data_offsets"]
    if not _counts(shape):
        _refuse(where, f"the shape is {_short(shape)}, not a list of numbers from 0 on")
    if not _counts(offsets) or len(offsets) != 2:
        _refuse(where, f"data_offsets is {_short(offsets)}, not two numbers from 0 on")
    dtype = from_safetensors(claim["dtype"], where=where)
    start, stop = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        _refuse(
            where,
            f"data_offsets {start:,}..{stop:,} hold {stop - start:,} bytes, the shape {_short(shape)} of {dtype} needs {_number(nbytes)}",
            do="Get the file again",
        )
    return Entry(name, dtype, tuple(shape), data + start, nbytes)


def _check_tiling(entries: list[Entry], data: int, size: int | None, path: str) -> None:
    """Raise unless the entries, in order, fill the bytes from `data` to the file's end, where that matters."""
    stop, before = data, "the header"
    for entry in entries:
        if entry.byte_offset != stop:
            kind = "overlap" if entry.byte_offset < stop else "leave a hole"
            _refuse(
                f"{path}: {entry.name}",
                f"the tensor starts at byte {entry.byte_offset:,} of the file, {before} ends at {stop:,}: they {kind}",
                do="Get the file again",
            )
        stop, before = stop + entry.nbytes, entry.name
    if size is None or stop == size:
        return
    cut = [entry for entry in entries if entry.byte_offset + entry.nbytes > size]
    if not cut:
        _refuse(
            path,
            f"the tensors end at byte {stop:,}, the file has {size:,}: {size - stop:,} bytes belong to no tensor",
            do="Get the file again",
        )
    _refuse(
        f"{path}: {cut[0].name}",
        f"the tensor's bytes are {cut[0].byte_offset:,}..{cut[0].byte_offset + cut[0].nbytes:,}, the file ends at {size:,}; "
        f"{len(cut)} of {len(entries)} tensors are not whole, {stop:,} bytes are expected",
        why="The file was cut short, or is still being written",
        do="Copy the file again",
    )


def _counts(claim: object) -> bool:
    """Whether a claim is a short list of integers from 0 on that fit 63 bits; JSON's true and false are none."""
    return isinstance(claim, list) and len(claim) <= 64 and all(type(number) is int and 0 <= number < 1 << 63 for number in claim)


def _printable(name: str, path: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in name):
        _refuse(path, f"the tensor name {name!r} is not Unicode text")
    return name


def _short(claim: object) -> str:
    text = json.dumps(claim)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: int) -> str:
    return f"{value:,}" if value < 1 << 64 else "more than any file has"


def _refuse(where: str, what: str, *, why: str | None = None, do: str | None = None) -> NoReturn:
    raise CheckpointError(what, where=where, why=why, do=do)
