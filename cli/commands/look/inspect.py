"""reshard inspect: what is in a checkpoint, from its metadata alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.quantities import plural
from reshard.models.lookup import draft_class
from reshard.models.quantization import unknown_quantization

from ... import options
from ...json_output import show_json
from ...plans import show_drops
from ...runs import run_document, show_bare_model, show_run
from ...tables import bar_text, count_text, nbytes_text, shape_text, show, show_table, strip_text
from .inspection import PLACEMENT_COLUMNS, Inspection, TreeView, name_of_model, placements

if TYPE_CHECKING:
    from reshard.canonical.dequantization import QuantizedFamily
    from reshard.geometry.meshes import Distribution
    from reshard.index.balance import ByteShare
    from reshard.index.fold import Fold
    from reshard.index.index import Tensor
    from reshard.opening.checkpoint import Checkpoint
    from reshard.opening.run_folders import Step
    from reshard.plans.summary import KindSummary

# Files of a checkpoint that cannot be opened.
_FILES_SHOWN = 20


@options.command(
    "inspect",
    "reshard inspect step-1000",
    "reshard inspect step-1000 --tensor '*q_proj*'",
    "reshard inspect step-1000 --by rank --sort bytes",
    "reshard inspect runs/7 --step latest",
)
@options.checkpoint("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--tensor", "globs", multiple=True, metavar="GLOB", help="Show who holds which box of the tensors whose names match.")
@click.option("--by", type=click.Choice(["kind", "rank", "file", "dtype", "layer"]), help="Show the bytes of each instead of the tree.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Show N levels of the tree (default: as many as --limit allows).")
@click.option("--sort", type=click.Choice(["model", "bytes"]), default="model", show_default=True, help="The order of the rows.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows; 0: all (default: 50 on a terminal, else all).")
@options.format_name
@options.model
@options.page
@options.summary_or_full
def command(checkpoints: tuple[str, ...], globs: tuple[str, ...], as_json: bool, full: bool, **given: Any) -> None:
    """Show what each CHECKPOINT is, whether it is complete, what it can become, and what it holds. No weight is read.

    If CHECKPOINT is the folder of a run or of models, list the checkpoints in it, at any depth, and which of them are complete.
    """
    page = options.page_of(given)
    view = TreeView(**{name: given.pop(name) for name in ("by", "depth", "sort", "limit")})
    if len(checkpoints) > 1 and page.path is not None:
        raise RequestError("--html draws one checkpoint", do=f"Give one of the {len(checkpoints)}, or leave --html out")
    documents = []
    for number, checkpoint in enumerate(checkpoints):
        if number and not as_json:
            show()
        documents.append(_inspected(checkpoint, view, page, globs, as_json=as_json, full=full, given=given))
    if as_json:
        show_json(documents[0] if len(documents) == 1 else {"checkpoints": documents})


def _inspected(
    checkpoint: str, view: TreeView, page: options.PageOptions, globs: tuple[str, ...], *, as_json: bool, full: bool, given: dict[str, Any]
) -> Mapping[str, Any]:
    """Show one checkpoint, or the checkpoints of a folder. Returns what is known of it, if it is not shown but asked for with --json."""
    import reshard
    from reshard.canonical.globs import check_globs, matches
    from reshard.opening.run_folders import run_at
    from reshard.storage.system_calls import gc_paused

    run = run_at(checkpoint) if given["format"] is None else None
    if run is not None:
        return _listed(checkpoint, run.checkpoints(), as_json=as_json)
    with gc_paused():  # a hundred thousand tensors are many objects, and none of them is garbage
        try:
            opened = Inspection(reshard.open(checkpoint, **given), view)
        except CheckpointError:
            if not as_json:
                _show_files(checkpoint)
            raise
        except RequestError as error:
            if (steps := _steps_of(error)) is not None:
                return _listed(checkpoint, steps, as_json=as_json)
            if as_json or error.id != "not-found" or not _is_model_alone(checkpoint):
                raise
            show_bare_model(checkpoint)
            return {}
        tensors = list(opened.tensors)
        if globs:
            check_globs("--tensor", globs, dict.fromkeys(tensor.name for tensor in tensors))
            tensors = [tensor for tensor in tensors if matches(tensor.name, globs)]
        following = opened.next(given.get("model"))
        drawn = tensors if globs else []
        page.write(lambda pages: pages.checkpoint_page(opened.checkpoint, opened.outlook, drawn, opened.headline, following))
        if as_json:
            return opened.document(tensors if full or globs else None)
        if globs:
            for tensor in tensors:
                _show_tensor(tensor)
        else:
            _show_checkpoint(opened, given.get("model"))
    return {}


def _listed(folder: str, steps: Sequence[Step], *, as_json: bool) -> Mapping[str, Any]:
    from reshard.requests.lost_files import with_lost_files

    found = with_lost_files(steps)
    if as_json:
        return run_document(folder, found)
    show_run(folder, found)
    return {}


def _is_model_alone(path: str) -> bool:
    """Whether a path is a model's config, or a folder with a config and no weights."""
    from reshard.opening.models import is_bare

    try:
        return is_bare(path)
    except ReshardError:
        return False


