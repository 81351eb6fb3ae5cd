"""Planning: from an opened checkpoint and a request to a proven plan, as a row of steps over one frozen Draft.

    resolve -> name -> select -> keep names -> examine -> dequantize -> merge own adapter -> combine -> merge adapter -> quantize
    -> lay out -> join -> prove

Each step takes a draft and returns the next one: it can be called alone, and what it made can be printed. What comes before, from keywords
to a request and from a path to a checkpoint, stands in request.py and opening.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.file_kinds import left
from reshard.adapter.model_files import adapter_config_at, blaming_the_parent
from reshard.adapter.save_folders import step_of
from reshard.canonical.content import check_against_model, check_counted, check_selected
from reshard.canonical.dequantization import quantized_names, with_values
from reshard.canonical.globs import check_globs
from reshard.canonical.optimizer_state import NO_TENSOR
from reshard.canonical.renaming import adapter_name, adapters_of, base_name, is_of_adapter, with_adapter_names
from reshard.canonical.stacked_experts import by_expert
from reshard.errors import CheckpointError, RequestError, UnsupportedError, blaming, some
from reshard.geometry.dtypes import BF16
from reshard.geometry.quantities import plural
from reshard.index.index import Tensor, about_left_out
from reshard.index.shards import Relocation
from reshard.models.lookup import find_model
from reshard.models.quantization import check_has_settings, packed_names, quantization_of, unknown_quantization, without_quantization
from reshard.models.stored_forms import LIBRARIES
from reshard.opening.checkpoint import Checkpoint
from reshard.plans.layout import BesideWeights, Layout
from reshard.plans.plan import Plan, make_plan
from reshard.plans.proof import prove
from reshard.requests.adapters import form_adapter, merge_adapter, merge_own_adapter
from reshard.requests.request import ConversionRequest, Draft, dtype_named
from reshard.storage.files import Files, inside, read_range
from reshard.storage.system_calls import gc_paused
from reshard.storage.trees import JoinedFiles, root_of

if TYPE_CHECKING:
    from reshard.canonical.combining import Formula
    from reshard.index.provenance import CombinedSource

_NAMES_ARE_KEPT = (
    "names stay as the source has them, so that its run can go on, and the fingerprint is of these names; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published names"
)
_WEIGHTS_ARE_MASTERS = (
    "the weights are the optimizer's full-precision masters, from which the run resumes; `weights=model` writes the model's rounded copy"
)
_ADAPTERS_ARE_COPIED = "LoRA adapters are copied as they are, and not merged into the base weights; `merge_adapter=` merges one"


@gc_paused()
def plan_conversion(
    source: Checkpoint, request: ConversionRequest, adapters: Sequence[Checkpoint] = (), others: Sequence[Checkpoint] = ()
) -> Plan:
    """The proven plan of the conversion of a checkpoint that the request asks for. adapters: the LoRA adapters to merge. others: the
    checkpoints that the source is combined with.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    draft = Draft.of(source, request, adapters, others)
    for step in STEPS:
        draft = step(draft)
    plan = join(draft)
    prove(plan)
    return plan


def resolve(draft: Draft) -> Draft:
    """Settle which copies of the weights, which states and which adapter are taken, and the files that go with them.

    If optimizer state is written and the format has no place for masters beside it, the masters are the weights: a run would otherwise
    resume from rounded weights. Trainers cast what they load to the type that they train in, so masters serve all.
    """
    source, request, format, selection = draft.source, draft.request, draft.request.to, draft.selection
    check_nothing_unanswered(source)
    if format.keeps_optimizer:
        _check_has_optimizer(draft)
        selection = replace(selection, optimizer=True)
    if selection.optimizer and selection.weights is None and not format.keeps_masters and source.index.by_kind("master"):
        selection = replace(selection, weights="master")
    if "_class_name" in (source.model_files.config or {}):  # of diffusers
        from reshard.requests.components import without_trainer_prefix

        prefix, about = without_trainer_prefix(source, selection, request.target.options.get("like"))
        selection, draft = replace(selection, strip_prefix=prefix), draft.noting(*about)
    keep_adapter = format.keeps_names and not request.drop_adapter and not request.merge_adapter
    draft = replace(
        draft,
        selection=replace(selection, masters=format.keeps_masters, packed_states=format.keeps_packed_states, keep_adapter=keep_adapter),
    )
    if (adapter_config := request.target.options.get("adapter_config")) is not None:
        return replace(draft, companions=replace(draft.companions, adapter_config=adapter_config_at(adapter_config)))
    return draft


