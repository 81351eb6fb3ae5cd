"""Destination: what a conversion writes. What differs between a directory and a folder of a store is in its methods.

    begin, or join what other processes have begun -> copy what is not finished -> commit

A directory (folder.py) is written by one process, or by the parts of one plan that share its lock; it keeps each finished block. A store
(store.py) has no locks; it keeps each finished file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Protocol

from reshard.engine.blocks import Job
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.journal import RunHeader
from reshard.engine.origins.reader import Tiles
from reshard.engine.record import Read
from reshard.errors import TargetError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.layout import Sidecar, TargetFile
from reshard.plans.manifest import Manifest, listed_files, usable_manifest
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Task
from reshard.storage.files import Files

Replaces = Callable[[], Iterable[str]]
"""Returns the files of an older checkpoint that a conversion removes. Raises TargetError if it may not write there."""
Records = Callable[[Iterable[TargetFile], Read], Iterator[Sidecar]]
"""Makes the files that record a conversion, from its files with their checksums and a function that reads them."""


@value
class FinishedBlocks:
    """What is there of some tasks."""

    keys: Collection[BlockKey] = ()
    """The blocks that need not be copied again."""
    digests: Mapping[BlockKey, bytes] = field(default_factory=dict)
    """The digests that are recorded: of these blocks, and of others that are there in part."""
    of_other_sources: Mapping[BlockKey, bytes] = field(default_factory=dict)
    """Those of blocks whose run saw other files as the source, which may have other bytes."""
    beyond: Mapping[BlockKey, int] = field(default_factory=dict)
    """The blocks in which values became infinite, and how many."""


@value
class Begun:
    """A conversion that has begun and has not ended."""

    header: RunHeader
    """Which conversion it is."""
    sentence: str
    """What it is, and how far."""


class Destination(Protocol):
    """What a conversion writes. Every method raises SystemRefusal if the disk or the store refuses."""

    @property
    def place(self) -> str:
        """Its path or URL."""

    @property
    def files(self) -> Files:
        """What lies there, readable as a checkpoint."""

    @property
    def is_running(self) -> bool | None:
        """Whether a process writes there; None if nothing can tell."""

    def workers(self, plan: Plan, tasks: Sequence[Task]) -> int:
        """The threads that copy these tasks. Raises RequestError if the memory that the caller allows is too little."""

    def tasks(self, plan: Plan) -> tuple[Task, ...]:
        """The plan in tasks that processes can share here."""

    def refresh(self) -> None:
        """Forget what was seen: other processes may have written meanwhile."""

    def entries(self, folders: Iterable[str] = ()) -> Sequence[str]:
        """What lies there: names, and paths of files in these folders. Raises TargetError if nothing can be written there."""

    def existing(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of these paths at which a file lies."""

    def unfinished_files(self) -> list[str]:
        """The files that conversions which have not ended have left under their final names, with their records."""

    def begun(self) -> Begun | None:
        """The conversion that has begun here and has not ended. Raises TargetError or CheckpointError for a foreign record."""

    def result_of(self, identity: str) -> Manifest | None:
        """The manifest, if the complete result of the plan with that identity lies here. What is left of its run is removed."""

    def alone(self, identity: str) -> AbstractContextManager[None]:
        """Inside this context, no other process writes, where that can be excluded. Raises TargetInUse if one does."""

    def begin(self, header: RunHeader, plan: Plan, *, resume: bool) -> None:
        """Begin a conversion, or go on with the one that has begun here, if `resume`. Called inside `alone`.

        Raises: TargetError if something lies there that may not be replaced, or is not of this plan.
        """

    def shared(self, header: RunHeader, plan: Plan, *, begins: bool) -> AbstractContextManager[bool]:
        """Inside this context, only processes with the same plan write. Yields whether tasks may be copied: not if all are.

        begins: begin the conversion, unless another process has. Raises: as `begin` does; TargetError if it has not begun.
        """

    def finished(self, plan: Plan, tasks: Sequence[Task]) -> FinishedBlocks:
        """What earlier runs of the same plan have finished of these tasks."""

    def missing(self, plan: Plan, identity: str) -> Mapping[Task, int]:
        """The tasks that are not finished, each with the bytes that it lacks."""

    def read_back(self, plan: Plan, jobs: Iterable[Job], digests: Mapping[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        """Each of these finished blocks, and whether it still has the bytes of its digest."""

    def copy(
        self, plan: Plan, tasks: Sequence[Task], done: Collection[BlockKey], tiles: Tiles, reading: Reading
    ) -> Iterator[tuple[Job, bytes]]:
        """Copy the blocks of these tasks that are not done, in the order that suits the destination; yields each with its digest.

        tiles: where the codes and scales of a weight meet. reading: compares what is read with the checksums of the source. Blocks may
        come more than once.

        Raises: WrongChecksum; then none of the blocks of this call count as finished for other processes.
        """

    def commit(self, plan: Plan, made: Records) -> None:
        """Add what is missing of the checksums, the small files and the records, of which the manifest is the last: with it, the result is
        complete. Raises: TargetInUse if another process still writes.
        """

    def abandon(self) -> None:
        """Remove what was written: its input is wrong, so that it can never be resumed."""


def complete_result(files: Files, identity: str, size: Callable[[str], int | None]) -> Manifest | None:
    """The manifest, if these files are the complete result of the plan with that identity. size: the length of a file."""
    manifest = usable_manifest(files)
    if manifest is None or manifest.plan != identity:
        return None
    return manifest if all(size(path) == nbytes for path, nbytes in listed_files(files, manifest).items()) else None


def check_same(begun: RunHeader, identity: str, place: str) -> None:
    """Raises TargetError if the interrupted conversion is of another plan."""
    if begun.identity != identity:
        raise TargetError(
            "the interrupted conversion here had other options or another version of reshard, or its source has changed since",
            where=place,
            why="Resuming would mix two conversions",
            do="Repeat the options of that run, or start again with `overwrite=True`",
        )


def check_empty(entries: Sequence[str], place: str) -> None:
    """Raises TargetError if something lies there. Without a record of its beginning, resuming means starting, which must not touch it."""
    if entries:
        more = f" and {plural(len(entries) - 1, 'other entry', 'other entries')}" if len(entries) > 1 else ""
        raise TargetError(
            f"there is no interrupted run of this conversion here, but {entries[0]}{more}",
            where=place,
            why="This is the result of another conversion, or of none; resuming would mix the two",
            do="Repeat the options of the interrupted run, or start again with `overwrite=True`",
            id="target-in-use",
        )
