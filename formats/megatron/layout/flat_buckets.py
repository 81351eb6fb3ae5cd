"""Where parameters lie in the flat buffers of the distributed optimizer.

    buffer:   [ bucket 0 .................................... ][ bucket 1 ... ]
    bucket:   [ last parameter | fill | ... | first parameter ]

A buffer holds the parameters of one chunk of the model (of one element type; experts have their own buffers) in reverse order. Each
parameter starts at a multiple of 64 elements, counted from the start of its bucket. A shared embedding has a bucket of its
own. The saved buffer has no padding at the end of a bucket: a bucket starts where the last parameter of the previous one ends.

Source: megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py (get_parameter_state_dp_zero) of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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


def lay_out_buffer(elements: Sequence[int], shared: Collection[int], bucket_size: int | None) -> tuple[tuple[int, ...], int]:
    """The first element of each parameter in their buffer, and the length of the buffer without padding at its end.

    elements: the number of elements of each parameter, in the order of the model. shared: the positions of those that are embeddings which
    other stages hold, too. A bucket is closed when it holds `bucket_size` elements or more; None: all parameters are in one bucket.
    """
    offsets: list[int] = []
    bucket = end = 0  # the start of the current bucket, and the end of its last parameter
    for i in reversed(range(len(elements))):
        offset = bucket + _aligned(end - bucket)
        offsets.append(offset)
        end = offset + elements[i]
        if i in shared or (bucket_size is not None and end - bucket >= bucket_size):
            bucket = end
    return tuple(reversed(offsets)), end


def buffer_of(parameters: Sequence[ChunkTensor], bucket_size: int | None) -> tuple[tuple[int, ...], int]:
    """What `lay_out_buffer` returns for these parameters."""
    shared = [i for i, parameter in enumerate(parameters) if parameter.is_shared]
    return lay_out_buffer([parameter.elements for parameter in parameters], shared, bucket_size)


def positions_in_buckets(parameters: Sequence[int], buckets: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """(bucket, offset in the bucket) of each parameter, in the order of the model; None if the parameters do not fill the buckets.

    parameters: the number of elements of each, in the order of the model. buckets: the length of each in elements.
    """
    positions: list[tuple[int, int]] = []
    bucket = end = 0
    for elements in reversed(parameters):
        offset = _aligned(end)
        if end and bucket < len(buckets) and offset + elements > buckets[bucket]:
            if not end <= buckets[bucket] <= offset:
                return None
            bucket, offset = bucket + 1, 0
        if bucket == len(buckets):
            return None
        positions.append((bucket, offset))
        end = offset + elements
    is_full = bucket == len(buckets) - 1 and end == buckets[bucket]
    return tuple(reversed(positions)) if is_full else None


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
