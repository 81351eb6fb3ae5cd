"""The index of the ranks' runs of flat parameters, with the names and shapes of the model's config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import RankFiles, check_missing_ranks, notes_on_missing_ranks, run_files
from reshard.adapter.save_folders import step_of
from reshard.adapter.state_dicts import FLAT, model_part
from reshard.canonical.renaming import unwrapped
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, IncompleteError, RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.value import value
from reshard.index.index import Index, RunFacts
from reshard.models.model import Model
from reshard.storage.files import Files

from .flat_parameters import FlatParameter, FlatRun, Shape, Slot, find_slots
from .optimizer import add_optimizer


class NamedPart(NamedTuple):
    """What one rank's file holds under a tensor's own name."""

    rank: int
    path: str
    stored: AnyTensor


@value
class ModelContent:
    """The content of all ranks' files with the model."""

    elements: dict[str, int] = field(default_factory=dict)
    """Unit ("", "layers.0.", ...) -> length of its flat parameter."""
    runs: dict[str, list[FlatRun]] = field(default_factory=dict)
    """Unit -> the runs of its flat parameter."""
    named: dict[str, list[NamedPart]] = field(default_factory=dict)
    """Name -> the parts of a tensor that is kept under its own name."""
    objects: list[str] = field(default_factory=list)
    """The names of everything that is not a tensor."""


def read(files: Files, hints: Hints) -> Index:
    """The index of the ranks' files in a folder.

    Raises: RequestError without the model's config; CheckpointError if the config does not fit, or elements of a parameter are lost.
    """
    run = run_files(files)
    if run.model is None:
        raise IncompleteError("there is no file of a rank with the model's flat parameters", where=files.root)
    shapes = declared_shapes(_declared_model(hints, run.model.first))
    builder = IndexBuilder("fsdp-local", files)
    builder.add_files(run.paths())
    content = read_model_files(files, run.model)
    builder.add_objects(content.objects)
    named = named_parameters(content.named, shapes)
    add_named(builder, content.named, named)
    flats = named or unit_parameters(content, shapes, ranks=max(run.model.paths) + 1)
    if not named:
        add_weights(builder, flats)
    if run.optimizer:
        add_optimizer(builder, run.optimizer, flats, has_names=bool(named))
    ranks = run.rank_count(1)
    builder.add_notes(notes_on_missing_ranks(run, ranks))
    index = builder.build(RunFacts("FSDP1 (LOCAL_STATE_DICT)", None, step_of(files.root), {"ranks": ranks}, hints.config))
    check_missing_ranks(run, ranks, index.tensors)
    return index


def _declared_model(hints: Hints, path: str) -> Model:
    """The model whose config was given. Raises RequestError without one."""
    if hints.model is None:
        unknown = (
            "no config.json is known" if hints.config is None else f"the architecture {hints.config.get('model_type')!r} is not declared"
        )
        raise RequestError(
            f"the file holds flat parameters, and {unknown}",
            where=path,
            why="LOCAL_STATE_DICT keeps the elements of many weights in one row, without their names, shapes and order",
            do="Give the model's config with `model=DIR` and, if it is not declared, `architecture=FILE`; or save with SHARDED_STATE_DICT, "
            "which keeps names and shapes",
        )
    return hints.model


def declared_shapes(model: Model) -> dict[str, Shape]:
    """The shapes of the model's weights. A tied head is left out: the flat parameter holds tied weights once, under the first name."""
    tied_head = model.architecture.tied[0] if model.is_tied else None
    return {name: weight.shape for name, weight in model.weights.items() if name != tied_head}


def read_model_files(files: Files, rank_files: RankFiles) -> ModelContent:
    """The content of all ranks' files with the model. Raises CheckpointError if two files disagree on a flat parameter's length."""
    content = ModelContent()
    for rank, path in rank_files.paths.items():
        model, other_keys = model_part(torch_zip.read(files, path, locate=False))
        content.objects.extend(other_keys)
        decoder = Decoder(path)
        for key, value in (model or {}).items():
            name, local = unwrapped(str(key)), decoder.decode(str(key), value)
            if local is None:
                content.objects.append(name)
            elif name.endswith(FLAT):
                unit, length = name.removesuffix(FLAT), math.prod(local.shape)
                _check_length(local, content.elements.setdefault(unit, length), f"{name} in {path}")
                runs = (FlatRun(rank, path, box.offsets[0], box.sizes[0], stored) for box, stored in local.shards)
                content.runs.setdefault(unit, []).extend(runs)
            else:
                content.named.setdefault(name, []).extend(NamedPart(rank, path, stored) for _, stored in local.shards)
    return content


