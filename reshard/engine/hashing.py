"""Hashing: the digests of a checkpoint's blocks, and of its tensors from those of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from reshard.engine.pool import workers_within
from reshard.engine.read_ahead import run_reading
from reshard.engine.transfer import Pieces, Worker
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, blocks
from reshard.index.index import Tensor
from reshard.plans.digests import CURRENT, DigestVersion, Fingerprint
from reshard.storage.files import Files

BlockDigests = dict[str, dict[int, bytes]]
"""Tensor -> number of the block -> digest."""
_Job = tuple[str, int, Pieces, Box]


def block_digests(
    files: Files,
    tensors: Mapping[str, Tensor],
    *,
    version: DigestVersion = CURRENT,
    workers: int | None = None,
    memory: int | None = None,
) -> Iterator[tuple[str, int, int, bytes | CheckpointError]]:
    """The digest of every block of every tensor: (tensor, block number, bytes, digest), in the order in which they are finished.

    In the place of a digest stands the error of a block that cannot be read, or whose replicas differ. workers: threads. memory: the most
    bytes of buffers. Raises: RequestError if `memory` is too small.
    """
    itemsize = max((tensor.dtype.itemsize for tensor in tensors.values()), default=1)

    def jobs() -> Iterator[_Job]:
        for name, tensor in tensors.items():
            pieces = Pieces(tensor)
            yield from ((name, number, pieces, box) for number, box in enumerate(blocks(tensor.shape)))

    def make_worker() -> Callable[[_Job], tuple[str, int, int, bytes | CheckpointError]]:
        worker = Worker(files, itemsize)

        def perform(job: _Job) -> tuple[str, int, int, bytes | CheckpointError]:
            name, number, pieces, box = job
            try:
                return name, number, box.volume * pieces.itemsize, worker.digest(pieces, box, version.new())
            except CheckpointError as error:
                return name, number, box.volume * pieces.itemsize, error

        return perform

    threads = workers_within(memory, workers, itemsize, buffers=2)
    return run_reading(jobs(), make_worker, threads, (files, lambda job: (job[2], job[3])))


def tensor_digest(name: str, tensor: Tensor, digests: Mapping[int, bytes], version: DigestVersion = CURRENT) -> bytes:
    """The digest of a tensor under a name. digests: those of its blocks, by their numbers."""
    return version.tensor(name, tensor.dtype, tensor.shape, (digest for _, digest in sorted(digests.items())))


def fingerprint_of(tensors: Mapping[str, Tensor], digests: BlockDigests, version: DigestVersion = CURRENT) -> Fingerprint:
    """The fingerprint of these tensors, from the digests of their blocks."""
    return version.checkpoint({name: tensor_digest(name, tensor, digests.get(name, {}), version) for name, tensor in tensors.items()})
