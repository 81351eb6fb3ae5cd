"""Whether a target still is what a conversion would write, and what it replaces: the questions of `convert --if-changed`.

Compared are: the options and what the plan knows of the result (`request` in reshard.json); path, names, lengths and modification times of
the source files (`source.state`); and the target's own files with what was recorded of them: lengths and samples of the files of weights,
the content of small files. No weight is read but for the samples, 64 KiB of each file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from reshard.engine.record import Provenance, lacking, request_digest, source_state
from reshard.engine.recorded import changed_files
from reshard.errors import CheckpointError, TargetError
from reshard.plans.digests import CURRENT
from reshard.plans.manifest import MANIFEST, RECORDS, Manifest, read_digests, read_manifest, usable_manifest, written_files
from reshard.plans.plan import Plan
from reshard.storage.files import Files, LocalFiles
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import is_url, local_path

_NO_PROVENANCE = Provenance()


def files_of_target(target: str | os.PathLike[str]) -> Files | None:
    """The files of a directory or of a folder in a store; None if there is none."""
    if is_url(target):
        from reshard.storage.stores.remote_files import RemoteFiles
        from reshard.storage.stores.urls import open_store

        url = os.fspath(target)
        return RemoteFiles(url) if open_store(url).list(below=False) else None
    root = local_path(target)
    return LocalFiles(root) if root.is_dir() else None


def reason_to_convert(plan: Plan, files: Files | None, provenance: Provenance = _NO_PROVENANCE) -> str | None:
    """Why the target must be written, as a part of a sentence; None if it holds the result of this plan for the source as it is now.

    files: of the target; None if there is none. provenance: what is wanted beside the weights.
    """
    if files is None:
        return "there is no target yet"
    if f"{WORK_FOLDER}/" in files.list():
        return "an earlier run was interrupted"
    try:
        manifest = read_manifest(files)
        if manifest is None:
            return f"there is no {MANIFEST}"
        if reason := _change(plan, manifest) or damage_of(files, manifest):
            return reason
    except CheckpointError as error:
        return f"{error.where}: {error.what}"
    missing = lacking(provenance, files)
    return f"there is no {missing[1].removeprefix('a ')}" if missing else None


def own_files(files: Files, plan: Plan, entries: Sequence[str], weights: Sequence[str], *, is_interrupted: bool) -> tuple[str, ...]:
    """The files of the target that reshard wrote, whether they exist or not. Raises TargetError if it holds weights that reshard did not
    write.

    entries: what lies there. weights: the files of weights among it. is_interrupted: whether a conversion has begun there.
    """
    manifest, root = usable_manifest(files), files.root
    if manifest is None and not is_interrupted:
        raise TargetError(
            f"`if_changed=True`: there is no {MANIFEST}, so reshard did not write what lies here, such as {entries[0]}",
            where=root,
            why="Only what reshard wrote is replaced",
            do="Choose another directory, or say `overwrite=True` to replace another checkpoint",
        )
    # Without reshard.digests the small files are those that are about to be written.
    small_files = [sidecar.path for sidecar in plan.layout.sidecars]
    own = dict.fromkeys((*small_files, *(written_files(files, manifest) if manifest else RECORDS)))
    others = [name for name in weights if name not in own]
    if others:
        raise TargetError(
            f"`if_changed=True`: {MANIFEST} does not list {others[0]}, so reshard did not write it here",
            where=root,
            why="Only what reshard wrote is replaced",
            do="Remove the file, or say `overwrite=True` to replace everything that lies here",
        )
    return tuple(own)


def _change(plan: Plan, manifest: Manifest) -> str | None:
    """What has changed since the manifest was written; None if nothing has."""
    if manifest.version is not CURRENT or not manifest.is_unchanged:
        return f"{MANIFEST} is of another version, or was edited"
    source = manifest.document.get("source")
    if not isinstance(source, dict) or source.get("state") != source_state(plan):
        return "the source files have changed, or are others"
    if manifest.document.get("request") != request_digest(plan):
        return "the options or the model have changed, or this version of reshard writes other files"
    return None


def damage_of(files: Files, manifest: Manifest) -> str | None:
    """What is not as reshard wrote it, or is lacking, in a target; None if nothing is."""
    from reshard.engine.checks.written_files import check_nothing_was_added, check_small_files
    from reshard.engine.compare import Comparison

    digests, result = read_digests(files, manifest), Comparison()
    for path, change in changed_files(files, digests.files).items():
        return f"{path} {change}"
    check_small_files(files, digests.small_files, result)
    check_nothing_was_added(files, manifest, digests, result)
    return f"{result.differences[0].name}: {result.differences[0].detail}" if result.differences else None
