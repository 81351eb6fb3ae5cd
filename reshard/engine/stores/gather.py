"""Gather: files of a store that are filled with the blocks of a plan, each from front to back, as an upload in parts.

    visits in the order of the files -> blocks, read ahead, cast, digested -> FileFronts -> uploads

A file appears when its upload is completed. A run that fails leaves no object of a file that is not complete, and no upload that is
pending, unless it is killed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from reshard.engine.events import event
from reshard.engine.journal import BlockKey
from reshard.engine.recipes.quantizer import Bands
from reshard.engine.run import Done, block_jobs, check_same_source, copied_blocks, source_trace, widest_element, workers_of
from reshard.engine.stores.gather_order import Pass, Visit, most_open, passes
from reshard.engine.stores.read_ahead import MEMORY_OF_STORES
from reshard.engine.stores.store_target import FinishedFile, StoreTarget
from reshard.errors import RequestError
from reshard.geometry.quantities import plural
from reshard.index.index import Constant
from reshard.plans.layout import TargetFile
from reshard.plans.manifest import fixed_ranges, parts, planned_bytes
from reshard.plans.plan import Plan
from reshard.storage.stores.file_fronts import FileFronts, FrontFile, part_bytes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from reshard.storage.stores.store import Entry

_MOST_AT_ONCE, _WORKERS = 8, 8
_LEAST_READING = 32 << 20


class Budget:
    """How a number of bytes, by default 1 GiB, is divided among what a conversion into a store holds at a time.

    Each open file has one part that is being filled and at least one that is being sent. Half of the rest is for reading ahead, an eighth
    for bytes that came before their turn, and what remains for more parts under way.
    """

    def __init__(self, memory: int | None, files: Sequence[TargetFile]) -> None:
        memory = MEMORY_OF_STORES if memory is None else memory
        self.part = max((part_bytes(file.nbytes) for file in files), default=part_bytes(0))
        self.most_open = (memory - _LEAST_READING) // (2 * self.part)
        if self.most_open < 1:
            needed = _LEAST_READING + 2 * self.part
            raise RequestError(
                f"--memory of {memory:,} bytes is too little: writing to a store needs {needed:,} here",
                do=f"Use --memory {needed >> 20}MiB or more",
            )
        is_open = min(self.most_open, max(1, most_open(files)))
        rest = memory - 2 * self.part * is_open
        self.reading, self.waiting = rest // 2, rest // 8
        self.at_once = min(_MOST_AT_ONCE, 1 + rest * 3 // 8 // (self.part * is_open))


class Gather:
    """Fills files of a store with the blocks of a plan. Iterate `run` to its end.

    budget: for the files that are filled. workers: threads. finished: files that an earlier run has completed.
    """

    def __init__(
        self,
        plan: Plan,
        identity: str,
        target: StoreTarget,
        *,
        budget: Budget,
        workers: int,
        finished: Mapping[str, FinishedFile],
    ) -> None:
        self.completed: dict[str, Entry] = {path: file.entry for path, file in finished.items()}
        """The files that are complete."""
        self.digests: dict[BlockKey, bytes] = {key: digest for file in finished.values() for key, digest in file.blocks.items()}
        """The digests of the blocks that they hold, and of those that were copied."""
        self.bands = Bands()
        """Where the codes and scales of a weight that is being quantized meet."""
        self.resumed_bytes = 0
        """The bytes of the blocks whose files are all complete from an earlier run."""
        self._plan, self._identity, self._target, self._budget, self._workers = plan, identity, target, budget, workers
        self._trace = trace = source_trace(plan)
        others = [file.blocks for file in finished.values() if trace and file.source != trace]
        self._of_other_sources = {key: digest for blocks in others for key, digest in blocks.items()}

    def run(self, paths: Collection[str], routes: Iterable[int]) -> Iterator[Done]:
        """Complete these files, and yield each block that was read or was there already. routes: the routes whose tensors they hold.

        Raises: TargetError if the source has changed since the files that are there were written.
        """
        check_same_source(self._plan, self._of_other_sources, self._workers, self._target.store.url)
        plan, routes = self._plan, list(routes)
        files = [file for file in plan.layout.files if file.path in paths]
        left = {file.path for file in files} - self.completed.keys()
        self._log_begin(files)
        everything = list(passes(plan, left, routes, self._budget.most_open, self.bands))
        reported = {visit.key for each in everything for visit in each.visits}
        for job in block_jobs(plan, routes):
            if job.key not in reported:
                # Every file that holds a part of this block is complete.
                self.resumed_bytes += job.nbytes
                yield Done(job.route.name, job.nbytes)
        reported.clear()
        for each in everything:
            for visit, digest in self._pass(each):
                self.digests[visit.key] = digest
                if visit.key not in reported:
                    reported.add(visit.key)
                    yield Done(visit.route.name, visit.nbytes)

    def _log_begin(self, files: Sequence[TargetFile]) -> None:
        budget, complete = self._budget, sum(file.path in self.completed for file in files)
        event(
            "writing",
            f"writing {plural(len(files), 'file')} to {self._target.store.url} with {plural(self._workers, 'thread')}, "
            f"{plural(budget.at_once, 'part')} of {budget.part:,} bytes of each file under way, {budget.reading:,} bytes read ahead"
            + (f"; {plural(complete, 'file')} complete from an earlier run" if complete else ""),
            target=self._target.store.url,
            files=len(files),
            bytes=sum(file.nbytes for file in files),
            workers=self._workers,
        )

    def _pass(self, each: Pass) -> Iterator[tuple[Visit, bytes]]:
        """Fill the files of a pass, and complete each when its last block has been written."""
        constants, target, budget = _by_path(self._plan.target_index.constants), self._target, self._budget
        files = {file.path: FrontFile(file.path, file.nbytes, partial(_fixed, file, constants.get(file.path, ()))) for file in each.files}
        fronts = FileFronts(target.store, files, at_once=budget.at_once)
        blocks_of: dict[str, list[BlockKey]] = {path: [] for path in files}
        for visit in each.visits:
            for path in visit.paths:
                blocks_of[path].append(visit.key)
        left = Counter({path: len(keys) for path, keys in blocks_of.items()})
        ending: dict[str, Future[Entry]] = {}

        def end(path: str) -> Entry:
            target.check_begun(self._identity)
            entry = fronts.complete(path)
            target.record(self._identity, self._trace, entry, [(key, self.digests[key]) for key in dict.fromkeys(blocks_of[path])])
            return entry

        try:
            ending.update((path, target.store.later(partial(end, path))) for path in files if not left[path])
            turn = _Turn(fronts, budget.waiting)
            copied = copied_blocks(
                self._plan, fronts, turn.taking(each.visits), widest_element(self._plan), self._workers, ahead=budget.reading
            )
            for visit, digest in copied:
                turn.done()
                yield visit, digest
                for path in visit.paths:
                    left[path] -= 1
                    if not left[path]:
                        ending[path] = target.store.later(partial(end, path))
            for path, future in ending.items():
                self.completed[path] = future.result()
        except BaseException:
            for path, future in ending.items():
                if future.exception() is None:
                    self.completed[path] = future.result()
            fronts.abort()
            raise


def gather_workers(plan: Plan, workers: int | None) -> int:
    """The number of threads that run a plan into a store."""
    # A thread waits while the parts of its file are under way, and others go on meanwhile.
    return workers_of(plan, workers or _WORKERS, None)


class _Turn:
    """Lets blocks begin in their order, as long as not too many bytes wait for bytes before them. most: of these bytes."""

    def __init__(self, fronts: FileFronts, most: int) -> None:
        self._fronts, self._most, self._under_way = fronts, most, 0
        self._changed = threading.Condition()

    def taking(self, visits: Sequence[Visit]) -> Iterator[Visit]:
        for visit in visits:
            with self._changed:
                # What is under way brings the bytes that others wait for. If nothing is, this block does.
                while self._under_way and self._fronts.waiting_bytes > self._most:
                    self._changed.wait(0.05)
                self._under_way += 1
            yield visit

    def done(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()


def _fixed(file: TargetFile, constants: Sequence[Constant]) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file that the plan knows: (byte offset, bytes), in order."""
    ranges = fixed_ranges(file, constants)
    return zip((start for start, _ in parts(ranges)), planned_bytes(file, constants, ranges), strict=True)


def _by_path(constants: Sequence[Constant]) -> dict[str, list[Constant]]:
    found: dict[str, list[Constant]] = {}
    for constant in constants:
        found.setdefault(constant.path, []).append(constant)
    return found