def name(draft: Draft) -> Draft:
    """Give tensors their canonical names, and those of the adapter that is asked for its names in the file of PEFT."""
    source, request = draft.source, draft.request
    index = source.of_model(draft.selection) if request.to.holds_adapters else source.named(draft.selection)
    if request.to.holds_adapters or request.merges_own_adapter:
        index = with_adapter_names(index, _chosen_adapter(draft))
    return replace(draft, index=index)


def select(draft: Draft) -> Draft:
    """Choose the tensors, and compare them with what the model needs."""
    draft = _with_content(draft)
    content, source = draft.content, draft.source
    _check_adapter(draft)
    with blaming_the_parent(source.model_files):
        if content.model is not None:
            check_has_settings(content.model.config, source.index.element_types)
        check_against_model(content, partial=content.selection.is_partial, strict=False, optional=content.not_needed)
    return draft.noting(*_about_tables(draft)) if draft.request.to.holds_adapters else draft


def keep_names(draft: Draft) -> Draft:
    """Go back to the names that the source has, if the target keeps them so that its run can go on, or its library alone loads them."""
    stored = draft.source.of_model(draft.selection)
    notes = draft.index.facts.notes[len(stored.facts.notes) :]
    quantization = draft.source.model.quantization if draft.source.model and not draft.request.dequantize else None
    library = quantization.library if quantization else None
    keeps_names = draft.request.to.keeps_names or library is not None
    if keeps_names and not draft.request.merge_adapter and (notes or draft.index is not stored):
        from reshard.canonical.trainer_names import with_states_of_weights

        stored = with_states_of_weights(stored, draft.source.model)
        return _with_content(replace(draft, index=stored)).noting(f"names stay as {library} has them" if library else _NAMES_ARE_KEPT)
    return draft.noting(*notes)


def examine(draft: Draft) -> Draft:
    """Check the choice as a whole, and note what is unusual about it."""
    request, content = draft.request, draft.content
    check_selected(content)
    check_counted(content)
    check_globs("`keep_dtype=`", request.target.keep_dtype, content.weights)
    draft = draft.noting(*_about_unknown(draft), *_about_trainer(draft), *about_left_out(content.left_out))
    if content.states:
        draft = draft.noting(*(note for note in draft.source.index.facts.notes if note.startswith(NO_TENSOR)))
    if draft.selection.weights != request.selection.weights and not request.to.keeps_optimizer and draft.source.index.keeps_both_copies:
        draft = draft.noting(_WEIGHTS_ARE_MASTERS)
    if not request.to.holds_adapters and any(map(is_of_adapter, content.tensors.values())):
        return replace(draft.noting(_ADAPTERS_ARE_COPIED), companions=replace(draft.companions, carries_adapter=True))
    return draft


def dequantize(draft: Draft) -> Draft:
    """Turn quantized weights into values, if the request asks for it; else name those that no cast may touch."""
    settings = draft.source.model_files.config or {}
    if draft.request.formula and not (quantization_of(settings) or unknown_quantization(settings)):
        return draft  # of several checkpoints, some may be quantized
    if not draft.request.dequantize:
        return replace(draft, kept_for=quantized_names(draft.content, draft.source.model_files.config))
    config = draft.companions.config
    companions = draft.companions.with_settings_of(without_quantization(config or {}))
    if unknown_quantization(config or {}) in LIBRARIES:
        return _from_library(replace(draft, companions=companions))
    return replace(draft, content=with_values(draft.content, config), companions=companions)


