"""Files of a source, read whole and compared with the digests that other programs have recorded beside them.

    <folder>/integrity.json                             {"algorithm": "sha256", "files": {name: digest}}, of all files of the folder but
                                                        itself (megatron-core 0.19.2, dist_checkpointing with verify_integrity)
    <root>/.cache/huggingface/download/<path>.metadata  three lines: commit, etag, time (huggingface_hub 0.24 to 2.4, `local_dir`)
    <path> is a link to .../blobs/<etag>                the cache of huggingface_hub

An etag of 64 hexadecimal digits is the SHA-256 of the file; one of 40 the SHA-1 of a git blob: of "blob <size>", a zero byte, the content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import itemgetter

from reshard.adapter.model_files import CARRIED, CONFIG
from reshard.engine.events import event
from reshard.engine.pool import Effort, run_jobs
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.quantities import grouped
from reshard.index.index import Tensor
from reshard.storage.claims import FileDigests
from reshard.storage.files import Files, LocalFiles, inside, missing, read_range, read_whole
from reshard.storage.trees import numbered, tree_at, trees_of

INTEGRITY = "integrity.json"
_DOWNLOADS = ".cache/huggingface/download/"
_MOST_BYTES, _STEP = 64 << 20, 1 << 20
# What is read beside the tensors: the config, the tokenizer, the index of the files.
_BESIDE = (*CARRIED, CONFIG, "*.index.json")


def check_digests(effort: Effort, *sources: tuple[Files, Iterable[Tensor]]) -> FileDigests:
    """Read the files of these tensors whole, if `effort` says so, and compare them with their recorded digests. With them, the files that
    an integrity.json lists, and those that are read beside tensors.

    Raises: CheckpointError with the id wrong-digest; MissingFile for a listed file that is not there; UnsupportedError for digests of
    another algorithm than SHA-256.
    """
    verified = without = 0
    for files, tensors in sources if effort.verify_source else ():
        used = {path for tensor in tensors for leaf in tensor.leaves for path in leaf.shards.holders}
        for tree, places in grouped([tree_at(trees_of(files), numbered(files, path)) for path in used], itemgetter(0)).items():
            paths = {path for _, path in places}
            listed = (path for folder in {path.rpartition("/")[0] for path in paths} for path in tree.list(folder))
            beside = {path for path in listed if any(fnmatchcase(path.rpartition("/")[2], glob) for glob in _BESIDE)}
            digests = recorded(tree, paths | beside)
            without += len(paths - digests.keys())
            for _, error in compared(tree, digests, effort):
                if error:
                    raise error
                verified += 1
    digests_of_source = FileDigests(verified, without)
    for note in digests_of_source.notes():
        event("source-digests", note, verified=verified, without_digest=without)
    return digests_of_source


def recorded(files: Files, paths: Iterable[str]) -> dict[str, str]:
    """The digests that are recorded of these files, and of the files that an integrity.json beside them lists.

    Raises: CheckpointError if an integrity.json is damaged, UnsupportedError if it is of another algorithm.
    """
    folders = {path[: len(path) - len(path.rpartition("/")[2])] for path in paths}
    digests = {path: digest for folder in folders for path, digest in listed_digests(files, folder).items()}
    return digests | {path: etag for path in paths if path not in digests and (etag := _etag(files, path))}


def listed_digests(files: Files, folder: str) -> dict[str, str]:
    """What the integrity.json of a folder lists; empty if there is none. folder: empty, or with a slash. Raises: as `recorded` does."""
    place = folder + INTEGRITY
    if files.size(place) is None:
        return {}
    try:
        content = json.loads(read_whole(files, place, limit=_MOST_BYTES))
        if content["algorithm"] != "sha256":
            raise UnsupportedError(
                f"its digests are of the algorithm {str(content['algorithm'])[:100]!r}, and SHA-256 is compared",
                where=place,
                do="Compare the files with the program that wrote it, and leave out `verify_source=True`",
            )
        digests = {inside(folder + name, where=place): digest for name, digest in content["files"].items()}
        if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests.values()):
            raise ValueError("a digest is not of SHA-256")
        return digests
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = 'it does not hold SHA-256 digests of files: {"algorithm": "sha256", "files": {name: digest}}'
        raise CheckpointError(what, where=place, do="Copy the file again from where the checkpoint was saved") from None


def compared(files: Files, digests: Mapping[str, str], effort: Effort) -> Iterator[tuple[str, CheckpointError | None]]:
    """Every file with what is wrong with it: it has another digest, or cannot be read."""

    def perform(path: str) -> tuple[str, CheckpointError | None]:
        try:
            stored = _digest(files, path, is_git=len(digests[path]) == 40)
        except CheckpointError as error:
            return path, error
        if stored == digests[path]:
            return path, None
        return path, CheckpointError(
            f"its {'SHA-256' if len(stored) == 64 else 'git SHA-1'} is {stored}, {digests[path]} was recorded",
            where=path,
            why="The file is damaged, or was changed after it was saved or downloaded",
            do="Copy or download the file again",
            id="wrong-digest",
        )

    return run_jobs(digests, lambda: perform, effort.threads(1, buffers=1))


def _digest(files: Files, path: str, *, is_git: bool) -> str:
    """The SHA-256 of a file, or the SHA-1 of the git blob that it is."""
    size = files.size(path)
    if size is None:
        raise missing(files, path)
    running = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if is_git else hashlib.sha256()
    for start in range(0, size, _STEP):
        running.update(read_range(files, path, start, min(_STEP, size - start)))
    return running.hexdigest()


def _etag(files: Files, path: str) -> str:
    """The digest that huggingface_hub has recorded of a file; empty if there is none."""
    place, etag = f"{_DOWNLOADS}{path}.metadata", ""
    if files.size(place) is not None:
        _, _, etag = read_whole(files, place, limit=_STEP).decode("utf-8", "replace").partition("\n")
    elif isinstance(files, LocalFiles) and os.path.islink(files.folder / path):
        etag = os.readlink(files.folder / path).replace("\\", "/").rpartition("blobs/")[2]
    etag = etag.partition("\n")[0].strip().strip('"').lower()
    return etag if re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", etag) else ""
