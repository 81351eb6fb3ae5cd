"""Front to back: files of a store that are filled with the blocks of a plan, each from front to back, as an upload in parts.

    jobs in the order of the files -> blocks, read ahead, cast, digested -> FileFronts -> uploads

A file appears when its upload is completed. A run that fails leaves no object of a file that is not complete, and no upload that is
pending, unless it is killed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from reshard.engine.blocks import Job, copied_blocks, is_refused, widest_element
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.visit_order import Pass, most_open
from reshard.engine.read_ahead import MEMORY_OF_STORES
from reshard.errors import RequestError
from reshard.geometry.quantities import grouped
from reshard.plans.layout import TargetFile
from reshard.plans.manifest import fixed_bytes
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey
from reshard.storage.stores.file_fronts import FileFronts, FrontFile, part_bytes
from reshard.storage.stores.store import Entry, Store

if TYPE_CHECKING:
    from concurrent.futures import Future

_MOST_AT_ONCE = 8
_LEAST_READING = 32 << 20

End = Callable[[str, Callable[[], tuple[Entry, Sequence[int | None]]], Iterable[tuple[BlockKey, bytes, int]]], None]
"""Ends a file when its last byte has come: (its path, what completes it, the blocks that it holds parts of, each with its digest and how
many of its values became infinite)."""


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
                f"`memory=` of {memory:,} bytes is too little: writing to a store needs {needed:,} here",
                do=f"Use `memory=` {needed >> 20}MiB or more",
            )
        is_open = min(self.most_open, max(1, most_open(files)))
        rest = memory - 2 * self.part * is_open
        self.reading, self.waiting = rest // 2, rest // 8
        self.at_once = min(_MOST_AT_ONCE, 1 + rest * 3 // 8 // (self.part * is_open))


def filled(plan: Plan, store: Store, work: Pass, budget: Budget, workers: int, end: End, reading: Reading) -> Iterator[tuple[Job, bytes]]:
    """Fill the files of a pass, and end each when its last block has been written. Yields each block with its digest."""
    files, jobs = work
    constants = grouped(plan.target_index.constants, attrgetter("path"))
    front_files = {
        file.path: FrontFile(file.path, file.nbytes, partial(fixed_bytes, file, constants.get(file.path, ())), file.checksums)
        for file in files
    }
    fronts = FileFronts(store, front_files, at_once=budget.at_once)
    blocks_of: dict[str, list[BlockKey]] = {file.path: [] for file in files}
    for job in jobs:
        for path in job.paths:
            blocks_of[path].append(job.key)
    left = Counter({path: len(keys) for path, keys in blocks_of.items()})
    done: dict[BlockKey, tuple[bytes, int]] = {}
    ending: list[Future[None]] = []

    def end_file(path: str) -> None:
        end(path, partial(fronts.complete, path), [(key, *done[key]) for key in dict.fromkeys(blocks_of[path])])

    try:
        ending += [store.later(partial(end_file, path)) for path in blocks_of if not left[path]]
        turn = _Turn(fronts, budget.waiting)
        for job, digest in copied_blocks(
            plan, fronts, turn.taking(jobs), widest_element(plan), workers, ahead=budget.reading, reading=reading
        ):
            turn.done()
            done[job.key] = digest, job.beyond
            yield job, digest
            for path in () if is_refused(plan, job) else job.paths:
                left[path] -= 1
                if not left[path]:
                    ending.append(store.later(partial(end_file, path)))
        for future in ending:
            future.result()
    except BaseException:
        for future in ending:
            future.exception()
        fronts.abort()
        raise


class _Turn:
    """Lets blocks begin in their order, as long as not too many bytes wait for bytes before them. most: of these bytes."""

    def __init__(self, fronts: FileFronts, most: int) -> None:
        self._fronts, self._most, self._under_way = fronts, most, 0
        self._changed = threading.Condition()

    def taking(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            with self._changed:
                # What is under way brings the bytes that others wait for. If nothing is, this block does.
                while self._under_way and self._fronts.waiting_bytes > self._most:
                    self._changed.wait(0.05)
                self._under_way += 1
            yield job

    def done(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()
