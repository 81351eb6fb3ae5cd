"""Staging: what a crash of the machine may not undo. A file gets its name when its bytes are on the disk, and the journal goes when the
names are."""

import os

import pytest
from helpers.fixture_places import HF

import reshard
from reshard.engine.destinations.folder import LocalFolder
from reshard.storage import staging
from reshard.storage.staging import JOURNAL


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("to", ["vllm", "dcp"])
@pytest.mark.parametrize("stops", [False, True], ids=["at once", "stopped before the commit"])
def test_bytes_are_synced_before_names_and_names_before_the_journal_goes(to, stops, tmp_path, monkeypatch):
    """A run that was stopped before its commit has no blocks left to copy, and writes what lies around them again."""
    synced, renamed, unnamed, ended = set(), [], set(), []
    pwrite, replace, unlink, sync, sync_folder = os.pwrite, os.replace, os.unlink, staging.sync_content, staging.sync_folder
    target = tmp_path / "out"

    def written(descriptor, *arguments):
        synced.discard(os.fstat(descriptor).st_ino)
        return pwrite(descriptor, *arguments)

    def content_synced(descriptor):
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def named(source, path):
        if str(source).startswith(str(target)):
            assert os.stat(source).st_ino in synced, f"{source} gets its name before its bytes are on the disk"
            renamed.append(path)
            unnamed.add(os.path.dirname(path))
        replace(source, path)

    def folder_synced(folder):
        sync_folder(folder)
        unnamed.discard(str(folder))

    def removed(path, **options):
        if os.path.basename(path) == JOURNAL and renamed:
            assert not unnamed, f"the journal goes, and names in {unnamed} are not on the disk"
            ended.append(path)
        unlink(path, **options)

    plan = reshard.plan(HF / "llama", to=to)
    if stops:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LocalFolder, "commit", interrupted)
            reshard.convert(plan, target)
    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "replace", named)
    monkeypatch.setattr(os, "unlink", removed)
    monkeypatch.setattr(staging, "sync_content", content_synced)
    monkeypatch.setattr(staging, "sync_folder", folder_synced)
    reshard.convert(plan, target, resume=stops)
    assert len(renamed) > 2 and len(ended) == 1
