"""Checks of files: their structure, their checksums, and files that no tensor uses. No value is interpreted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Format
from reshard.containers import safetensors
from reshard.containers.zip_directory import Directory, Member, Range, payload, read_directory
from reshard.engine.checks.recorded_digests import INTEGRITY, compared, listed_digests, recorded
from reshard.engine.pool import Effort, run_jobs
from reshard.errors import CheckpointError, ReshardError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found, of_error
from reshard.storage.files import Files, files_below

# Deeper folders belong to something else.
_DEPTH = 4
_ZIP = b"PK\3\4"
_STEP = 1 << 20


def paths_of(files: Files, used: Collection[str]) -> tuple[str, ...]:
    """The files to check: those in the folders of files in which tensors lie; all files below the checkpoint, if none is known."""
    folders = {path.rpartition("/")[0] for path in used}
    if not folders:
        return tuple(files_below(files, "", _DEPTH))
    return tuple(path for folder in sorted(folders) for path in files.list(folder) if not path.endswith("/"))


def damaged_files(files: Files, paths: Sequence[str], checked: Collection[str]) -> Iterator[Finding]:
    """Files whose structure is damaged: the zips of torch.save, and safetensors. checked: files that were read already."""
    for path in paths:
        if path in checked:
            continue
        try:
            if path.endswith(".safetensors"):
                safetensors.read_header(files, path)
            elif _is_one_zip(files, path):
                read_directory(Range(files, path))
        except CheckpointError as error:
            yield of_error(error, "damaged-file")


def unused_files(format: Format, used: Collection[str], files: Files, paths: Sequence[str]) -> Iterator[Finding]:
    """Files with the names of weight files from which no tensor is read. used: those from which tensors are."""
    for path in paths:
        name = path.rpartition("/")[2]
        if (
            path not in used
            and files.size(path)
            and name.endswith((".safetensors", ".bin", ".distcp"))
            and any(fnmatchcase(name, glob) for glob in format.owns)
        ):
            yield found(
                "unused-file", f"it is called like a weight file of the format {format.name}, and no tensor of it is read", file=path
            )


def integrity(files: Files, paths: Sequence[str], *, deep: bool) -> Iterator[Finding]:
    """What integrity.json says of the files of its folder, without reading them: files that it lists and that are missing, and others."""
    for folder in sorted({path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] == INTEGRITY}):
        place = f"{folder}/{INTEGRITY}" if folder else INTEGRITY
        try:
            digests = listed_digests(files, place.removesuffix(INTEGRITY))
        except ReshardError as error:
            yield found("integrity-not-checked", error.what, file=place)
            continue
        yield from (found("missing-file", f"{place} lists it", file=path) for path in digests if files.size(path) is None)
        for path in files.list(folder):
            if path not in digests and path != place and not path.endswith("/"):
                yield found("unlisted-file", f"{place} does not list it", file=path)
        if not deep:
            yield found("integrity-not-checked", f"it lists the SHA-256 of {plural(len(digests), 'file')}, which were not read", file=place)


def wrong_digests(files: Files, paths: Sequence[str], effort: Effort) -> Iterator[Finding]:
    """Files that do not have the digest that was recorded for them."""
    with suppress(UnsupportedError, CheckpointError):  # a finding of `integrity`
        digests = recorded(files, paths)
        for path, error in compared(files, {path: digest for path, digest in digests.items() if files.size(path) is not None}, effort):
            effort.report(files.size(path) or 0)
            if error:
                yield found("wrong-digest", error.what, file=path)


# The bytes of one zip, a file of torch.save or an entry of a DCP file, and its directory.
_Zip = tuple[Range, Directory]


def wrong_checksums(files: Files, paths: Sequence[str], workers: int, advance: Callable[[int], None]) -> Iterator[Finding]:
    """Members of zips whose bytes do not have the stored CRC-32. advance: called with the bytes that were read."""
    unchecked: list[str] = []

    def jobs() -> Iterator[tuple[_Zip, Member]]:
        for source in _zips(files, paths):
            try:
                directory = read_directory(source)
            except CheckpointError:
                continue  # found by `damaged_files`, or when the checkpoint is opened
            members = directory.members.values()
            if not any(member.crc32 for member in members):
                unchecked.append(source.path)
            # A CRC-32 of 0 means that none was computed.
            yield from (((source, directory), member) for member in members if member.crc32)

    def make_worker() -> Callable[[tuple[_Zip, Member]], tuple[int, Finding | None]]:
        buffer = bytearray(_STEP)

        def perform(job: tuple[_Zip, Member]) -> tuple[int, Finding | None]:
            zip_, member = job
            try:
                if _crc32(files, zip_, member, memoryview(buffer)) == member.crc32:
                    return member.nbytes, None
            except CheckpointError as error:
                return 0, of_error(error, "damaged-file")
            detail = f"the {plural(member.nbytes, 'byte')} of its member {member.name} do not have the CRC-32 that was saved with them"
            return member.nbytes, found("wrong-checksum", detail, file=zip_[0].path)

        return perform

    for nbytes, finding in run_jobs(jobs(), make_worker, workers):
        advance(nbytes)
        if finding:
            yield finding
    if unchecked:
        detail = f"{plural(len(set(unchecked)), 'file')} of torch.save without checksums, such as {unchecked[0]}"
        yield found("no-checksums", detail)


def _crc32(files: Files, zip_: _Zip, member: Member, buffer: memoryview) -> int:
    source, directory = zip_
    start, crc = source.start + payload(source, directory, member), 0
    for done in range(0, member.nbytes, _STEP):
        part = buffer[: min(_STEP, member.nbytes - done)]
        files.read_into(source.path, start + done, part)
        crc = zlib.crc32(part, crc)
    return crc


def _zips(files: Files, paths: Sequence[str]) -> Iterator[Range]:
    """Every zip: files of torch.save, and the entries of DCP files."""
    for path in paths:
        if _is_one_zip(files, path):
            yield Range(files, path)
    for folder in dict.fromkeys(path.rpartition("/")[0] for path in paths if path.endswith(".distcp")):
        try:
            metadata = DcpFolder(files, folder + "/" if folder else "").metadata
        except CheckpointError:
            continue
        prefix = folder + "/" if folder else ""
        for item in metadata.tensors.values():
            chunks = item.chunks
            if not item.transforms:  # an encoded entry is no zip
                for file, start, nbytes in zip(chunks.files, chunks.entry_offsets, chunks.entry_nbytes, strict=True):
                    yield Range(files, prefix + metadata.paths[int(file)], int(start), int(nbytes))
        for value in metadata.objects.values():
            if not value.transforms:
                yield Range(files, prefix + value.path, value.entry_offset, value.entry_nbytes)


def _is_one_zip(files: Files, path: str) -> bool:
    """Whether a file starts as a zip and is one. A DCP file is many zips."""
    size = files.size(path)
    if path.endswith(".distcp") or not size or size < len(_ZIP):
        return False
    head = bytearray(len(_ZIP))
    files.read_into(path, 0, memoryview(head))
    return bytes(head) == _ZIP
