"""Pipeline schedules: how much of the time stages wait, and how many microbatches' activations a stage holds at once.

With P stages, M microbatches and v chunks of layers per stage:

    schedule      waiting, as a part of the whole time    stage i holds at most
    gpipe         (P - 1) / (M + P - 1)                    M microbatches
    1f1b          (P - 1) / (M + P - 1)                    min(M, P - i)
    interleaved   (P - 1) / (v M + P - 1)                  min(v M, 2 (P - i - 1) + (v - 1) P + 1) chunks of the v M

Stages are taken to be equally long, sending to be free. Narayanan et al. give (P - 1) / M and (P - 1) / (v M): the same wait relative to
the time without it.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; the chunks are those of
get_pp_rank_microbatches in megatron-core 0.16.1 (core/pipeline_parallel/schedules.py), and one that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from reshard.errors import RequestError, check_word

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a pipeline of `stages` works through `microbatches`. chunks: of layers per stage; more than one is interleaved."""

    name: str = "1f1b"
    stages: int = 1
    microbatches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        check_word("--schedule", self.name, SCHEDULES)
        if self.microbatches < 1:
            raise RequestError(f"--microbatches {self.microbatches}: one at least goes through a step")
        if (self.name == "interleaved") != (self.chunks > 1):
            raise RequestError(
                f"--schedule {self.name} with {self.chunks} chunk{'s' if self.chunks > 1 else ''} per stage",
                why="Stages are interleaved by giving each several chunks of layers",
                do="Say --schedule interleaved together with --vp 2 or more",
            )
        if self.chunks > 1 and (self.stages < 2 or self.microbatches % self.stages):
            raise RequestError(
                f"{self.microbatches} microbatches on {self.stages} stages cannot be interleaved",
                why="The schedule goes through the chunks in groups of as many microbatches as there are stages, two at least",
                do=f"Give --microbatches a multiple of {max(self.stages, 2)}",
            )

    @property
    def bubble(self) -> Fraction:
        """The part of the whole time that every stage waits."""
        return Fraction(self.stages - 1, self.chunks * self.microbatches + self.stages - 1)

    def in_flight(self, stage: int) -> Fraction:
        """How many microbatches' activations of all its layers a stage holds at most."""
        if self.name == "gpipe":
            return Fraction(self.microbatches)
        if self.chunks == 1:
            return Fraction(min(self.microbatches, self.stages - stage))
        ahead = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages
        return Fraction(min(self.chunks * self.microbatches, ahead + 1), self.chunks)


NO_PIPELINE = Schedule()
