"""reshard inspect: what is in a checkpoint, from its metadata alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.models.lookup import draft_class

from ... import options
from ...json_output import Streamed, show_json
from ...plans import show_drop_reasons
from ...runs import show_run
from ...tables import bar_text, count_text, nbytes_text, shape_text, show, show_table, strip_text

if TYPE_CHECKING:
    from reshard.canonical.content import Content, Drop
    from reshard.canonical.dequantization import QuantizedFamily
    from reshard.geometry.meshes import Distribution, Mesh
    from reshard.index.balance import ByteShare
    from reshard.index.fold import Fold
    from reshard.index.index import Tensor
    from reshard.plans.summary import ExpertSummary, KindSummary
    from reshard.requests.checkpoint import Checkpoint
    from reshard.requests.outlook import Outlook

# Rows of the tree on a terminal, and in a document that is not --full.
_ROWS_ON_TERMINAL, _MOST_ROWS_OF_JSON = 50, 1000
# Files of a checkpoint that cannot be opened.
_FILES_SHOWN = 20


@click.command(
    "inspect",
    cls=options.Command,
    examples=[
        "reshard inspect step-1000",
        "reshard inspect step-1000 --tensor '*q_proj*'",
        "reshard inspect step-1000 --by rank --sort bytes",
        "reshard inspect runs/7",
    ],
)
@click.argument("checkpoint")
@click.option("--tensor", "globs", multiple=True, metavar="GLOB", help="Show who holds which box of the tensors whose names match.")
@click.option("--by", type=click.Choice(["kind", "rank", "file", "dtype", "layer"]), help="Show the bytes of each instead of the tree.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Show N levels of the tree (default: as many as --limit allows).")
@click.option("--sort", type=click.Choice(["model", "bytes"]), default="model", show_default=True, help="The order of the rows.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows; 0: all (default: 50 on a terminal, else all).")
@options.format_name
@options.model
@options.page
@options.summary_or_full
def command(checkpoint: str, globs: tuple[str, ...], as_json: bool, full: bool, **given: Any) -> None:
    """Show what CHECKPOINT is, whether it is complete, what it can become, and what it holds. No weight is read.

    If CHECKPOINT is the folder of a run, list the checkpoints of its steps, at any depth, and which of them are complete.
    """
    import reshard
    from reshard.canonical.globs import check_globs, matches
    from reshard.containers.gc_pause import gc_paused
    from reshard.runs.steps import run_at

    page_options = options.page_of(given)
    view = TreeView(**{name: given.pop(name) for name in ("by", "depth", "sort", "limit")})
    run = run_at(checkpoint) if given["format"] is None else None
    if run is not None:
        show_run(checkpoint, run.steps(), as_json=as_json)
        return
    with gc_paused():  # a hundred thousand tensors are many objects, and none of them is garbage
        try:
            opened = reshard.open(checkpoint, **given)
        except CheckpointError:
            if not as_json:
                _show_files(checkpoint)
            raise
        tensors = list(opened.index.tensors)
        if globs:
            check_globs("--tensor", globs, dict.fromkeys(tensor.name for tensor in tensors))
            tensors = [tensor for tensor in tensors if matches(tensor.name, globs)]
        if page_options.path:
            _write_page(opened, tensors if globs else [], page_options)
        if as_json:
            show_json(document(opened, tensors if full or globs else None, view))
        elif globs:
            for tensor in tensors:
                _show_tensor(tensor)
        else:
            _show_checkpoint(opened, view, given.get("model"))


def _show_files(path: str) -> None:
    """The files of a checkpoint that cannot be opened: what is there. Nothing if not even its format is known."""
    from reshard.adapter import registry
    from reshard.adapter.model_files import find_model_files_near
    from reshard.health.files import paths_of
    from reshard.storage.tar import open_tree

    try:
        files = open_tree(path)
        format, _ = registry.detect(files)
        paths, config = paths_of(files, ()), find_model_files_near(files).config or {}
    except ReshardError:
        return
    sizes = {found: files.size(found) or 0 for found in paths}
    stored = f"{plural(len(sizes), 'file')}, {nbytes_text(sum(sizes.values()))}"
    show(f"{path}: {_name_of_model(config) or 'unknown model'}; {format.name}, incomplete or damaged; {stored} are here")
    shown = list(sizes.items())[:_FILES_SHOWN]
    show_table([(found, nbytes_text(nbytes)) for found, nbytes in shown], ("file", "bytes"))
    if len(sizes) > len(shown):
        show(f"  and {len(sizes) - len(shown):,} more")


def _write_page(opened: Checkpoint, tensors: list[Tensor], page: options.PageOptions) -> None:
    from reshard.pages.pages import checkpoint_page
    from reshard.requests.outlook import outlook

    page.write(checkpoint_page(opened, outlook(opened, _content(opened)), tensors))


@value
class TreeView:
    """How much of a checkpoint is shown, and in which order."""

    by: str | None = None
    depth: int | None = None
    sort: str = "model"
    limit: int | None = None

    @property
    def most(self) -> int | None:
        """The most rows; None for all."""
        return (_ROWS_ON_TERMINAL if sys.stdout.isatty() else None) if self.limit is None else self.limit or None


def document(opened: Checkpoint, tensors: list[Tensor] | None, view: TreeView) -> dict[str, Any]:
    """What is known about a checkpoint, with stable keys. tensors: those that are described one by one."""
    from reshard.models.lookup import model_type_of
    from reshard.plans import summary
    from reshard.requests.outlook import outlook

    index, model, found = opened.index, opened.model, outlook(opened, _content(opened))
    return {
        "path": opened.path,
        "format": index.format,
        "detected_by": opened.detected,
        "producer": index.facts.producer,
        "version": index.facts.version,
        "step": index.facts.step,
        "parallel": dict(index.facts.parallel),
        "model_type": model_type_of(opened.model_files.config or {}),
        "architecture_known": model is not None,
        "parameters": _parameters(opened),
        "experts": _experts_document(opened),
        "bytes": sum(file.nbytes for file in index.files),
        "files": [{"path": file.path, "bytes": file.nbytes} for file in index.files],
        "kinds": [
            {"kind": row.kind, "dtype": row.dtype, "tensors": row.tensors, "elements": row.elements, "bytes": row.nbytes}
            for row in summary.kinds(index)
        ],
        "models": [
            {
                "root": each.root,
                "main": each.is_main,
                "tensors": each.tensors,
                "parameters": each.parameters,
                "bytes": each.nbytes,
            }
            for each in opened.models
        ],
        "quantized": [
            {
                "name": family.name,
                "form": family.form,
                "shape": list(family.shape),
                "weights": family.weights,
                "elements": family.elements,
                "stored": [{"name": kind, "dtype": dtype, "shape": list(shape)} for kind, dtype, shape in family.stored],
            }
            for family in _quantized(opened)
        ],
        "adapter": _adapter(opened),
        "tensor_count": len(index.tensors),
        "withheld_count": len(_withheld(opened)),
        "object_count": len(index.objects),
        "notes": list(index.facts.notes),
        "mesh": _mesh(index.facts.mesh),
        "outlook": {
            "engines": {name: list(sizes) for name, sizes in found.engines.items()},
            "needed": list(found.needed),
            "problem": found.problem,
            "next": _next(opened, found, None),
        },
        "tree": [_branch(level, branch) for level, branch in _rows(_folded(opened, view), view, _MOST_ROWS_OF_JSON)[0]],
        "shares": [{"name": each.name, "tensors": each.tensors, "bytes": each.nbytes} for each in _shares(opened, view)],
        **({} if tensors is None else _details(opened, tensors)),
    }


def _details(opened: Checkpoint, tensors: list[Tensor]) -> dict[str, Any]:
    """What a summary leaves out."""
    return {
        "tensors": Streamed(_tensor, tensors),
        "withheld": [{"name": drop.name, "kind": drop.kind, "bytes": drop.nbytes, "reason": drop.reason} for drop in _withheld(opened)],
        "objects": list(opened.index.objects),
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    from reshard.index.coverage import sharding_text

    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "sharding": sharding_text(tensor),
        "pieces": _pieces(tensor),
        "placements": _placements(tensor),
    }


def _pieces(tensor: Tensor) -> list[dict[str, Any]]:
    from reshard.index.shards import primary_rows

    shards, primary = tensor.shards, primary_rows(tensor.shards)
    ranks = shards.ranks.tolist() if shards.ranks is not None else [None] * len(shards)
    return [
        {"file": shards.path(i), "offsets": offsets, "sizes": sizes, "replica": not primary[i], "rank": ranks[i]}
        for i, (offsets, sizes) in enumerate(zip(shards.offsets.tolist(), shards.sizes.tolist(), strict=True))
    ]


def _mesh(mesh: Mesh | None) -> list[dict[str, Any]] | None:
    return [{"dimension": name, "ranks": size} for name, size in zip(mesh.names, mesh.sizes, strict=True)] if mesh else None


def _placements(tensor: Tensor) -> list[dict[str, Any]] | None:
    """What each mesh dimension does to the tensor; None if the files do not say."""
    distribution = tensor.distribution
    if distribution is None:
        return None
    dimensions = zip(distribution.mesh.names, distribution.mesh.sizes, distribution.placements, strict=True)
    return [
        {"dimension": name, "ranks": size, "placement": str(placement), "meaning": placement.meaning}
        for name, size, placement in dimensions
    ]


@lru_cache(maxsize=1)
def _content(opened: Checkpoint) -> Content | None:
    """What a conversion would take; None if it would be refused, for example because none of several models is the main one."""
    try:
        return opened.content()
    except ReshardError:
        return None


def _is_adapter(opened: Checkpoint) -> bool:
    """Whether it holds a LoRA adapter and no base weights."""
    content = _content(opened)
    return content is not None and content.is_adapter


def _parameters(opened: Checkpoint) -> int:
    from reshard.plans import summary

    content = _content(opened)
    return summary.parameter_count(content, opened.model_files.config) if content else 0


def _quantized(opened: Checkpoint) -> tuple[QuantizedFamily, ...]:
    from reshard.canonical.dequantization import quantized_families

    content = _content(opened)
    return quantized_families(content, opened.model_files.config) if content else ()


def _withheld(opened: Checkpoint) -> tuple[Drop, ...]:
    content = _content(opened)
    return content.withheld if content else ()


def _show_checkpoint(opened: Checkpoint, view: TreeView, model: str | None) -> None:
    index, facts = opened.index, opened.index.facts
    _show_answer(opened, model)
    producer = " ".join(word for word in (facts.producer, facts.version) if word)
    show(f"  format    {index.format}" + (f" ({producer})" if producer else "") + f", recognized by {opened.detected}")
    show(f"  model     {_model_text(opened)}")
    if facts.step is not None:
        show(f"  step      {facts.step}")
    if facts.mesh:
        show(f"  mesh      {facts.mesh}: {facts.mesh.ranks} ranks")
    elif facts.parallel:
        show("  run       " + ", ".join(f"{name} {size}" for name, size in facts.parallel.items()))
    _show_models(opened)
    if index.objects:
        show(f"  other     {plural(len(index.objects), 'object')}, for example {index.objects[0]}")
    for note in facts.notes:
        show(f"  note      {note}")
    show()
    if view.by:
        _show_shares(_shares(opened, view), view)
        return
    show_table(_kind_rows(opened), ("kind", "dtypes", "tensors", "elements", "bytes"))
    _show_quantized(opened)
    for title, tensors in _sections(opened):
        show()
        if title:
            show(title)
        _show_tree(_fold_of(opened, tensors, view), view)
    _show_placements(index.tensors)


def _show_quantized(opened: Checkpoint) -> None:
    """The quantized weights: their shapes in elements, and how they are stored."""
    families = _quantized(opened)
    if not families:
        return
    show()
    rows = [
        (
            family.name,
            family.form,
            shape_text(family.shape),
            family.weights,
            ", ".join(f"{kind} {dtype} {shape_text(shape)}" for kind, dtype, shape in family.stored),
        )
        for family in families
    ]
    show_table(rows, ("quantized weights", "form", "shape", "tensors", "each stored as"))


def _show_answer(opened: Checkpoint, model: str | None) -> None:
    """What it is, whether it is complete, what it can become, and the next command."""
    from reshard.requests.outlook import outlook

    index, facts, found = opened.index, opened.index.facts, outlook(opened, _content(opened))
    dtypes = dict.fromkeys(tensor.dtype.name for tensor in index.tensors if tensor.kind in ("weight", "master"))
    forms = dict.fromkeys(family.form for family in _quantized(opened))
    stored_as = " and ".join(forms) or ", ".join(list(dtypes)[:3])
    what = [_name_of_model(opened.model_files.config or {}) or "unknown model", _size_text(opened) + _experts_text(opened), stored_as]
    ranks = facts.mesh.ranks if facts.mesh else None
    where = (
        f"{index.format}" + (f" of {plural(ranks, 'rank')}" if ranks else "") + (f", step {facts.step}" if facts.step is not None else "")
    )
    show(f"{opened.path}: {', '.join(word for word in what if word)}; {where}")
    size = nbytes_text(sum(file.nbytes for file in index.files))
    stored = f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {size}"
    show(f"  partial   {stored}; {found.problem}" if found.problem else f"  complete  {stored}; no piece of a tensor is missing")
    sizes: dict[tuple[int, ...], list[str]] = {}
    for name, legal in found.engines.items():
        sizes.setdefault(legal, []).append(name)
    if sizes:
        show("  serves    " + "; ".join(f"{', '.join(names)} at TP {', '.join(map(str, legal))}" for legal, names in sizes.items()))
    for question in found.needed:
        show(f"  needed    {question}")
    if command := _next(opened, found, model):
        show(f"  next      {command}")


def _next(opened: Checkpoint, found: Outlook, model: str | None) -> str | None:
    """A command that goes on from here; None if nothing can be proposed. model: what --model was."""
    path, about_model = shlex.quote(opened.path), f" --model {shlex.quote(model)}" if model else ""
    from reshard.adapter import registry
    from reshard.canonical.lora import LoraSettings

    kinds = {tensor.kind for tensor in opened.index.tensors}
    content = _content(opened)
    if found.problem:
        return f"reshard doctor {path}{about_model}"
    if _is_adapter(opened):
        of_peft = f"reshard convert BASE merged --to hf --merge-adapter {path}"
        return of_peft if registry.named(opened.format).holds_adapters else f"reshard convert {path} adapter --to peft{about_model}"
    if len(opened.models) > 1 and not any(each.is_main for each in opened.models):
        return f"reshard convert {path} out --to hf --root {shlex.quote(opened.models[0].root)}"
    if not kinds & {"weight", "master"}:
        return None
    if opened.format in found.engines:
        return f"reshard verify {path}"
    about_model = about_model or (" --model DIR" if opened.model_files.config is None else "")
    if content is not None and content.adapter:
        is_known = LoraSettings(opened.model_files.adapter_config or {}).alpha is not None
        about_model += " --merge-adapter self" + ("" if is_known else " --lora-alpha ALPHA")
    if found.engines:
        engine = "vllm" if "vllm" in found.engines else min(found.engines)
        return f"reshard convert {path} out --to {engine} --tp {max(size for size in found.engines[engine] if size <= 8)}{about_model}"
    return f"reshard convert {path} out --to hf{about_model}"


def _kind_rows(opened: Checkpoint) -> list[tuple[object, ...]]:
    """One row for each kind of tensor, its element types inside, the largest first."""
    from reshard.plans import summary

    kinds: dict[str, list[KindSummary]] = {}
    for row in summary.kinds(opened.index):
        kinds.setdefault(row.kind, []).append(row)
    return [
        (
            kind,
            ", ".join(row.dtype for row in sorted(rows, key=lambda row: -row.nbytes)),
            sum(row.tensors for row in rows),
            sum(row.elements for row in rows),
            nbytes_text(sum(row.nbytes for row in rows)),
        )
        for kind, rows in kinds.items()
    ]


def _sections(opened: Checkpoint) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The tensors of each model, if there are several, with the option that selects it; then all others."""
    tensors, models = opened.index.tensors, opened.models
    if len(models) > 1:
        for found in models:
            prefix = f"{found.root}."
            yield f"{found.root} (--root {shlex.quote(found.root)})", tuple(each for each in tensors if each.name.startswith(prefix))
        tensors = tuple(each for each in tensors if not any(each.name.startswith(f"{found.root}.") for found in models))
    if tensors:
        yield ("tensors of no model" if len(models) > 1 else ""), tensors