def _steps_of(error: RequestError) -> Sequence[Step] | None:
    """The checkpoints among which nothing was chosen, if that is the error."""
    from reshard.opening.choice import SeveralCheckpoints

    return error.steps if isinstance(error, SeveralCheckpoints) else None


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
    show(f"{path}: {name_of_model(config) or 'unknown model'}; {format.name}, incomplete or damaged; {stored} are here")
    shown = list(sizes.items())[:_FILES_SHOWN]
    show_table([(found, nbytes_text(nbytes)) for found, nbytes in shown], ("file", "bytes"))
    if len(sizes) > len(shown):
        show(f"  and {len(sizes) - len(shown):,} more")


def _show_checkpoint(opened: Inspection, model: str | None) -> None:
    index, facts, view = opened.index, opened.facts, opened.view
    _show_answer(opened, model)
    producer = " ".join(word for word in (facts.producer, facts.version) if word)
    show(f"  format    {index.format}" + (f" ({producer})" if producer else "") + f", recognized by {opened.checkpoint.detected}")
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
        _show_shares(opened.shares, view)
        return
    show_table(list(_kind_rows(opened.checkpoint)), ("kind", "dtypes", "tensors", "elements", "bytes"))
    _show_quantized(opened.quantized)
    sections, distributions = list(_sections(opened.checkpoint)), _distributions(opened.tensors)
    below = sum(3 + len(distribution.mesh.names) for distribution in distributions)
    for number, (title, tree) in enumerate(sections):
        show()
        if title:
            show(title)
        _show_tree(tree, view, below + 6 * (len(sections) - number - 1))
    _show_distributions(distributions)


def _show_quantized(families: tuple[QuantizedFamily, ...]) -> None:
    """The quantized weights: their shapes in elements, and how they are stored."""
    rows = []
    for family in families:
        stored = ", ".join(f"{kind} {dtype} {shape_text(shape)}" for kind, dtype, shape in family.stored)
        rows.append((family.name, family.form, shape_text(family.shape), family.weights, stored))
    if rows:
        show()
        show_table(rows, ("quantized weights", "form", "shape", "tensors", "each stored as"))


def _show_answer(opened: Inspection, model: str | None) -> None:
    """What it is, whether it is complete, what it can become, and the next command."""
    index, facts, found = opened.index, opened.facts, opened.outlook
    what = [name_of_model(opened.config or {}) or "unknown model", _size_text(opened) + _experts_text(opened), opened.stored_as]
    ranks = f" of {plural(facts.mesh.ranks, 'rank')}" if facts.mesh and facts.mesh.ranks else ""
    where = index.format + ranks + (f", step {facts.step}" if facts.step is not None else "")
    show(f"{opened.checkpoint.path}: {', '.join(word for word in what if word)}; {where}")
    stored = f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {nbytes_text(opened.nbytes)}"
    show(f"  partial   {stored}; {found.problem}" if found.problem else f"  complete  {stored}; no piece of a tensor is missing")
    sizes: dict[tuple[int, ...], list[str]] = {}
    for name, legal in found.engines.items():
        sizes.setdefault(legal, []).append(name)
    if sizes:
        show("  serves    " + "; ".join(f"{', '.join(names)} at TP {', '.join(map(str, legal))}" for legal, names in sizes.items()))
    for question in found.needed:
        show(f"  needed    {question}")
    if following := opened.next(model):
        show(f"  next      {following}")


