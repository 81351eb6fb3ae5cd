"""reshard inspect: what is in a checkpoint, from its metadata alone."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural

from .. import options
from ..json_output import show_json
from ..plans import show_drop_reasons
from ..tables import count_text, nbytes_text, shape_text, show, table

if TYPE_CHECKING:
    from reshard.canonical.content import Content, Drop
    from reshard.geometry.meshes import Distribution, Mesh
    from reshard.index.index import Tensor
    from reshard.verbs.checkpoint import Checkpoint


@click.command("inspect", cls=options.Command, examples=["reshard inspect step-1000", "reshard inspect step-1000 --tensor '*q_proj*'"])
@click.argument("checkpoint")
@click.option("--tensor", "globs", multiple=True, metavar="GLOB", help="Show the boxes of tensors whose names match.")
@options.format_name
@options.model
@options.summary_or_full
def command(checkpoint: str, globs: tuple[str, ...], as_json: bool, full: bool, **given: Any) -> None:
    """Show what CHECKPOINT holds, and where each part lies. No weight is read."""
    import reshard
    from reshard.canonical.globs import check_globs, matches

    opened = reshard.open(checkpoint, **given)
    check_globs("--tensor", globs, dict.fromkeys(tensor.name for tensor in opened.index.tensors))
    tensors = [tensor for tensor in opened.index.tensors if not globs or matches(tensor.name, globs)]
    if as_json:
        show_json(document(opened, tensors if full or globs else None))
    elif globs:
        for tensor in tensors:
            _show_tensor(tensor)
    else:
        _show_checkpoint(opened)


def document(opened: Checkpoint, tensors: list[Tensor] | None) -> dict[str, Any]:
    """What is known about a checkpoint, with stable keys. tensors: those that are described one by one."""
    from reshard.models.lookup import model_type_of
    from reshard.plans import summary

    index, model = opened.index, opened.model
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
        "bytes": sum(file.nbytes for file in index.files),
        "files": [{"path": file.path, "bytes": file.nbytes} for file in index.files],
        "kinds": [
            {"kind": row.kind, "dtype": row.dtype, "tensors": row.tensors, "elements": row.elements, "bytes": row.nbytes}
            for row in summary.kinds(index)
        ],
        "models": [
            {
                "root": found.root,
                "main": found.is_main,
                "tensors": found.tensors,
                "parameters": found.parameters,
                "bytes": found.nbytes,
            }
            for found in opened.models
        ],
        "adapter": _adapter(opened),
        "tensor_count": len(index.tensors),
        "withheld_count": len(_withheld(opened)),
        "object_count": len(index.objects),
        "notes": list(index.facts.notes),
        "mesh": _mesh(index.facts.mesh),
        **({} if tensors is None else _details(opened, tensors)),
    }


def _details(opened: Checkpoint, tensors: list[Tensor]) -> dict[str, Any]:
    """What a summary leaves out."""
    return {
        "tensors": [_tensor(tensor) for tensor in tensors],
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
    from reshard.errors import ReshardError

    try:
        return opened.content()
    except ReshardError:
        return None


def _parameters(opened: Checkpoint) -> int:
    from reshard.plans import summary

    content = _content(opened)
    return summary.parameter_count(content) if content else 0


def _withheld(opened: Checkpoint) -> tuple[Drop, ...]:
    content = _content(opened)
    return content.withheld if content else ()


def _show_checkpoint(opened: Checkpoint) -> None:
    from reshard.plans import summary

    index, facts = opened.index, opened.index.facts
    show(opened.path)
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
    show(f"  files     {len(index.files)}, {nbytes_text(sum(file.nbytes for file in index.files))}")
    if index.objects:
        show(f"  other     {plural(len(index.objects), 'object')}, for example {index.objects[0]}")
    for question in facts.unanswered:
        show(f"  needed    {question}")
    for note in facts.notes:
        show(f"  note      {note}")
    show()
    rows = [(row.kind, row.dtype, row.tensors, row.elements, nbytes_text(row.nbytes)) for row in summary.kinds(index)]
    show(table(rows, ("kind", "dtype", "tensors", "elements", "bytes")))
    show()
    groups = summary.groups(index.tensors)
    named = [(g.name, g.count, g.kind, g.dtype, shape_text(g.shape), g.sharding, g.state) for g in groups]
    show(table(named, ("tensor", "count", "kind", "dtype", "shape", "sharding", "with" if any(g.state for g in groups) else "")))
    _show_placements(index.tensors)


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
    }


def _show_models(opened: Checkpoint) -> None:
    """The models, where there are several; the adapter, if there is one; and what is not a weight."""
    from reshard.plans import summary

    models = opened.models
    for found in models if len(models) > 1 else ():
        size = f"{plural(found.tensors, 'tensor')}, {plural(found.parameters, 'parameter')}, {nbytes_text(found.nbytes)}"
        show(f"  models    {found.root}: {size}" + (" (the main model)" if found.is_main else f" (--root {found.root})"))
    if adapter := summary.adapter(opened.index):
        rank = f" r={', '.join(map(str, adapter.ranks))}" if adapter.ranks else ""
        size = f"{plural(adapter.tensors, 'tensor')}, {plural(adapter.parameters, 'parameter')}, {nbytes_text(adapter.nbytes)}"
        show(f"  adapter   LoRA{rank} on {', '.join(adapter.modules)}: {size}; conversions do not merge it")
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
        show(table(_placement_rows(weights[0]), _PLACEMENT_COLUMNS))


def _placement_rows(tensor: Tensor) -> list[tuple[str, ...]]:
    return [(row["dimension"], row["ranks"], row["placement"], row["meaning"]) for row in _placements(tensor) or ()]


_PLACEMENT_COLUMNS = ("dimension", "ranks", "placement", "meaning")


def _model_text(opened: Checkpoint) -> str:
    from reshard.models.lookup import model_type_of

    text = _size_text(opened)
    config = opened.model_files.config
    if config is None:
        return text + "; no config.json here or in the parent directory (--model DIR gives one)"
    if opened.model is None:
        return f"{model_type_of(config)} (unsupported architecture: only hf and other whole-tensor formats), {text}"
    d, architecture = opened.model.dimensions, opened.model.architecture
    tied = ", tied head" if opened.model.is_tied else ""
    sizes = f"{d['layers']} layers, hidden {d['hidden']}, {d['heads']} heads ({d['kv_heads']} KV), vocabulary {d['vocab']}"
    declared = f", declared by {architecture.declared_in}" if architecture.declared_in else ""
    named = "" if declared or opened.architecture is None else f", read as {architecture.model_type}"
    return f"{model_type_of(config)}{declared}{named}, {text}: {sizes}{tied}"


def _size_text(opened: Checkpoint) -> str:
    kinds = {tensor.kind for tensor in opened.index.tensors}
    if "weight" in kinds or "master" in kinds:
        return f"{count_text(_parameters(opened))} parameters"
    return "several models" if "other" in kinds else "LoRA adapter without its base model" if "adapter" in kinds else "0 parameters"


def _show_tensor(tensor: Tensor) -> None:
    from reshard.index.coverage import sharding_text
    from reshard.index.shards import primary_rows

    show(f"{tensor.name}  {tensor.kind} {tensor.dtype} {shape_text(tensor.shape)}, {sharding_text(tensor)}, {nbytes_text(tensor.nbytes)}")
    if tensor.distribution is not None:
        show(f"on the mesh {tensor.distribution.mesh}")
        show(table(_placement_rows(tensor), _PLACEMENT_COLUMNS))
    primary, ranks = primary_rows(tensor.shards), tensor.shards.ranks
    rows = []
    for i, piece in enumerate(tensor.pieces()):
        kind = "empty" if not piece.box.volume else "" if primary[i] else "replica"
        rank = "" if ranks is None else int(ranks[i])
        rows.append((rank, str(piece.box), piece.extent.path, piece.extent.byte_offset, shape_text(piece.extent.strides), kind))
    show(table(rows, ("rank" if ranks is not None else "", "box", "file", "byte offset", "strides", "")))