def _folded(opened: Checkpoint, view: TreeView) -> Fold:
    return _fold_of(opened, opened.index.tensors, view)


def _fold_of(opened: Checkpoint, tensors: Iterable[Tensor], view: TreeView) -> Fold:
    found = opened.tree if tensors is opened.index.tensors else opened.tree_of(tensors)
    return found.sorted_by_bytes() if view.sort == "bytes" else found


def _rows(tree: Fold, view: TreeView, most: int | None) -> tuple[list[tuple[int, Fold]], int]:
    """The rows of a tree that are shown, and how many are not. Without --depth, as many levels as fit."""
    every = list(tree.walk(view.depth))
    if most is None or len(every) <= most:
        return every, 0
    if view.depth is None:
        for depth in range(max(level for level, _ in every), 0, -1):
            rows = [(level, branch) for level, branch in every if level < depth]
            if len(rows) <= most:
                return rows, len(every) - len(rows)
    return every[:most], len(every) - most


def _branch(level: int, branch: Fold) -> dict[str, Any]:
    from reshard.index.coverage import sharding_text

    first = branch.stored[0] if branch.stored else None
    return {
        "level": level,
        "name": branch.name,
        "alike": len(branch.numbers) or 1,
        "tensors": branch.tensors,
        "elements": branch.elements,
        "bytes": branch.nbytes,
        "kind": first.kind if first else None,
        "dtype": first.dtype.name if first else None,
        "shape": list(first.shape) if first else None,
        "sharding": sharding_text(first) if first else None,
        "state": branch.state or None,
    }


