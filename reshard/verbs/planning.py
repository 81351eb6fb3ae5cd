"""From an opened checkpoint and a request to a proven plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.format import Format
from reshard.adapter.model_files import ADAPTER_CONFIG, ModelFiles, adapter_config_at, blaming_the_parent
from reshard.canonical.content import Content, check_against_model, check_selected, content_of
from reshard.canonical.dequantization import quantized_names, with_values
from reshard.canonical.globs import check_globs
from reshard.canonical.lora import LoraSettings, adapters_of, is_of_adapter, with_adapter_names
from reshard.canonical.merging import Adapter, with_adapter_merged
from reshard.canonical.requantization import quantized, requantized
from reshard.canonical.stacked_experts import by_expert
from reshard.containers.gc_pause import gc_paused
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.geometry.stored import whole
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.models.quantization import check_has_settings
from reshard.models.quantization_settings import without_quantization
from reshard.plans.plan import Plan, make_plan
from reshard.plans.proof import prove
from reshard.plans.target import Target
from reshard.storage.files import Files
from reshard.storage.joined import JoinedFiles

if TYPE_CHECKING:
    from reshard.verbs.checkpoint import Checkpoint
    from reshard.verbs.request import ConversionRequest

_NAMES_ARE_KEPT = (
    "names stay as the source has them, so that its run can go on, and the fingerprint is of these names; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published names"
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
        weights = selection.weights or ("master" if source.index.by_kind("master") else None)
        selection = replace(selection, weights=weights, optimizer=True)
    selection = replace(selection, masters=format.keeps_masters)
    companions = source.model_files
    if (adapter_config := request.options.get("adapter_config")) is not None:
        companions = replace(companions, adapter_config=adapter_config_at(adapter_config))
    index, choose = _adapter_index(source, request, companions) if format.holds_adapters else (source.named(selection), None)

    def chosen() -> Content:
        """The chosen tensors of `index`, and what reads their values."""
        return replace(
            content_of(index, source.model, selection, choose),
            read_scalar=lambda key: _scalar(content.tensors[key], source.files),
            recorded=lambda: source.recorded_digests(index, content),
        )

    content = chosen()
    _check_part(source, content, format)
    with blaming_the_parent(source.model_files):
        if content.model is not None:
            check_has_settings(content.model.config, source.index.element_types)
        check_against_model(content, partial=selection.is_partial, strict=False, optional=content.implied)
    stored = source.of_model(selection)
    notes = index.facts.notes[len(stored.facts.notes) :]
    if format.keeps_names and (notes or index is not stored):
        index, notes = stored, (_NAMES_ARE_KEPT,)
        content = chosen()
    check_selected(content)
    check_globs("--keep-dtype", request.keep_dtype, content.weights)
    if not format.holds_adapters and any(tensor.kind == "adapter" for tensor in content.tensors.values()):
        notes = (*notes, _ADAPTERS_ARE_COPIED)
    kept_for = quantized_names(content, source.model_files.config)
    if request.dequantize:
        content, kept_for = with_values(content, companions.config), frozenset()
        companions = companions.with_quantization(without_quantization(companions.config or {}))
    planned, stored, files = content, index, source.files
    if adapter is not None:
        planned, stored, files, merged = _with_adapter(content, index, source, adapter)
        notes = (*notes, *merged)
    if request.quantize and planned.model and request.quantize not in planned.model.architecture.quantized_as:
        stored, tensors, model = by_expert(stored, planned.tensors, planned.model)
        planned = replace(planned, tensors=tensors, model=model)
    if request.quantize or request.requantize:
        make = quantized if request.quantize else requantized
        planned, config = make(planned, companions.config, request.quantize or request.requantize)
        companions, kept_for = companions.with_quantization(config), quantized_names(planned, config)
    target = Target(format.name, request.parallel, request.dtype, request.keep_dtype, kept_for, request.options, request.only_rank)
    layout = format.lay_out(planned, target, companions)
    about_config = (source.model_files.note,) if source.model_files.note else ()
    plan = make_plan(stored, files, planned, target, replace(layout, notes=(*about_config, *notes, *layout.notes)))
    prove(plan)
    return plan


def _adapter_index(source: Checkpoint, request: ConversionRequest, companions: ModelFiles) -> tuple[Index, Callable[[Tensor], bool]]:
    """The index under the names of the adapter that the request chooses, and a function that tells the adapter's tensors."""
    chosen = request.options.get("adapter")
    index = with_adapter_names(source.of_model(request.selection), chosen)
    names = adapters_of(source.index.tensors)
    if len(names) > 1 and chosen not in names:
        raise RequestError(
            f"the checkpoint holds {plural(len(names), 'adapter')}: {', '.join(names)}",
            where=source.path,
            why="The file of PEFT holds one",
            do=f"Choose one, such as --adapter {names[0]}",
        )
    biases = LoraSettings(companions.adapter_config or {}).trains_bias

    def is_chosen(tensor: Tensor) -> bool:
        return (is_of_adapter(tensor) and not adapters_of([tensor])) or biases(tensor.name)

    return index, is_chosen


