"""Laws of a store: a `Backend` of another kind of URL, asked through `Store`, as reshard asks it."""

from __future__ import annotations

import pytest

from reshard.errors import CheckpointError, TargetError
from reshard.storage.stores.store import Store

PART = 5 << 20
"""The smallest part of an upload that S3 takes."""


class StoreLaws:
    """What a store owes. A class that inherits it has a fixture `store`, which returns an empty Store: `open_store("memory://empty")`."""

    NOTICES_CHANGES = True
    """Whether the store refuses to read a file that was written since it was listed."""
    HIDES_UPLOADS = True
    """Whether a file appears only when it is complete."""

    def test_a_file_that_was_put_is_listed_and_read(self, store: Store) -> None:
        entry = store.put("run/step-1/a.bin", bytes(range(256)))
        assert (entry.path, entry.nbytes) == ("run/step-1/a.bin", 256) and store.look("run/step-1/a.bin") == entry
        assert bytes(store.read(entry, 0, 256)) == bytes(range(256))
        assert bytes(store.read(entry, 250, 256)) == bytes(range(250, 256)) and bytes(store.read(entry, 7, 8)) == b"\7"

    def test_lists_are_sorted_and_tell_folders(self, store: Store) -> None:
        for path in ("run/b", "run/a", "run/deep/c", "runs"):
            store.put(path, b"1")
        assert [entry.path for entry in store.list("run")] == ["run/a", "run/b", "run/deep/c"]
        assert [entry.path for entry in store.list("run", below=False)] == ["run/a", "run/b", "run/deep/"]
        assert {entry.path for entry in store.list()} == {"run/a", "run/b", "run/deep/c", "runs"}

    def test_what_is_not_there_is_none_or_named(self, store: Store) -> None:
        assert store.look("nothing") is None and store.list("nothing") == ()
        entry = store.put("a", b"1")
        store.remove(["a", "nothing"])
        assert store.look("a") is None and store.list() == ()
        with pytest.raises(CheckpointError, match=r"/a: .*gone"):
            store.read(entry, 0, 1)

    def test_a_file_that_was_written_since_is_not_read(self, store: Store) -> None:
        if not self.NOTICES_CHANGES:
            pytest.skip("this store reads the newest file")
        entry = store.put("a", b"first")
        store.put("a", b"other")
        with pytest.raises(CheckpointError, match="was written since it was listed"):
            store.read(entry, 0, 5)

    def test_a_file_is_created_once(self, store: Store) -> None:
        store.create("manifest", b"first")
        store.create("manifest", b"first")  # the answer to the first attempt may have been lost
        with pytest.raises(TargetError, match="exists already"):
            store.create("manifest", b"second")
        (entry,) = store.list()
        assert bytes(store.read(entry, 0, entry.nbytes)) == b"first"

    def test_an_upload_appears_when_it_is_closed(self, store: Store) -> None:
        content = bytes(range(256)) * (2 * PART // 256) + b"the rest"
        upload = store.upload("large", len(content), part=PART, at_once=2)
        for start in range(0, len(content), PART // 2):
            upload.write(content[start : start + PART // 2])
        assert store.look("large") is None or not self.HIDES_UPLOADS
        entry = upload.close()
        assert entry.nbytes == len(content) and bytes(store.read(entry, 0, len(content))) == content

    def test_an_upload_that_is_given_up_leaves_nothing(self, store: Store) -> None:
        upload = store.upload("large", 3 * PART, part=PART, at_once=2)
        upload.write(bytes(2 * PART))
        upload.abort()
        assert store.list() == ()