def _show_tree(tree: Fold, view: TreeView) -> None:
    from reshard.index.coverage import sharding_text

    rows, more = _rows(tree, view, view.most)
    cells = []
    for level, branch in rows:
        first = branch.stored[0] if branch.stored else None
        kind = f" ({first.kind})" if first and first.kind != "weight" else ""
        about = (first.dtype.name, shape_text(first.shape), sharding_text(first)) if first else ("", "", "")
        share = bar_text(branch.nbytes / tree.nbytes if tree.nbytes else 0)
        cells.append(("  " * level + branch.name + kind, branch.tensors, *about, branch.state, nbytes_text(branch.nbytes), share))
    has_state = any(branch.state for _, branch in rows)
    show_table(cells, ("tensor", "count", "dtype", "shape", "sharding", "with" if has_state else "", "bytes", ""), optional=(7, 5, 4))
    if more:
        show(f"  and {plural(more, 'row')} more; --limit 0 shows all, --depth N fewer levels")


def _shares(opened: Checkpoint, view: TreeView) -> tuple[ByteShare, ...]:
    from reshard.index.balance import shares

    if view.by is None:
        return ()
    found = shares(opened.index, view.by)
    return tuple(sorted(found, key=lambda share: -share.nbytes)) if view.sort == "bytes" else found