def _check_part(source: Checkpoint, content: Content, format: Format) -> None:
    """Raises RequestError if an adapter is asked for and there is none, UnsupportedError if there is nothing but an adapter."""
    if format.holds_adapters and not content.is_adapter:
        raise RequestError("the checkpoint holds no LoRA adapter", where=source.path, do="Convert it with --to hf")
    if content.is_adapter and not format.holds_adapters and not format.keeps_names and not content.selection.keep_unknown:
        raise UnsupportedError(
            f"the checkpoint holds a LoRA adapter and no base weights, for example {next(iter(content.tensors))}",
            where=source.path,
            why=f"{format.name} holds whole models",
            do="Write the adapter with --to peft, or convert the base model with --merge-adapter and this directory",
        )


def _with_adapter(content: Content, index: Index, base: Checkpoint, adapter: Checkpoint) -> tuple[Content, Index, Files, tuple[str, ...]]:
    """The content with an adapter merged, the index and the files of both, and notes."""
    config = adapter.model_files.adapter_config
    if config is None or not all(tensor.kind == "adapter" and len(tensor.shards) == 1 for tensor in adapter.index.tensors):
        raise RequestError(
            f"--merge-adapter: there is no adapter in PEFT's form: {ADAPTER_CONFIG} and adapter_model.safetensors",
            where=adapter.path,
            why="The scale of an adapter is in that file",
            do="Write the adapter of a training checkpoint with --to peft first, and name its directory",
        )
    if content.states or content.is_adapter:
        raise RequestError(
            "--merge-adapter merges into the weights of a base model",
            where=base.path,
            do="Leave out --optimizer" if content.states else "Give the base model as the source, and this directory with --merge-adapter",
        )
    tensors = {tensor.name: _moved(tensor, adapter.files) for tensor in adapter.index.tensors}
    merged = with_adapter_merged(content, Adapter(os.path.abspath(adapter.path), LoraSettings(config), tensors))
    # Digests of the base say nothing about the weights that replace some of it.
    replaced = {name for name, tensor in merged.tensors.items() if tensor is not content.tensors.get(name) and not tensor.updates}
    merged = replace(merged, recorded=lambda: {name: text for name, text in content.recorded().items() if name not in replaced})
    files = tuple(replace(file, path=JoinedFiles.path_in(adapter.files, file.path)) for file in adapter.index.files)
    both = replace(index, tensors=(*index.tensors, *tensors.values()), files=(*index.files, *files))
    return merged, both, JoinedFiles(base.files, [adapter.files]), tuple(_notes_on_merge(merged, content, adapter.path))


def _moved(tensor: Tensor, files: Files) -> Tensor:
    """A tensor of one piece under the path that its file has in the joined tree."""
    piece = tensor.shards.piece(0)
    extent = replace(piece.extent, path=JoinedFiles.path_in(files, piece.extent.path))
    return replace(tensor, shards=Shards.of([replace(piece, extent=extent)]))


def _notes_on_merge(merged: Content, base: Content, path: str) -> Iterator[str]:
    """Notes on an adapter that is merged, and on weights of it that have another element type than those of the base."""
    count = merged.merged.weights if merged.merged else 0
    yield f"the adapter {path} is merged into {plural(count, 'weight')}: base + scale * (B x A) in float32, rounded once"
    if merged.model and merged.model.is_tied and merged.tensors[merged.model.architecture.tied[1]].updates:
        yield "the head is tied to the embedding, so the merge changes both, as PEFT's does"
    if other := [name for name, tensor in merged.weights.items() if tensor.dtype != base.tensors[name].dtype]:
        dtype = merged.tensors[other[0]].dtype
        yield f"{plural(len(other), 'weight')} of the adapter, such as {other[0]}, keep its element type {dtype}; --dtype casts them"


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
