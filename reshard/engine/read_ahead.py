"""Reading ahead: the bytes of the next jobs are fetched from a store while others are worked on.

    jobs in their order -> batches -> close ranges as one -> requests of at most 16 MiB -> jobs whose bytes are on their way

An example with 1 GiB of memory, so that a batch has 128 MiB. Three jobs read bytes of one file, in MiB:

    job 1   0 to 10       request 0 to 14, for jobs 1 and 2: the gap of 0.5 is at most 1 (MERGED_GAP), the whole at most 16
    job 2   10.5 to 14
    job 3   14 to 50      requests 14 to 30, 30 to 46 and 46 to 50: with request 0 to 14 it would have more than 16

All of these count as held, 50 MiB, until the jobs that use them are done: job 1 alone releases nothing, job 2 after it 14 MiB. The batch is
filled up to 128 MiB by the jobs that follow. The next batch begins when its bytes fit into the 1 GiB, too.

Local files are read when they are needed: the system reads ahead on its own. So jobs on local files pass through unchanged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from reshard.engine.origins.reader import Reader
from reshard.engine.pool import run_jobs
from reshard.engine.transfer import FileRange, Pieces
from reshard.errors import ReshardError
from reshard.geometry.boxes import Box
from reshard.geometry.value import mutable

if TYPE_CHECKING:
    from reshard.storage.files import Files
    from reshard.storage.stores.remote_files import Fetched, RemoteFiles

Job = TypeVar("Job")
Result = TypeVar("Result")

BoxOfTensor = tuple[Pieces | Reader, Box]
"""What a job reads of one checkpoint: a box of a tensor."""
MEMORY_OF_STORES = 1 << 30
"""Bytes of buffers for a conversion from or to a store, if the caller sets no limit."""
LONGEST_REQUEST = 16 << 20
"""The most bytes of one request. S3 answers requests of 8 to 16 MiB fastest (AWS guideline)."""


# Jobs whose ranges are looked up at a time. Where a zip holds a tensor, a small header says where its bytes begin.
_LOCATED_AT_ONCE = 32


@mutable(eq=False)
class _Shared:
    """Bytes that several jobs read."""

    fetched: Fetched
    users: int


class ReadAhead:
    """Jobs on files in a store. memory: the most bytes that are fetched and not released."""

    def __init__(self, files: RemoteFiles, memory: int) -> None:
        self._files, self._memory = files, memory
        self._batch = max(min(memory // 4, 128 << 20), min(memory, LONGEST_REQUEST))
        self._held = 0
        self._users: dict[int, list[_Shared]] = {}
        self._changed = threading.Condition()

    def fetching(self, jobs: Iterable[Job], reads: Callable[[Job], BoxOfTensor]) -> Iterator[Job]:
        """The jobs in their order, each after its bytes were asked for. reads: what a job will read."""
        from concurrent.futures import ThreadPoolExecutor

        gap = self._files.MERGED_GAP
        with ThreadPoolExecutor(_LOCATED_AT_ONCE, thread_name_prefix="reshard-locate") as threads:
            source = iter(jobs)
            located = deque((job, threads.submit(_ranges, reads, job, gap)) for job in islice(source, _LOCATED_AT_ONCE))
            ready: deque[Job] = deque()
            while located or ready:
                while located and (not ready or self._held + self._batch <= self._memory):
                    batch, nbytes = [], 0
                    while located and nbytes < self._batch:
                        job, future = located.popleft()
                        located.extend((following, threads.submit(_ranges, reads, following, gap)) for following in islice(source, 1))
                        batch.append((job, future.result()))
                        nbytes += sum(stop - start for _, start, stop in batch[-1][1])
                    with self._changed:
                        # Jobs that are under way release what they hold. If none is, this batch is the only one.
                        while not ready and self._held and self._held + nbytes > self._memory:
                            self._changed.wait()
                    self._begin(batch)
                    ready.extend(job for job, _ in batch)
                yield ready.popleft()

    def releasing(self, perform: Callable[[Job], Result]) -> Callable[[Job], Result]:
        """A function that performs a job and then forgets its bytes."""

        def perform_and_release(job: Job) -> Result:
            try:
                return perform(job)
            finally:
                self._release(job)

        return perform_and_release

    def _begin(self, batch: Iterable[tuple[Job, list[FileRange]]]) -> None:
        wanted = [(path, start, stop, id(job)) for job, ranges in batch for path, start, stop in ranges if self._files.can_fetch(path)]
        requests: list[tuple[str, int, int, set[int]]] = []
        for path, start, stop, user in sorted(wanted):
            if (
                requests
                and requests[-1][0] == path
                and start - requests[-1][2] <= self._files.MERGED_GAP
                and stop - requests[-1][1] <= LONGEST_REQUEST
            ):
                last = requests[-1]
                requests[-1] = path, last[1], max(last[2], stop), {*last[3], user}
                continue
            if requests and requests[-1][0] == path and stop <= requests[-1][2]:
                requests[-1][3].add(user)
                continue
            for first in range(start, stop, LONGEST_REQUEST):
                requests.append((path, first, min(first + LONGEST_REQUEST, stop), {user}))
        with self._changed:
            self._held += sum(stop - start for _, start, stop, _ in requests)
        for path, start, stop, users in requests:
            shared = _Shared(self._files.fetch(path, start, stop), len(users))
            for user in users:
                self._users.setdefault(user, []).append(shared)

    def _release(self, job: object) -> None:
        with self._changed:
            for shared in self._users.pop(id(job), ()):
                shared.users -= 1
                if not shared.users:
                    self._files.release([shared.fetched])
                    self._held -= shared.fetched.stop - shared.fetched.start
            self._changed.notify_all()


def run_reading(
    jobs: Iterable[Job],
    make_worker: Callable[[], Callable[[Job], Result]],
    workers: int,
    *reads: tuple[Files, Callable[[Job], BoxOfTensor]],
    memory: int | None = None,
) -> Iterator[Result]:
    """The results of jobs that read files, as `run_jobs` returns them.

    reads: files, and from a job to the box that it reads of them. memory: the most bytes that are read ahead.
    """
    reading = [(ahead, reads_of) for files, reads_of in reads if (ahead := _read_ahead(files, memory))]
    for ahead, reads_of in reading:
        jobs = ahead.fetching(jobs, reads_of)

    def make_releasing_worker() -> Callable[[Job], Result]:
        perform = make_worker()
        for ahead, _ in reading:
            perform = ahead.releasing(perform)
        return perform

    return run_jobs(jobs, make_releasing_worker, workers)


def _ranges(reads: Callable[[Job], BoxOfTensor], job: Job, gap: int) -> list[FileRange]:
    """The file ranges that a job reads. To find them, small headers may be read."""
    tensor, box = reads(job)
    try:
        return list(tensor.ranges(box, gap))
    except ReshardError:
        return []  # the job meets the same error, and whoever performs it knows what to make of it


def _read_ahead(files: Files, memory: int | None) -> ReadAhead | None:
    """How jobs on these files get their bytes; None if they are local. memory: the most bytes that are fetched ahead."""
    if files.store is None:
        return None
    from reshard.storage.stores.remote_files import RemoteFiles

    return ReadAhead(files, MEMORY_OF_STORES // 2 if memory is None else memory) if isinstance(files, RemoteFiles) else None
