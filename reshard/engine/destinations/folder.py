"""LocalFolder: a directory that a conversion writes. Files are staged in its work folder, and get their final names when all are complete.

A journal (journal.py) notes each block, so that an interrupted conversion is resumed by block. Processes that share a plan have a share of
the directory's lock each; a block that two of them convert gets the same bytes twice.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.engine.blocks import Job, block_jobs, copied_blocks, is_refused, read_back, source_trace, widest_element, workers_of
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.destination import Begun, FinishedBlocks, Records, Replaces, check_empty, check_same, complete_result
from reshard.engine.destinations.journal import Journal, RunHeader, Unfinished, journal_of_part, progress, read_header, read_journal
from reshard.engine.events import event
from reshard.engine.origins.reader import Tiles
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.errors import RequestError, TargetError, TargetInUse, WrongChecksum
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import grouped, plural
from reshard.plans.layout import TargetFile
from reshard.plans.manifest import MANIFEST, Manifest, fixed_bytes
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Task
from reshard.storage.files import Files, LocalFiles, read_range
from reshard.storage.lock import is_locked
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.staging import Staging
from reshard.storage.system_calls import system_errors

if TYPE_CHECKING:
    from reshard.engine.destinations.sealing import Sealing


class LocalFolder:
    """A directory as a `Destination`. replaces: called when no other run can write there any more."""

    def __init__(self, root: Path, effort: Effort = NO_LIMITS, *, replaces: Replaces = tuple) -> None:
        self.root, self.place = root, str(root)
        self._effort, self._replaces = effort, replaces
        self._staging = Staging(root)
        self._is_alone = False
        self._unfinished: Unfinished | None = None
        """What the journals said when the conversion was resumed or joined."""
        self._resumed: Unfinished | None = None
        """The conversion that is resumed."""
        self._header = RunHeader()
        self._journal: Journal | None = None
        """The journal of a conversion that is run alone."""
        self._sealing: Sealing | None = None
        """The checksums of a conversion that is run alone."""
        self._reads_back = False
        """Whether what earlier runs have written is read again."""

    @property
    def files(self) -> Files:
        return LocalFiles(self.root)

    @property
    def is_running(self) -> bool:
        return is_locked(self.root)

    def workers(self, plan: Plan, tasks: Sequence[Task]) -> int:
        return workers_of(plan, self._effort)

    def tasks(self, plan: Plan) -> tuple[Task, ...]:
        return plan.tasks()

    def refresh(self) -> None:
        self._unfinished = None

    def entries(self, folders: Iterable[str] = ()) -> Sequence[str]:
        with system_errors("read", self.root):
            if self.root.exists() and not self.root.is_dir():
                raise TargetError("the target is a file; a directory is written", where=self.place)
            names = sorted(entry.name for entry in self.root.iterdir() if entry.name != WORK_FOLDER) if self.root.exists() else []
            inner = (path for folder in folders for path in (self.root / folder).rglob("*") if path.is_file())
            return [*names, *sorted(str(path.relative_to(self.root)) for path in inner)]

    def existing(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if os.path.lexists(self.root / path) and not (self.root / path).is_dir())

    def unfinished_files(self) -> list[str]:
        return []

    def begun(self) -> Begun | None:
        journal = read_journal(self.root)
        return Begun(journal.header, f"an interrupted conversion to {journal.header.to}{journal.progress} lies here") if journal else None

    def result_of(self, identity: str) -> Manifest | None:
        # Until the last rename of a run, the target holds what it is about to replace. After it, the work folder may be left.
        if not self._is_alone:
            manifest = None if self._staging.journal.exists() else self._result(identity)
            if manifest and self._staging.work.exists():
                with suppress(TargetInUse), self.alone(identity):
                    return self.result_of(identity)
            return manifest
        earlier = read_journal(self.root)
        is_over = earlier is None or (earlier.committing and not (self._staging.work / MANIFEST).exists())
        manifest = self._result(identity) if is_over else None
        if manifest:
            self._staging.clean()
        return manifest

    def _result(self, identity: str) -> Manifest | None:
        return complete_result(self.files, identity, self.files.size) if self.root.is_dir() else None

    @contextmanager
    def alone(self, identity: str) -> Iterator[None]:
        with self._staging.locked(identity, partial(progress, self.root)), system_errors("written", self.root):
            self._is_alone = True
            try:
                yield
            finally:
                self._is_alone = False
                self._stop()

    def begin(self, header: RunHeader, plan: Plan, *, resume: bool) -> None:
        earlier = read_journal(self.root)
        if resume and earlier:
            check_same(earlier.header, header.identity, self.place)
            self._prepare(plan, resume=True, committing=earlier.committing)
            self._journal = Journal(self._staging, source_trace(plan), None, finished=earlier.nbytes_of_journal)
            self._unfinished = self._resumed = earlier
            self._header = earlier.header
            return
        self._prepare_anew(header, plan, earlier, resume=resume)
        self._journal = Journal(self._staging, source_trace(plan), self._header)
        self._write_framing(plan, plan.layout.files)

    def _prepare_anew(self, header: RunHeader, plan: Plan, earlier: Unfinished | None, *, resume: bool = False) -> None:
        self._header = replace(header, replaces=tuple(self._replaces()))
        if resume:
            check_empty(self.entries(), self.place)
        if earlier and earlier.committing:
            # No complete checkpoint is left to preserve, and without the journal nothing would say so.
            self._staging.remove((*earlier.header.replaces, *self._header.replaces))
        try:
            self._prepare(plan, resume=False)
        except RequestError:  # A run that cannot begin leaves nothing behind; one that cannot continue keeps the work of the earlier run.
            self._staging.abandon()
            raise

    def _prepare(self, plan: Plan, *, resume: bool, committing: bool = False) -> None:
        self._staging.prepare({file.path: file.nbytes for file in plan.layout.files}, resume=resume, committing=committing)

    @contextmanager
    def shared(self, header: RunHeader, plan: Plan, *, begins: bool) -> Iterator[bool]:
        def is_begun() -> bool:
            begun = read_header(self.root)
            if begun:
                return begun.identity == header.identity
            return not self._staging.journal.exists() and self._result(header.identity) is not None

        def begin() -> None:
            if not begins:
                raise TargetError("the conversion that this task belongs to has ended", where=self.place, id="target-in-use")
            self._prepare_anew(header, plan, read_journal(self.root))
            self._write_framing(plan, plan.layout.files)
            self._staging.sync()
            Journal(self._staging, source_trace(plan), self._header).stop()
            self._staging.close()

        sharing = self._staging.shared(header.identity, partial(progress, self.root), is_begun=is_begun, begin=begin)
        with sharing, system_errors("written", self.root):
            if begins:
                self._unfinished = read_journal(self.root)
            yield not begins or (self._unfinished is not None and not self._unfinished.committing)

    def finished(self, plan: Plan, tasks: Sequence[Task]) -> FinishedBlocks:
        unfinished, self._unfinished = self._unfinished or read_journal(self.root), None
        if not unfinished:
            return FinishedBlocks()
        routes = {i for task in tasks for i in task.routes}
        others = unfinished.of_other_sources(source_trace(plan))
        return FinishedBlocks(
            unfinished.blocks.keys(),
            unfinished.blocks,
            {key: digest for key, digest in others.items() if key[0] in routes},
            unfinished.beyond,
        )

    def missing(self, plan: Plan, identity: str) -> Mapping[Task, int]:
        unfinished = read_journal(self.root)
        finished = unfinished.blocks if unfinished and unfinished.header.identity == identity else {}
        missing = {}
        for task in self.tasks(plan):
            tensors = ((i, plan.routes[i].target) for i in task.routes)
            boxes = (((i, j), box, tensor.dtype) for i, tensor in tensors for j, box in enumerate(blocks(tensor.shape)))
            nbytes = sum(box.volume * dtype.itemsize for key, box, dtype in boxes if key not in finished)
            if nbytes:
                missing[task] = nbytes
        return missing

    def read_back(self, plan: Plan, jobs: Iterable[Job], digests: Mapping[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        self._reads_back = True
        return read_back(self._staging.files(), jobs, digests, widest_element(plan), self.workers(plan, ()))

    def copy(
        self, plan: Plan, tasks: Sequence[Task], done: Collection[BlockKey], tiles: Tiles, reading: Reading
    ) -> Iterator[tuple[Job, bytes]]:
        routes, workers = [i for task in tasks for i in task.routes], self.workers(plan, tasks)
        jobs = (job for job in block_jobs(plan, routes, tiles, workers=workers) if job.key not in done)
        sealing = self._sealing_of(plan)
        if self._is_alone:
            self._log_begin(plan)
            self._sealing = sealing
            if sealing and self._resumed and (self._resumed.committing or not self._reads_back):  # every block is there
                sealing.complete(workers, trusts=True)
            if self._resumed and self._resumed.committing:
                self._check_is_all_there(plan, jobs, self._sealed(plan))
            elif self._resumed:
                self._write_framing(plan, self._sealed(plan), again=True)
            assert self._journal is not None
            journal = self._journal
        else:
            self._prepare(plan, resume=True)
            journal = Journal(self._staging, source_trace(plan), None, path=journal_of_part(self._staging))
        try:
            for job, digest in copied_blocks(plan, sealing or self._staging, jobs, widest_element(plan), workers, reading=reading):
                if not is_refused(plan, job):
                    journal.add(job.key, digest, job.nbytes, job.beyond)
                yield job, digest
            if not self._is_alone:
                journal.end()
        except BaseException as error:
            if isinstance(error, WrongChecksum) and not self._is_alone:
                journal.withdraw()
            journal.stop()
            raise

    def _sealing_of(self, plan: Plan) -> Sealing | None:
        """What keeps account of the checksums in the framing of the files; None if no file has any."""
        if not any(file.checksums for file in plan.layout.files):
            return None
        from reshard.engine.destinations.sealing import Sealing

        return Sealing(plan, self._staging)

    def _sealed(self, plan: Plan) -> Iterable[TargetFile]:
        """The files of the plan with their checksums, as far as they are known."""
        return self._sealing.sealed() if self._sealing else plan.layout.files

    def _log_begin(self, plan: Plan) -> None:
        files, replaces, resumed, workers = plan.layout.files, self._header.replaces, self._resumed, self.workers(plan, ())
        event(
            "writing",
            f"writing {plural(len(files), 'file')} to {self.place} with {plural(workers, 'thread')}"
            + (f", which replace {plural(len(replaces), 'file')}" if replaces else "")
            + (f"; {resumed.nbytes:,} bytes are there from an earlier run" if resumed else ""),
            target=self.place,
            files=len(files),
            bytes=sum(route.target.nbytes for route in plan.routes),
            resumed_bytes=resumed.nbytes if resumed else 0,
            replaces=len(replaces),
            workers=workers,
        )

    def _check_is_all_there(self, plan: Plan, jobs: Iterator[Job], sealed: Iterable[TargetFile]) -> None:
        """Raises TargetError if blocks or framing are lacking, although the files were about to get their final names."""
        files = self._staging.files()
        if next(jobs, None) or any(read_range(files, path, at, len(data)) != data for path, at, data in _fixed_bytes(plan, sealed)):
            raise TargetError(
                "bytes have changed since the interrupted run wrote them",
                where=self.place,
                why="Its files were about to get their final names, or have them already",
                do="Start again with `overwrite=True`",
            )

    def _write_framing(self, plan: Plan, files: Iterable[TargetFile], *, again: bool = False) -> None:
        """Write the bytes of these files that the plan knows. again: zeros, too, with which new files are already filled."""
        for path, byte_offset, data in _fixed_bytes(plan, files):
            if again or data.strip(b"\0"):
                self._staging.write(path, byte_offset, memoryview(data))

    def commit(self, plan: Plan, made: Records) -> None:
        # The old checkpoint goes, then the new one comes. Index, config and manifest are the first to go and the last to come.
        staging = self._staging
        assert self._journal is not None
        if self._sealing:
            self._sealing.complete(self.workers(plan, ()), trusts=False)
        staging.sync()
        sidecars = (*plan.layout.sidecars, *made(self._sealed(plan), staging.read))
        for sidecar in sidecars:
            staging.add(sidecar.path, sidecar.content)
        self._journal.begin_commit()
        names = [file.path for file in plan.layout.files] + [sidecar.path for sidecar in sidecars]
        staging.commit(names, replaces=self._header.replaces, again=self._resumed is not None and self._resumed.committing)

    def abandon(self) -> None:
        self._stop()
        self._staging.abandon()

    def _stop(self) -> None:
        if self._journal:
            self._journal.stop()
        self._journal = self._resumed = self._sealing = None


def _fixed_bytes(plan: Plan, files: Iterable[TargetFile]) -> Iterator[tuple[str, int, bytes]]:
    """The bytes of these files that a plan knows, such as headers and padding, in parts: (path, byte offset, bytes)."""
    constants = grouped(plan.target_index.constants, attrgetter("path"))
    return ((file.path, *part) for file in files for part in fixed_bytes(file, constants.get(file.path, ())))