def _from_library(draft: Draft) -> Draft:
    """The draft with the values of weights that only the library loads that packed them."""
    from reshard.requests.library_forms import unpacked

    source, config = draft.source, draft.companions.config or {}
    named = config.get("dtype") or config.get("torch_dtype")
    usual = dtype_named(named, "`dtype` of config.json") if isinstance(named, str) else None
    index, drops = unpacked(draft.index, usual or BF16, lambda tensor: _bytes_of(tensor, draft.files))
    model = find_model(config, source.architecture, {tensor.name: tensor.shape for tensor in index.tensors})
    content = source.content(draft.selection, index=index, model=model)
    check_against_model(content, partial=draft.selection.is_partial, strict=False, optional=content.not_needed)
    chosen = {tensor.name for tensor in content.tensors.values()}
    of_weights = (drop for drop in drops if drop.name.partition(".weight")[0] + ".weight" in chosen)
    return replace(draft, content=replace(content, drops=(*content.drops, *of_weights)), companions=draft.companions)


def _bytes_of(tensor: Tensor, files: Files) -> bytes:
    """The bytes of a small tensor that lies in one piece. Raises CheckpointError if it lies in several."""
    pieces = [*tensor.pieces()]
    if len(pieces) != 1:
        raise CheckpointError(f"it lies in {plural(len(pieces), 'piece')}, and one is expected", where=tensor.name)
    return read_range(files, pieces[0].extent.path, pieces[0].extent.byte_offset, tensor.nbytes)


def combine(draft: Draft) -> Draft:
    """Attach the other checkpoints to the tensors, if the request combines several. Each goes through the steps so far by itself."""
    formula = draft.request.formula
    if formula is None:
        return draft
    from reshard.canonical.combining import CombinedCheckpoint, combined
    from reshard.index.provenance import Combined

    _check_can_be_combined(draft)
    drafts = [draft]
    for other in draft.others:
        with blaming(other.path):
            drafts.append(_read(Draft.of(other, draft.request)))
    checkpoints = [CombinedCheckpoint(draft.source.path, draft.content)]
    for added in drafts[1:]:
        relocation = Relocation(partial(JoinedFiles.path_in, added.files))
        checkpoints.append(CombinedCheckpoint(added.source.path, added.content, relocation))
    _check_packed(drafts)
    content = combined(checkpoints, formula, draft.target.dtype_of)
    index = draft.index
    for added, checkpoint in zip(drafts[1:], checkpoints[1:], strict=True):
        tensors = (checkpoint.relocated(tensor) for tensor in added.index.tensors)
        files = (replace(file, path=JoinedFiles.path_in(added.files, file.path)) for file in added.index.files)
        index = replace(index, tensors=(*index.tensors, *tensors), files=(*index.files, *files))
    steps = [combined_draft.index.facts.step for combined_draft in drafts]
    facts = replace(content.facts, step=max((step for step in steps if step is not None), default=None))
    index, content = replace(index, facts=facts), replace(content, facts=facts)
    weights = formula.weights(len(drafts))
    sources = tuple(map(_combined_source, drafts, weights))
    content = replace(content, combined=Combined(formula.rule, formula.text, sources))
    draft = replace(draft, index=index, content=content, files=JoinedFiles(draft.files, [added.files for added in drafts[1:]]))
    return draft.noting(*_notes_on_combination(draft, formula, steps))


