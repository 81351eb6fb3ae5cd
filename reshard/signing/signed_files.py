"""The files of a folder as a signature covers them: every regular file, in folders of any depth, hidden ones too.

Left out are the signature itself, what belongs to a repository (.git, ...), and what a download of the Hugging Face hub leaves. Links are
no files: a link could lead elsewhere tomorrow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping

from blake3 import blake3

from reshard.engine.compare import Comparison, Difference
from reshard.engine.pool import Effort, run_jobs
from reshard.errors import CheckpointError, RequestError
from reshard.plans.digests import Hash
from reshard.signing.statement import Statement
from reshard.storage.files import Files, LocalFiles
from reshard.storage.own_files import WORK_FOLDER

# The first four are left out by every implementation (spec/v1.0.md, 6.2); a verifier leaves out the others as the signature lists them.
USUALLY_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
OF_DOWNLOADS = (".cache/huggingface",)
_HASHES: Mapping[str, Callable[[], Hash]] = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b, "blake3": blake3}
_PART = 1 << 20


def covered_files(files: Files, ignored: Collection[str], *, follows_links: bool = False) -> Iterator[tuple[str, int | None]]:
    """The paths of the files that a signature covers, with their lengths; of a link, if links are not followed, None."""
    left_out, folders = {*USUALLY_IGNORED, *ignored}, [""]
    while folders:
        for path in files.list(folders.pop()):
            name = path.rstrip("/")
            if name in left_out:
                continue
            if not follows_links and isinstance(files, LocalFiles) and os.path.islink(files.folder / name):
                yield name, None
            elif path.endswith("/"):
                folders.append(path)
            else:
                yield name, files.size(name)


def check_can_be_signed(files: Files) -> None:
    """Raises RequestError for what is no folder, or one that is still written."""
    if files.is_file:
        raise RequestError("a folder is signed, and this is one file", where=files.root, do="Give the folder that holds it")
    if f"{WORK_FOLDER}/" in files.list():
        what = f"an interrupted conversion lies here ({WORK_FOLDER})"
        raise RequestError(what, where=files.root, do="Finish it with `resume=True`, or remove it with `reshard clean`")


def digests_of_files(files: Files, ignored: Collection[str], effort: Effort) -> dict[str, str]:
    """The SHA-256 of each file that a signature covers, by its path. Each file is read once, from its begin to its end.

    Raises: CheckpointError for a link, and for a file that is written meanwhile; RequestError if there is no file.
    """
    sizes: dict[str, int] = {}
    for path, nbytes in covered_files(files, ignored):
        if nbytes is None:
            what = "it is a link, or no regular file, and a signature covers files alone"
            raise CheckpointError(what, where=path, do=f"Copy the folder with what links lead to: cp -rL {files.root} COPY")
        try:
            path.encode()
        except UnicodeEncodeError:
            raise CheckpointError("the name of the file is not in UTF-8, so no signature can hold it", where=path, do="Rename it") from None
        sizes[path] = nbytes
    if not sizes:
        raise RequestError("there is no file to sign", where=files.root, do="Give the folder of a checkpoint")
    return dict(_hashed(files, sizes, "sha256", effort))


def compare_files(files: Files, statement: Statement, ignored: Collection[str], result: Comparison, effort: Effort) -> None:
    """Compare a folder with what was signed: every byte of every file, and that no file is missing or was added."""
    sizes: dict[str, int] = {}
    for path, nbytes in covered_files(files, {*statement.ignored, *ignored}, follows_links=statement.follows_links):
        if path not in statement.files:
            result.differences.append(Difference(path, "extra", "the file was added since the folder was signed"))
        elif nbytes is None:
            result.differences.append(Difference(path, "values", "a link, or no regular file, stands in place of the file that was signed"))
        else:
            sizes[path] = nbytes
    named = {difference.name for difference in result.differences}
    for path in sorted(statement.files.keys() - sizes.keys() - named):
        result.differences.append(Difference(path, "missing", "the file is missing"))
    for path, digest in _hashed(files, sizes, statement.algorithm, effort):
        if digest != statement.files[path]:
            result.differences.append(Difference(path, "values", "the file has changed since it was signed"))
    result.nbytes += sum(sizes.values())
    result.differences.sort(key=lambda difference: difference.name)


def _hashed(files: Files, sizes: Mapping[str, int], algorithm: str, effort: Effort) -> Iterator[tuple[str, str]]:
    """Each path with the digest of its file."""

    def make_worker() -> Callable[[str], tuple[str, str]]:
        buffer = memoryview(bytearray(_PART))

        def perform(path: str) -> tuple[str, str]:
            running = _HASHES[algorithm]()
            for start in range(0, sizes[path], _PART):
                part = buffer[: min(_PART, sizes[path] - start)]
                files.read_into(path, start, part)
                running.update(part)
                effort.report(len(part))
            if files.changed(path) == "written":
                raise CheckpointError("the file was written while it was read", where=path, do="Wait until nothing writes there")
            return path, running.digest().hex()

        return perform

    largest_first = sorted(sizes, key=lambda path: (-sizes[path], path))
    return run_jobs(largest_first, make_worker, effort.threads(1, buffers=1))
