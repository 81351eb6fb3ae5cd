"""The steps of planning that are about LoRA adapters: they are merged into weights, or brought into another form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.adapter.model_files import ADAPTER_CONFIG
from reshard.canonical.content import ADAPTER_LEFT_OUT, Content
from reshard.canonical.renaming import adapter_name, adapters_of, is_of_adapter
from reshard.errors import RequestError
from reshard.geometry.quantities import plural
from reshard.geometry.sections import whole
from reshard.index.index import Tensor
from reshard.index.shards import Relocation
from reshard.opening.checkpoint import Checkpoint
from reshard.requests.request import Draft
from reshard.storage.trees import JoinedFiles

if TYPE_CHECKING:
    from reshard.canonical.lora import LoraSettings


def merge_own_adapter(draft: Draft) -> Draft:
    """Merge the adapter that the checkpoint itself holds into its weights, if the request asks for it."""
    if not draft.request.merges_own_adapter:
        return draft
    from reshard.canonical.lora import LoraSettings

    content = draft.content
    own = {name: tensor for name, tensor in content.adapter.items() if not adapters_of([tensor])}
    settings = LoraSettings(draft.companions.adapter_config or {}).with_alpha(draft.request.target.options.get("lora_alpha"))
    settings.check_parameters(found.module for name in own if (found := adapter_name(name)) is not None)
    drops = tuple(drop for drop in content.drops if drop.name not in own or drop.reason != ADAPTER_LEFT_OUT)
    draft = replace(draft, content=replace(content, drops=drops))
    return _merged(draft, settings, own, draft.request.adapter_weights[0]).noting(*settings.notes)


def merge_adapter(draft: Draft) -> Draft:
    """Merge the adapters of the directories that the request names into the weights, or into what was combined, one after the other."""
    weights = draft.request.adapter_weights[-len(draft.adapters) :]
    for adapter, weight in zip(draft.adapters, weights, strict=False):
        draft = _with_adapter(draft, adapter, weight)
    return draft


def form_adapter(draft: Draft) -> Draft:
    """Bring an adapter of experts into the canonical form, if the request asks for another one than it has."""
    form = draft.request.to.form_of_adapter(draft.content, draft.target) if draft.request.to.holds_adapters else None
    if form is None:
        return draft
    from reshard.canonical.adapters.forms import formed
    from reshard.canonical.lora import LoraSettings
    from reshard.engine.views import LazyTensor

    def read(tensor: Tensor) -> bytes:
        return LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, draft.files)[:].words().tobytes()

    settings = LoraSettings(draft.companions.adapter_config or {}).with_alpha(draft.request.target.options.get("lora_alpha"))
    made = formed(draft.content, settings, draft.source.path, form, read)
    stored = draft.content.tensors
    others = (tensor for tensor in draft.index.tensors if stored.get(tensor.name) is not tensor)
    target = replace(draft.request.target, options={**draft.request.target.options, "experts": form})
    return replace(
        draft,
        index=replace(draft.index, tensors=(*others, *made.all_tensors)),
        content=replace(made.content, recorded=dict),
        companions=replace(draft.companions, adapter_config=made.config),
        request=replace(draft.request, target=target),
    ).noting(f"the adapter of the experts is written in the form {form}", *made.notes)


def adapter_in(adapter: Checkpoint, keyword: str) -> tuple[LoraSettings, dict[str, Tensor]]:
    """The settings of the adapter of a directory, and its tensors with the paths that its files have beside those of a base (JoinedFiles).

    Raises: RequestError, naming the keyword, if it is not in PEFT's form.
    """
    from reshard.canonical.lora import LoraSettings

    config = adapter.model_files.adapter_config
    if config is None or not all(map(is_of_adapter, adapter.index.tensors)):
        raise RequestError(
            f"`{keyword}=`: there is no adapter in PEFT's form: {ADAPTER_CONFIG} and adapter_model.safetensors",
            where=adapter.path,
            why="The scale of an adapter is in that file, or in the args.json of ms-swift",
            do="Write the adapter of a training checkpoint with `to=peft` first, and name its directory",
        )
    relocation = Relocation(partial(JoinedFiles.path_in, adapter.files))
    return LoraSettings(config), {tensor.name: replace(tensor, shards=relocation.of(tensor.shards)) for tensor in adapter.index.tensors}


def _with_adapter(draft: Draft, adapter: Checkpoint, weight: float) -> Draft:
    """The draft with the adapter of a directory merged, and its tensors and files beside the base's."""
    settings, tensors = adapter_in(adapter, "merge_adapter")
    draft = _merged(draft, settings, tensors, weight, adapter.path)
    files = (replace(file, path=JoinedFiles.path_in(adapter.files, file.path)) for file in adapter.index.files)
    both = replace(draft.index, tensors=(*draft.index.tensors, *tensors.values()), files=(*draft.index.files, *files))
    return replace(draft, index=both, files=JoinedFiles(draft.files, [adapter.files]))


def _merged(draft: Draft, settings: LoraSettings, tensors: Mapping[str, Tensor], weight: float, path: str | None = None) -> Draft:
    """The draft with an adapter merged, and notes on it. weight: the factor of its updates. path: its directory; None for the
    checkpoint's own.

    Raises: RequestError if the content is not the weights of a base model alone.
    """
    from reshard.canonical.merging import with_adapter_merged, with_vocabulary

    content = draft.content
    if content.states or content.is_adapter:
        raise RequestError(
            "`merge_adapter=` merges into the weights of a base model",
            where=draft.source.path,
            do="Leave out `optimizer=True`"
            if content.states
            else "Give the base model as the source, and this directory with `merge_adapter=`",
        )
    merged = with_adapter_merged(content, os.path.abspath(path or draft.source.path), settings, tensors, weight)
    # Digests of the base say nothing about the weights that replace some of it.
    replaced = {name for name, tensor in merged.tensors.items() if tensor is not content.tensors.get(name) and not tensor.is_computed}
    merged = replace(merged, recorded=lambda: {name: text for name, text in content.recorded().items() if name not in replaced})
    if merged.model is not content.model and merged.model is not None and draft.companions.config is not None:
        config = with_vocabulary(dict(draft.companions.config), merged.model.dimensions["vocab"])
        draft = replace(draft, companions=draft.companions.with_settings_of(config))
        draft = draft.noting(f"the adapter holds tables of {merged.model.dimensions['vocab']} tokens, and config.json says so now")
    return replace(draft, content=merged).noting(*_notes_on_merge(merged, content, path or "of the checkpoint"))


def _notes_on_merge(merged: Content, base: Content, path: str) -> Iterator[str]:
    """Notes on an adapter that is merged, and on weights of it that have another element type than those of the base."""
    count = merged.merged.weights if merged.merged else 0
    factor = f", times {merged.merged.weight:g}" if merged.merged and merged.merged.weight != 1 else ""
    yield f"the adapter {path} is merged into {plural(count, 'weight')}: base + scale * (B x A){factor} in float32, rounded once"
    if merged.model and merged.model.is_tied and merged.tensors[merged.model.architecture.tied[1]].origin.changed_by:
        yield "the head is tied to the embedding, so the merge changes both, as PEFT's does"
    if other := [name for name, tensor in merged.weights.items() if tensor.dtype != base.tensors[name].dtype]:
        dtype = merged.tensors[other[0]].dtype
        yield f"{plural(len(other), 'weight')} of the adapter, such as {other[0]}, keep its element type {dtype}; `dtype=` casts them"
