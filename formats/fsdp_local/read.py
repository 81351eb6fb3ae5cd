"""The index of the ranks' runs of flat parameters, with the names and shapes of the model's config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import RankFiles, run_files, with_notes_on_missing_ranks
from reshard.adapter.save_folders import step_of
from reshard.adapter.state_dicts import FLAT, decoded, elements_of, model_part, read_optimizer
from reshard.canonical.optimizer_state import names_for, state_kind
from reshard.canonical.renaming import unwrapped
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import LocalTensor
from reshard.errors import CheckpointError, IncompleteError, RequestError
from reshard.geometry.boxes import Box, Shape
from reshard.index.index import Index, RunFacts
from reshard.models.model import Model
from reshard.storage.files import Files

from .flat_parameters import FlatParameter, FlatRun, Slot, find_slots

Runs = Mapping[str, Sequence[FlatRun]]
"""Unit ("", "layers.0.", ...) or name of a tensor -> what the ranks' files hold of it."""
RankStates = tuple[int, str, list[tuple[Any, str, LocalTensor]]]
"""A rank, its file, and the tensors in it, as SavedOptimizer has them."""


def read(files: Files, hints: Hints) -> Index:
    """The index of the ranks' files in a folder.

    Raises: RequestError without the model's config; CheckpointError if the config does not fit, or elements of a parameter are lost.
    """
    run = run_files(files)
    if run.model is None:
        raise IncompleteError("there is no file of a rank with the model's flat parameters", where=files.root)
    model = _declared_model(hints, run.model.first)
    # The flat parameter holds tied weights once, under the first name.
    tied_head = model.architecture.tied[0] if model.is_tied else None
    shapes = {name: weight.shape for name, weight in model.weights.items() if name != tied_head}
    builder = IndexBuilder("fsdp-local", files)
    builder.add_files(run.paths())
    lengths, units, tensors = read_model_files(builder, run.model)
    named = add_named(builder, tensors, shapes)
    flats = named or unit_parameters(lengths, units, shapes, ranks=max(run.model.paths) + 1)
    for flat in flats.values() if not named else ():
        add_weights(builder, flat)
    if run.optimizer:
        add_optimizer(builder, run.optimizer, flats, has_names=bool(named))
    ranks = run.rank_count(1)
    index = builder.build(RunFacts("FSDP1 (LOCAL_STATE_DICT)", None, step_of(files.root), {"ranks": ranks}, hints.config))
    return with_notes_on_missing_ranks(index, run, ranks)


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


def read_model_files(builder: IndexBuilder, rank_files: RankFiles) -> tuple[Mapping[str, int], Runs, Runs]:
    """The lengths of the units' flat parameters, the runs of them, and the tensors that are kept under their own names.

    Raises: CheckpointError if two files disagree on a flat parameter's length.
    """
    lengths: dict[str, int] = {}
    units: dict[str, list[FlatRun]] = {}
    tensors: dict[str, list[FlatRun]] = {}
    for rank, path in rank_files.paths.items():
        model, other_keys = model_part(torch_zip.read(builder.files, path, locate=False))
        builder.add_objects(other_keys)
        stored_tensors, others = decoded(model or {}, path)
        builder.add_objects(map(unwrapped, others))
        for key, local in stored_tensors:
            name = unwrapped(key)
            if local.dtype.is_unread:
                builder.add("weight", name, local, path, rank)
            elif name.endswith(FLAT):
                unit, length = name.removesuffix(FLAT), math.prod(local.shape)
                if local.shape != (lengths.setdefault(unit, length),):
                    raise CheckpointError(
                        f"the flat parameter has the shape {list(local.shape)}, in an earlier file {lengths[unit]:,} elements",
                        where=f"{name} in {path}",
                        why="The files are from different runs",
                        do="Keep the files of one save only",
                    )
                units.setdefault(unit, []).extend(FlatRun(rank, path, box.offsets[0], stored) for box, stored in local.shards)
            else:
                tensors.setdefault(name, []).extend(FlatRun(rank, path, 0, stored) for _, stored in local.shards)
    return lengths, units, tensors


def add_named(builder: IndexBuilder, tensors: Runs, shapes: Mapping[str, Shape]) -> dict[str, FlatParameter]:
    """Add the tensors that the ranks keep under their own names. Returns the parameters of which they hold runs, as use_orig_params does.
    Other tensors are whole on every rank.

    Raises: CheckpointError if the config does not have such a parameter, or a smaller shape for it.
    """
    flats: dict[str, FlatParameter] = {}
    for name, parts in tensors.items():
        shape = shapes.get(name)
        if shape is None and len({part.stored.shape for part in parts}) > 1:
            raise CheckpointError(
                "every rank holds a run of it, but the config has no such weight",
                where=name,
                why="Only the config tells its shape, so the config is of another model",
                do="Give the config that the model was trained with by `model=DIR`",
            )
        is_whole_on_every_rank = len(parts) > 1 and all(part.stored.shape == shape and part.count for part in parts)
        if shape is not None and not is_whole_on_every_rank:
            flats[name] = _in_order_of_ranks(name, shape, parts)
            add_weights(builder, flats[name])
        else:
            for part in parts:
                whole = LocalTensor(part.stored.dtype, part.stored.shape, ((Box.whole(part.stored.shape), part.stored),))
                builder.add("weight", name, whole, part.path, part.rank)
    return flats


