"""Reading whole checkpoints: their fingerprint, and whether two hold the same; block by block, whatever their layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from reshard.canonical.content import Content
from reshard.engine.casts import cast
from reshard.engine.pool import run_jobs, workers_within
from reshard.engine.transfer import Block, Pieces, Worker, bytes_of
from reshard.errors import DifferenceFound
from reshard.geometry.boxes import Box, blocks
from reshard.index.index import Index, Tensor
from reshard.plans.digests import Fingerprint, block_digest, checkpoint_fingerprint, tensor_digest
from reshard.storage.files import Files, read_range


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One checkpoint as a comparison sees it: where its bytes are, and which tensors are meant."""

    files: Files
    index: Index
    content: Content


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not equal about a tensor: `kind` is "missing", "extra", "shape", "dtype" or "values"."""

    name: str
    kind: str
    detail: str


@dataclass(slots=True)
class Comparison:
    """What `verify` found. `differences` is empty if the two hold the same weights."""

    tensors: int = 0
    nbytes: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises DifferenceFound, telling the first difference and how many there are."""
        if self.differences:
            first = self.differences[0]
            more = f" and {len(self.differences) - 1} other differences" if len(self.differences) > 1 else ""
            raise DifferenceFound(first.detail + more, where=first.name)


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    number: int
    box: Box
    sides: tuple[Pieces, ...]


def fingerprint_blocks(side: Side, *, workers: int | None = None, memory: int | None = None) -> Iterator[tuple[str, int, int, bytes]]:
    """Every block of every chosen tensor, once: (tensor, block number, bytes, digest), in the order in which they are done."""
    tensors = side.content.tensors

    def jobs() -> Iterator[_Job]:
        for name, tensor in tensors.items():
            pieces = Pieces(tensor)
            yield from (_Job(name, number, box, (pieces,)) for number, box in enumerate(blocks(tensor.shape)))

    itemsize = _widest(tensors.values())

    def make_worker() -> Callable[[_Job], tuple[str, int, int, bytes]]:
        worker = Worker(side.files, itemsize)

        def perform(job: _Job) -> tuple[str, int, int, bytes]:
            data = bytes_of(worker.gather(job.sides[0], job.box))
            return job.name, job.number, len(data), block_digest(data)

        return perform

    yield from run_jobs(jobs(), make_worker, workers_within(memory, workers, itemsize, buffers=2))


def fingerprint_of(side: Side, digests: dict[str, dict[int, bytes]]) -> Fingerprint:
    """The fingerprint from the blocks' digests by tensor and number."""
    return checkpoint_fingerprint(
        {
            name: tensor_digest(name, tensor.dtype, tensor.shape, (digest for _, digest in sorted(digests.get(name, {}).items())))
            for name, tensor in side.content.tensors.items()
        }
    )


def compare(
    left: Side, right: Side, result: Comparison, *, with_cast: bool = False, workers: int | None = None, memory: int | None = None
) -> Iterator[int]:
    """Compare every element of every tensor, replicas and constants included; fills `result`, yields bytes as they are done.

    with_cast: where element types differ, cast the left's values to the right's, as torch does, before comparing bits.
    """
    both = list(_comparable(left, right, result, with_cast=with_cast))
    result.differences.extend(difference for side in (left, right) for difference in _wrong_constants(side))
    itemsize = _widest([tensor for pair in both for tensor in pair])
    different: dict[str, tuple[int, str]] = {}

    def jobs() -> Iterator[_Job]:
        for a, b in both:
            sides = Pieces(a), Pieces(b)
            yield from (_Job(a.name, number, box, sides) for number, box in enumerate(blocks(a.shape)))

    def make_worker() -> Callable[[_Job], tuple[_Job, int, Box | None]]:
        workers_pair = Worker(left.files, itemsize), Worker(right.files, itemsize)

        def perform(job: _Job) -> tuple[_Job, int, Box | None]:
            a, b = (worker.gather(pieces, job.box) for worker, pieces in zip(workers_pair, job.sides, strict=True))
            a = cast(a, job.sides[0].tensor.dtype, job.sides[1].tensor.dtype)
            return job, b.nbytes, None if np.array_equal(a, b) else _first_difference(a, b, job.box)

        return perform

    for job, nbytes, found in run_jobs(jobs(), make_worker, workers_within(memory, workers, itemsize, buffers=5 if with_cast else 4)):
        result.nbytes += nbytes
        if found is not None and (job.name not in different or job.number < different[job.name][0]):
            different[job.name] = job.number, f"the values differ, first at element {list(found.offsets)}"
        yield nbytes
    result.differences.extend(Difference(name, "values", detail) for name, (_, detail) in sorted(different.items()))


def _comparable(left: Side, right: Side, result: Comparison, *, with_cast: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs whose values can be compared; what keeps the others from it goes into the result."""
    a, b = left.content.tensors, right.content.tensors
    for name in sorted(a.keys() - b.keys()):
        result.differences.append(Difference(name, "missing", f"it is in {left.files.root} and not in {right.files.root}"))
    for name in sorted(b.keys() - a.keys()):
        result.differences.append(Difference(name, "extra", f"it is in {right.files.root} and not in {left.files.root}"))
    for name in [name for name in a if name in b]:
        x, y = a[name], b[name]
        result.tensors += 1
        if x.shape != y.shape:
            result.differences.append(Difference(name, "shape", f"its shape is {list(x.shape)} on the left, {list(y.shape)} on the right"))
        elif x.dtype != y.dtype and not (with_cast and x.dtype.floating and y.dtype.floating):
            hint = " (--cast compares the values after a cast)" if x.dtype.floating and y.dtype.floating else ""
            result.differences.append(Difference(name, "dtype", f"it is {x.dtype} on the left, {y.dtype} on the right{hint}"))
        else:
            yield x, y


def _wrong_constants(side: Side) -> Iterator[Difference]:
    """Constants (padding rows, scales that must be 1) whose bytes are not what the format demands."""
    step = 1 << 20
    for each in side.index.constants:
        for start in range(0, each.nbytes, step):
            size = min(step, each.nbytes - start)
            found = read_range(side.files, each.path, each.byte_offset + start, size)
            if found != (each.expected * (size // len(each.expected) + 1))[:size]:
                yield Difference(
                    each.name, "values", f"bytes that must hold a constant (padding or a scale) hold something else, in {each.path}"
                )
                break


def _first_difference(a: Block, b: Block, box: Box) -> Box:
    at = np.argwhere(np.asarray(a != b))[0] if a.shape else np.zeros(0, np.int64)
    return Box(tuple(int(i) + start for i, start in zip(at, box.offsets, strict=True)), (1,) * len(box.sizes))


def _widest(tensors: Iterable[Tensor]) -> int:
    return max((tensor.dtype.itemsize for tensor in tensors), default=1)
