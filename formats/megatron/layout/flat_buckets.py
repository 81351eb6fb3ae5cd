"""Where parameters lie in the flat buffers of the distributed optimizer.

    buffer:   [ bucket 0 .................................... ][ bucket 1 ... ]
    bucket:   [ last parameter | fill | ... | first parameter ]

A buffer holds the parameters of one chunk of the model (of one element type; experts have their own buffers) in reverse order. Each
parameter starts at a multiple of 64 elements, counted from the start of its bucket. A shared embedding has a bucket of its
own. The saved buffer has no padding at the end of a bucket: a bucket starts where the last parameter of the previous one ends.

Source: megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py (get_parameter_state_dp_zero) of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from .chunks import ChunkTensor
from .stages import Args, parallel_size

_ALIGNMENT = 64
BUFFER_KINDS = {"param": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Array of a buffer -> torch's name for that kind of state."""


def by_buffer(parameters: Iterable[ChunkTensor]) -> list[list[ChunkTensor]]:
    """The parameters of each buffer: there is one buffer for each element type of each chunk."""
    buffers: dict[tuple[int, object], list[ChunkTensor]] = {}
    for parameter in parameters:
        buffers.setdefault((parameter.chunk, parameter.dtype), []).append(parameter)
    return list(buffers.values())


def bucket_size(args: Args) -> int:
    """The bucket size of a run whose gradient reduction overlaps, in its first stage; later stages have one bucket
    (distributed_data_parallel.py)."""
    data_parallel = parallel_size(args, "data_parallel_size") * parallel_size(args, "context_parallel_size")
    size = args.get("ddp_bucket_size")
    return size if isinstance(size, int) else max(40_000_000, 1_000_000 * data_parallel)


def lay_out_buffer(
    parameters: Sequence[ChunkTensor], closed_at: Callable[[ChunkTensor, int, int], int | None]
) -> tuple[tuple[int, ...], int]:
    """The first element of each parameter in their buffer, and the length of the buffer without padding at its end.

    parameters: in the order of the model. closed_at: where a bucket ends that a parameter closes, given where the bucket starts and the
    parameter ends; None: the bucket goes on.
    """
    offsets: list[int] = []
    bucket = end = 0  # the start of the current bucket, and the end of its last parameter
    for parameter in reversed(parameters):
        offsets.append(bucket + _aligned(end - bucket))
        end = offsets[-1] + parameter.elements
        if (closed := closed_at(parameter, bucket, end)) is not None:
            bucket = end = closed
    return tuple(reversed(offsets)), end


def buffer_of(parameters: Sequence[ChunkTensor], bucket_size: int | None) -> tuple[tuple[int, ...], int]:
    """What `lay_out_buffer` returns for a run that closes a bucket when it holds `bucket_size` elements; None: for one without buckets."""

    def closed_at(parameter: ChunkTensor, start: int, end: int) -> int | None:
        return end if parameter.is_shared or (bucket_size is not None and end - start >= bucket_size) else None

    return lay_out_buffer(parameters, closed_at)


def offsets_in_buckets(parameters: Sequence[ChunkTensor], lengths: Iterable[int]) -> tuple[int, ...] | None:
    """The first element of each parameter in the buffer that saved buckets of these lengths make; None if it does not fill the buckets.

    A bucket may end where the next parameter would start, and not where its last one ends: a shared embedding opens a bucket there.
    """
    ends = list(accumulate(lengths))
    closed: list[int] = []

    def closed_at(_: ChunkTensor, start: int, end: int) -> int | None:
        closing = next((candidate for candidate in ends[len(closed) :] if end <= candidate <= start + _aligned(end - start)), None)
        closed.extend([] if closing is None else [closing])
        return closing

    offsets, _ = lay_out_buffer(parameters, closed_at)
    is_filled = closed == ends and max(map(sum, zip(offsets, (parameter.elements for parameter in parameters), strict=True))) == ends[-1]
    return offsets if is_filled else None


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
