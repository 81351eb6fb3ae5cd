"""Running a plan: blocks are written into a work folder, and when all are written, the files get their final names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.engine.journal import BlockKey, Journal, names_a_plan, read_journal
from reshard.engine.pool import run_jobs, workers_within
from reshard.engine.transfer import Pieces, Worker, bytes_of
from reshard.engine.values import Values
from reshard.errors import CheckpointError, RequestError, TargetError
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.quantities import plural
from reshard.plans.digests import Fingerprint, block_digest, checkpoint_fingerprint, tensor_digest
from reshard.plans.layout import Sidecar
from reshard.plans.plan import Plan, Route
from reshard.storage.staging import WORK_FOLDER, Staging

MANIFEST = "reshard.json"


@dataclass(frozen=True, slots=True)
class Done:
    """A block that has been written."""

    name: str
    """Its canonical tensor."""
    nbytes: int
    """Its size in bytes, in the target's element type and without replicas."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One block to convert."""

    key: BlockKey
    """Its key in the journal."""
    route: Route
    """The route of its tensor."""
    source: Values
    """The values that are read."""
    target: Pieces
    """The pieces that are written."""
    box: Box
    """The block, in the coordinates of the canonical tensor."""

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.route.target.dtype.itemsize


class Conversion:
    """One run of a plan into the directory `root`. Iterate `run()` to its end.

    resume: finish an interrupted run. replaces: files of an older checkpoint in `root` that are removed when the new one is complete.
    workers: threads. memory: the most bytes of buffers.
    """

    def __init__(
        self,
        plan: Plan,
        root: str | Path,
        *,
        resume: bool = False,
        replaces: tuple[str, ...] = (),
        workers: int | None = None,
        memory: int | None = None,
    ) -> None:
        self.plan = plan
        self.fingerprint: Fingerprint | None = None
        """The fingerprint of the result; None until `run` has ended."""
        self.resumed_bytes = 0
        """The bytes that an earlier run has written."""
        self._staging = Staging(root)
        self._resume, self._replaces = resume, replaces
        self._identity = plan.identity()
        self._itemsize = max((dtype.itemsize for route in plan.routes for dtype in route.dtypes), default=1)
        self._workers = workers_within(memory, workers, self._itemsize, buffers=3 if any(r.is_cast for r in plan.routes) else 2)

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(route.target.nbytes for route in self.plan.routes)

    def __repr__(self) -> str:
        return f"Conversion({self.plan!r}, {str(self._staging.root)!r})"

    def run(self) -> Iterator[Done]:
        """Run the plan, and yield each finished block.

        Whatever stops the run, no file has its final name unless all files are complete, and finished blocks are in the journal.

        Raises: CheckpointError if a source file cannot be read or replicas differ; then nothing is left in the target. RequestError if the
        disk is full, or there is no interrupted run to resume.
        """
        if self._resume and is_finished(self._staging.root, self._identity):
            self._staging.clean()
            self.fingerprint = recorded_fingerprint(self._staging.root)
            self.resumed_bytes = self.total
            return
        resume = self._resume and names_a_plan(self._staging.journal)
        if self._resume and not resume:
            self._check_nothing_else_is_there()
        finished = read_journal(self._staging.journal, self._identity) if resume else {}
        sizes = {file.path: file.nbytes for file in self.plan.layout.files}
        try:
            self._staging.prepare(sizes, resume=resume)
        except RequestError:
            if not resume:
                self._staging.abandon()
            raise
        journal = Journal(self._staging, self._identity, self._replaces, resumed=resume)
        digests = dict(finished)
        try:
            yield from self._blocks(digests, journal)
        except CheckpointError:
            # The input is wrong, so this run can never be resumed.
            journal.abandon()
            self._staging.abandon()
            raise
        finally:
            journal.close()
        self.fingerprint = self._fingerprint(digests)
        self._finish(journal.replaces)

    def _check_nothing_else_is_there(self) -> None:
        """Raises RequestError if the target holds files. Without a journal, resuming means starting, which must not touch such files."""
        root = self._staging.root
        others = [entry.name for entry in root.iterdir() if entry.name != WORK_FOLDER] if root.exists() else []
        if others:
            more = f" and {plural(len(others) - 1, 'other entry', 'other entries')}" if len(others) > 1 else ""
            raise TargetError(
                f"there is no interrupted run of this conversion here, but {others[0]}{more}",
                where=str(root),
                why="This is the result of another conversion, or of none; resuming would mix the two",
                do="Repeat the options of the interrupted run, or start again with --overwrite",
                id="target-in-use",
            )

    def _blocks(self, digests: dict[BlockKey, bytes], journal: Journal) -> Iterator[Done]:
        staging, plan = self._staging, self.plan
        if not digests:
            self._write_framing()
        finished = frozenset(digests)
        for job in self._jobs():
            if job.key in finished:
                self.resumed_bytes += job.nbytes
                yield Done(job.route.name, job.nbytes)

        def make_worker() -> Callable[[_Job], tuple[_Job, bytes]]:
            worker = Worker(plan.source_files, self._itemsize, staging.write, staging.write_runs)

            def perform(job: _Job) -> tuple[_Job, bytes]:
                block = job.source.read(worker, job.box)
                digest = block_digest(bytes_of(block))
                worker.scatter(block, job.target, job.box)
                return job, digest

            return perform

        for job, digest in run_jobs((job for job in self._jobs() if job.key not in finished), make_worker, self._workers):
            digests[job.key] = digest
            journal.add(job.key, digest)
            yield Done(job.route.name, job.nbytes)

    def _jobs(self) -> Iterator[_Job]:
        for i, route in enumerate(self.plan.routes):
            source, target = Values(route.source, route.target.dtype), Pieces(route.target)
            for j, box in enumerate(blocks(route.target.shape)):
                yield _Job((i, j), route, source, target, box)

    def _write_framing(self) -> None:
        """Write the bytes that the plan knows: headers, and constants that are not zero. New files are already filled with zeros."""
        for file in self.plan.layout.files:
            for offset, data in file.literals:
                self._staging.write(file.path, offset, memoryview(data))
        for constant in self.plan.target_index.constants:
            if constant.expected.strip(b"\0"):
                data = constant.expected * (constant.nbytes // len(constant.expected))
                self._staging.write(constant.path, constant.byte_offset, memoryview(data))

    def _fingerprint(self, digests: dict[BlockKey, bytes]) -> Fingerprint:
        """The fingerprint of the result, from the digests of all blocks."""
        by_route: dict[int, list[tuple[int, bytes]]] = {}
        for (i, j), digest in digests.items():
            by_route.setdefault(i, []).append((j, digest))
        aliases: dict[str, list[str]] = {}
        for alias, stored in self.plan.layout.aliases.items():
            aliases.setdefault(stored, []).append(alias)
        by_tensor: dict[str, bytes] = {}
        for i, route in enumerate(self.plan.routes):
            block_digests = [digest for _, digest in sorted(by_route.get(i, []))]
            for name in (route.name, *aliases.get(route.name, ())):
                by_tensor[name] = tensor_digest(name, route.target.dtype, route.target.shape, block_digests)
        return checkpoint_fingerprint(by_tensor)

    def _finish(self, replaces: tuple[str, ...]) -> None:
        """Write the sidecars and the manifest, and give all files their final names."""
        staging, layout = self._staging, self.plan.layout
        staging.sync()
        # The manifest comes last: a directory with a manifest is complete.
        sidecars = (*layout.sidecars, Sidecar(MANIFEST, self._manifest()))
        for sidecar in sidecars:
            staging.add(sidecar.path, sidecar.content)
        names = [file.path for file in layout.files] + [sidecar.path for sidecar in sidecars]
        staging.commit(names, replaces=[path for path in replaces if path not in names])

    def _manifest(self) -> bytes:
        """The content of the manifest: what the other files do not say, such as engine version, parallel sizes and fingerprint."""
        assert self.fingerprint is not None
        document = {
            "format": self.plan.layout.format,
            "tp": self.plan.layout.parallel.tp,
            "pp": self.plan.layout.parallel.pp,
            "ep": self.plan.layout.parallel.ep,
            "dp": self.plan.layout.parallel.dp,
            "engine_version": self.plan.target.engine_version,
            "fingerprint": self.fingerprint.root,
            "plan": self._identity,
            "source_format": self.plan.source.format,
            "files": {file.path: file.nbytes for file in self.plan.layout.files},
        }
        return (json.dumps(document, indent=2) + "\n").encode()


def is_finished(root: Path, identity: str) -> bool:
    """Whether a directory holds the complete result of the plan with that identity.

    There may still be a work folder, if the run was stopped after its last rename and before it removed the folder.
    """
    manifest = read_manifest(root)
    if manifest is None or manifest.get("plan") != identity:
        return False
    files = manifest.get("files")
    return isinstance(files, dict) and all((root / path).is_file() and (root / path).stat().st_size == size for path, size in files.items())


def recorded_fingerprint(root: Path) -> Fingerprint:
    """The fingerprint in the manifest of a finished conversion, without the digests of its tensors."""
    return Fingerprint(str((read_manifest(root) or {}).get("fingerprint")), {})


def read_manifest(root: Path) -> dict[str, object] | None:
    """The manifest of a directory that a conversion wrote; None if it has none."""
    try:
        value = json.loads((root / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
