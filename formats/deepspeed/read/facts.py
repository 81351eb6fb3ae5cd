"""What is known about the run that saved a tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.index.index import RunFacts

from ..layout.degrees import RunDegrees
from .run_states import RunStates


def run_facts(
    states: RunStates, aliases: Mapping[str, str], config: Mapping[str, Any] | None, degrees: RunDegrees | None = None
) -> RunFacts:
    """The run's facts. aliases: tied parameters, second name -> stored name. config: the model's. degrees: None to leave them out."""
    model, optimizer = states.first_model, states.first_optimizer
    versions = (model.version, *(other.version for other in states.optimizers.values()))
    return RunFacts(
        producer=producer(states),
        version=next(filter(None, versions), None),
        step=model.step,
        parallel=degrees.sizes() if degrees else {},
        config=config,
        state={**model.progress, **({"loss_scaler": optimizer.loss_scaler} if optimizer and optimizer.loss_scaler else {})},
        tied=dict(aliases),
        buffers=None if model.buffers is None else tuple(sorted(model.buffers)),
    )


def producer(states: RunStates) -> str:
    """The program that wrote the files: "DeepSpeed", with ZeRO's stage if there is one. Only the config distinguishes ZeRO-1 from 2."""
    optimizer = states.first_optimizer
    if optimizer is None:
        return "DeepSpeed"
    if optimizer.zero_stage == 3:
        return "DeepSpeed ZeRO-3"
    settings = states.first_model.config.get("zero_optimization")
    stage = settings.get("stage") if isinstance(settings, Mapping) else None
    return f"DeepSpeed ZeRO-{stage if stage in (1, 2) else '1/2'}"
