"""StoreOutputs: the outputs of a watch in a store. `latest` is an object that holds the name of the newest; equal files are not linked."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import TargetError, UnsupportedError, some
from reshard.plans.manifest import DIGESTS, MANIFEST, usable_manifest, written_files
from reshard.runs.outputs import LATEST, MOST_OF_RECORD, RECORD
from reshard.runs.removal import left
from reshard.storage.own_files import foreign
from reshard.storage.stores.urls import open_store
from reshard.storage.tar import open_tree

# What `latest` may hold: the name of a folder.
_LONGEST_NAME = 1024


class StoreOutputs:
    """`Outputs` of a folder in a store. Objects cannot be appended to, so the record is written anew with each line."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def place(self, name: str) -> str:
        return self._store.place(name)

    def prepare(self, finished: Iterable[str]) -> None:
        return None

    def names(self) -> set[str]:
        return {entry.path.rstrip("/") for entry in self._store.list(below=False) if entry.path.endswith("/")}

    def link_unchanged(self, name: str, earlier: str) -> tuple[int, int]:
        raise UnsupportedError("objects have no links", where=self.place(name))

    def move_latest(self, name: str) -> bool:
        entry = self._store.look(LATEST)
        if entry is not None:
            text = bytes(self._store.read(entry, 0, entry.nbytes)) if entry.nbytes <= _LONGEST_NAME else b""
            if not text.endswith(b"\n") or b"/" in text:
                raise TargetError(
                    "there is an object that does not name an output", where=self.place(LATEST), do="Remove it, or choose another `into=`"
                )
            if text == f"{name}\n".encode():
                return False
        self._store.put(LATEST, f"{name}\n".encode())
        return True

    def remove(self, name: str) -> bool:
        entries = [entry.path for entry in self._store.list(f"{name}/")]
        tree = open_tree(self.place(name))
        manifest = usable_manifest(tree)
        if f"{name}/{MANIFEST}" not in entries or manifest is None:
            return False
        own = {f"{name}/{path}" for path in written_files(tree, manifest)}
        # The manifest goes last: if this is interrupted, the rest is removed later, and until then nobody takes it for complete.
        for records in ((), (f"{name}/{DIGESTS}",), (f"{name}/{MANIFEST}",)):
            self._store.remove(records or (path for path in entries if path in own and not path.endswith((DIGESTS, MANIFEST))))
        if others := [path for path in entries if path not in own]:
            left(f"{self.place(name)} holds what reshard did not write, which stays: {some(others)}", self.place(name))
        return True

    def read_record(self) -> bytes:
        entry = self._store.look(RECORD)
        if entry and entry.nbytes > MOST_OF_RECORD:
            raise foreign(self.place(RECORD), f"it has {entry.nbytes:,} bytes, more than a record of {MOST_OF_RECORD:,}")
        return b"" if entry is None else bytes(self._store.read(entry, 0, entry.nbytes))

    def append_record(self, line: bytes) -> None:
        self._store.put(RECORD, self.read_record() + line)
