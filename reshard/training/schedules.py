"""Pipeline schedules: the fraction of the time that stages wait, and the number of microbatches whose activations a stage holds at once.

With P stages, M microbatches and v chunks of layers per stage:

    schedule      waiting, as a fraction of the time      stage i holds at most
    gpipe         (P - 1) / (M + P - 1)                    M microbatches
    1f1b          (P - 1) / (M + P - 1)                    min(M, P - i)
    interleaved   (P - 1) / (v M + P - 1)                  min(v M, 2 (P - i - 1) + (v - 1) P + 1) chunks of the v M

All stages are assumed to take equally long, and sending to take no time. Narayanan et al. give (P - 1) / M and (P - 1) / (v M): the same
wait, relative to the time without it.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. The number of chunks is that of
get_pp_rank_microbatches in megatron-core 0.16.1 (core/pipeline_parallel/schedules.py) plus the chunk that is being computed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from reshard.errors import RequestError, check_word
from reshard.geometry.value import value

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@value
class PipelineSchedule:
    """The order in which a pipeline computes its microbatches."""

    JSON = "schedule=name stages microbatches chunks_per_stage=chunks"

    name: str = "1f1b"
    """gpipe, 1f1b or interleaved."""
    stages: int = 1
    """Number of pipeline stages."""
    microbatches: int = 1
    """Microbatches per step."""
    chunks: int = 1
    """Chunks of layers per stage; more than one with the interleaved schedule only."""

    def __post_init__(self) -> None:
        check_word("`schedule=`", self.name, SCHEDULES)
        if self.microbatches < 1:
            raise RequestError(f"`microbatches={self.microbatches}`: a step has at least one")
        if (self.name == "interleaved") != (self.chunks > 1):
            raise RequestError(
                f"`schedule={self.name}` with {self.chunks} chunk{'s' if self.chunks > 1 else ''} per stage",
                why="The interleaved schedule is the one in which each stage has several chunks of layers",
                do="Give `schedule=interleaved` together with `vp=2` or more",
            )
        if self.chunks > 1 and (self.stages < 2 or self.microbatches % self.stages):
            raise RequestError(
                f"{self.microbatches} microbatches on {self.stages} stages cannot be interleaved",
                why="The schedule computes the chunks in groups of microbatches, one for each stage, and needs at least two stages",
                do=f"Give `microbatches=` a multiple of {max(self.stages, 2)}",
            )

    @property
    def bubble(self) -> Fraction:
        """The fraction of the time that every stage waits."""
        return Fraction(self.stages - 1, self.chunks * self.microbatches + self.stages - 1)

    def in_flight(self, stage: int) -> Fraction:
        """The most microbatches whose activations a stage holds at once. Chunks of a microbatch count as fractions of it."""
        if self.name == "gpipe":
            return Fraction(self.microbatches)
        if self.chunks == 1:
            return Fraction(min(self.microbatches, self.stages - stage))
        ahead = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages
        return Fraction(min(self.chunks * self.microbatches, ahead + 1), self.chunks)


NO_PIPELINE = PipelineSchedule()


def fewest_microbatches(schedule: PipelineSchedule, most: float) -> int:
    """The fewest microbatches at which stages wait for at most the share `most` of the time.

    Raises: RequestError unless 0 < most < 1.
    """
    if not 0 < most < 1:
        raise RequestError(f"`max_bubble=` {most:g} is not between 0 and 1", do="Use for example `max_bubble=10%`")
    # (P - 1) / (v M + P - 1) <= most
    count = max(1, math.ceil((schedule.stages - 1) * (1 - most) / (most * schedule.chunks) - 1e-9))
    step = schedule.stages if schedule.chunks > 1 else 1
    return -(-count // step) * step


def bubbles(schedule: PipelineSchedule) -> tuple[tuple[int, float], ...]:
    """(microbatches, bubble) from as many microbatches as stages on, doubled five times, and for the number that was asked for."""
    counts = sorted({schedule.stages << power for power in range(6)} | {schedule.microbatches})
    return tuple((count, float(replace(schedule, microbatches=count).bubble)) for count in counts)
