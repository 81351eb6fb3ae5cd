"""The verb `cache`: the result of a conversion from a cache, so that an engine's start needs one command.

    $RESHARD_CACHE, else $XDG_CACHE_HOME/reshard, else ~/.cache/reshard
        entries/NAME/          what `convert` writes; NAME has the digest of the fingerprint of the weights and of what was asked for
        layouts/NAME.json      a learned layout (serving/learned/library.py); its time is when it was learned
        links/DIGEST           JSON: the entry for one plan of one source as it is now; its time is when the entry was used last
        work/DIGEST/           a conversion that has not ended; the next call continues it
        .reshard/              the lock: one process converts, others wait for it

A link is found without reading a weight: it is named by the identity of the plan, which has the names, lengths and times of the source's
files. An entry is named by its content: the same weights under another path, asked for in the same way, are one entry. It is checked each
time as `convert --if-changed` checks a target: lengths, samples of the files of weights, all small files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

from reshard.engine.events import event
from reshard.engine.record import request_digest
from reshard.errors import CheckpointError, RequestError, TargetError, TargetInUse
from reshard.geometry.quantities import nbytes_text
from reshard.geometry.value import value
from reshard.opening.keywords import ConvertOptions, PathLike, checked_keywords
from reshard.plans.digests import content_digest
from reshard.plans.manifest import Manifest, usable_manifest
from reshard.plans.plan import Plan
from reshard.requests.unchanged import damage_of
from reshard.runs.removal import discard, left, record_of
from reshard.serving.learned.fit import coverage
from reshard.serving.learned.library import Library
from reshard.storage.claims import SourceChecks
from reshard.storage.files import LocalFiles
from reshard.storage.lock import Lock
from reshard.storage.own_files import cache_root, json_object, read_own
from reshard.storage.system_calls import absolute_place, is_url, system_errors
from reshard.verbs.convert import convert
from reshard.verbs.plan import check_whole, effort_of

_SECONDS_BETWEEN_TRIES = 0.5
_MOST_OF_LINK = 1 << 16
SECONDS_KEPT = 600.0
"""An entry that was asked for in the last ten minutes is not removed to make room: an engine may be about to read it."""


@value
class CacheEntry:
    """A converted model in the cache, or a learned layout."""

    JSON = "path fingerprint format bytes=nbytes source age used"

    path: str
    """Its folder, which an engine loads; the file of a layout."""
    fingerprint: str
    """The fingerprint of its weights; empty for a layout."""
    format: str
    """Its format, and the parallel sizes."""
    nbytes: int
    """The bytes of its files."""
    source: str
    """The checkpoint that it was converted from; of a layout, the engine's class of the model."""
    age: float
    """The seconds since it was asked for last."""
    used: bool = False
    """Whether it was in the cache already."""
    source_checks: SourceChecks = SourceChecks()
    """What of the source was compared with the checksums that its files hold, if it was converted now."""


@checked_keywords
def cache(plan: Plan, *, root: PathLike | None = None, max_size: int | None = None, **options: Unpack[ConvertOptions]) -> CacheEntry:
    """The result of a plan, from the cache or converted into it.

    root: the folder of the cache; None: that of the environment. max_size: the most bytes of all entries; those that were used longest ago
    are removed until the new one fits.

    Raises: what `convert` raises; RequestError if the result is larger than max_size.
    """
    check_whole(plan)
    store, effort = Cache(root), effort_of(plan, options)
    identity, request = plan.identity(), request_digest(plan)
    asked = content_digest(f"{identity} {request}".encode()).rpartition(":")[2]
    if entry := store.linked(asked):
        return entry
    with store.locked(identity):
        if entry := store.linked(asked):  # another process has converted it
            return entry
        return store.add(plan, asked, request, max_size, effort)


