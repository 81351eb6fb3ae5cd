"""What a ring moves: the bytes that one rank sends in a collective over N ranks, and how long a link takes for them.

An all-reduce of M bytes is a reduce-scatter and an all-gather; each sends N - 1 of N equal parts on (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"). Latency and overlap with computing are not counted.
"""

from __future__ import annotations


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """2 M (N - 1) / N, rounded up."""
    return -(-2 * nbytes * (ranks - 1) // ranks)


def all_gather_bytes(nbytes: int, ranks: int) -> int:
    """M (N - 1) / N, rounded up, where M is what every rank has in the end."""
    return -(-nbytes * (ranks - 1) // ranks)


def reduce_scatter_bytes(nbytes: int, ranks: int) -> int:
    """M (N - 1) / N, rounded up, where M is what every rank has at the start."""
    return all_gather_bytes(nbytes, ranks)


def seconds(nbytes: int, link: int) -> float:
    """How long a rank sends, when its link takes `link` bytes per second."""
    return nbytes / link
