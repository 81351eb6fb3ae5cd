"""Traffic of ring collectives: the bytes that one rank sends in a collective over N ranks, and the time that a link needs for them.

An all-reduce of M bytes is a reduce-scatter and an all-gather. In each of them a rank sends N - 1 of N equal parts (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). Latency and overlap with computation are not counted.
"""

from __future__ import annotations


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends: 2 M (N - 1) / N, rounded up."""
    return -(-2 * nbytes * (ranks - 1) // ranks)


def all_gather_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends: M (N - 1) / N, rounded up. M is the result on every rank."""
    return -(-nbytes * (ranks - 1) // ranks)


def reduce_scatter_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends: M (N - 1) / N, rounded up. M is the input on every rank."""
    return all_gather_bytes(nbytes, ranks)


def seconds(nbytes: int, link: int) -> float:
    """The time to send `nbytes` over a link of `link` bytes per second, in seconds."""
    return nbytes / link
