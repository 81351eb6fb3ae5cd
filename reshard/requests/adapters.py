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
from reshard.models.model import Model
from reshard.opening.checkpoint import Checkpoint
from reshard.requests.request import Draft
from reshard.storage.trees import JoinedFiles

if TYPE_CHECKING:
    from reshard.canonical.lora import LoraSettings


def merge_own_adapter(draft: Draft) -> Draft:
    """Merge the adapter that the checkpoint itself holds into its weights, if the request asks for it."""
    request = draft.request
    if not request.merges_own_adapter or request.to.holds_adapters:
        return draft
    draft, settings, own = _own_adapter(draft)
    return draft if request.combine == "linear" else _merged(draft, settings, own, request.adapter_weights[0]).noting(*settings.notes)


def merge_adapter(draft: Draft) -> Draft:
    """Merge the adapters of the directories that the request names into the weights, or into what was combined, one after the other; or
    make one adapter of them first."""
    request = draft.request
    if draft.adapters and (request.to.holds_adapters or request.combine == "linear"):
        return _with_combined(draft)
    weights = request.adapter_weights[-len(draft.adapters) :]
    for adapter, weight in zip(draft.adapters, weights, strict=False):
        settings, tensors = adapter_in(adapter, "merge_adapter")
        draft = _beside(_merged(draft, settings, tensors, weight, adapter.path), adapter, tensors)
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
    for_engine = draft.request.target.options.get("engine") is not None
    made = formed(draft.content, settings, draft.source.path, form, read, for_engine=for_engine)
    stored = draft.content.tensors
    others = (tensor for tensor in draft.index.tensors if stored.get(tensor.name) is not tensor)
    target = replace(draft.request.target, options={**draft.request.target.options, "experts": form})
    return replace(
        draft,
        index=replace(draft.index, tensors=(*others, *made.all_tensors)),
        content=replace(made.content, recorded=dict),
        companions=replace(draft.companions, adapter_config=made.config),
        request=replace(draft.request, target=target),
    ).noting(*made.notes)


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


def _own_adapter(draft: Draft) -> tuple[Draft, LoraSettings, dict[str, Tensor]]:
    """The adapter that the checkpoint itself holds, beside weights or alone, and the draft in which it is not left out."""
    from reshard.canonical.lora import LoraSettings

    content = draft.content
    stored = content.tensors if content.is_adapter else content.adapter
    own = {name: tensor for name, tensor in stored.items() if not adapters_of([tensor])}
    settings = LoraSettings(draft.companions.adapter_config or {}).with_alpha(draft.request.target.options.get("lora_alpha"))
    settings.check_parameters(own_name.module for name in own if (own_name := adapter_name(name)) is not None)
    drops = tuple(drop for drop in content.drops if drop.name not in own or drop.reason != ADAPTER_LEFT_OUT)
    return replace(draft, content=replace(content, drops=drops)), settings, own


def _with_combined(draft: Draft) -> Draft:
    """The draft with one adapter made of several: merged into the weights, or as the content of a target that is an adapter.

    Raises: RequestError if the own adapter of such a source is not named, or its form is to change as well; as `combined`.
    """
    from reshard.canonical.adapters.combining import Source, combined
    from reshard.index.provenance import MergedAdapter

    request, into_weights = draft.request, not draft.request.to.holds_adapters
    _check_can_be_combined(draft)
    sources = list[Source]()
    base, names = draft, iter(request.adapter_weights)
    if request.merges_own_adapter:
        draft, settings, own = _own_adapter(draft)
        sources.append(Source(draft.source.path, settings, own, next(names)))
    for adapter, weight in zip(draft.adapters, names, strict=True):
        settings, tensors = adapter_in(adapter, "merge_adapter")
        sources.append(Source(adapter.path, settings, tensors, weight))
        draft = _beside(draft, adapter, tensors)
    settings, tensors = combined(sources, request.combine, draft.content.model)
    last: MergedAdapter | None = None
    for source in sources:
        last = MergedAdapter(os.path.abspath(source.path), source.settings.config, len(tensors), source.weight, last, request.combine)
    if into_weights:
        draft = _merged(draft, settings, tensors, 1.0, sources[-1].path)
        assert last is not None and draft.content.merged is not None, "adapters were merged"
        last = replace(last, weights=draft.content.merged.weights)
        return replace(draft, content=replace(draft.content, merged=last))
    content = replace(base.content, tensors=tensors, merged=last, recorded=dict)
    made = replace(draft, content=content, companions=replace(draft.companions, adapter_config=dict(settings.config)))
    return made.noting(f"the factors of {plural(len(sources), 'adapter')} are combined in float32, as PEFT's {request.combine} does")


