"""Outlook: what a checkpoint can become. Which serving engines take it at which sizes, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.model_files import has_tokenizer
from reshard.canonical.content import Content, check_against_model
from reshard.errors import IncompleteError, ReshardError, UnsupportedError
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.models.config_values import component_class
from reshard.models.lookup import draft_class
from reshard.models.model import Model
from reshard.models.quantization import without_quantization
from reshard.plans.layout import Target
from reshard.serving.legality import check_degrees

if TYPE_CHECKING:
    from reshard.adapter.serving_format import ServingFormat
    from reshard.opening.checkpoint import Checkpoint

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""The tensor-parallel sizes that are tried."""


@value
class Outlook:
    """What a checkpoint can become."""

    engines: dict[str, tuple[int, ...]]
    """Serving engine -> the tensor-parallel sizes at which it takes the model."""
    needed: tuple[str, ...]
    """What the user must give first, each with the option that gives it."""
    problem: str | None
    """Why it cannot be converted as it is, such as a weight that is missing; None if nothing is known to be in the way."""


def outlook(checkpoint: Checkpoint, read: Content | ReshardError) -> Outlook:
    """What a checkpoint can become, from its config. No weight is read.

    found: its weights under canonical names, or why there are none, such as a missing piece or several models.
    """
    content = None if isinstance(read, ReshardError) else read
    if content is not None and content.is_adapter:
        return Outlook({}, (), None)
    needed, model = list(checkpoint.index.facts.unanswered), checkpoint.sized_model
    kinds = {tensor.kind for tensor in checkpoint.index.tensors}
    if checkpoint.index.facts.delta is not None:
        return Outlook({}, tuple(needed), None)
    if not kinds & {"weight", "master"}:
        return Outlook({}, (), "it holds no weights of a whole model")
    if checkpoint.model_files.config is None:
        needed.append("the model's config: `model=DIR`")
    elif component_class(checkpoint.model_files.config):
        pass  # the pipeline around it has the tokenizers
    elif checkpoint.config_problem:
        needed.append(f"a config with the sizes of the model: `model=DIR` ({checkpoint.config_problem})")
    elif not has_tokenizer(checkpoint.model_files.names) and not draft_class(checkpoint.model_files.config):
        needed.append("a tokenizer (tokenizer.json, tokenizer.model, ...) to serve it: `model=DIR`")
    problem = _problem(content) if content else _text(read) if isinstance(read, IncompleteError | UnsupportedError) else None
    if content and content.unknown and not problem:
        what = f"{plural(len(content.unknown), 'weight')} that the declared architecture lacks, such as {content.unknown[0]}"
        needed.append(f"for serving: a decision about {what}; `exclude=` or `drop_unknown=True` leaves them out")
    if model is not None and (library := model.quantization and model.quantization.library):
        needed.append(f"for serving: `dequantize=True`, as the weights are quantized for {library}")
        model = Model(model.architecture, without_quantization(model.config))
    is_served = model is not None and not problem and not (content and content.unknown)
    return Outlook(engine_sizes(model) if model and is_served else {}, tuple(needed), problem)


def engine_sizes(model: Model) -> dict[str, tuple[int, ...]]:
    """Serving engine -> the tensor-parallel sizes at which it takes a model from files of ranks. Left out are engines that take it at none,
    and those whose releases of today read no such files."""
    engines = {name: engine for name, engine in registry.serving_formats().items() if engine.until is None}
    sizes = {name: tuple(size for size in SIZES if _takes(engine, model, size)) for name, engine in engines.items()}
    return {name: legal for name, legal in sizes.items() if legal}


def _problem(content: Content) -> str | None:
    """A sentence about the first weight that the config needs and the checkpoint lacks, or that has another shape."""
    try:
        check_against_model(content, partial=False, strict=False, optional=content.not_needed)
    except ReshardError as error:
        return _text(error)
    return None


def _text(error: ReshardError) -> str:
    return f"{error.where}: {error.what}" if error.where else error.what


def _takes(engine: ServingFormat, model: Model, tp: int) -> bool:
    """Whether an engine takes a model at a tensor-parallel size."""
    parallel = Parallel(tp=tp)
    try:
        check_degrees(model, engine.engine_rules(model, Target(engine.name, parallel)), parallel)
    except ReshardError:
        return False
    return True