class Cache:
    """A folder of converted models."""

    def __init__(self, root: PathLike | None = None) -> None:
        """root: None: that of the environment. Raises RequestError for a URL, which an engine could not open as a folder."""
        place = os.fspath(root) if root is not None else cache_root()
        if is_url(place):
            raise RequestError("the cache is a local folder, which engines open", where=place)
        self.root = Path(place).expanduser()

    def linked(self, asked: str) -> CacheEntry | None:
        """The entry for a plan, if it is there and as it was written."""
        about = self._link(asked)
        folder = self.root / "entries" / about.get("entry", "")
        manifest = _whole(folder) if about else None
        if manifest is None:
            return None
        with suppress(OSError):  # a cache that is only read is used, too
            os.utime(self.root / "links" / asked, follow_symlinks=False)
        return CacheEntry(
            str(folder), manifest.fingerprint, f"{manifest.format} {manifest.summary}", _nbytes(folder), about["source"], 0.0, True
        )

    @contextmanager
    def locked(self, identity: str) -> Iterator[None]:
        """Wait for the lock of the cache, and hold it. identity: of the plan that is converted."""
        with system_errors("created", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        lock, said = Lock(self.root, identity, lambda: ""), False
        while True:
            try:
                lock.acquire()
                break
            except TargetInUse as error:
                if not said:
                    event("cache-waits", f"another process converts into the cache; waiting for it. {error.what}", target=str(self.root))
                said = True
                time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            yield
        finally:
            lock.release()

    def add(self, plan: Plan, asked: str, request: str, max_size: int | None, options: Any) -> CacheEntry:
        """Convert a plan into the cache. The caller holds the lock. request: the digest of what was asked for."""
        nbytes = sum(file.nbytes for file in plan.layout.files)
        if max_size is not None:
            self._make_room(nbytes, max_size)
        work = self.root / "work" / asked
        result = convert(plan, work, if_changed=True, **options)
        content = content_digest(json.dumps([result.fingerprint.root, request]).encode()).rpartition(":")[2]
        entry = self.root / "entries" / f"{plan.layout.format}-{plan.layout.parallel.in_file_names}-{content[:16]}"
        with system_errors("written", entry):
            entry.parent.mkdir(exist_ok=True)
            if _whole(entry):  # the same weights under another path
                discard(work, entry.name)
            else:
                if record_of(entry):
                    event("cache-damaged", f"{entry} was changed since it was written, and is replaced", level=30, target=str(entry))
                    discard(entry, entry.name)
                if os.path.lexists(entry):
                    what, do = "something that reshard did not write lies there", "Move it away, or choose another cache"
                    raise TargetError(what, where=str(entry), do=do)
                work.rename(entry)
            links = self.root / "links"
            links.mkdir(exist_ok=True)
        about = {"entry": entry.name, "source": absolute_place(plan.source_files.root)}
        link, partial = links / asked, links / f".{asked}"
        if link.is_dir() and not link.is_symlink():
            raise RequestError("it is a directory", where=str(link), do="Move it away, or choose another cache")
        with system_errors("written", link):  # what else has its name, such as a FIFO, is replaced and never opened
            partial.unlink(missing_ok=True)
            partial.write_text(json.dumps(about))
            os.replace(partial, link)
        made, checks = f"{plan.layout.format} {plan.layout.parallel}", result.source_checks
        return CacheEntry(str(entry), result.fingerprint.root, made, _nbytes(entry), about["source"], 0.0, source_checks=checks)

    def entries(self) -> list[CacheEntry]:
        """All entries, the one that was used last first."""
        used: dict[str, tuple[float, str]] = {}
        for link in _listed(self.root / "links"):
            if about := self._link(link.name):
                used[about["entry"]] = max(used.get(about["entry"], (0.0, "")), (link.lstat().st_mtime, about["source"]))
        entries = []
        for folder in _listed(self.root / "entries"):
            manifest = usable_manifest(LocalFiles(folder)) if record_of(folder) else None
            if manifest is None:
                left(f"{folder} is no entry that reshard wrote, and stays", folder)
                continue
            when, source = used.get(folder.name, (folder.stat().st_mtime, ""))
            what = f"{manifest.format} {manifest.summary}"
            entries.append(CacheEntry(str(folder), manifest.fingerprint, what, _nbytes(folder), source, max(time.time() - when, 0.0), True))
        for path, layout in Library(self.root / "layouts").layouts():
            what = f"{layout.engine} {layout.engine_version} layout, {coverage(layout)}"
            looks = path.stat()
            entries.append(CacheEntry(str(path), "", what, looks.st_size, layout.model_class, max(time.time() - looks.st_mtime, 0.0), True))
        return sorted(entries, key=lambda entry: entry.age)

    def remove(self, entry: CacheEntry) -> None:
        """Remove an entry and its links."""
        path = Path(entry.path)
        if self._is_layout(entry):
            with system_errors("removed", path):
                path.unlink(missing_ok=True)
        else:
            for link in _listed(self.root / "links"):
                if self._link(link.name).get("entry") == path.name:
                    link.unlink(missing_ok=True)
            with system_errors("removed", path):
                discard(path, path.name)
        event("cache-removed", f"removed {entry.path}, {nbytes_text(entry.nbytes)}", target=entry.path, bytes=entry.nbytes)

    def _link(self, name: str) -> dict[str, str]:
        """What a link says; empty for none, and for one that is not as reshard writes it, which is told."""
        try:
            record = json_object(read_own(self.root, f"links/{name}", limit=_MOST_OF_LINK))
        except FileNotFoundError:
            return {}
        except (OSError, TargetError):
            record = {}
        entry, source = record.get("entry"), record.get("source")
        if not isinstance(entry, str) or not isinstance(source, str) or entry != os.path.basename(entry) or entry in ("", ".", ".."):
            left(f"{self.root / 'links' / name} is no link that reshard wrote, and is passed over", self.root / "links" / name)
            return {}
        return {"entry": entry, "source": source}

    def _is_layout(self, entry: CacheEntry) -> bool:
        return Path(entry.path).parent == self.root / "layouts"

    def _make_room(self, nbytes: int, max_size: int) -> None:
        """Remove the entries that were used longest ago until so many bytes fit."""
        entries = self.entries()
        removable = [entry for entry in entries if entry.age > SECONDS_KEPT and not self._is_layout(entry)]
        total = sum(entry.nbytes for entry in entries)
        if nbytes + total - sum(entry.nbytes for entry in removable) > max_size:
            raise RequestError(
                f"the result has {nbytes:,} bytes, and the cache may have {max_size:,}",
                where=str(self.root),
                why=f"Entries that were used in the last {SECONDS_KEPT / 60:.0f} minutes are not removed",
                do="Give a larger `max_size=`, or convert into a folder of your own",
            )
        while removable and nbytes + total > max_size:
            total -= removable[-1].nbytes
            self.remove(removable.pop())


def _whole(folder: Path) -> Manifest | None:
    """The record of an entry that is as it was written; None for another, for none, and for a link."""
    if record_of(folder) is None:
        return None
    files = LocalFiles(folder)
    manifest = usable_manifest(files)
    try:
        return manifest if manifest is not None and damage_of(files, manifest) is None else None
    except CheckpointError:
        return None


def _listed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []


def _nbytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
