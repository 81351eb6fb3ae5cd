"""Folder: what a conversion would write, as files that are computed when they are read.

folder = reshard.folder("step-1000", to="hf", dtype="bf16")
folder["config.json"].read()
folder["model.safetensors"].read(0, 8)
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Unpack

from reshard.doors.identity import identity_of
from reshard.doors.planned_bytes import CHUNK, PlannedBytes
from reshard.engine.blocks import fingerprint_of_result, widest_element
from reshard.engine.pool import NO_LIMITS
from reshard.engine.record import Provenance, planned_record, records
from reshard.errors import RequestError, choices
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import ManyPlanOptions, checked_keywords
from reshard.plans.layout import Sidecar
from reshard.plans.manifest import DIGESTS, MANIFEST, manifest_bytes
from reshard.plans.plan import Plan
from reshard.storage.system_calls import gc_paused
from reshard.verbs.plan import Source, check_whole, plan_of


@gc_paused()
@checked_keywords
def folder(source: Source | Sequence[Source], *, to: str, **options: Unpack[ManyPlanOptions]) -> Folder:
    """The files that a conversion to the format `to` would write, as a mapping from paths to files. Takes the keywords of `plan`.

    Nothing is written, and no weight is read before somebody asks for its bytes. The bytes are those that `convert` writes; only
    reshard.json has no command, no time, and no fingerprint until `Folder.record` has read everything.

    Raises: what `plan` raises. UnsupportedError if a file's framing could not be made without reading most of the file.
    """
    return Folder(plan_of(source, to, dict(options)), source if isinstance(source, Checkpoint) else None)


class Folder(Mapping[str, "VirtualFile"]):
    """The files of a plan. Threads may share it. Iterating gives their paths: files with tensors, then the others, reshard.json last."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint | None = None) -> None:
        check_whole(plan)
        self.plan, self.checkpoint = plan, checkpoint
        """The plan that is read; and its source, if it is one checkpoint that was opened before."""
        self.planned = PlannedBytes(plan)
        """The bytes of the files with tensors."""
        self._records: tuple[Sidecar, ...] | None = None
        self._lock = threading.Lock()

    @property
    def source_path(self) -> str:
        """Where the source lies."""
        return self.plan.source_files.root

    @property
    def _files(self) -> dict[str, VirtualFile]:
        return (
            self._made
            if self._records is None
            else self._made | {record.path: VirtualFile(self, record.path, len(record.content), record.content) for record in self._records}
        )

    @cached_property
    def _made(self) -> dict[str, VirtualFile]:
        with self._lock:
            weights = {file.path: VirtualFile(self, file.path, file.nbytes, None) for file in self.plan.layout.files}
            small = (*self.plan.layout.sidecars, planned_record(self.plan))
            return weights | {record.path: VirtualFile(self, record.path, len(record.content), record.content) for record in small}

    @cached_property
    def _identity(self) -> str:
        with self._lock:
            return identity_of(self.plan)

    def etag(self, path: str) -> str:
        """The ETag of a file with tensors, 64 hexadecimal digits: equal for equal content, never for other content."""
        return hashlib.sha256(f"{self._identity}\0{path}".encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def revision(self) -> str:
        """What stands for all files, as a commit does: 40 hexadecimal digits."""
        told = [(file.path, file.size, file.etag) for file in self.values()]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:40]

    def record(self) -> None:
        """Read every byte once, add reshard.digests, and put the fingerprint into reshard.json.

        Raises: CheckpointError if the source is damaged or has changed.
        """
        plan = self.plan
        fingerprint = fingerprint_of_result(plan)
        sealed = (file.sealed(self.planned.checksums_of(file)) if file.checksums else file for file in plan.layout.files)

        def read(path: str, byte_offset: int, nbytes: int) -> bytes:
            return self[path].read(byte_offset, byte_offset + nbytes)

        digests, manifest = records(
            plan, sealed, plan.identity(), fingerprint, read, Provenance(), NO_LIMITS.threads(widest_element(plan), buffers=2)
        )
        document = {name: given for name, given in json.loads(manifest.content).items() if name not in ("files", "digest")}
        content = manifest_bytes({**document, "time": None}, {file.path: file.nbytes for file in plan.layout.files})
        self._records = digests, Sidecar(MANIFEST, content)

    def close(self) -> None:
        """End the threads of the folder."""
        self.planned.close()

    def __getitem__(self, path: str) -> VirtualFile:
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def file(self, path: str) -> VirtualFile:
        """A file by its path. Raises RequestError with the nearest paths."""
        if path not in self._files:
            why = f"Call `record()` to compute {DIGESTS}" if path == DIGESTS else None
            raise RequestError("there is no such file", where=path, why=why, do=choices(path, [*self._files], most=3), id="not-found")
        return self._files[path]

    def __repr__(self) -> str:
        nbytes = sum(file.nbytes for file in self.plan.layout.files)
        return f"Folder({self.plan.source.format} -> {self.plan.layout.format}, {plural(len(self), 'file')}, {plural(nbytes, 'byte')})"


@value(eq=False)
class VirtualFile:
    """A file of a folder."""

    folder: Folder
    """The folder."""
    path: str
    """Its path in the folder."""
    size: int
    """Its length in bytes."""
    content: bytes | None
    """Its bytes, if it is small and known; None: they are computed."""

    @property
    def etag(self) -> str:
        """A text that is never equal for other content (`Folder.etag`); of a small file the SHA-256 of its content."""
        return self.folder.etag(self.path) if self.content is None else hashlib.sha256(self.content).hexdigest()

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of the file; by default all.

        Raises: RequestError if the range leaves the file. CheckpointError if the source has changed since it was opened, is damaged, or
        has copies that differ; ValuesOverflow if a cast makes values infinite. SystemRefusal if the system cannot read now.
        """
        return b"".join(self.chunks(start, stop))

    def chunks(self, start: int = 0, stop: int | None = None, most: int = CHUNK) -> Iterator[bytes | memoryview]:
        """The bytes of `read` in parts of at most `most` bytes, which are computed while they are taken."""
        stop = self.size if stop is None else stop
        if not 0 <= start <= stop <= self.size:
            raise RequestError(f"bytes {start:,}..{stop:,} of a file of {self.size:,}", where=self.path, do="Ask for a range of the file")
        if self.content is None:
            return self.folder.planned.chunks(self.path, start, stop, most)
        content = self.content
        return (content[at : min(at + most, stop)] for at in range(start, stop, most))

    def __repr__(self) -> str:
        return f"VirtualFile({self.path!r}, {plural(self.size, 'byte')})"
