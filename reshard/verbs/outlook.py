"""Outlook: what a checkpoint can become. Which serving engines take it at which sizes, what is missing, and the next command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.errors import ReshardError
from reshard.geometry.parallel import Parallel
from reshard.models.model import Model
from reshard.plans.target import Target
from reshard.serving.legality import check_degrees

if TYPE_CHECKING:
    from reshard.verbs.checkpoint import Checkpoint

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""The tensor-parallel sizes that are tried."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a checkpoint can become."""

    engines: dict[str, tuple[int, ...]]
    """Serving engine -> the tensor-parallel sizes at which it takes the model."""
    needed: tuple[str, ...]
    """What the user must give first, each with the option that gives it."""
    next: str | None
    """A command that goes on from here; None if nothing can be proposed."""


def outlook(checkpoint: Checkpoint) -> Outlook:
    """What a checkpoint can become, from its config. No weight is read."""
    needed, model = list(checkpoint.index.facts.unanswered), checkpoint.model
    kinds = {tensor.kind for tensor in checkpoint.index.tensors}
    if not kinds & {"weight", "master"}:
        return Outlook({}, ("weights: there is only state of a run or an adapter",) if kinds else (), None)
    if checkpoint.model_files.config is None:
        needed.append("the model's config: --model DIR")
    engines = {}
    for name, engine in registry.formats().items() if model else ():
        if isinstance(engine, ServingFormat) and (sizes := tuple(size for size in SIZES if _takes(engine, model, size))):
            engines[name] = sizes
    return Outlook(engines, tuple(needed), _next(checkpoint, engines))


def _takes(engine: ServingFormat, model: Model, tp: int) -> bool:
    """Whether an engine takes a model at a tensor-parallel size."""
    parallel = Parallel(tp=tp)
    try:
        check_degrees(model, engine.engine_rules(model, Target(engine.name, parallel)), parallel)
    except ReshardError:
        return False
    return True


def _next(checkpoint: Checkpoint, engines: dict[str, tuple[int, ...]]) -> str | None:
    path = shlex.quote(checkpoint.path)
    if len(checkpoint.models) > 1 and not any(found.is_main for found in checkpoint.models):
        return f"reshard inspect {path} --root {shlex.quote(checkpoint.models[0].root)}"
    if checkpoint.format in engines:
        return f"reshard verify {path}"
    if engines:
        name, sizes = next(iter(sorted(engines.items(), key=lambda item: (item[0] != "vllm", item[0]))))
        return f"reshard convert {path} out --to {name} --tp {max(size for size in sizes if size <= 8)}"
    return f"reshard convert {path} out --to hf"


