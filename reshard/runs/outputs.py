"""The folders that a watch writes: hard links between equal files, the link to the newest, and the removal of old ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from reshard.errors import TargetError
from reshard.plans.manifest import RECORDS, usable_manifest
from reshard.storage.files import LocalFiles
from reshard.storage.system_calls import system_errors

_PART = 1 << 20
_REMOVING = ".removing-"
_LINKING = ".linking"


def link_unchanged(target: Path, earlier: Path) -> tuple[int, int]:
    """Replace the files of an output that are equal to those of an earlier one, byte by byte, by hard links to these. Returns how many
    files and bytes that saves."""
    count = nbytes = 0
    for path in _equal_files(target, earlier):
        link = target / (path + _LINKING)
        with system_errors("linked", link):
            link.unlink(missing_ok=True)
            os.link(earlier / path, link)
            os.replace(link, target / path)
        count, nbytes = count + 1, nbytes + (target / path).stat().st_size
    return count, nbytes


def _equal_files(target: Path, earlier: Path) -> Iterator[str]:
    """The files that both folders have with equal bytes, and that are not one file yet. reshard's own records are of one output each."""
    for path in LocalFiles(target).list():
        ours, theirs = target / path, earlier / path
        if path in RECORDS or not ours.is_file() or ours.is_symlink() or not theirs.is_file() or ours.samefile(theirs):
            continue
        if ours.stat().st_size == theirs.stat().st_size and _is_equal(ours, theirs):
            yield path


def _is_equal(left: Path, right: Path) -> bool:
    with system_errors("read", left), left.open("rb") as a, right.open("rb") as b:
        while True:
            x, y = a.read(_PART), b.read(_PART)
            if x != y:
                return False
            if not x:
                return True


def move_link(link: Path, target: Path) -> bool:
    """Let a symbolic link beside a folder point at it; whether it did not yet. At no moment there is no link.

    Raises: TargetError if something else has the link's name.
    """
    if link.exists() and not link.is_symlink():
        raise TargetError("there is something that is not a symbolic link", where=str(link), do="Remove it, or choose another --into")
    if link.is_symlink() and os.readlink(link) == target.name:
        return False
    new = link.with_name(link.name + _LINKING)
    with system_errors("written", link):
        new.unlink(missing_ok=True)
        new.symlink_to(target.name)
        os.replace(new, link)
    return True


def remove_output(target: Path) -> bool:
    """Remove a folder that reshard wrote; whether there was one. It disappears at once: nobody sees a half of it."""
    if not target.is_dir() or target.is_symlink() or usable_manifest(LocalFiles(target)) is None:
        return False
    hidden = target.with_name(_REMOVING + target.name)
    with system_errors("removed", target):
        shutil.rmtree(hidden, ignore_errors=True)
        target.rename(hidden)
        shutil.rmtree(hidden)
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill has left of removals and links in the folder of outputs."""
    for path in folder.glob(_REMOVING + "*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