def _in_order_of_ranks(name: str, shape: Shape, parts: Sequence[FlatRun]) -> FlatParameter:
    """A parameter as a flat parameter of its own. The runs, in the order of the ranks, are the whole parameter."""
    runs, end = list[FlatRun](), 0
    for part in sorted(parts, key=lambda part: part.rank):
        runs.append(replace(part, start=end))
        end += part.count
    if end > math.prod(shape):
        raise CheckpointError(
            f"the ranks hold {end:,} elements of it, the config's shape {list(shape)} has {math.prod(shape):,}",
            where=name,
            why="The config is of another model",
            do="Give the config that the model was trained with by `model=DIR`",
        )
    return FlatParameter((Slot(name, shape, 0),), tuple(runs))


def unit_parameters(lengths: Mapping[str, int], runs: Runs, shapes: Mapping[str, Shape], ranks: int) -> dict[str, FlatParameter]:
    """Unit -> its flat parameter. A unit holds the parameters whose names start with its name, except those of the units inside it.

    Raises: CheckpointError if the config's parameters do not fill a flat parameter.
    """
    flats: dict[str, FlatParameter] = {}
    for unit, elements in lengths.items():
        inner = tuple(other for other in lengths if other != unit and other.startswith(unit))
        members = [(name, shape) for name, shape in shapes.items() if name.startswith(unit) and not name.startswith(inner)]
        flats[unit] = FlatParameter(find_slots(members, elements, ranks, where=f"{unit}{FLAT}"), tuple(runs[unit]))
    return flats


def add_weights(builder: IndexBuilder, flat: FlatParameter) -> None:
    """Add the parameters in a flat parameter."""
    for name, run, local in flat.parts(flat.runs):
        builder.add("weight", name, local, run.path, run.rank)


def add_optimizer(builder: IndexBuilder, rank_files: RankFiles, flats: Mapping[str, FlatParameter], *, has_names: bool) -> None:
    """Add the optimizer's state of all ranks, and its param groups, which are equal on all ranks.

    The optimizer numbers the flat parameters, in their order.
    has_names: it numbers single parameters instead. The number of elements on each rank then tells which number is which parameter.
    """
    of_ranks: list[RankStates] = []
    for rank, path in rank_files.paths.items():
        optimizer = read_optimizer(builder.files, path)
        of_ranks.append((rank, path, optimizer.tensors))
    ranks = list(rank_files.paths)
    counts = _counts_by_parameter(of_ranks) if has_names else {}
    parameters = [(unit, flat.counts(ranks)) for unit, flat in flats.items()]
    names, notes = names_for(optimizer.state_dict, optimizer.numbers(), counts, parameters)
    builder.add_notes(notes)
    builder.param_groups = tuple(
        replace(group, names=tuple(slot.name for unit in group.names if unit in flats for slot in flats[unit].slots))
        for group in optimizer.param_groups(names)
    )
    for rank, path, tensors in of_ranks:
        for parameter, kind, local in tensors:
            flat = flats.get(names[parameter]) if parameter in names else None
            if flat and local.shape and local.shards:
                for name, run, part in flat.parts(_state_runs(flat, rank, path, kind, local)):
                    builder.add(*state_kind(name, parameter, kind), part, run.path, run.rank)
            else:
                # Unnamed state, or a count of steps: one for all parameters of a flat parameter.
                for slot_name in [slot.name for slot in flat.slots] if flat else [None]:
                    builder.add(*state_kind(slot_name, parameter, kind), local, path, rank)


def _counts_by_parameter(of_ranks: Sequence[RankStates]) -> dict[Any, Shape]:
    """The parameter's number -> how many elements of its state each rank holds."""
    counts: dict[Any, dict[int, int]] = {}
    for rank, _, tensors in of_ranks:
        for parameter, _, local in tensors:
            if local.shape:
                counts.setdefault(parameter, {})[rank] = math.prod(local.shape)
    return {parameter: tuple(by_rank.get(rank, 0) for rank, *_ in of_ranks) for parameter, by_rank in counts.items()}


def _state_runs(flat: FlatParameter, rank: int, path: str, kind: str, local: LocalTensor) -> Iterator[FlatRun]:
    """The runs of a rank's optimizer state: the same elements as its runs of the flat parameter, without padding at the end."""
    stored, count = local.shards[0][1], math.prod(local.shape)
    for run in flat.runs:
        if run.rank == rank:
            if count < run.count:
                raise CheckpointError(f"its {kind} has {count:,} elements, the parameters beside it {run.count:,}", where=path)
            yield replace(run, path=path, stored=elements_of(stored, 0, run.stored.shape, run.stored.strides))
