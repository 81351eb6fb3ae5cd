"""The optimizer's state of all ranks, cut into the state of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import RankFiles
from reshard.adapter.state_dicts import read_optimizer
from reshard.canonical.optimizer_state import names_for, state_kind
from reshard.containers.distributed_tensors import LocalTensor
from reshard.errors import CheckpointError

from .flat_parameters import FlatParameter, FlatRun, Shape

RankStates = tuple[int, str, list[tuple[Any, str, LocalTensor]]]
"""A rank, its file, and the tensors in it, as SavedOptimizer has them."""


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
            if flat and local.shape:
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
            yield FlatRun(rank, path, run.start, run.count, stored)
