"""reshard inspect: what is in a checkpoint, from its metadata alone."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.documents import document, to_json
from reshard.pages.sections import TreeView

from ... import options
from ...replies import Output, Reply, Streamed, show_sections
from ...runs import pipeline_reply, run_reply
from ...tables import show
from .following import following

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.index.fold import Fold
    from reshard.index.index import Tensor
    from reshard.opening.run_folders import Step
    from reshard.verbs.look.inspection import Inspection

# Rows of the tree in a document that is not --full.
_MOST_ROWS = 1000
# What inspect shows of adapter_config.json, under its own names.
_ADAPTER_SETTINGS = {
    "alpha": "lora_alpha",
    "base_model": "base_model_name_or_path",
    "task_type": "task_type",
    "rslora": "use_rslora",
    "dora": "use_dora",
}


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
def command(checkpoints: tuple[str, ...], globs: tuple[str, ...], full: bool, **given: Any) -> Reply | None:
    """Show what each CHECKPOINT is, whether it is complete, what it can become, and what it holds. No weight is read.

    If CHECKPOINT is the folder of a run or of models, list the checkpoints in it, at any depth, and which of them are complete; if it is a
    diffusers pipeline, its components.
    """
    from reshard.storage.system_calls import gc_paused

    output, view = Output.current(), TreeView(**{name: given.pop(name) for name in ("by", "depth", "sort", "limit")})
    if len(checkpoints) > 1 and output.page is not None:
        raise RequestError("--html draws one checkpoint", do=f"Give one of the {len(checkpoints)}, or leave --html out")
    # A hundred thousand tensors are many objects, and none of them is garbage.
    click.get_current_context().with_resource(gc_paused())
    replies = (_inspected(checkpoint, view, globs, full, given) for checkpoint in checkpoints)
    if len(checkpoints) == 1:
        return next(replies)
    if output.as_json:
        return Reply({"checkpoints": [reply.as_document() for reply in replies]}, ())
    for number, reply in enumerate(replies):
        if number:
            show()
        output.show(reply)
    return None


def _inspected(checkpoint: str, view: TreeView, globs: tuple[str, ...], full: bool, given: dict[str, Any]) -> Reply:
    """What is known of one checkpoint, or the checkpoints of a folder."""
    import reshard
    from reshard.canonical.globs import check_globs, matches
    from reshard.opening.choice import SeveralCheckpoints
    from reshard.opening.pipelines import pipeline_at
    from reshard.opening.run_folders import run_at
    from reshard.pages.checkpoints import checkpoint_sections
    from reshard.pages.folders import damaged_sections
    from reshard.verbs.look.inspection import Inspection

    if pipeline := pipeline_at(checkpoint, given):
        _refuse_ignored("a pipeline lies here", "Choose a component with --component NAME")
        return pipeline_reply(pipeline)
    run, as_json = run_at(checkpoint) if given["format"] is None else None, Output.current().as_json
    if run is not None:
        _refuse_ignored(*_those(steps := run.checkpoints()))
        return run_reply(checkpoint, steps)
    try:
        opened = Inspection(reshard.open(checkpoint, **given))
    except CheckpointError:
        if not as_json:
            show_sections(damaged_sections(checkpoint))
        raise
    except SeveralCheckpoints as error:
        _refuse_ignored(*_those(error.steps))
        return run_reply(checkpoint, error.steps)
    except RequestError as error:
        if as_json or error.id != "not-found" or not _is_model_alone(checkpoint):
            raise
        return _bare_model(checkpoint)
    tensors = list(opened.tensors)
    if globs:
        check_globs("--tensor", globs, dict.fromkeys(tensor.name for tensor in tensors))
        tensors = [tensor for tensor in tensors if matches(tensor.name, globs)]
    return Reply(
        partial(_document, opened, view, tensors if full or globs else None),
        checkpoint_sections(opened, view, following(opened, given.get("model")), tensors if globs else None),
    )


# What is said of one checkpoint, and not of a list of several.
_OF_ONE = ("globs", "by", "depth", "sort", "limit", "model", "model_wins", "vocab_size", "architecture")


def _those(steps: Sequence[Step]) -> tuple[str, str]:
    """What lies there in place of one checkpoint, and how to choose one."""
    if len(steps) > 1:
        return "several lie here", "Choose one, such as with --step latest or by its path"
    return "a run lies here", f"Give {steps[0].path}"


def _refuse_ignored(there: str, do: str) -> None:
    """Raises RequestError if an option is given that has no meaning for a list of checkpoints."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in _OF_ONE and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise RequestError(f"{param.opts[0]} is for one checkpoint, and {there}", do=f"{do}, or leave the option out")


