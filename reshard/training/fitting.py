"""Fitting: the smallest number of GPUs for a model, the largest model for a GPU, and the fewest microbatches for a bubble."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import RequestError
from reshard.geometry.value import value
from reshard.training.schedules import Schedule

if TYPE_CHECKING:
    from reshard.training.memory import Estimate

# No model has more parameters than this.
_MOST_PARAMETERS = 1 << 50


@value
class Fit:
    """What one strategy makes of a GPU's memory."""

    zero: int
    """The ZeRO stage; 3 is FSDP."""
    gpus: int | None
    """The smallest of the numbers of GPUs at which the fullest rank fits; None if it fits at none."""
    parameters: int | None
    """The largest number of parameters that fits at the largest number of GPUs; None if a model was given, not a number of parameters."""


def fits(estimates: Sequence[Estimate], nbytes: int, of_parameters: Callable[[int, int], Estimate] | None = None) -> tuple[Fit, ...]:
    """For each strategy, what fits into `nbytes` bytes on every GPU.

    estimates: the same model on rising numbers of GPUs. of_parameters: the estimate of a number of parameters at one ZeRO stage, on the
    largest number of GPUs.
    """
    found = []
    for number, strategy in enumerate(estimates[0].strategies):
        fitting = [each for each in estimates if each.strategies[number].fullest.total <= nbytes]
        largest = _largest(lambda count, zero=strategy.zero: of_parameters(count, zero), nbytes) if of_parameters else None  # type: ignore[misc]
        found.append(Fit(strategy.zero, _gpus(fitting[0]) if fitting else None, largest))
    return tuple(found)


def _gpus(estimate: Estimate) -> int:
    parallel = estimate.training.parallel
    return parallel.dp * parallel.tp * parallel.pp


def _largest(estimate: Callable[[int], Estimate], nbytes: int) -> int:
    """The largest number of parameters whose fullest rank fits, to three digits; 0 if none fits."""
    low, high = 0, _MOST_PARAMETERS
    while high - low > max(1, low // 2000):
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle).strategies[0].fullest.total <= nbytes else (low, middle)
    return low


def fewest_microbatches(schedule: Schedule, most: float) -> int:
    """The fewest microbatches at which stages wait for at most the share `most` of the time.

    Raises: RequestError unless 0 < most < 1.
    """
    if not 0 < most < 1:
        raise RequestError(f"--max-bubble {most:g} is not between 0 and 1", do="Use for example --max-bubble 10%")
    # (P - 1) / (v M + P - 1) <= most
    count = max(1, math.ceil((schedule.stages - 1) * (1 - most) / (most * schedule.chunks) - 1e-9))
    step = schedule.stages if schedule.chunks > 1 else 1
    return -(-count // step) * step


def bubbles(schedule: Schedule) -> tuple[tuple[int, float], ...]:
    """(microbatches, bubble) from as many microbatches as stages on, doubled five times, and for the number that was asked for."""
    counts = sorted({schedule.stages << power for power in range(6)} | {schedule.microbatches})
    return tuple((count, float(replace(schedule, microbatches=count).bubble)) for count in counts)


def schedules_of(estimates: Sequence[Estimate]) -> tuple[Schedule, ...]:
    """The pipelines of several estimates, each number of stages once, the shortest first."""
    by_stages = {each.training.schedule.stages: each.training.schedule for each in estimates}
    return tuple(by_stages[stages] for stages in sorted(by_stages) if stages > 1)