def _kind_rows(opened: Checkpoint) -> Iterator[tuple[object, ...]]:
    """One row for each kind of tensor, its element types inside, the largest first."""
    from reshard.plans import summary

    kinds: dict[str, list[KindSummary]] = {}
    for row in summary.kinds(opened.index):
        kinds.setdefault(row.kind, []).append(row)
    for kind, rows in kinds.items():
        dtypes = ", ".join(row.dtype for row in sorted(rows, key=lambda row: -row.nbytes))
        nbytes = nbytes_text(sum(row.nbytes for row in rows))
        yield kind, dtypes, sum(row.tensors for row in rows), sum(row.elements for row in rows), nbytes


def _sections(opened: Checkpoint) -> Iterator[tuple[str, Fold]]:
    """The tensors of each model, if there are several, with the option that selects it; then all others."""
    tensors, models = opened.index.tensors, opened.models
    if len(models) < 2:
        if tensors:
            yield "", opened.tree
        return
    for found in models:
        own = (each for each in tensors if each.name.startswith(f"{found.root}."))
        yield f"{found.root} (--root {shlex.quote(found.root)})", opened.tree_of(own)
    if others := [each for each in tensors if not any(each.name.startswith(f"{found.root}.") for found in models)]:
        yield "tensors of no model", opened.tree_of(others)


def _show_tree(tree: Fold, view: TreeView, below: int) -> None:
    from reshard.index.coverage import sharding_text

    rows, more = view.rows(tree, view.most(below))
    cells = []
    for level, branch in rows:
        first = branch.stored[0] if branch.stored else None
        kind = f" ({first.kind})" if first and first.kind != "weight" else ""
        about = (first.dtype.name, shape_text(first.shape), sharding_text(first)) if first else ("", "", "")
        share = bar_text(branch.nbytes / tree.nbytes if tree.nbytes else 0)
        cells.append(("  " * level + branch.name + kind, branch.count, *about, branch.state, nbytes_text(branch.nbytes), share))
    has_state = any(branch.state for _, branch in rows)
    show_table(cells, ("tensor", "count", "dtype", "shape", "sharding", "with" if has_state else "", "bytes", ""), optional=(5, 7, 4))
    if more:
        show(f"  and {plural(more, 'row')} more; --limit 0 shows all, --depth N fewer levels")


def _show_shares(found: tuple[ByteShare, ...], view: TreeView) -> None:
    from reshard.index.balance import share_rows

    if not found:
        show(f"  the files do not say which {view.by} held what; --by file shows where the bytes are")
        return
    rows = share_rows(found, len(found[: view.most()]), bar_text)
    show_table(rows, (str(view.by), "tensors", "bytes", "share", ""), optional=(4,))
    if len(found) > len(rows):
        show(f"  and {len(found) - len(rows):,} more; --limit 0 shows all")


