"""The manifest: what a conversion wrote, from what and how, in two files beside the result.

    reshard.json      one JSON object of less than 64 kB: format, fingerprint, source, command, versions, files, drops
    reshard.digests   a line of JSON for each file and each tensor, with its digest; equal results have equal digests, whatever the source

reshard.json holds the digest of reshard.digests, and a digest of its own other keys. Both are hostile input: their size is limited, and
every value that is used is checked. Of a file that holds tensors, the digest of its fixed bytes and the digests of the tensors together
cover every byte. Version 1 of the manifest (reshard 0.1) is reshard.json alone, without digests of single tensors.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeGuard

from reshard.errors import CheckpointError, ReshardError, UnsupportedError, some
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.digests import CURRENT, VERSIONS, DigestVersion, Hash, content_digest, is_digest
from reshard.secrets import masked_in
from reshard.storage.files import Files, inside, read_range, read_whole

if TYPE_CHECKING:
    from reshard.index.index import Constant
    from reshard.plans.layout import TargetFile


Ranges = tuple[tuple[int, int], ...]
"""Byte ranges [start, stop) of a file, in order and disjoint."""
MANIFEST = "reshard.json"
DIGESTS = "reshard.digests"
CHECKSUMS = "SHA256SUMS"
README = "README.md"
"""The file that `convert --card` adds a section to (card.py)."""
RECORDS = (DIGESTS, CHECKSUMS, MANIFEST)
"""The files that record a conversion."""
SCHEMA_VERSION = 2
MOST_BYTES = 1 << 16
"""reshard.json is written with fewer bytes than this."""
# Version 1 listed all files in reshard.json.
_MOST_READ = 1 << 24
_MOST_DIGESTS, _LONGEST_LINE = 1 << 28, 1 << 24
# Bytes are made, read and hashed in parts of at most this length.
_PART = 1 << 20


@value
class Manifest:
    """What reshard.json says."""

    version: DigestVersion
    """The version of its digests."""
    fingerprint: str
    """The fingerprint of everything that was written."""
    plan: str
    """The identity of the plan (`Plan.identity`)."""
    format: str
    """The format that was written."""
    files: Mapping[str, int] | None
    """The length of each file that holds tensors; None if they are too many, then reshard.digests has the list."""
    digests: str | None
    """The digest of reshard.digests; None in version 1."""
    document: Mapping[str, Any]
    """The whole JSON object."""

    @property
    def summary(self) -> str:
        """The number of files and the parallel sizes, for messages."""
        sizes = {axis: self.document.get(axis) for axis in ("tp", "pp", "ep", "dp")}
        text = "".join(f", {axis} {size}" for axis, size in sizes.items() if isinstance(size, int) and size > 1)
        return plural(len(self.files), "file") + text if self.files is not None else text.removeprefix(", ") or self.format

    @property
    def step(self) -> int | None:
        """The step of the run that the source was saved at, for formats that have no place for it."""
        source = self.document.get("source")
        step = source.get("step") if isinstance(source, dict) else None
        return step if _is_size(step) else None

    @property
    def overflow(self) -> dict[str, int]:
        """How many finite values of each tensor became infinite in the cast."""
        counts = self.document.get("overflow")
        return {name: count for name, count in counts.items() if _is_size(count)} if isinstance(counts, dict) else {}

    @property
    def combination(self) -> str | None:
        """A sentence about the checkpoints that this one was combined from; None if it was made of one."""
        combined = self.document.get("combined")
        sources = combined.get("sources") if isinstance(combined, dict) else None
        if not isinstance(combined, dict) or not isinstance(sources, list):
            return None
        steps = [
            f"step {part['step']}" if _is_size(part.get("step")) else str(part.get("path")) for part in sources if isinstance(part, dict)
        ]
        weights = [f"{part['weight']:.6g}" if isinstance(part.get("weight"), float) else "?" for part in sources if isinstance(part, dict)]
        named = [f"{step} ({weight})" for step, weight in zip(steps, weights, strict=True)]
        about = f"{combined.get('rule')} ({combined.get('asked')})"[:200]
        return f"{about} of {plural(len(named), 'checkpoint')}: {some(named, most=11)}; {MANIFEST} has their paths and fingerprints"

    @property
    def is_unchanged(self) -> bool:
        """Whether reshard.json holds what reshard wrote. Version 1 has no digest that could tell."""
        return self.digests is None or self.document.get("digest") == _self_digest(self.document)


@value
class FileRecord:
    """A file that holds tensors."""

    nbytes: int
    """Its length."""
    fixed: Ranges
    """The ranges of its fixed bytes."""
    fixed_digest: str
    """The digest of its fixed bytes."""
    samples: str
    """The digest of some parts of it (`sample_ranges`), which tells files apart quickly."""


@value
class Digests:
    """What reshard.digests says."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    """The files that hold tensors."""
    small_files: dict[str, str] = field(default_factory=dict)
    """The digest of each other file, such as config.json."""
    tensors: dict[str, str] = field(default_factory=dict)
    """The digest of each tensor by key, optimizer state included."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Tensors that are stored once under another name: alias -> stored name. `tensors` has the digests of both."""