def _show_shares(found: tuple[ByteShare, ...], view: TreeView) -> None:
    from reshard.index.balance import share_rows

    if not found:
        show(f"  the files do not say which {view.by} held what; --by file shows where the bytes are")
        return
    rows = share_rows(found, len(found[: view.most]), bar_text)
    show_table(rows, (str(view.by), "tensors", "bytes", "share", ""), optional=(4,))
    if len(found) > len(rows):
        show(f"  and {len(found) - len(rows):,} more; --limit 0 shows all")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / (whole or 1):.3g} %"


def _adapter(opened: Checkpoint) -> dict[str, Any] | None:
    from reshard.plans import summary

    found = summary.adapter(opened.index)
    if found is None:
        return None
    return {
        "modules": list(found.modules),
        "ranks": list(found.ranks),
        "tensors": found.tensors,
        "parameters": found.parameters,
        "bytes": found.nbytes,
        **{key: (opened.model_files.adapter_config or {}).get(name) for key, name in _ADAPTER_SETTINGS.items()},
    }


# What inspect shows of adapter_config.json, under its own names.
_ADAPTER_SETTINGS = {
    "alpha": "lora_alpha",
    "base_model": "base_model_name_or_path",
    "task_type": "task_type",
    "rslora": "use_rslora",
    "dora": "use_dora",
}