def quantize(draft: Draft) -> Draft:
    """Store the weights in the quantized form that the request names."""
    form = draft.request.quantize or draft.request.requantize
    if not form:
        dtype = draft.target.dtype
        return draft.noting(_WITHOUT_SCALES.format(dtype)) if dtype and dtype.itemsize == 1 else draft
    from reshard.canonical.quantizing import quantized, requantized

    model = draft.content.model
    if draft.request.quantize and model and form not in model.architecture.quantized_as:
        index, tensors, model = by_expert(draft.index, draft.content.tensors, model)
        draft = replace(draft, index=index, content=replace(draft.content, tensors=tensors, model=model))
    described = (
        partial(quantized, settings=draft.request.quantization, dtype_of=draft.target.dtype_of) if draft.request.quantize else requantized
    )
    content, config = described(draft.content, draft.companions.config, form)
    kept_for = quantized_names(content, config)
    return replace(draft, content=content, companions=draft.companions.with_settings_of(config), kept_for=kept_for)


_WITHOUT_SCALES = (
    "the weights are cast to {} without scales: no quantized model, and engines do not load it as one; "
    "`quantize=fp8-channel` computes scales"
)


def lay_out(draft: Draft) -> Draft:
    """Ask the target's format for its files."""
    source, facts = draft.source, draft.content.facts
    owned, paths = registry.named(source.format).owns, [file.path for file in source.index.files]
    beside = cache(partial(draft.companions.looked_beside, source.files, paths, owned))
    draft = replace(draft, companions=replace(draft.companions, beside=beside))
    target = draft.request.to.settled(draft.content, draft.target, draft.companions)
    draft = replace(draft, request=replace(draft.request, target=target))
    layout = _accounted(draft.request.to.lay_out(draft.content, target, draft.companions), beside(), facts.headers)
    _check_paths(layout)
    unread = [file.path for file in layout.left if file.kind == "weight-file"]
    notes = (
        *draft.notes,
        *(note for note in facts.notes if any(path in note for path in unread)),
        *layout.notes,
        *_notes_on_copies(draft, layout),
    )
    return replace(draft, layout=replace(layout, notes=notes), notes=notes)


def _accounted(layout: Layout, beside: BesideWeights, headers: Iterable[str]) -> Layout:
    """The layout with one file of each name, and with everything that it does not carry. headers: the entries of the source's headers."""
    weights = {file.path for file in layout.files}
    sidecars = {sidecar.path: sidecar for sidecar in layout.sidecars if sidecar.path not in weights}
    others = {file.path: file.kind for file in beside.left if file.path not in sidecars}
    for name, content in beside.carried.items():
        written = [sidecar for path, sidecar in sidecars.items() if path == name or path.endswith(f"/{name}")]
        if not any(sidecar.content == content for sidecar in written):
            others[name] = "replaced-file" if written or name in weights else "unplaced-file"
    others |= dict.fromkeys((key for key in headers if key not in layout.headers), "header-entry")
    return replace(layout, sidecars=tuple(sidecars.values()), left=tuple(left(name, kind) for name, kind in others.items()))


def _check_paths(layout: Layout) -> None:
    """Raises RequestError if a file of the target would lie outside of it: names may come from tensors or from options."""
    for path in (*(file.path for file in layout.files), *(file.path for file in layout.sidecars)):
        try:
            inside(path, where=layout.format)
        except CheckpointError:
            raise RequestError(
                f"a file of the target would be {path!r}, which is outside of it",
                why=f"The format {layout.format} makes this name from the names of tensors or from its options; nothing was written",
                do="Look at these names and options",
            ) from None


def join(draft: Draft) -> Plan:
    """The plan that feeds each piece of the layout from the pieces that are stored."""
    assert draft.layout is not None, "the draft has been laid out"
    return make_plan(draft.index, draft.files, draft.content, draft.target, draft.layout)


def if_about_adapters(step: Callable[[Draft], Draft]) -> Callable[[Draft], Draft]:
    """A step of requests/adapters.py, which is taken if the request names an adapter, or the target is one."""
    return lambda draft: step(draft) if draft.request.merge_adapter or draft.request.to.holds_adapters else draft