def sample_ranges(nbytes: int) -> Ranges:
    """The ranges of a file that its samples consist of: 16 parts of 4 KiB, spread evenly; a short file is taken whole."""
    count, length = 16, 4096
    if nbytes <= count * length:
        return ((0, nbytes),)
    return tuple((start, start + length) for start in ((nbytes - length) * i // (count - 1) for i in range(count)))


# ---- fixed bytes: framing, padding and constants, those that the plan knows and no source tensor fills ----


def fixed_ranges(file: TargetFile, constants: Sequence[Constant]) -> Ranges:
    """The ranges of the fixed bytes of a file. constants: those of this file."""
    ranges, end = [(constant.byte_offset, constant.byte_offset + constant.nbytes) for constant in constants], 0
    for start, stop in [*sorted((item.byte_offset, item.byte_offset + item.tensor.nbytes) for item in file.tensors), (file.nbytes,) * 2]:
        if start > end:
            ranges.append((end, start))
        end = max(end, stop)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def parts(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The ranges in order, cut into parts of at most 1 MiB."""
    for start, stop in ranges:
        yield from ((at, min(at + _PART, stop)) for at in range(start, stop, _PART))


def fixed_bytes(file: TargetFile, constants: Sequence[Constant]) -> Iterator[tuple[int, bytes]]:
    """The fixed bytes of a file as they will be written, in parts: literals, constants, and zeros elsewhere."""
    known = FixedBytes(file, constants)
    return ((start, bytes(known.content(start, stop))) for start, stop in parts(fixed_ranges(file, constants)))


class FixedBytes:
    """The bytes of a file that its plan knows, at any place of the file. constants: those of this file."""

    def __init__(self, file: TargetFile, constants: Sequence[Constant]) -> None:
        known = [(offset, len(data), data) for offset, data in file.literals if data]
        known += [(constant.byte_offset, constant.nbytes, constant.expected) for constant in constants if constant.expected.strip(b"\0")]
        self._known = sorted(known, key=lambda part: part[0])
        self._starts = [start for start, _, _ in self._known]
        self.nbytes = sum(len(content) for _, _, content in self._known)
        """The bytes of memory that it takes."""

    def content(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of the file, with zeros where the plan knows none."""
        content = bytearray(stop - start)
        for at, nbytes, repeated in islice(self._known, max(0, bisect_right(self._starts, start) - 1), None):
            if at >= stop:
                break
            first, last = max(at, start), min(at + nbytes, stop)
            if first < last:
                phase = (first - at) % len(repeated)
                content[first - start : last - start] = (repeated * ((last - first + phase) // len(repeated) + 1))[phase:][: last - first]
        return content


# ---- writing ----


def manifest_bytes(document: Mapping[str, Any], files: Mapping[str, int]) -> bytes:
    """The content of reshard.json. A list that would make it too large is null; reshard.digests lists the files, too."""
    listed = {**masked_in(document), "files": dict(files)}
    for chosen in (listed, {**listed, "files": None}, {**listed, "files": None, "dropped": None}):
        content = json.dumps({**chosen, "digest": _self_digest(chosen)}, indent=2).encode() + b"\n"
        if len(content) < MOST_BYTES:
            break
    return content


def digests_bytes(digests: Digests) -> bytes:
    """The content of reshard.digests. Files come first, so that their list can be read alone. Names are sorted."""
    lines: list[Mapping[str, Any]] = [{"schema_version": SCHEMA_VERSION}]
    for path, file in sorted(digests.files.items()):
        fixed = ",".join(f"{start}-{stop}" for start, stop in file.fixed)
        lines.append({"file": path, "bytes": file.nbytes, "fixed": fixed, "fixed_digest": file.fixed_digest, "samples": file.samples})
    lines += [{"small_file": path, "digest": digest} for path, digest in sorted(digests.small_files.items())]
    lines += [{"tensor": name, "digest": digest} for name, digest in sorted(digests.tensors.items())]
    lines += [{"alias": alias, "of": name} for alias, name in sorted(digests.aliases.items())]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _self_digest(document: Mapping[str, Any]) -> str:
    """The digest of a manifest without its own digest."""
    text = json.dumps({key: value for key, value in document.items() if key != "digest"}, sort_keys=True, separators=(",", ":"))
    return content_digest(text.encode())


# ---- reading ----


def read_manifest(files: Files) -> Manifest | None:
    """The manifest of a checkpoint that reshard wrote; None if it has none.

    Raises: CheckpointError if reshard.json is damaged, UnsupportedError if a later version of reshard wrote it.
    """
    # Of a folder that was opened by the path of one file, only that file is meant.
    if MANIFEST not in files.list():
        return None
    try:
        document = json.loads(read_whole(files, MANIFEST, limit=_MOST_READ))
    except (ValueError, RecursionError) as error:
        raise _damaged(MANIFEST, f"it is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise _damaged(MANIFEST, "it does not hold a JSON object")
    number = document.get("schema_version", 1)
    if not isinstance(number, int) or number not in VERSIONS:
        raise UnsupportedError(
            f"its schema_version is {number!r}, and this version of reshard reads {', '.join(map(str, VERSIONS))}",
            where=MANIFEST,
            do="Use the version of reshard that wrote it, or a later one",
        )
    version, sizes = VERSIONS[number], document.get("files")
    if not (sizes is None and number > 1) and not (isinstance(sizes, dict) and all(_is_size(size) for size in sizes.values())):
        raise _damaged(MANIFEST, "it does not list the files and their sizes")
    if not is_digest(document.get("fingerprint"), version) or (number > 1 and not is_digest(document.get("digests"))):
        raise _damaged(MANIFEST, "it holds no fingerprint")
    if not isinstance(document.get("format"), str) or not isinstance(document.get("plan"), str):
        raise _damaged(MANIFEST, "it does not name the format and the plan")
    listed = None if sizes is None else {inside(path, where=MANIFEST): size for path, size in sizes.items()}
    digests = document["digests"] if number > 1 else None
    return Manifest(version, document["fingerprint"], document["plan"], document["format"], listed, digests, document)


def usable_manifest(files: Files) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none, or a damaged one. `read_manifest` tells what is damaged."""
    try:
        return read_manifest(files)
    except ReshardError:
        return None


def listed_files(files: Files, manifest: Manifest) -> Mapping[str, int]:
    """The length of each file that holds tensors, from reshard.json or, if they are too many, from reshard.digests."""
    if manifest.files is not None:
        return manifest.files
    if files.size(DIGESTS) is None:
        raise _damaged(DIGESTS, "the file is missing")
    listed: dict[str, int] = {}
    for record in _records(_lines(files, CURRENT.new())):
        if "file" in record:
            listed[inside(str(record["file"]), where=DIGESTS)] = _file_record(record).nbytes
        elif listed:
            break
    return listed


def written_files(files: Files, manifest: Manifest) -> tuple[str, ...]:
    """Every file that reshard wrote by its records, which come last, whether it exists or not. Small files are those that reshard.digests
    lists, if it is there."""
    listed: list[str] = []
    with suppress(CheckpointError):
        listed += listed_files(files, manifest)
        listed += read_digests(files, manifest).small_files
    return tuple(dict.fromkeys((*listed, *RECORDS)))


def check_listed_files(files: Files, manifest: Manifest) -> None:
    """Raises CheckpointError, naming the file, if one of the files that reshard wrote is missing or has another length."""
    for path, size in listed_files(files, manifest).items():
        nbytes = files.size(path)
        if nbytes != size:
            raise CheckpointError(
                "the file is missing" if nbytes is None else f"the file has {nbytes:,} bytes, {size:,} were written",
                where=path,
                why=f"{MANIFEST} lists {manifest.summary}",
                do=f"Copy the file again from where it was written, or remove {MANIFEST} if another program has written here since",
            )


def read_digests(files: Files, manifest: Manifest) -> Digests:
    """The digests that belong to a manifest of version 2.

    Raises: CheckpointError if reshard.digests is missing, damaged, or belongs to another conversion.
    """
    if files.size(DIGESTS) is None:
        raise _damaged(DIGESTS, "the file is missing")
    digests, running = Digests(), CURRENT.new()
    for record in _records(_lines(files, running)):
        if "file" in record:
            _add(digests.files, inside(str(record["file"]), where=DIGESTS), _file_record(record))
        elif "small_file" in record:
            _add(digests.small_files, inside(str(record["small_file"]), where=DIGESTS), _digest(record, "digest"))
        elif "tensor" in record:
            _add(digests.tensors, str(record["tensor"]), _digest(record, "digest"))
        elif "alias" in record:
            _add(digests.aliases, str(record["alias"]), str(record.get("of")))
    if CURRENT.text(running.digest()) != manifest.digests:
        raise _damaged(DIGESTS, f"it is not the file that {MANIFEST} names")
    return digests


def _lines(files: Files, running: Hash) -> Iterator[bytes]:
    """The lines of reshard.digests. `running` gets all bytes."""
    size, rest = files.size(DIGESTS) or 0, b""
    if size > _MOST_DIGESTS:
        raise _damaged(DIGESTS, f"it has {size:,} bytes, more than the limit of {_MOST_DIGESTS:,}")
    for start in range(0, size, _PART):
        part = read_range(files, DIGESTS, start, min(_PART, size - start))
        running.update(part)
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
        if len(rest) > _LONGEST_LINE:
            raise _damaged(DIGESTS, f"a line has more than {_LONGEST_LINE:,} bytes")
    if rest:
        raise _damaged(DIGESTS, "its last line is incomplete")


def _records(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise _damaged(DIGESTS, f"line {number} is not a JSON object")
        yield record


def _file_record(record: Mapping[str, Any]) -> FileRecord:
    size, fixed = record.get("bytes"), record.get("fixed")
    if (
        not isinstance(size, int)
        or not _is_size(size)
        or not isinstance(fixed, str)
        or not re.fullmatch(r"(\d{1,18}-\d{1,18}(,|$))*", fixed)
    ):
        raise _damaged(DIGESTS, f"the record of {str(record['file'])[:200]!r} is incomplete")
    ranges = tuple((int(start), int(stop)) for start, _, stop in (span.partition("-") for span in fixed.split(",") if span))
    end = 0
    for start, stop in ranges:
        if not end <= start <= stop <= size:
            raise _damaged(DIGESTS, f"the ranges of {str(record['file'])[:200]!r} do not lie in the file in order")
        end = stop
    return FileRecord(size, ranges, _digest(record, "fixed_digest"), _digest(record, "samples"))


def _digest(record: Mapping[str, Any], key: str) -> str:
    if not is_digest(record.get(key)):
        raise _damaged(DIGESTS, f"a record has no digest under {key!r}")
    return str(record[key])


def _add(records: dict[str, Any], name: str, value: Any) -> None:
    if name in records:
        raise _damaged(DIGESTS, f"{name[:200]!r} is recorded twice")
    records[name] = value


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _damaged(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=path,
        why="So the files cannot be compared with what reshard wrote",
        do=f"Copy {MANIFEST} and {DIGESTS} again from where the checkpoint was written, or remove both",
    )