def _show_models(opened: Checkpoint) -> None:
    """The models, where there are several; the adapter, if there is one; and what is not a weight."""
    from reshard.plans import summary

    models = opened.models
    for found in models if len(models) > 1 else ():
        size = f"{plural(found.tensors, 'tensor')}, {plural(found.parameters, 'parameter')}, {nbytes_text(found.nbytes)}"
        show(f"  models    {found.root}: {size}" + (" (the main model)" if found.is_main else f" (--root {found.root})"))
    if adapter := summary.adapter(opened.index):
        ranks = f" of {'rank' if len(adapter.ranks) == 1 else 'ranks'} {' and '.join(map(str, adapter.ranks))}" if adapter.ranks else ""
        size = f"{plural(adapter.tensors, 'tensor')}, {plural(adapter.parameters, 'parameter')}, {nbytes_text(adapter.nbytes)}"
        settings = opened.model_files.adapter_config or {}
        alpha = f", alpha {settings['lora_alpha']}" if settings.get("lora_alpha") is not None else ""
        kinds = "".join(f", {word}" for word, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if settings.get(key))
        base = f" for {settings['base_model_name_or_path']}" if settings.get("base_model_name_or_path") else ""
        show(f"  adapter   LoRA{ranks}{alpha}{kinds}, on {', '.join(adapter.modules)}{base}: {size}")
        merged = "--merge-adapter merges it, in PEFT's form, into its base" if _is_adapter(opened) else "--merge-adapter self merges it"
        show(f"            --to peft writes it alone; {merged}")
    show_drop_reasons(drop for drop in _withheld(opened) if drop.kind not in ("other", "adapter"))