def _is_model_alone(path: str) -> bool:
    """Whether a path is a model's config, or a folder with a config and no weights."""
    from reshard.opening.models import is_bare

    try:
        return is_bare(path)
    except ReshardError:
        return False


def _bare_model(path: str) -> Reply:
    """The model of a config. Raises: RequestError if its architecture is not declared."""
    from reshard.opening.models import model_at
    from reshard.pages.folders import bare_model_sections
    from reshard.requests.outlook import engine_sizes

    model = model_at(path)
    engines = engine_sizes(model)
    engine = "vllm" if "vllm" in engines else min(engines, default=None)
    return Reply({}, bare_model_sections(path, model, engines, engine and f"reshard degrees {shlex.quote(path)} --to {engine}"))


def _document(opened: Inspection, view: TreeView, tensors: list[Tensor] | None) -> dict[str, Any]:
    """What is known, with stable keys. tensors: those that are described one by one."""
    from reshard.index.balance import shares
    from reshard.models.lookup import model_type_of
    from reshard.plans import summary

    mesh, experts, adapter = opened.facts.mesh, opened.experts, summary.adapter(opened.index)
    divided = shares(opened.index, view.by) if view.by else ()
    settings = {key: opened.adapter_config.get(name) for key, name in _ADAPTER_SETTINGS.items()}
    inspected = document(
        opened,
        model_type=model_type_of(opened.config or {}),
        architecture_known=opened.checkpoint.model is not None,
        experts=experts and document(experts, active_parameters=opened.active_parameters),
        kinds=summary.kinds(opened.index),
        quantized=[
            document(form, stored=[dict(zip(("name", "dtype", "shape"), s, strict=True)) for s in form.stored]) for form in opened.quantized
        ],
        adapter=adapter and {**document(adapter), **settings},
        tensor_count=len(opened.tensors),
        withheld_count=len(opened.withheld),
        object_count=len(opened.index.objects),
        mesh=[{"dimension": name, "ranks": size} for name, size in zip(mesh.names, mesh.sizes, strict=True)] if mesh else None,
        outlook=document(opened.outlook, next=following(opened, None)),
        tree=[_branch(level, branch) for level, branch in view.rows(opened.checkpoint.tree, _MOST_ROWS)[0]],
        shares=sorted(divided, key=lambda share: -share.nbytes) if view.sort == "bytes" else divided,
    )
    every = {"withheld": to_json(opened.withheld), "objects": list(opened.index.objects)}
    return inspected if tensors is None else {**inspected, "tensors": Streamed(_tensor, tensors), **every}


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
        "kind": first and first.kind,
        "dtype": first and first.dtype.name,
        "shape": first and list(first.shape),
        "sharding": first and sharding_text(first),
        "state": branch.state or None,
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    from reshard.index.coverage import sharding_text
    from reshard.index.shards import primary_rows
    from reshard.pages.checkpoints import PLACEMENT_COLUMNS, placements

    shards, primary = tensor.shards, primary_rows(tensor.shards)
    ranks = shards.ranks.tolist() if shards.ranks is not None else [None] * len(shards)
    pieces = [
        {"file": shards.path(i), "offsets": offsets, "sizes": sizes, "replica": not primary[i], "rank": ranks[i]}
        for i, (offsets, sizes) in enumerate(zip(shards.offsets.tolist(), shards.sizes.tolist(), strict=True))
    ]
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "sharding": sharding_text(tensor),
        "pieces": pieces,
        "placements": [dict(zip(PLACEMENT_COLUMNS, row, strict=True)) for row in placements(tensor)] if tensor.distribution else None,
    }