_READING: tuple[Callable[[Draft], Draft], ...] = (
    resolve, name, select, keep_names, examine, dequantize, if_about_adapters(merge_own_adapter),
)  # fmt: skip
STEPS: tuple[Callable[[Draft], Draft], ...] = (
    *_READING, combine, if_about_adapters(merge_adapter), if_about_adapters(form_adapter), quantize, lay_out,
)  # fmt: skip
"""The steps from the first draft to one that can be joined, in order."""
CONTENT_STEPS = STEPS[:-1]
"""Those before the layout: they settle which tensors are taken."""


def check_nothing_unanswered(source: Checkpoint) -> None:
    """Raises RequestError if the user has not given a fact that is in no file of the checkpoint, such as the vocabulary size."""
    if source.index.facts.delta is not None:
        from reshard.opening.chains import delta_alone

        raise delta_alone(source.path, source.index.facts.delta)
    if source.index.facts.unanswered:
        raise RequestError(
            f"{source.path} does not say {'; nor '.join(source.index.facts.unanswered)}",
            why="It is in no file of the checkpoint, and is not guessed",
            id="ambiguous",
        )


def _read(draft: Draft) -> Draft:
    """The draft of a checkpoint after the steps that do not depend on the target."""
    for step in _READING:
        draft = step(draft)
    return draft


def _combined_source(draft: Draft, weight: float) -> CombinedSource:
    """What is recorded of a checkpoint that is combined. Formats without a place for the step have it in the folder's name."""
    from reshard.index.provenance import CombinedSource

    step = draft.index.facts.step
    step = step_of(os.path.basename(draft.files.root.rstrip("/"))) if step is None else step
    path = "+".join([root_of(draft.files), *(delta.path for delta in draft.source.deltas)])
    return CombinedSource(path, draft.files, draft.source.deltas, draft.source.format, step, weight, draft.content.recorded)


def _check_can_be_combined(draft: Draft) -> None:
    """Raises RequestError if the request asks for what is not done with several checkpoints at once."""
    request = draft.request
    if not draft.others:
        raise RequestError(f"one checkpoint cannot be combined ({request.formula})", where=draft.source.path, do="Give several sources")
    if draft.content.states or request.to.keeps_optimizer:
        raise RequestError(
            "optimizer state is not combined",
            why="It belongs to the weights of one step, and says nothing about the mean of several",
            do="Leave out `optimizer=True`, and write a format that can do without, such as `to=hf`",
        )
    if draft.content.is_adapter or request.to.holds_adapters:
        raise RequestError(
            "LoRA adapters are not combined",
            why="The mean of two products of factors is not the product of the mean factors",
            do="Merge each adapter into its base with `merge_adapter=` first, then combine the results",
        )
    if request.requantize:
        raise RequestError(
            f"`requantize={request.requantize}` keeps the values of one checkpoint, and several are combined", do="Use `quantize=`"
        )


def _check_packed(drafts: Sequence[Draft]) -> None:
    """Raises RequestError if a checkpoint is quantized and is not dequantized, or if none is that could be."""
    for draft in drafts:
        config = draft.source.model_files.config or {}
        stored = {name: tensor.dtype.name for name, tensor in draft.content.tensors.items() if not tensor.is_computed}
        codes = {*draft.kept_for, *packed_names(stored), *(name for name, dtype in stored.items() if dtype.startswith("F8"))}
        if codes or (unknown_quantization(config) and not draft.request.dequantize):
            raise RequestError(
                f"it is quantized in {draft.source.path}, or is a scale of a quantized weight",
                where=some(sorted(codes), most=3) or None,
                why="Codes and scales have no mean: the values have",
                do="Add `dequantize=True`, with `model=DIR` if no config.json says how they are quantized, or give checkpoints that are "
                "not quantized. Convert FP8 values without scales to bf16 first",
            )
    configs = (draft.source.model_files.config or {} for draft in drafts)
    if drafts[0].request.dequantize and not any(map(quantization_of, configs)):
        raise RequestError("`dequantize=True`: none of the checkpoints is quantized", do="Leave it out")


