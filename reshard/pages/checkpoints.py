"""Checkpoints, described once: what one is, what it can become, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.geometry.quantities import grouped, plural
from reshard.index.balance import ByteShare, shares
from reshard.index.coverage import sharding_text
from reshard.index.shards import primary_rows
from reshard.models.config_values import component_class
from reshard.models.lookup import draft_class
from reshard.models.quantization import unknown_quantization
from reshard.models.stored_forms import not_read
from reshard.pages.sections import Drawing, Facts, Head, OnPage, Rows, Section, Share, Tree, TreeView
from reshard.pages.texts import count_text, nbytes_text, shape_text, strip_text
from reshard.plans import summary
from reshard.verbs.look.inspection import Inspection, name_of_model

if TYPE_CHECKING:
    from reshard.canonical.content import Drop
    from reshard.index.index import Tensor
    from reshard.models.model import Model
    from reshard.opening.checkpoint import Checkpoint
    from reshard.plans.summary import ExpertSummary

PLACEMENT_COLUMNS = ("dimension", "ranks", "placement", "meaning")
# Kinds of tensors whose names are not those of weights that they belong to.
_NAMED_ALONE = frozenset({"weight", "buffer", "adapter", "other", "state", "unknown"})
Fact = tuple[str, object]


def checkpoint_sections(
    opened: Inspection, view: TreeView, command: str | None, drawn: Sequence[Tensor] | None = None
) -> Iterator[Section]:
    """What a checkpoint is, whether it is complete, what it can become, and what it holds.

    command: the one that goes on from here. drawn: tensors that are described one by one, on a terminal instead of all else.
    """
    first, held = [*_answer(opened, command)], [*_content(opened, view)]
    if drawn is not None:
        yield from map(OnPage, (*first, *held))
        for tensor in drawn:
            yield from _tensor(tensor)
    elif view.by:
        divided = shares(opened.index, view.by)
        yield from (*first, "")
        if divided:
            ordered = sorted(divided, key=lambda share: -share.nbytes) if view.sort == "bytes" else divided
            yield share_rows(ordered, view.by, view.limit)
        else:
            yield f"  the files do not say which {view.by} held what; `by='file'` shows where the bytes are"
        yield from map(OnPage, held)
    else:
        yield from (*first, "", *held)
    yield Drawing("Layers", "layers", (opened.index,))
    yield Drawing("Who holds what", "value", (opened.checkpoint,))
    yield from (Drawing(f"Bytes by {by}", "shares", (opened.index, by)) for by in ("rank", "file", "layer"))


def share_rows(divided: Sequence[ByteShare], by: str, limit: int | None = None) -> Rows:
    """Parts of the stored bytes: name, tensors, bytes, share of all, and a bar that compares it with the largest."""
    total, largest = sum(share.nbytes for share in divided) or 1, max((share.nbytes for share in divided), default=0) or 1
    rows = [
        (share.name, share.tensors, nbytes_text(share.nbytes), f"{100 * share.nbytes / total:.3g} %", Share(share.nbytes / largest))
        for share in divided
    ]
    return Rows((by, "tensors", "bytes", "share", ""), rows, optional=(4,), limit=limit, fits=True, hint="; `limit=0` shows all")


def _answer(opened: Inspection, command: str | None) -> Iterator[Section]:
    index, facts, problem = opened.index, opened.facts, opened.outlook.problem
    step = "" if facts.step is None else f", step {facts.step}"
    ranks = facts.mesh.ranks if facts.mesh else None
    active, name = opened.active_parameters, name_of_model(opened.config or {}) or "unknown model"
    tiles = [
        ("model", name),
        (opened.parameters_name, count_text(opened.parameters) if opened.parameters else None),
        ("active for a token", None if active is None else count_text(active)),
        ("stored as", opened.stored_as),
        ("size", nbytes_text(opened.nbytes)),
        ("format", index.format),
        ("files", len(index.files)),
        ("ranks", ranks or None),
        ("step", facts.step),
    ]
    verdict, tone = ("partial", "bad") if problem else ("complete", "good")
    headline = f"{name}, {_size_text(opened)}: {opened.checkpoint.path}" if opened.config else opened.checkpoint.path
    yield Head(headline, "checkpoint", verdict, tone, tiles, command)
    what = [name, _size_text(opened) + experts_text(opened.experts, active), opened.stored_as]
    where = index.format + (f" of {plural(ranks, 'rank')}" if ranks else "") + step
    yield f"{opened.checkpoint.path}: {', '.join(word for word in what if word)}; {where}"
    stored = f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {nbytes_text(opened.nbytes)}"
    producer = " ".join(word for word in (facts.producer, facts.version) if word)
    run = ", ".join(f"{name} {size}" for name, size in facts.parallel.items())
    skipped = [drop for drop in opened.withheld if drop.kind not in ("other", "adapter")]
    yield Facts(
        [
            (verdict, "; ".join([stored, problem or "no piece of a tensor is missing", *head_text(opened.checkpoint.sized_model)])),
            ("serves", sizes_text(opened.outlook.engines)),
            ("needed", opened.outlook.needed),
            ("next", command),
            ("format", f"{index.format}{f' ({producer})' if producer else ''}, recognized by {opened.checkpoint.detected}"),
            ("model", _model_text(opened)),
            ("step", facts.step),
            ("mesh", f"{facts.mesh}: {facts.mesh.ranks} ranks" if facts.mesh else None),
            ("run", None if facts.mesh else run),
            *_models(opened),
            *dropped_facts(skipped),
            ("other", f"{plural(len(index.objects), 'object')}, for example {index.objects[0]}" if index.objects else None),
            ("note", facts.notes),
        ]
    )


def _content(opened: Inspection, view: TreeView) -> Iterator[Section]:
    """The kinds of tensors, the quantized weights, the tree, and the distributions over a mesh."""
    yield Rows(("kind", "dtypes", "tensors", "elements", "bytes"), [*_kinds(opened.checkpoint)], "Kinds")
    if opened.quantized:
        quantized = [
            (family.name, family.form, shape_text(family.shape), family.weights, _stored_text(family.stored)) for family in opened.quantized
        ]
        yield from ("", Rows(("quantized weights", "form", "shape", "tensors", "each stored as"), quantized, "Quantized weights"))
    yield from _trees(opened.checkpoint, view)
    distributed = [tensor for tensor in opened.tensors if tensor.distribution is not None and tensor.kind == "weight"]
    for distribution, weights in grouped(distributed, lambda tensor: tensor.distribution).items():
        others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        title = f"on the mesh {distribution.mesh if distribution else ''}: {weights[0].name}{others}"
        yield from ("", title, Rows(PLACEMENT_COLUMNS, placements(weights[0])))


def _stored_text(stored: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    return ", ".join(f"{kind} {dtype} {shape_text(shape)}" for kind, dtype, shape in stored)


def _kinds(opened: Checkpoint) -> Iterator[tuple[object, ...]]:
    """One row for each kind of tensor, its element types inside, the largest first."""
    for kind, rows in grouped(summary.kinds(opened.index), lambda row: row.kind).items():
        dtypes = ", ".join(row.dtype for row in sorted(rows, key=lambda row: -row.nbytes))
        nbytes = nbytes_text(sum(row.nbytes for row in rows))
        yield kind, dtypes, sum(row.tensors for row in rows), sum(row.elements for row in rows), nbytes


def _trees(opened: Checkpoint, view: TreeView) -> Iterator[Section]:
    """The tensors of each model, if there are several, with the option that selects it; then all others."""
    tensors, models = opened.index.tensors, opened.models
    if len(models) < 2:
        yield from ("", Tree(opened.tree, view)) if tensors else ()
        return
    for model in models:
        own = (tensor for tensor in tensors if tensor.name.startswith(f"{model.root}."))
        title = f"{model.root} (`root={model.root}`)"
        yield from ("", title, Tree(opened.tree_of(own), view, title))
    if others := [tensor for tensor in tensors if not any(tensor.name.startswith(f"{model.root}.") for model in models)]:
        title = "tensors of no model"
        yield from ("", title, Tree(opened.tree_of(others), view, title))


def _models(opened: Inspection) -> Iterator[Fact]:
    """The models, where there are several, and the adapter, if there is one."""
    models, settings = opened.checkpoint.models, opened.adapter_config
    for model in models if len(models) > 1 else ():
        size = f"{plural(model.tensors, 'tensor')}, {plural(model.parameters, 'parameter')}, {nbytes_text(model.nbytes)}"
        yield "models", f"{model.root}: {size} ({'the main model' if model.is_main else f'`root={model.root}`'})"
    if adapter := summary.adapter(opened.index):
        ranks = f" of {'rank' if len(adapter.ranks) == 1 else 'ranks'} {' and '.join(map(str, adapter.ranks))}" if adapter.ranks else ""
        size = f"{plural(adapter.tensors, 'tensor')}, {plural(adapter.parameters, 'parameter')}, {nbytes_text(adapter.nbytes)}"
        alpha = f", alpha {settings['lora_alpha']}" if settings.get("lora_alpha") is not None else ""
        kinds = "".join(f", {word}" for word, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if settings.get(key))
        base = f" for {settings['base_model_name_or_path']}" if settings.get("base_model_name_or_path") else ""
        from reshard.canonical.adapters.forms import FORMS, form_of

        form = form_of(tensor.name for tensor in opened.index.tensors if tensor.kind in ("adapter", "master"))
        experts = f"; experts {form}: {FORMS[form]}" if form else ""
        yield "adapter", f"LoRA{ranks}{alpha}{kinds}, on {', '.join(adapter.modules)}{base}: {size}{experts}"
        merged = "`merge_adapter=` merges it into its base" if opened.is_adapter else "`merge_adapter='self'` merges it"
        yield "", f"`to='peft'` writes it alone; {merged}"


def dropped_facts(drops: Iterable[Drop]) -> list[Fact]:
    """What is left out: one fact for each reason."""
    facts: list[Fact] = []
    for reason, same in grouped(drops, lambda drop: drop.reason).items():
        counts = ", ".join(f"{number} {kind}" for kind, number in Counter(drop.kind for drop in same).items())
        example = same[0].name if same[0].kind in _NAMED_ALONE else f"{same[0].kind} of {same[0].name}"
        facts.append(("skip", f"{counts}, {nbytes_text(sum(drop.nbytes for drop in same))}: {reason}; for example {example}"))
    return facts


def placements(tensor: Tensor) -> list[tuple[str, int, str, str]]:
    """What each mesh dimension does to the tensor; empty if the files do not say."""
    if tensor.distribution is None:
        return []
    mesh = tensor.distribution.mesh
    dimensions = zip(mesh.names, mesh.sizes, tensor.distribution.placements, strict=True)
    return [(name, size, str(placement), placement.meaning) for name, size, placement in dimensions]


def _model_text(opened: Inspection) -> str:
    text, model, config = _size_text(opened), opened.checkpoint.sized_model, opened.config
    if config is None:
        return text + "; no config.json here or in the parent directory (`model=DIR` gives one)"
    if model is None:
        method = unknown_quantization(config)
        unknown = not_read(method).removeprefix("the weights are ") if method else "not declared: serving engines need `learn=True`"
        unknown = "a component of a diffusers pipeline" if component_class(config) else unknown
        reason = "engines read it from its hf folder" if draft_class(config) else opened.checkpoint.config_problem or unknown
        return f"{name_of_model(config)} ({reason}), {text}"
    architecture = model.architecture
    declared = f", declared by {architecture.declared_in}" if architecture.declared_in else ""
    named = "" if declared or opened.checkpoint.architecture is None else f", read as {architecture.model_type}"
    return f"{name_of_model(config)}{declared}{named}, {text}: {dimensions_text(model)}"


def dimensions_text(model: Model) -> str:
    """The sizes of a model."""
    d = model.dimensions
    heads = plural(d["heads"], "head") + (f" ({d['kv_heads']} KV)" if "kv_heads" in d else "")
    return f"{plural(d['layers'], 'layer')}, hidden {d['hidden']}, {heads}, vocabulary {d['vocab']}{', tied head' if model.is_tied else ''}"


def head_text(model: Model | None) -> Iterator[str]:
    """What a model is that has another head than a language model, with its head: "a reward model: score, 1 label"."""
    if model and (head := model.architecture.head):
        none = "no head" if head.is_usual else "its weights are not declared"
        yield f"{head.what}: " + (f"{head.module}, {plural(model.dimensions['labels'], 'label')}" if head.module else none)


def sizes_text(engines: Mapping[str, tuple[int, ...]]) -> str:
    """Serving engines and the tensor-parallel sizes at which they take a model."""
    by_sizes = grouped(engines, lambda name: engines[name])
    return "; ".join(f"{', '.join(names)} at TP {', '.join(map(str, legal))}" for legal, names in by_sizes.items())


def _size_text(opened: Inspection) -> str:
    kinds = {tensor.kind for tensor in opened.tensors}
    if "weight" in kinds or "master" in kinds:
        return f"{count_text(opened.parameters)} {opened.parameters_name}"
    return "several models" if "other" in kinds else "LoRA adapter without its base model" if "adapter" in kinds else "no weights"


def experts_text(experts: ExpertSummary | None, active: int | None) -> str:
    """The routed experts and the parameters that work on one token, in brackets; empty without experts."""
    if experts is None:
        return ""
    top = "" if experts.per_token is None else f", top {experts.per_token}"
    return f" ({'' if active is None else f'{count_text(active)} active; '}{plural(experts.number, 'expert')}{top})"


def _tensor(tensor: Tensor) -> Iterator[Section]:
    """Who holds which box of a tensor, with a strip for each axis along which it is cut."""
    yield f"{tensor.name}  {tensor.kind} {tensor.dtype} {shape_text(tensor.shape)}, {sharding_text(tensor)}, {nbytes_text(tensor.nbytes)}"
    if tensor.distribution is not None:
        yield from (f"on the mesh {tensor.distribution.mesh}", Rows(PLACEMENT_COLUMNS, placements(tensor)))
    shards = tensor.shards
    primary, ranks = primary_rows(shards), shards.ranks
    cut = [axis for axis in range(len(tensor.shape)) if len(set(shards.sizes[:, axis].tolist()) | {tensor.shape[axis]}) > 1]
    rows = []
    for i, piece in enumerate(tensor.pieces()):
        kind = "empty" if not piece.box.volume else "" if primary[i] else "replica"
        rank = "" if ranks is None else int(ranks[i])
        strips = (strip_text(piece.box.offsets[axis], piece.box.stops[axis], tensor.shape[axis], replica=not primary[i]) for axis in cut)
        where = (str(piece.box), piece.extent.path, piece.extent.byte_offset, shape_text(piece.extent.strides), kind)
        rows.append((rank, *strips, *where))
    headings = ("rank" if ranks is not None else "", *(f"axis {axis}" for axis in cut), "box", "file", "byte offset", "strides", "")
    yield Rows(headings, rows)
    yield Drawing(tensor.name, "tensor", (tensor,))
