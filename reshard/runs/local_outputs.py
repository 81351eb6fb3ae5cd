"""LocalOutputs: the outputs of a watch on the disk. Equal files are hard links, the newest is named by a symbolic link.

What is removed or replaced is what reshard wrote (removal.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from reshard.errors import TargetError
from reshard.plans.manifest import RECORDS
from reshard.runs.outputs import LATEST, MOST_OF_RECORD, RECORD
from reshard.runs.removal import LINKING, discard, record_of
from reshard.storage.files import LocalFiles
from reshard.storage.own_files import open_own, read_own
from reshard.storage.system_calls import sync_folder, system_errors

_PART = 1 << 20
_REMOVING = ".removing-"
_REPLACING = ".replacing-"


class LocalOutputs:
    """`Outputs` of a folder on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, name: str) -> str:
        return str(self._folder / name)

    def prepare(self, finished: Iterable[str]) -> None:
        with system_errors("created", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        for name in finished:
            with suppress(OSError, ValueError):  # A name in a record that was edited may be no name.
                discard(self._folder / (_REMOVING + name), name)

    def names(self) -> set[str]:
        with system_errors("listed", self._folder):
            return {path.name for path in self._folder.iterdir() if path.is_dir()}

    def link_unchanged(self, name: str, earlier: str) -> tuple[int, int]:
        target, other, count, nbytes = self._folder / name, self._folder / earlier, 0, 0
        for path in _equal_files(target, other):
            link = target / (path + LINKING)
            with system_errors("linked", link):
                link.unlink(missing_ok=True)
                os.link(other / path, link)
                os.replace(link, target / path)
            count, nbytes = count + 1, nbytes + (target / path).stat().st_size
        return count, nbytes

    def move_latest(self, name: str) -> bool:
        link = self._folder / LATEST
        if link.exists() and not link.is_symlink():
            raise TargetError("there is something that is not a symbolic link", where=str(link), do="Remove it, or choose another `into=`")
        if link.is_symlink() and os.readlink(link) == name:
            return False
        new = link.with_name(link.name + LINKING)
        with system_errors("written", link):
            if new.is_symlink():
                new.unlink()
            new.symlink_to(name)
            os.replace(new, link)
        return True

    def remove(self, name: str) -> bool:
        target = self._folder / name
        if record_of(target) is None:
            return False
        # It disappears at once: nobody sees a half of it.
        with system_errors("removed", target):
            hidden = self._folder / (_REMOVING + name)
            discard(hidden, name)
            target.rename(hidden)
            discard(hidden, name)
        return True

    def put(self, new: Path, name: str) -> None:
        """Give the folder `new` the name of an output. An output that had it is set aside, and removed afterwards.

        Raises: TargetError if something that reshard did not write has the name.
        """
        target, aside = self._folder / name, self._folder / (_REPLACING + name)
        if os.path.lexists(target) and record_of(target) is None:
            raise TargetError(
                "something that reshard did not write lies there", where=str(target), do="Move it away, or choose another folder"
            )
        with system_errors("replaced", target):
            if target.exists():
                target.rename(aside)
            new.rename(target)
            sync_folder(self._folder)
            discard(aside, name)

    def put_back(self) -> None:
        """End what a kill has left of `put`: an output that was set aside gets its name again, unless the new one has it already."""
        with system_errors("put back", self._folder):
            for aside in [path for path in self._folder.glob(f"{_REPLACING}*") if record_of(path)]:
                target = self._folder / aside.name.removeprefix(_REPLACING)
                if os.path.lexists(target):
                    discard(aside, target.name)
                else:
                    aside.rename(target)

    def read_record(self) -> bytes:
        with system_errors("read", self._folder / RECORD):
            try:
                return read_own(self._folder, RECORD, limit=MOST_OF_RECORD)
            except FileNotFoundError:
                return b""

    def append_record(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with system_errors("written", self._folder / RECORD), open(open_own(self._folder, RECORD, flags), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


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