def _show_placements(tensors: tuple[Tensor, ...]) -> None:
    """Every distribution of weights over the mesh, and what it means."""
    by_distribution: dict[Distribution, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.distribution is not None and tensor.kind == "weight":
            by_distribution.setdefault(tensor.distribution, []).append(tensor)
    for distribution, weights in by_distribution.items():
        show()
        others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        show(f"on the mesh {distribution.mesh}: {weights[0].name}{others}")
        show_table(_placement_rows(weights[0]), _PLACEMENT_COLUMNS)


def _placement_rows(tensor: Tensor) -> list[tuple[str, ...]]:
    return [(row["dimension"], row["ranks"], row["placement"], row["meaning"]) for row in _placements(tensor) or ()]


_PLACEMENT_COLUMNS = ("dimension", "ranks", "placement", "meaning")


def _model_text(opened: Checkpoint) -> str:
    text = _size_text(opened)
    config = opened.model_files.config
    if config is None:
        return text + "; no config.json here or in the parent directory (--model DIR gives one)"
    if opened.model is None:
        reason = (
            "engines read it from its hf folder"
            if draft_class(config)
            else "unsupported architecture: only hf and other whole-tensor formats"
        )
        return f"{_name_of_model(config)} ({reason}), {text}"
    d, architecture = opened.model.dimensions, opened.model.architecture
    tied = ", tied head" if opened.model.is_tied else ""
    heads = f"{plural(d['heads'], 'head')} ({d['kv_heads']} KV)"
    sizes = f"{plural(d['layers'], 'layer')}, hidden {d['hidden']}, {heads}, vocabulary {d['vocab']}"
    declared = f", declared by {architecture.declared_in}" if architecture.declared_in else ""
    named = "" if declared or opened.architecture is None else f", read as {architecture.model_type}"
    return f"{_name_of_model(config)}{declared}{named}, {text}: {sizes}{tied}"


def _name_of_model(config: Mapping[str, Any]) -> str | None:
    """What a config calls its model: its type, or the class of a draft model; None if it names neither."""
    from reshard.models.lookup import model_type_of

    draft = draft_class(config)
    return f"draft model {draft}" if draft else model_type_of(config)


def _size_text(opened: Checkpoint) -> str:
    kinds = {tensor.kind for tensor in opened.index.tensors}
    if "weight" in kinds or "master" in kinds:
        return f"{count_text(_parameters(opened))} parameters"
    return "several models" if "other" in kinds else "LoRA adapter without its base model" if "adapter" in kinds else "0 parameters"


def _experts_text(opened: Checkpoint) -> str:
    """The routed experts and the parameters that work on one token, in brackets; empty without experts."""
    found = _experts(opened)
    if found is None:
        return ""
    top = "" if found.per_token is None else f", top {found.per_token}"
    active = "" if found.idle_parameters is None else f"{count_text(_parameters(opened) - found.idle_parameters)} active; "
    return f" ({active}{plural(found.number, 'expert')}{top})"


def _experts_document(opened: Checkpoint) -> dict[str, int | None] | None:
    found = _experts(opened)
    if found is None:
        return None
    active = None if found.idle_parameters is None else _parameters(opened) - found.idle_parameters
    return {"number": found.number, "per_token": found.per_token, "active_parameters": active}


def _experts(opened: Checkpoint) -> ExpertSummary | None:
    """The routed experts, if the checkpoint holds the weights of a model that has some."""
    from reshard.plans import summary

    try:
        return summary.experts(opened.model) if opened.model is not None and _parameters(opened) else None
    except RequestError:  # a config that says nonsense about them; what needs it refuses it
        return None


def _show_tensor(tensor: Tensor) -> None:
    """Who holds which box of a tensor, with a strip for each axis along which it is cut."""
    from reshard.index.coverage import sharding_text
    from reshard.index.shards import primary_rows

    show(f"{tensor.name}  {tensor.kind} {tensor.dtype} {shape_text(tensor.shape)}, {sharding_text(tensor)}, {nbytes_text(tensor.nbytes)}")
    if tensor.distribution is not None:
        show(f"on the mesh {tensor.distribution.mesh}")
        show_table(_placement_rows(tensor), _PLACEMENT_COLUMNS)
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
    show_table(rows, headings)