def _check_can_be_combined(draft: Draft) -> None:
    """Raises RequestError if what is asked for besides contradicts the combination of adapters."""
    request = draft.request
    if not request.to.holds_adapters:
        if request.formula and request.merges_own_adapter:
            raise RequestError(
                "`combine=linear` with `merge_adapter=self` and several sources", do="Combine the adapters first, with `to=peft`"
            )
    elif not request.merges_own_adapter:
        raise RequestError(
            "`merge_adapter=` names adapters, and not that of the source",
            where=draft.source.path,
            why="The result is one adapter, and the source is one of its parts",
            do="Name `merge_adapter=self` first, and each further adapter after it",
        )
    elif option := next((name for name in ("experts", "engine") if request.target.options.get(name)), None):
        do = f"Combine them first, then write the result with `to=peft` and `{option}=`"
        raise RequestError(f"`{option}=` with several adapters", do=do)


def _beside(draft: Draft, adapter: Checkpoint, tensors: Mapping[str, Tensor]) -> Draft:
    """The draft with the tensors and files of an adapter beside those of the source."""
    files = (replace(file, path=JoinedFiles.path_in(adapter.files, file.path)) for file in adapter.index.files)
    both = replace(draft.index, tensors=(*draft.index.tensors, *tensors.values()), files=(*draft.index.files, *files))
    return replace(draft, index=both, files=JoinedFiles(draft.files, [adapter.files]))


def _merged(draft: Draft, settings: LoraSettings, tensors: Mapping[str, Tensor], weight: float, path: str | None = None) -> Draft:
    """The draft with an adapter merged, and notes on it. weight: the factor of its updates. path: its directory; None for the
    checkpoint's own.

    Raises: RequestError if the content is not the weights of a base model alone.
    """
    from reshard.canonical.adapters.heads import with_changes
    from reshard.canonical.merging import with_adapter_merged

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
    if merged.model is not content.model and merged.model and content.model and draft.companions.config is not None:
        config = with_changes(draft.companions.config, content.model, merged.model)
        draft = replace(draft, companions=draft.companions.with_settings_of(config))
        draft = draft.noting(*_notes_on_model(content.model, merged.model))
    return replace(draft, content=merged).noting(*_notes_on_merge(merged, content, path or "of the checkpoint"))


def _notes_on_model(before: Model, after: Model) -> Iterator[str]:
    """Notes on an adapter that makes another model of its base."""
    if after.architecture.head is not before.architecture.head:
        yield f"the head of the adapter takes the place of the base's: the merge is {after.noun}, and config.json says so now"
    elif before.is_tied and not after.is_tied:
        yield "the training had its own copy of a tied table (modules_to_save): head and embedding differ now, as in PEFT's merge"
    if before.dimensions["vocab"] != after.dimensions["vocab"]:
        yield f"the adapter holds tables of {after.dimensions['vocab']} tokens, and config.json says so now"


def _notes_on_merge(merged: Content, base: Content, path: str) -> Iterator[str]:
    """Notes on an adapter that is merged, and on weights of it that have another element type than those of the base."""
    count = merged.merged.weights if merged.merged else 0
    factor = f", times {merged.merged.weight:g}" if merged.merged and merged.merged.weight != 1 else ""
    yield f"the adapter {path} is merged into {plural(count, 'weight')}: base + scale * (B x A){factor} in float32, rounded once"
    if merged.model and merged.model.is_tied and merged.tensors[merged.model.architecture.tied[1]].origin.changed_by:
        yield "the head is tied to the embedding, so the merge changes both, as PEFT's does"
    if other := [name for name, tensor in merged.weights.items() if tensor.dtype != base.tensors.get(name, tensor).dtype]:
        dtype = merged.tensors[other[0]].dtype
        yield f"{plural(len(other), 'weight')} of the adapter, such as {other[0]}, keep its element type {dtype}; `dtype=` casts them"