def _notes_on_combination(draft: Draft, formula: Formula, steps: Sequence[int | None]) -> Iterator[str]:
    """Notes on the checkpoints that are combined."""
    from reshard.canonical.combining import steps_note

    weights = formula.weights(len(steps))
    base = "the base, " if formula.rule == "task-arithmetic" else ""
    paths = [checkpoint.path for checkpoint in (draft.source, *draft.others)]
    shown = [f"{base if i == 0 else ''}{path}" + ("" if base and i == 0 else f" ({weights[i]:.6g})") for i, path in enumerate(paths)]
    yield f"{formula}: {some(shown, most=7)}; computed in float64, rounded once"
    if note := steps_note(steps, formula):
        yield note


def _check_has_optimizer(draft: Draft) -> None:
    """Raises RequestError if the source has no optimizer state, which the format always holds."""
    if not any(tensor.kind.startswith(("moment", "state")) for tensor in draft.source.index.tensors):
        others = [
            name
            for name, format in registry.formats().items()
            if format.can_write and not format.keeps_optimizer and name not in registry.serving_formats()
        ]
        unread = next((note for note in draft.source.index.facts.notes if note.startswith("optimizer.")), None)
        raise RequestError(
            f"`to={draft.request.to.name}` always writes optimizer state, and {'none is read' if unread else 'this checkpoint has none'}",
            where=draft.source.path,
            why=unread,
            do=f"Give a checkpoint with optimizer state, or write a format that can do without: {', '.join(others)}",
        )


def _with_content(draft: Draft) -> Draft:
    """The draft with the tensors that the selection takes: those of the adapter, for a format that holds adapters."""
    adapter = _is_of_adapter(draft) if draft.request.to.holds_adapters else None
    return replace(draft, content=draft.source.content(draft.selection, index=draft.index, adapter=adapter))


def _about_unknown(draft: Draft) -> Iterator[str]:
    """A note about weights that the declared architecture lacks."""
    content = draft.content
    if content.unknown and content.model:
        what = f"{plural(len(content.unknown), 'weight')} that the declaration of {content.model.architecture.model_type} lacks"
        yield f"carried as they are: {what}, such as {content.unknown[0]}; `drop_unknown=True` leaves them out"


def _about_trainer(draft: Draft) -> Iterator[str]:
    """A note if the names of a trainer stay because the model is not known."""
    if draft.content.model is not None or draft.request.to.keeps_names:
        return
    from reshard.canonical.trainer_names import trainer_of

    if trainer := trainer_of(draft.content.weights):
        yield (
            f"the names are those of {trainer}, which transformers and serving engines do not load; they stay, as the model is not "
            "known. `model=DIR` names it"
        )


def _notes_on_copies(draft: Draft, layout: Layout) -> Iterator[str]:
    """A note on the embedding and head in layers for multi-token prediction: published folders may hold copies of the model's own there,
    which other formats store once. vLLM 0.32 shares the model's (v1/spec_decode/llm_base_proposer.py)."""
    content = draft.content
    if registry.named(draft.source.format).needs_model_files or not draft.request.to.needs_model_files or content.model is None:
        return
    roles = {name: weight.role for name, weight in content.model.weights.items() if weight.role.startswith("mtp.")}
    copies = [name for name in content.missing if roles.get(name) in ("mtp.embedding", "mtp.head")]
    if copies and any(name in content.tensors and name not in layout.left_out for name in roles):
        named = ", ".join(copies[:2]) + (" ..." if len(copies) > 2 else "")
        yield f"not written: {named}, copies of the embedding and the head that the source stores once; vLLM shares the model's own"


