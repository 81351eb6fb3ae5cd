"""From an opened checkpoint and a request to a proven plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.canonical.content import check_against_model, content_of
from reshard.canonical.dequantization import quantized_names, with_scales_attached, without_quantization
from reshard.engine.views import LazyTensor
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


def plan_conversion(source: Checkpoint, request: ConversionRequest) -> Plan:
    """The proven plan of the conversion of a checkpoint that the request asks for.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    check_nothing_unanswered(source)
    format, selection = request.to, request.selection
    if format.keeps_optimizer:
        weights = selection.weights or ("master" if source.index.by_kind("master") else None)
        selection = replace(selection, weights=weights, optimizer=True)
    selection = replace(selection, masters=format.keeps_masters)
    index = source.named(selection)
    content = content_of(index, source.model, selection)
    check_against_model(content, partial=selection.is_partial, strict=False)
    notes = index.facts.notes[len(source.index.facts.notes) :]
    if format.keeps_names and index is not source.index:
        index, notes = source.index, (_NAMES_ARE_KEPT,)
        content = content_of(index, source.model, selection)
    content = replace(content, read_scalar=lambda key: _scalar(content.tensors[key], source.files))
    companions, kept_for = source.model_files, quantized_names(content, source.model_files.config)
    if request.dequantize:
        content, kept_for = with_scales_attached(content, companions.config), frozenset()
        companions = replace(companions, config=without_quantization(companions.config or {}), derived=True)
    target = Target(format.name, request.parallel, request.dtype, request.keep_dtype, kept_for, request.options, request.only_rank)
    layout = format.lay_out(content, target, companions)
    plan = make_plan(index, source.files, content, target, replace(layout, notes=(*notes, *layout.notes)))
    prove(plan)
    return plan


def check_nothing_unanswered(source: Checkpoint) -> None:
    """Raises RequestError if the user has not given a fact that is in no file of the checkpoint, such as the vocabulary size."""
    if source.index.facts.unanswered:
        raise RequestError(
            f"{source.path} does not say {'; nor '.join(source.index.facts.unanswered)}",
            why="It is in no file of the checkpoint, and is not guessed",
            do="Say it with the option named above",
            id="ambiguous",
        )


def _scalar(tensor: Tensor, files: Files) -> float:
    """The value of a tensor of one element."""
    return float(LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).numpy().item())