def _show_models(opened: Inspection) -> None:
    """The models, where there are several; the adapter, if there is one; and what is not a weight."""
    from reshard.plans import summary

    models, settings = opened.checkpoint.models, opened.adapter_config
    for found in models if len(models) > 1 else ():
        size = f"{plural(found.tensors, 'tensor')}, {plural(found.parameters, 'parameter')}, {nbytes_text(found.nbytes)}"
        show(f"  models    {found.root}: {size}" + (" (the main model)" if found.is_main else f" (--root {found.root})"))
    if adapter := summary.adapter(opened.index):
        ranks = f" of {'rank' if len(adapter.ranks) == 1 else 'ranks'} {' and '.join(map(str, adapter.ranks))}" if adapter.ranks else ""
        size = f"{plural(adapter.tensors, 'tensor')}, {plural(adapter.parameters, 'parameter')}, {nbytes_text(adapter.nbytes)}"
        alpha = f", alpha {settings['lora_alpha']}" if settings.get("lora_alpha") is not None else ""
        kinds = "".join(f", {word}" for word, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if settings.get(key))
        base = f" for {settings['base_model_name_or_path']}" if settings.get("base_model_name_or_path") else ""
        show(f"  adapter   LoRA{ranks}{alpha}{kinds}, on {', '.join(adapter.modules)}{base}: {size}")
        merged = "--merge-adapter merges it into its base" if opened.is_adapter else "--merge-adapter self merges it"
        show(f"            --to peft writes it alone; {merged}")
    show_drops(drop for drop in opened.withheld if drop.kind not in ("other", "adapter"))


def _distributions(tensors: tuple[Tensor, ...]) -> dict[Distribution, list[Tensor]]:
    """The weights of each distribution over the mesh."""
    found: dict[Distribution, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.distribution is not None and tensor.kind == "weight":
            found.setdefault(tensor.distribution, []).append(tensor)
    return found


def _show_distributions(found: dict[Distribution, list[Tensor]]) -> None:
    """Every distribution of weights over the mesh, and what it means."""
    for distribution, weights in found.items():
        show()
        others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        show(f"on the mesh {distribution.mesh}: {weights[0].name}{others}")
        show_table(placements(weights[0]), PLACEMENT_COLUMNS)


def _model_text(opened: Inspection) -> str:
    text, model, config = _size_text(opened), opened.checkpoint.sized_model, opened.config
    if config is None:
        return text + "; no config.json here or in the parent directory (--model DIR gives one)"
    if model is None:
        method = unknown_quantization(config)
        unknown = f"quantized ({method}) with a method that is not known" if method else "not declared: serving engines need --learn"
        reason = "engines read it from its hf folder" if draft_class(config) else opened.checkpoint.config_problem or unknown
        return f"{name_of_model(config)} ({reason}), {text}"
    d, architecture = model.dimensions, model.architecture
    heads = plural(d["heads"], "head") + (f" ({d['kv_heads']} KV)" if "kv_heads" in d else "")
    sizes = f"{plural(d['layers'], 'layer')}, hidden {d['hidden']}, {heads}, vocabulary {d['vocab']}"
    declared = f", declared by {architecture.declared_in}" if architecture.declared_in else ""
    named = "" if declared or opened.checkpoint.architecture is None else f", read as {architecture.model_type}"
    return f"{name_of_model(config)}{declared}{named}, {text}: {sizes}{', tied head' if model.is_tied else ''}"


def _size_text(opened: Inspection) -> str:
    kinds = {tensor.kind for tensor in opened.tensors}
    if "weight" in kinds or "master" in kinds:
        return f"{count_text(opened.parameters)} {opened.parameters_name}"
    return "several models" if "other" in kinds else "LoRA adapter without its base model" if "adapter" in kinds else "no weights"


def _experts_text(opened: Inspection) -> str:
    """The routed experts and the parameters that work on one token, in brackets; empty without experts."""
    if (found := opened.experts) is None:
        return ""
    top = "" if found.per_token is None else f", top {found.per_token}"
    active = "" if opened.active_parameters is None else f"{count_text(opened.active_parameters)} active; "
    return f" ({active}{plural(found.number, 'expert')}{top})"


def _show_tensor(tensor: Tensor) -> None:
    """Who holds which box of a tensor, with a strip for each axis along which it is cut."""
    from reshard.index.coverage import sharding_text
    from reshard.index.shards import primary_rows

    show(f"{tensor.name}  {tensor.kind} {tensor.dtype} {shape_text(tensor.shape)}, {sharding_text(tensor)}, {nbytes_text(tensor.nbytes)}")
    if tensor.distribution is not None:
        show(f"on the mesh {tensor.distribution.mesh}")
        show_table(placements(tensor), PLACEMENT_COLUMNS)
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