def _check_length(local: LocalTensor, elements: int, where: str) -> None:
    if len(local.shape) != 1 or local.shape[0] != elements:
        raise CheckpointError(
            f"the flat parameter has the shape {list(local.shape)}, in an earlier file {elements:,} elements",
            where=where,
            why="The files are from different runs",
            do="Keep the files of one save only",
        )


def named_parameters(named: Mapping[str, Sequence[NamedPart]], shapes: Mapping[str, Shape]) -> dict[str, FlatParameter]:
    """The parameters that the ranks keep in runs under their own names, as use_orig_params does. Other tensors are whole on every rank.

    Raises: CheckpointError if the config does not have such a parameter, or a smaller shape for it.
    """
    flats: dict[str, FlatParameter] = {}
    for name, parts in named.items():
        shape = shapes.get(name)
        if shape is None and len({part.stored.shape for part in parts}) > 1:
            raise CheckpointError(
                "every rank holds a run of it, but the config has no such weight",
                where=name,
                why="Only the config tells its shape, so the config is of another model",
                do="Give the config that the model was trained with by `model=DIR`",
            )
        if shape is not None and not _is_whole_on_every_rank(parts, shape):
            flats[name] = _in_order_of_ranks(name, shape, parts)
    return flats


def _is_whole_on_every_rank(parts: Sequence[NamedPart], shape: Shape) -> bool:
    """Whether several ranks hold a tensor, and each holds all of it."""
    return all(part.stored.shape == shape for part in parts) and math.prod(shape) > 0 and len(parts) > 1


def _in_order_of_ranks(name: str, shape: Shape, parts: Sequence[NamedPart]) -> FlatParameter:
    """A parameter as a flat parameter of its own. The runs, in the order of the ranks, are the whole parameter."""
    runs, end = list[FlatRun](), 0
    for rank, path, stored in sorted(parts, key=lambda part: part.rank):
        count = math.prod(stored.shape)
        runs.append(FlatRun(rank, path, end, count, stored))
        end += count
    if end > math.prod(shape):
        raise CheckpointError(
            f"the ranks hold {end:,} elements of it, the config's shape {list(shape)} has {math.prod(shape):,}",
            where=name,
            why="The config is of another model",
            do="Give the config that the model was trained with by `model=DIR`",
        )
    return FlatParameter(math.prod(shape), (Slot(name, shape, 0),), tuple(runs))


def add_named(builder: IndexBuilder, named: Mapping[str, Sequence[NamedPart]], flats: Mapping[str, FlatParameter]) -> None:
    """Add the tensors that are kept under their own names: those in `flats` as runs, the others as whole tensors."""
    for name, parts in named.items():
        if name in flats:
            add_weights(builder, {name: flats[name]})
            continue
        for rank, path, stored in parts:
            whole = LocalTensor(stored.dtype, stored.shape, ((Box.whole(stored.shape), stored),))
            builder.add("weight", name, whole, path, rank)


def unit_parameters(content: ModelContent, shapes: Mapping[str, Shape], ranks: int) -> dict[str, FlatParameter]:
    """Unit -> its flat parameter. A unit holds the parameters whose names start with its name, except those of the units inside it.

    Raises: CheckpointError if the config's parameters do not fill a flat parameter.
    """
    flats: dict[str, FlatParameter] = {}
    for unit, elements in content.elements.items():
        inner = tuple(other for other in content.elements if other != unit and other.startswith(unit))
        members = [(name, shape) for name, shape in shapes.items() if name.startswith(unit) and not name.startswith(inner)]
        slots = find_slots(members, elements, ranks, where=f"{unit}{FLAT}")
        flats[unit] = FlatParameter(elements, slots, tuple(content.runs[unit]))
    return flats


def add_weights(builder: IndexBuilder, flats: Mapping[str, FlatParameter]) -> None:
    """Add the parameters in flat parameters."""
    for flat in flats.values():
        for name, run, local in flat.parts(flat.runs):
            builder.add("weight", name, local, run.path, run.rank)
