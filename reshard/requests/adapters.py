"""The LoRA adapter of a conversion: taken out of a checkpoint, merged into the weights, or left out because the user says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.adapter.model_files import ADAPTER_CONFIG, ModelFiles
from reshard.canonical.content import ADAPTER_LEFT_OUT, Content
from reshard.canonical.lora import LoraSettings, adapter_name, adapters_of, is_of_adapter, with_adapter_names
from reshard.canonical.merging import Adapter, with_adapter_merged
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files
from reshard.storage.joined import JoinedFiles

if TYPE_CHECKING:
    from reshard.requests.checkpoint import Checkpoint
    from reshard.requests.request import ConversionRequest


def adapter_index(source: Checkpoint, request: ConversionRequest, companions: ModelFiles) -> tuple[Index, Callable[[Tensor], bool]]:
    """The index under the names of the adapter that the request chooses, and a function that tells the adapter's tensors."""
    index = with_adapter_names(source.of_model(request.selection), chosen_adapter(source, request))
    biases = LoraSettings(companions.adapter_config or {}).trains_bias

    def is_chosen(tensor: Tensor) -> bool:
        return (is_of_adapter(tensor) and not adapters_of([tensor])) or biases(tensor.name)

    return index, is_chosen


def chosen_adapter(source: Checkpoint, request: ConversionRequest) -> str | None:
    """The name of the adapter that is taken; None if the checkpoint holds one. Raises RequestError if it holds several."""
    chosen, names = request.options.get("adapter"), adapters_of(source.index.tensors)
    if len(names) > 1 and chosen not in names:
        raise RequestError(
            f"the checkpoint holds {plural(len(names), 'adapter')}: {', '.join(names)}",
            where=source.path,
            why="One is written or merged",
            do=f"Choose one, such as --adapter {names[0]}",
        )
    return chosen


def check_part(source: Checkpoint, content: Content, request: ConversionRequest) -> None:
    """Raises RequestError if an adapter is asked for and there is none, or there is one and the request does not say what happens to it;
    UnsupportedError if there is nothing but an adapter."""
    format, is_merged = request.to, request.merges_own_adapter
    if content.adapter and not (request.drop_adapter or is_merged):
        raise RequestError(
            f"the checkpoint holds a LoRA adapter of {plural(len(content.adapter), 'tensor')}, for example {next(iter(content.adapter))}",
            where=source.path,
            why="Without it the result is the base model, and what was trained is lost",
            do="Merge it with --merge-adapter self, leave it out with --drop-adapter, or write it alone with --to peft",
        )
    if (request.drop_adapter or is_merged) and not content.adapter:
        option = "--drop-adapter" if request.drop_adapter else "--merge-adapter self"
        raise RequestError(
            f"{option}: no LoRA adapter is left beside weights",
            where=source.path,
            why="--include or --exclude leaves it out" if content.selection.is_partial else None,
            do=f"Leave out {option}",
        )
    if format.holds_adapters and not content.is_adapter:
        raise RequestError("the checkpoint holds no LoRA adapter", where=source.path, do="Convert it with --to hf")
    if content.is_adapter and not format.holds_adapters and not format.keeps_names and not content.selection.keep_unknown:
        raise UnsupportedError(
            f"the checkpoint holds a LoRA adapter and no base weights, for example {next(iter(content.tensors))}",
            where=source.path,
            why=f"{format.name} holds whole models",
            do="Write the adapter with --to peft, or convert the base model with --merge-adapter and this directory",
        )


def with_asked_adapter(
    content: Content, index: Index, base: Checkpoint, request: ConversionRequest, companions: ModelFiles, adapter: Checkpoint | None
) -> tuple[Content, Index, Files, tuple[str, ...]]:
    """The content with the adapter merged that the request names, if it names one; the index and the files of all that is read; notes.

    adapter: that of --merge-adapter DIR. companions: with the settings of the checkpoint's own adapter.
    """
    if adapter is not None:
        return _with_adapter(content, index, base, adapter)
    if request.merges_own_adapter:
        merged, notes = _with_own_adapter(content, base, companions.adapter_config or {}, request)
        return merged, index, base.files, notes
    return content, index, base.files, ()


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
    tensors = {tensor.name: _moved(tensor, adapter.files) for tensor in adapter.index.tensors}
    merged = _merged(content, base, Adapter(os.path.abspath(adapter.path), LoraSettings(config), tensors))
    files = tuple(replace(file, path=JoinedFiles.path_in(adapter.files, file.path)) for file in adapter.index.files)
    both = replace(index, tensors=(*index.tensors, *tensors.values()), files=(*index.files, *files))
    return merged, both, JoinedFiles(base.files, [adapter.files]), tuple(_notes_on_merge(merged, content, adapter.path))


def _with_own_adapter(
    content: Content, base: Checkpoint, config: Mapping[str, Any], request: ConversionRequest
) -> tuple[Content, tuple[str, ...]]:
    """The content with the adapter that the checkpoint itself holds merged, and notes. config: the adapter's settings."""
    own = {name: tensor for name, tensor in content.adapter.items() if not adapters_of([tensor])}
    settings = LoraSettings(config).with_alpha(request.options.get("lora_alpha"))
    settings.check_parameters(found.module for name in own if (found := adapter_name(name)) is not None)
    drops = tuple(drop for drop in content.drops if drop.name not in own or drop.reason != ADAPTER_LEFT_OUT)
    merged = _merged(replace(content, drops=drops), base, Adapter(os.path.abspath(base.path), settings, own))
    return merged, (*_notes_on_merge(merged, content, "of the checkpoint"), *settings.notes)


def _merged(content: Content, base: Checkpoint, adapter: Adapter) -> Content:
    """The content with an adapter merged. Raises RequestError if the content is not the weights of a base model alone."""
    if content.states or content.is_adapter:
        raise RequestError(
            "--merge-adapter merges into the weights of a base model",
            where=base.path,
            do="Leave out --optimizer" if content.states else "Give the base model as the source, and this directory with --merge-adapter",
        )
    merged = with_adapter_merged(content, adapter)
    # Digests of the base say nothing about the weights that replace some of it.
    replaced = {name for name, tensor in merged.tensors.items() if tensor is not content.tensors.get(name) and not tensor.updates}
    return replace(merged, recorded=lambda: {name: text for name, text in content.recorded().items() if name not in replaced})


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