def _chosen_adapter(draft: Draft) -> str | None:
    """The name of the adapter that is taken; None if the checkpoint holds one. Raises RequestError if it holds several."""
    chosen, names = draft.request.target.options.get("adapter"), adapters_of(draft.source.index.tensors)
    if len(names) > 1 and chosen not in names:
        raise RequestError(
            f"the checkpoint holds {plural(len(names), 'adapter')}: {', '.join(names)}",
            where=draft.source.path,
            why="One is written or merged",
            do=f"Choose one, such as `adapter={names[0]}`",
        )
    if names and chosen is None:
        parsed = ((tensor.name, adapter_name(tensor.name)) for tensor in draft.source.index.tensors)
        if unnamed := next((stored for stored, name in parsed if name is not None and name.adapter is None), None):
            raise RequestError(
                f"it belongs to an adapter without a name, and other tensors to the adapter {names[0]}",
                where=unnamed,
                why="One adapter is written or merged",
                do=f"Choose that with `adapter={names[0]}`, or leave its tensors out with `exclude=` '*.{names[0]}.*'",
            )
    return chosen


def _is_of_adapter(draft: Draft) -> Callable[[Tensor], bool]:
    """A function that tells the tensors of the chosen adapter: those with its names, and the biases that were trained with it."""
    from reshard.canonical.lora import LoraSettings

    biases = LoraSettings(draft.companions.adapter_config or {}).trains_bias
    return lambda tensor: (is_of_adapter(tensor) and not adapters_of([tensor])) or biases(tensor.name)


def _about_tables(draft: Draft) -> Iterator[str]:
    """A note on each table of tokens that has more rows than the model's: the adapter alone does not hold them."""
    weights = draft.content.model.as_published() if draft.content.model else {}
    for tensor in draft.index.tensors:
        weight = weights.get(base_name(tensor.name))
        if weight and tensor.kind == "weight" and tensor.shape[1:] == weight.shape[1:] and tensor.shape[0] > weight.shape[0]:
            rows = f"{tensor.shape[0]:,} rows, and the model {weight.shape[0]:,}: the adapter holds none of them"
            yield f"{tensor.name} has {rows}. To keep them, merge with `merge_adapter=self` and the config that has their number"


def _check_adapter(draft: Draft) -> None:
    """Raises RequestError if an adapter is asked for and there is none, or there is one and the request does not say what happens to it;
    UnsupportedError if there is nothing but an adapter."""
    source, content, request = draft.source, draft.content, draft.request
    format, is_merged = request.to, request.merges_own_adapter
    if content.adapter and not (request.drop_adapter or is_merged):
        raise RequestError(
            f"the checkpoint holds a LoRA adapter of {plural(len(content.adapter), 'tensor')}, for example {next(iter(content.adapter))}",
            where=source.path,
            why="Without it the result is the base model, and what was trained is lost",
            do="Merge it with `merge_adapter=self`, leave it out with `drop_adapter=True`, or write it alone with `to=peft`",
        )
    if (request.drop_adapter or is_merged) and not (content.adapter or format.holds_adapters):
        option = "`drop_adapter=True`" if request.drop_adapter else "`merge_adapter=self`"
        raise RequestError(
            f"{option}: no LoRA adapter is left beside weights",
            where=source.path,
            why="`include=` or `exclude=` leaves it out" if content.selection.is_partial else None,
            do=f"Leave out {option}",
        )
    if format.holds_adapters and not content.is_adapter:
        raise RequestError("the checkpoint holds no LoRA adapter", where=source.path, do="Convert it with `to=hf`")
    if content.is_adapter and not format.holds_adapters and not format.keeps_names and not content.selection.keep_unknown:
        raise UnsupportedError(
            f"the checkpoint holds a LoRA adapter and no base weights, for example {next(iter(content.tensors))}",
            where=source.path,
            why=f"{format.name} holds whole models",
            do="Write the adapter with `to=peft`, or convert the base model with `merge_adapter=` and this directory",
        )
