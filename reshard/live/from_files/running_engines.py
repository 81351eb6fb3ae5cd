"""RunningEngines: the staging of running engines as a Destination. It is written as a whole or not at all, and keeps nothing between runs.

begin    bytes that the format prescribes
copy     the blocks of the plan, in the order of the source
commit   the end of the streams: the ranks then agree, and install what came (session.py)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from reshard.engine.blocks import Held, Job, block_jobs, copied_blocks, widest_element, workers_of
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.destination import Begun, FinishedBlocks, Records
from reshard.engine.destinations.journal import RunHeader
from reshard.engine.origins.reader import Tiles
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.errors import UnsupportedError
from reshard.live.from_files.rank_streams import RankStreams
from reshard.plans.manifest import Manifest
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Task
from reshard.storage.files import Files, VirtualFiles


class RunningEngines:
    """The ranks of engines that wait for an update."""

    is_running = None

    def __init__(self, place: str, streams: RankStreams, effort: Effort = NO_LIMITS, held: Plan | None = None) -> None:
        """place: how messages call them. held: the plan of the checkpoint whose weights they hold, if they get only what changes."""
        self.place, self._streams, self._effort, self._held = place, streams, effort, held

    @property
    def files(self) -> Files:
        return VirtualFiles(self.place)

    def workers(self, plan: Plan, tasks: Sequence[Task]) -> int:
        return workers_of(plan, self._effort, self._held)

    def tasks(self, plan: Plan) -> tuple[Task, ...]:
        return plan.tasks()

    def refresh(self) -> None:
        """Nobody else writes there."""

    def entries(self, folders: Iterable[str] = ()) -> Sequence[str]:
        return ()

    def existing(self, paths: Iterable[str]) -> tuple[str, ...]:
        return ()

    def unfinished_files(self) -> list[str]:
        return []

    def begun(self) -> Begun | None:
        return None

    def result_of(self, identity: str) -> Manifest | None:
        return None

    def alone(self, identity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, header: RunHeader, plan: Plan, *, resume: bool) -> None:
        self._streams.write_constants()

    def shared(self, header: RunHeader, plan: Plan, *, begins: bool) -> AbstractContextManager[bool]:
        raise UnsupportedError("an update has one sender", where=self.place, do="Push from one process")

    def finished(self, plan: Plan, tasks: Sequence[Task]) -> FinishedBlocks:
        return FinishedBlocks()

    def missing(self, plan: Plan, identity: str) -> Mapping[Task, int]:
        return {}

    def read_back(self, plan: Plan, jobs: Iterable[Job], digests: Mapping[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        return iter(())

    def copy(
        self, plan: Plan, tasks: Sequence[Task], done: Collection[BlockKey], tiles: Tiles, reading: Reading
    ) -> Iterator[tuple[Job, bytes]]:
        held = Held.of(self._held, self._streams.held) if self._held and self._streams.held else None
        jobs = block_jobs(plan, [i for task in tasks for i in task.routes], tiles, held)
        return copied_blocks(plan, self._streams, jobs, widest_element(plan), self.workers(plan, tasks), held=held, reading=reading)

    def commit(self, plan: Plan, made: Records) -> None:
        self._streams.end()

    def abandon(self) -> None:
        self._streams.give_up()
