"""From an opened checkpoint and a request to a proven plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.format import Format
from reshard.adapter.model_files import adapter_config_at, blaming_the_parent
from reshard.canonical.content import Content, Selection, check_against_model, check_counted, check_selected
from reshard.canonical.dequantization import quantized_names, with_values
from reshard.canonical.globs import check_globs
from reshard.canonical.lora import is_of_adapter, with_adapter_names
from reshard.canonical.quantizing import quantized, requantized
from reshard.canonical.stacked_experts import by_expert
from reshard.canonical.trainer_names import trainer_of
from reshard.containers.gc_pause import gc_paused
from reshard.errors import RequestError
from reshard.geometry.quantities import plural
from reshard.models.quantization import check_has_settings, without_quantization
from reshard.plans.layout import Layout, Target
from reshard.plans.plan import Plan, make_plan
from reshard.plans.proof import prove
from reshard.requests.adapters import adapter_index, check_part, chosen_adapter, with_asked_adapter

if TYPE_CHECKING:
    from reshard.requests.checkpoint import Checkpoint
    from reshard.requests.request import ConversionRequest

_NAMES_ARE_KEPT = (
    "names stay as the source has them, so that its run can go on, and the fingerprint is of these names; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published names"
)
_WEIGHTS_ARE_MASTERS = (
    "the weights are the optimizer's full-precision masters, from which the run resumes; --weights model writes the model's rounded copy"
)
_ADAPTERS_ARE_COPIED = "LoRA adapters are copied as they are, and not merged into the base weights; --merge-adapter merges one"


@gc_paused()
def plan_conversion(source: Checkpoint, request: ConversionRequest, adapter: Checkpoint | None = None) -> Plan:
    """The proven plan of the conversion of a checkpoint that the request asks for. adapter: the LoRA adapter to merge.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    check_nothing_unanswered(source)
    format, selection = request.to, request.selection
    if format.keeps_optimizer:
        _check_has_optimizer(source, format)
        selection = replace(selection, optimizer=True)
    selection = _resumed(selection, source, format)
    keep_adapter = format.keeps_names and not request.drop_adapter and request.merge_adapter is None
    selection = replace(selection, masters=format.keeps_masters, keep_adapter=keep_adapter)
    companions = source.model_files
    if (adapter_config := request.options.get("adapter_config")) is not None:
        companions = replace(companions, adapter_config=adapter_config_at(adapter_config))
    index, choose = adapter_index(source, request, companions) if format.holds_adapters else (source.named(selection), None)
    if request.merges_own_adapter:
        index = with_adapter_names(index, chosen_adapter(source, request))

    content = source.content(selection, index=index, adapter=choose)
    check_part(source, content, request)
    with blaming_the_parent(source.model_files):
        if content.model is not None:
            check_has_settings(content.model.config, source.index.element_types)
        check_against_model(content, partial=selection.is_partial, strict=False, optional=content.implied)
    stored = source.of_model(selection)
    notes = index.facts.notes[len(stored.facts.notes) :]
    if format.keeps_names and request.merge_adapter is None and (notes or index is not stored):
        index, notes = stored, (_NAMES_ARE_KEPT,)
        content = source.content(selection, index=index, adapter=choose)
    check_selected(content)
    check_counted(content)
    check_globs("--keep-dtype", request.keep_dtype, content.weights)
    notes = (*notes, *_about_unknown(content), *_about_trainer(content, format))
    if selection.weights != request.selection.weights and not format.keeps_optimizer and source.index.keeps_both_copies:
        notes = (*notes, _WEIGHTS_ARE_MASTERS)
    if not format.holds_adapters and any(map(is_of_adapter, content.tensors.values())):
        notes, companions = (*notes, _ADAPTERS_ARE_COPIED), replace(companions, carries_adapter=True)
    kept_for = quantized_names(content, source.model_files.config)
    if request.dequantize:
        content, kept_for = with_values(content, companions.config), frozenset()
        companions = companions.with_quantization(without_quantization(companions.config or {}))
    planned, stored, files, about_merge = with_asked_adapter(content, index, source, request, companions, adapter)
    if request.quantize and planned.model and request.quantize not in planned.model.architecture.quantized_as:
        stored, tensors, model = by_expert(stored, planned.tensors, planned.model)
        planned = replace(planned, tensors=tensors, model=model)
    if request.quantize or request.requantize:
        make = quantized if request.quantize else requantized
        planned, config = make(planned, companions.config, request.quantize or request.requantize)
        companions, kept_for = companions.with_quantization(config), quantized_names(planned, config)
    target = Target(format.name, request.parallel, request.dtype, request.keep_dtype, kept_for, request.options, request.only_rank)
    layout = format.lay_out(planned, target, companions)
    notes = (*source.model_files.notes, *notes, *about_merge, *layout.notes, *_notes_on_copies(source, planned, layout))
    plan = make_plan(stored, files, planned, target, replace(layout, notes=notes))
    prove(plan)
    return plan


def _about_unknown(content: Content) -> Iterator[str]:
    """A note about weights that the declared architecture lacks."""
    if content.unknown and content.model:
        what = f"{plural(len(content.unknown), 'weight')} that the declaration of {content.model.architecture.model_type} lacks"
        yield f"carried as they are: {what}, such as {content.unknown[0]}; --drop-unknown leaves them out"


def _about_trainer(content: Content, format: Format) -> Iterator[str]:
    """A note if the names of a trainer stay because the model is not known."""
    if content.model is None and not format.keeps_names and (trainer := trainer_of(content.weights)):
        yield (
            f"the names are those of {trainer}, which transformers and serving engines do not load; they stay, as the model is not "
            "known. --model DIR names it"
        )


def _notes_on_copies(source: Checkpoint, content: Content, layout: Layout) -> Iterator[str]:
    """A note on the embedding and head in layers for multi-token prediction: published folders may hold copies of the model's own there,
    which other formats store once. vLLM 0.32 shares the model's (v1/spec_decode/llm_base_proposer.py)."""
    if registry.named(source.format).needs_model_files or not registry.named(layout.format).needs_model_files or content.model is None:
        return
    roles = {name: weight.role for name, weight in content.model.weights.items() if weight.role.startswith("mtp.")}
    copies = [name for name in content.missing if roles.get(name) in ("mtp.embedding", "mtp.head")]
    if copies and any(name in content.tensors and name not in layout.left_out for name in roles):
        named = ", ".join(copies[:2]) + (" ..." if len(copies) > 2 else "")
        yield f"not written: {named}, copies of the embedding and the head that the source stores once; vLLM shares the model's own"


def _resumed(selection: Selection, source: Checkpoint, format: Format) -> Selection:
    """The selection, with the masters as the weights if optimizer state is written and the format has no place for masters beside them.

    A run would otherwise resume from rounded weights. Trainers cast what they load to the type that they train in, so masters serve all.
    """
    if selection.optimizer and selection.weights is None and not format.keeps_masters and source.index.by_kind("master"):
        return replace(selection, weights="master")
    return selection


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
