"""Removing an output: only what reshard wrote and lists in it. What else lies there gets a folder of its own, which stays.

    OUT/.replaced-NAME/    what somebody else has put into the output NAME, before it was replaced or removed

An output is a checkpoint that reshard wrote, which its manifest tells, or a delta, which its index tells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain, count
from logging import WARNING
from pathlib import Path

from reshard.engine.events import event
from reshard.errors import some
from reshard.index.deltas import INDEX, OWN_KEY
from reshard.plans.manifest import DIGESTS, MANIFEST, usable_manifest, written_files
from reshard.storage.files import LocalFiles, inside
from reshard.storage.own_files import ForeignFile, json_object, open_own, own_folder, read_own

LINKING = ".linking"
"""The end of the name of a link that is being made in place of a file."""
# Keys of ours stand at the start of a delta's index.
_OF_OUR_DELTA, _HEAD = f'"{OWN_KEY}"'.encode(), 1 << 16
# The digests of 200,000 tensors of a delta.
_MOST_OF_INDEX = 64 << 20


def record_of(folder: Path) -> str | None:
    """The file that tells that reshard wrote what a folder holds; None if it is a link, or none does."""
    if not folder.is_dir() or folder.is_symlink():
        return None
    if usable_manifest(LocalFiles(folder)) is not None:
        return MANIFEST
    with suppress(OSError, ForeignFile), open(open_own(folder, INDEX, os.O_RDONLY), "rb") as file:
        if _OF_OUR_DELTA in file.read(_HEAD):
            return INDEX
    return None


def discard(folder: Path, name: str) -> None:
    """Remove what reshard wrote in an output that was set aside; the record goes last, so that a kill leaves an output. Anything else there
    is moved to .replaced-NAME beside it, and told. A folder that is no output stays, unless it is empty. name: of the output."""
    record = record_of(folder)
    if record is not None:
        own = [path for path in _listed(folder, record) if path not in (record, DIGESTS)]
        for path in chain(own, (path + LINKING for path in own)):
            _remove(folder, path, os.unlink)
        for inner in sorted({str(parent) for path in own for parent in Path(path).parents} - {"."}, reverse=True):
            _remove(folder, inner, os.rmdir)
        if others := sorted(path.name for path in folder.iterdir() if path.name not in (record, DIGESTS)):
            places = (folder.parent / (f".replaced-{name}" + (f"-{i}" if i > 1 else "")) for i in count(1))
            rest = next(place for place in places if not os.path.lexists(place))
            rest.mkdir()
            for other in others:
                (folder / other).rename(rest / other)
            left(f"{folder.parent / name} held what reshard did not write: {some(others)}. It is in {rest} now", rest)
        for path in (DIGESTS, record):
            _remove(folder, path, os.unlink)
    with suppress(OSError):  # It holds something else, or there is none.
        folder.rmdir()


def left(what: str, place: object) -> None:
    """Tell that something stays where an output is removed."""
    event("stays", what, level=WARNING, path=str(place))


def _listed(folder: Path, record: str) -> Iterable[str]:
    """The files that the record of an output lists."""
    files = LocalFiles(folder)
    if record == MANIFEST:
        manifest = usable_manifest(files)
        return written_files(files, manifest) if manifest else ()
    of_weights = json_object(read_own(folder, INDEX, limit=_MOST_OF_INDEX)).get("weight_map")
    return {inside(path, where=INDEX) for path in of_weights.values() if isinstance(path, str)} if isinstance(of_weights, dict) else ()


def _remove(folder: Path, path: str, remove: Callable[..., None]) -> None:
    """Remove a file or an empty folder in a folder, unless a link leads there, or it is of another kind."""
    above, _, name = path.rpartition("/")
    other = OSError if remove is os.rmdir else IsADirectoryError
    with suppress(other, FileNotFoundError, NotADirectoryError, ForeignFile), own_folder(folder, above) as descriptor:
        remove(name, dir_fd=descriptor)
