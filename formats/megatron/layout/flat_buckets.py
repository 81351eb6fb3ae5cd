"""Where parameters lie in the flat buffers of the distributed optimizer.

A buffer holds the parameters of one chunk of the model (of one element type, experts apart from the rest) in reverse order, each from a
multiple of 64 elements on, counted from its bucket's start; a table that several stages share has a bucket of its own. What is saved leaves
out the padding at the end of buckets, so a bucket begins where the one before ended.
Source: megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py (get_parameter_state_dp_zero) of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 64
# The arrays of a buffer, and what each is.
KINDS = {"param": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in a buffer: how many elements, and whether other stages share it."""

    elements: int
    shared: bool = False


def starts(parameters: Sequence[Held], bucket_size: int | None) -> tuple[tuple[int, ...], int]:
    """Where each parameter starts, in the order of the model, and where the last one ends.

    bucket_size: a bucket is closed when it holds so many elements; None: everything is one bucket.
    """
    found: list[int] = []
    bucket = end = 0  # where the current bucket starts, and where its last parameter ends
    for parameter in reversed(parameters):
        start = bucket - (bucket - end) // _ALIGNMENT * _ALIGNMENT
        found.append(start)
        end = start + parameter.elements
        if parameter.shared or (bucket_size is not None and end - bucket >= bucket_size):
            bucket = end
    return tuple(reversed(found)), end


def places_in_buckets(parameters: Sequence[int], buckets: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """(bucket, where in it) of each parameter, in the order of the model, from how many elements each bucket holds; None if they are not
    these parameters' buckets."""
    found: list[tuple[int, int]] = []
    bucket = end = 0
    for elements in reversed(parameters):
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if end and bucket < len(buckets) and start + elements > buckets[bucket]:
            if not end <= buckets[bucket] <= start:
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(buckets):
            return None
        found.append((bucket, start))
        end = start + elements
    is_full = bucket == len(buckets) - 1 and end == buckets[bucket]
    return tuple(reversed(found)) if is_full else None
