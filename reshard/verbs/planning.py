"""From an opened checkpoint and a request to a proven plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.format import Format
from reshard.adapter.model_files import blaming_the_parent
from reshard.canonical.content import Content, check_against_model, check_selected, content_of
from reshard.canonical.dequantization import quantized_names, with_values, without_quantization
from reshard.canonical.globs import check_globs
from reshard.canonical.requantization import quantized, requantized
from reshard.containers.gc_pause import gc_paused
from reshard.errors import RequestError
from reshard.geometry.stored import whole
from reshard.index.index import Tensor
from reshard.plans.plan import Plan, make_plan
from reshard.plans.proof import prove
from reshard.plans.target import Target
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.verbs.checkpoint import Checkpoint
    from reshard.verbs.request import ConversionRequest

_NAMES_ARE_KEPT = (
    "names stay as the source has them, so that its run can go on, and the fingerprint is of these names; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published names"
)
_ADAPTERS_ARE_COPIED = "LoRA adapters are copied as they are, and not merged into the base weights; PEFT merges them (merge_and_unload)"


@gc_paused()
def plan_conversion(source: Checkpoint, request: ConversionRequest) -> Plan:
    """The proven plan of the conversion of a checkpoint that the request asks for.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    check_nothing_unanswered(source)
    format, selection = request.to, request.selection
    if format.keeps_optimizer:
        _check_has_optimizer(source, format)
        weights = selection.weights or ("master" if source.index.by_kind("master") else None)
        selection = replace(selection, weights=weights, optimizer=True)
    selection = replace(selection, masters=format.keeps_masters)
    index = source.named(selection)

    def chosen() -> Content:
        """The chosen tensors of `index`, and what reads their values."""
        return replace(
            content_of(index, source.model, selection),
            read_scalar=lambda key: _scalar(content.tensors[key], source.files),
            recorded=lambda: source.recorded_digests(index, content),
        )

    content = chosen()
    with blaming_the_parent(source.model_files):
        check_against_model(content, partial=selection.is_partial, strict=False)
    stored = source.of_model(selection)
    notes = index.facts.notes[len(stored.facts.notes) :]
    if format.keeps_names and notes:
        index, notes = stored, (_NAMES_ARE_KEPT,)
        content = chosen()
    check_selected(content)
    check_globs("--keep-dtype", request.keep_dtype, content.weights)
    if any(tensor.kind == "adapter" for tensor in content.tensors.values()):
        notes = (*notes, _ADAPTERS_ARE_COPIED)
    companions, kept_for = source.model_files, quantized_names(content, source.model_files.config)
    if request.dequantize:
        content, kept_for = with_values(content, companions.config), frozenset()
        companions = replace(companions, config=without_quantization(companions.config or {}), derived=True)
    if request.quantize or request.requantize:
        make = quantized if request.quantize else requantized
        content, config = make(content, companions.config, request.quantize or request.requantize)
        companions, kept_for = replace(companions, config=config, derived=True), quantized_names(content, config)
    target = Target(format.name, request.parallel, request.dtype, request.keep_dtype, kept_for, request.options, request.only_rank)
    layout = format.lay_out(content, target, companions)
    about_config = (source.model_files.note,) if source.model_files.note else ()
    plan = make_plan(index, source.files, content, target, replace(layout, notes=(*about_config, *notes, *layout.notes)))
    prove(plan)
    return plan


def _check_has_optimizer(source: Checkpoint, format: Format) -> None:
    """Raises RequestError if the source has no optimizer state, which the format always holds."""
    if not any(tensor.kind.startswith(("moment", "state")) for tensor in source.index.tensors):
        others = [
            name
            for name, each in registry.formats().items()
            if each.can_write and not each.keeps_optimizer and name not in registry.serving_formats()
        ]
        raise RequestError(
            f"--to {format.name} always writes optimizer state, and this checkpoint has none",
            where=source.path,
            do=f"Give a checkpoint with optimizer state, or write a format that can do without: {', '.join(others)}",
        )


def check_nothing_unanswered(source: Checkpoint) -> None:
    """Raises RequestError if the user has not given a fact that is in no file of the checkpoint, such as the vocabulary size."""
    if source.index.facts.unanswered:
        raise RequestError(
            f"{source.path} does not say {'; nor '.join(source.index.facts.unanswered)}",
            why="It is in no file of the checkpoint, and is not guessed",
            id="ambiguous",
        )


def _scalar(tensor: Tensor, files: Files) -> float:
    """The value of a tensor of one element."""
    from reshard.engine.views import LazyTensor

    return float(LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).numpy().item())
