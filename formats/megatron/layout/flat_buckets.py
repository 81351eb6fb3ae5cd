"""Where parameters lie in the flat buffers of the distributed optimizer.

    buffer:   [ bucket 0 .................................... ][ bucket 1 ... ]
    bucket:   [ last parameter | fill | ... | first parameter ]

A buffer holds the parameters of one chunk of the model (of one element type; experts have their own buffers) in reverse order. Each
parameter starts at a multiple of 64 elements, counted from the start of its bucket. A shared embedding has a bucket of its
own. The saved buffer has no padding at the end of a bucket: a bucket starts where the last parameter of the previous one ends.

Source: megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py (get_parameter_state_dp_zero) of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.geometry.value import value

_ALIGNMENT = 64
BUFFER_KINDS = {"param": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Array of a buffer -> torch's name for that kind of state."""


@value
class BufferedParameter:
    """A parameter in a buffer."""

    elements: int
    """The number of its elements."""
    is_shared: bool = False
    """Whether it is an embedding that other stages hold, too."""


@value
class BufferLayout:
    """Where the parameters of a buffer lie."""

    offsets: tuple[int, ...]
    """The first element of each parameter, in the order of the model."""
    elements: int
    """The length of the buffer, without padding at its end."""


def lay_out_buffer(parameters: Sequence[BufferedParameter], bucket_size: int | None) -> BufferLayout:
    """Where parameters, given in the order of the model, lie in their buffer.

    A bucket is closed when it holds `bucket_size` elements or more; None: all parameters are in one bucket.
    """
    offsets: list[int] = []
    bucket = end = 0  # the start of the current bucket, and the end of its last parameter
    for parameter in reversed(parameters):
        offset = bucket + _aligned(end - bucket)
        offsets.append(offset)
        end = offset + parameter.elements
        if parameter.is_shared or (bucket_size is not None and end - bucket >= bucket_size):
            bucket = end
    return BufferLayout(tuple(reversed(offsets)), end)


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
