"""The parallel sizes of a Megatron run, and the ranks of a stage that write files.

Source: megatron/core/parallel_state.py of 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from reshard.geometry.value import value


@value
class ParallelSizes:
    """The parallel sizes of a run."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size: the number of stages."""
    ep: int = 1
    """Expert-parallel size."""
    vp: int = 1
    """Chunks of layers per stage (virtual pipeline)."""
    etp: int = 1
    """Tensor-parallel size of the experts."""

    @property
    def ranks_per_stage(self) -> int:
        """The smallest number of ranks that a stage can have: a multiple of tp and of etp * ep."""
        return math.lcm(self.tp, self.etp * self.ep)

    def stage_ranks(self) -> Iterator[StageRank]:
        """The ranks of a stage that write files: one for each pair of tensor-parallel and expert-parallel rank."""
        seen: set[tuple[str, int, int]] = set()
        for number in range(self.ranks_per_stage):
            tp_rank, ep_rank, etp_rank = number % self.tp, number // self.etp % self.ep, number % self.etp
            if ("file", tp_rank, ep_rank) not in seen:
                is_first_dense = ("dense", tp_rank, 0) not in seen
                is_first_experts = ("experts", ep_rank, etp_rank) not in seen
                yield StageRank(tp_rank, ep_rank, etp_rank, number, is_first_dense, is_first_experts)
                seen |= {("file", tp_rank, ep_rank), ("dense", tp_rank, 0), ("experts", ep_rank, etp_rank)}


@value
class StageRank:
    """A rank of one stage."""

    tp_rank: int
    """Tensor-parallel rank."""
    ep_rank: int
    """Expert-parallel rank."""
    etp_rank: int
    """Tensor-parallel rank among the ranks that share an expert."""
    number: int = 0
    """The rank's number in its stage, from 0."""
    is_first_dense: bool = True
    """Whether it is the first rank of the stage with its shard of the dense weights."""
    is_first_experts: bool = True
    """Whether it is the first rank of the stage with its shard of its experts."""
