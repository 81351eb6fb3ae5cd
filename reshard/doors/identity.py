"""Identity: a digest of everything that determines the bytes of a virtual folder, which clients keep beside their copies as an ETag.

It is the same on every machine if the source carries digests of its files: the records of reshard, those of a download from the Hugging
Face Hub, an integrity.json, the ETag of a store. Of any other file, its place, its inode and its times stand for its content.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial

import numpy as np

import reshard
from reshard.engine.checks.recorded_digests import INTEGRITY, recorded
from reshard.engine.record import request_digest, samples
from reshard.errors import ReshardError
from reshard.plans.manifest import DIGESTS, MANIFEST, usable_manifest
from reshard.plans.plan import Plan
from reshard.secrets import public
from reshard.storage.files import Files, read_range
from reshard.storage.trees import numbered, root_of, tree_at, trees_of

# A file may get its time so many seconds after that of the record of its digest was taken.
_SLACK = 1.0
_DOWNLOAD = ".cache/huggingface/download/{}.metadata"


def identity_of(plan: Plan) -> str:
    """A digest of the request, of where the source's tensors lie in its files, and of what identifies each of these files: 64 hexadecimal
    digits."""
    digest = hashlib.sha256(f"reshard {reshard.__version__}\0{plan.source.format}\0{request_digest(plan)}\0".encode())
    for table in {id(route.source.shards.table): route.source.shards.table for route in plan.routes}.values():
        for column in (table.offsets, table.sizes, table.files, table.positions):
            digest.update(np.ascontiguousarray(column).tobytes())
    for route in plan.routes:
        digest.update(f"{route.name}\0{route.source.dtype}\0{route.target.dtype}\0{route.quantized_by}\0".encode("utf-8", "surrogatepass"))
    for identity in _identities(plan):
        digest.update(json.dumps(identity).encode())
    return digest.hexdigest()


def _identities(plan: Plan) -> list[tuple[str, int, str]]:
    """(path, length, what stands for the content) of every file of the source."""
    trees = trees_of(plan.source_files)
    placed = [(numbered(plan.source_files, file.path), file.nbytes) for file in plan.source.files]
    digests = [_recorded(tree, [inner for name, _ in placed for of, inner in [tree_at(trees, name)] if of is tree]) for tree in trees]
    found = []
    for name, nbytes in placed:
        tree, path = tree_at(trees, name)
        found.append((name, nbytes, digests[trees.index(tree)].get(path) or _of_this_machine(tree, path)))
    return found


def _recorded(files: Files, paths: list[str]) -> dict[str, str]:
    """The digests that the tree carries of these files, with samples of their content, unless a file was written after its digest."""
    manifest, found = usable_manifest(files), dict[str, str]()
    if manifest and manifest.digests and manifest.is_unchanged and files.size(DIGESTS) is not None:
        found = {path: f"{manifest.digests} {path}" for path in manifest.files or () if _is_older(files, path, MANIFEST)}
    try:
        digests = recorded(files, paths)
    except ReshardError:
        digests = {}
    for path, digest in digests.items():
        record = next((each for each in (_DOWNLOAD.format(path), _beside(path, INTEGRITY)) if files.size(each) is not None), None)
        if record is None or _is_older(files, path, record):
            found[path] = digest
    return {path: f"{found[path]} {samples(path, files.size(path) or 0, partial(read_range, files))}" for path in paths if path in found}


def _beside(path: str, name: str) -> str:
    return f"{path.rpartition('/')[0]}/{name}".lstrip("/")


def _is_older(files: Files, path: str, record: str) -> bool:
    """Whether a file was not written after the record of its digest."""
    written, recorded_at = files.written(path), files.written(record)
    return written is not None and recorded_at is not None and written <= recorded_at + _SLACK


def _of_this_machine(files: Files, path: str) -> str:
    """The stamp of a file and, on a disk, where it lies: no other content of this machine has the same."""
    if files.store is not None:
        return f"{public(files.root)} {files.stamp(path)}"
    return f"{os.uname().nodename} {root_of(files)} {files.stamp(path)} {files.trace(path)}"
