"""The values of all tensors, read once, block by block, and their replicas compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace

from reshard.engine.pool import Effort
from reshard.engine.read_ahead import run_reading
from reshard.engine.transfer import Block, Pieces, Worker, bytes_of
from reshard.errors import CheckpointError, ReplicasDiffer
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.value import mutable
from reshard.health.findings import Finding, found, of_error
from reshard.index.index import Tensor
from reshard.index.name_parts import is_scale
from reshard.index.shards import primary_rows
from reshard.measures.statistics import Statistics, statistics_of
from reshard.plans.digests import CURRENT
from reshard.storage.files import Files


@mutable
class Measured:
    """A tensor and what its values showed."""

    tensor: Tensor
    """The tensor."""
    statistics: Statistics = field(default_factory=Statistics)
    """The statistics of the blocks that could be read."""
    fault: Finding | None = None
    """Why a block could not be read, or which replicas differ."""
    is_complete: bool = True
    """Whether all blocks could be read."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """The digest of each block by its number, if asked for."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.tensor.name


# The index of a tensor, the number of a block in it, the block, and the tensor's pieces, replicas included.
_Job = tuple[int, int, Box, Pieces]


def measure(
    tensors: Sequence[Tensor],
    files: Files,
    effort: Effort,
    *,
    with_digests: bool = False,
) -> list[Measured]:
    """The statistics of every tensor. Weights and masters get all of them, optimizer state those that it needs.

    with_digests: also hash every block.

    Raises: RequestError if the memory of `effort` is too small.
    """
    measured = [Measured(tensor) for tensor in tensors]
    itemsize = max((tensor.dtype.itemsize for tensor in tensors), default=1)

    def jobs() -> Iterator[_Job]:
        for number, tensor in enumerate(tensors):
            pieces = Pieces(tensor)
            yield from ((number, block, box, pieces) for block, box in enumerate(blocks(tensor.shape)))

    def make_worker() -> Callable[[_Job], tuple[_Job, Statistics | None, bytes | None, Finding | None]]:
        worker = Worker(files, itemsize)

        def perform(job: _Job) -> tuple[_Job, Statistics | None, bytes | None, Finding | None]:
            number, _, box, pieces = job
            tensor = tensors[number]
            block, fault = _gathered(worker, pieces, box)
            if block is None:
                return job, None, None, fault
            is_weight, signs = tensor.kind in ("weight", "master"), tensor.kind == "moment2" or is_scale(tensor.name)
            statistics = statistics_of(block, tensor.dtype, box, tensor.shape, values=is_weight, signs=signs)
            return job, statistics, CURRENT.block(bytes_of(block)) if with_digests else None, fault

        return perform

    threads = effort.threads(itemsize, buffers=3)
    finished = run_reading(jobs(), make_worker, threads, (files, lambda job: (job[3], job[2])))
    for (number, block, box, _), statistics, digest, fault in finished:
        entry = measured[number]
        entry.fault = entry.fault or fault
        if statistics is None:
            entry.is_complete = False
        else:
            entry.statistics.add(statistics)
            effort.report(box.volume * entry.tensor.dtype.itemsize)
        if digest is not None:
            entry.digests[block] = digest
    return measured


def _gathered(worker: Worker, pieces: Pieces, box: Box) -> tuple[Block | None, Finding | None]:
    """A block, and a finding if its replicas differ; None and a finding if it cannot be read."""
    try:
        return worker.gather(pieces, box), None
    except ReplicasDiffer as error:
        return worker.gather(Pieces(pieces.tensor.without_replicas()), box), of_error(error)
    except CheckpointError as error:
        return None, replace(of_error(error), tensor=pieces.tensor.name)


def place_of(tensor: Tensor, element: tuple[int, ...]) -> tuple[str | None, int | None]:
    """The file and the rank that hold an element."""
    shards = tensor.shards
    for row in primary_rows(shards).nonzero()[0].tolist():
        if shards.box(row).contains(Box(element, (1,) * len(element))):
            return shards.path(row), None if shards.ranks is None else int(shards.ranks[row])
    return None, None


def faults(measured: Sequence[Measured], tied_head: str | None) -> Iterator[Finding]:
    """What went wrong while reading. tied_head: the head that was read with the embedding as its replica."""
    for entry in measured:
        if entry.fault is None:
            continue
        if entry.name == tied_head and entry.fault.id == "replicas-differ":
            yield found("tied-mismatch", entry.fault.detail, tensor=tied_head)
        else:
            yield entry.fault
