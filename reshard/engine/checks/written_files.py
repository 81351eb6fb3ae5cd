"""Checking a folder that reshard wrote against its manifest: every byte of every file, and that no file is missing or was added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

from reshard.adapter import registry
from reshard.engine.compare import Comparison, Difference, Side, wrong_constants
from reshard.engine.pool import Effort
from reshard.engine.record import digest_of
from reshard.engine.recorded import BlockDigests, changed_files, files_of, tensor_digest
from reshard.engine.walk import block_digests
from reshard.errors import CheckpointError
from reshard.index.index import Tensor
from reshard.plans.digests import CURRENT, DigestVersion
from reshard.plans.manifest import MANIFEST, RECORDS, Digests, FileRecord, Manifest, listed_files
from reshard.storage.files import Files, read_range

KnownDigests = Callable[[Tensor], Mapping[int, bytes] | None]
"""The digests of a tensor's blocks by their numbers, of a tensor that was read already; None for one that was not."""


def check_sizes(files: Files, manifest: Manifest, result: Comparison) -> None:
    """Compare the lengths of the files that hold tensors with the manifest."""
    for path, size in listed_files(files, manifest).items():
        nbytes = files.size(path)
        if nbytes is None:
            result.differences.append(Difference(path, "missing", f"the file is missing ({MANIFEST} lists {manifest.summary})"))
        elif nbytes != size:
            result.differences.append(Difference(path, "size", f"the file has {nbytes:,} bytes, {size:,} were written"))


def check_nothing_was_added(files: Files, manifest: Manifest, digests: Digests, result: Comparison) -> None:
    """Find the files that reshard did not write. Files of weights are differences, because an engine would read them."""
    globs = [glob for format in registry.formats().values() for glob in format.owns]
    for path in _other_files(files, {*digests.files, *digests.small_files, *RECORDS}):
        if any(fnmatchcase(path, glob) for glob in globs):
            detail = f"the file is not one that reshard wrote ({MANIFEST} lists {manifest.summary})"
            result.differences.append(Difference(path, "extra", detail))
        else:
            result.notes.append(f"{path} is not listed in {MANIFEST} and was not checked")


def check_small_files(files: Files, small_files: Mapping[str, str], result: Comparison) -> None:
    """Compare the content of the small files, such as config.json, with their digests."""
    for path, expected in small_files.items():
        size = files.size(path)
        if size is None:
            result.differences.append(Difference(path, "missing", "the file is missing"))
        elif digest_of(path, ((0, size),), partial(read_range, files)) != expected:
            result.differences.append(Difference(path, "values", "the file has changed since reshard wrote it"))


def check_fixed_bytes(files: Files, records: Mapping[str, FileRecord], result: Comparison) -> None:
    """Compare what lies around the tensors, such as headers and padding, with its digests; and name the files that were exchanged."""
    for path, change in changed_files(files, records).items():
        if files.size(path) == records[path].nbytes:
            result.differences.append(Difference(path, "values", f"the file {change}"))
    named = {difference.name for difference in result.differences}
    for path, record in records.items():
        if path not in named and digest_of(path, record.fixed, partial(read_range, files)) != record.fixed_digest:
            detail = "bytes around the tensors (header, padding or constants) have changed since reshard wrote the file"
            result.differences.append(Difference(path, "values", detail))


def check_tensors(
    side: Side, tensors: Mapping[str, Tensor], digests: Digests, result: Comparison, known: KnownDigests, effort: Effort
) -> None:
    """Compare every tensor, its replicas and the constants around it.

    tensors: by the keys under which the digests were recorded. known: of tensors that are not read again.
    """
    result.differences.extend(wrong_constants(side.files, side.index.constants))
    # An alias may be readable under the stored name only.
    stored = {name: name if name in tensors else digests.aliases.get(name, name) for name in digests.tensors}
    for name in [name for name, stored_name in stored.items() if stored_name not in tensors]:
        result.differences.append(Difference(name, "missing", "no file holds it any more"))
        del stored[name]
    chosen = {stored_name: tensors[stored_name] for stored_name in dict.fromkeys(stored.values())}
    by_tensor: BlockDigests = {name: dict(of_blocks) for name, tensor in chosen.items() if (of_blocks := known(tensor))}
    by_tensor |= hash_blocks(side.files, {name: tensor for name, tensor in chosen.items() if name not in by_tensor}, result, effort)
    named = {difference.name for difference in result.differences}
    for name, source in stored.items():
        result.tensors += 1
        if source in named:
            continue
        if CURRENT.text(tensor_digest(name, chosen[source], by_tensor.get(source, {}))) != digests.tensors[name]:
            result.differences.append(
                Difference(name, "values", f"the values are not those that reshard wrote; it lies in {files_of(chosen[source])}")
            )


def hash_blocks(
    files: Files, tensors: Mapping[str, Tensor], result: Comparison, effort: Effort, version: DigestVersion = CURRENT
) -> BlockDigests:
    """The digests of all blocks. A tensor whose copies differ is added to `result`."""
    unreadable: dict[str, CheckpointError] = {}
    digests = block_digests(files, tensors, effort, version=version, unreadable=unreadable)
    result.nbytes += sum(tensor.nbytes for tensor in tensors.values())
    result.differences.extend(Difference(name, "values", error.what) for name, error in unreadable.items())
    return digests


def _other_files(files: Files, known: set[str]) -> list[str]:
    """The files that are not known, in the root and in the folders of the known files. Hidden folders are left out."""
    folders = {""}
    for path in known:
        names = path.split("/")[:-1]
        folders |= {"/".join(names[: i + 1]) for i in range(len(names))}
    listed = (path for folder in sorted(folders) for path in files.list(folder))
    return [path for path in listed if not path.endswith("/") and path not in known]
