"""The optimizer's state of all ranks, cut into the state of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import RankFiles
from reshard.adapter.state_dicts import group_numbers, optimizer_part, states
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.errors import CheckpointError
from reshard.geometry.value import value
from reshard.storage.files import Files

from .flat_parameters import FlatParameter, FlatRun, Shape


@value
class RankState:
    """One state of one parameter, as one rank's optimizer holds it."""

    rank: int
    """The rank."""
    path: str
    """Its file."""
    parameter: Any
    """The parameter's number, or its name."""
    kind: str
    """The optimizer's word for the state: "exp_avg", "step", ..."""
    local: LocalTensor
    """The elements."""


def add_optimizer(builder: IndexBuilder, rank_files: RankFiles, flats: Mapping[str, FlatParameter], *, has_names: bool) -> None:
    """Add the optimizer's state of all ranks, and its param groups.

    The optimizer numbers the flat parameters, in their order.
    has_names: it numbers single parameters instead. The number of elements on each rank then tells which number is which parameter.
    """
    optimizer, rank_states = read_optimizer_files(builder.files, rank_files)
    ranks = list(rank_files.paths)
    counts = _counts_by_parameter(rank_states, ranks) if has_names else {}
    parameters = [(unit, flat.counts(ranks)) for unit, flat in flats.items()]
    names, notes = names_for(optimizer, group_numbers(optimizer), counts, parameters)
    builder.add_notes(notes)
    builder.param_groups = tuple(
        replace(group, names=tuple(slot.name for unit in group.names if unit in flats for slot in flats[unit].slots))
        for group in plain_groups(optimizer["param_groups"], names, optimizer["state"])
    )
    for state in rank_states:
        flat = flats.get(names[state.parameter]) if state.parameter in names else None
        if flat and state.local.shape:
            for name, run, local in flat.parts(_state_runs(flat, state)):
                builder.add(*state_kind(name, state.parameter, state.kind), local, run.path, run.rank)
        else:
            # Unnamed state, or a count of steps: one for all parameters of a flat parameter.
            for slot_name in [slot.name for slot in flat.slots] if flat else [None]:
                builder.add(*state_kind(slot_name, state.parameter, state.kind), state.local, state.path, state.rank)


def read_optimizer_files(files: Files, rank_files: RankFiles) -> tuple[Mapping[str, Any], list[RankState]]:
    """The optimizer's state dict of the last rank (the param groups are equal on all ranks), and the states of all ranks."""
    rank_states: list[RankState] = []
    optimizer: Mapping[str, Any] | None = None
    for rank, path in rank_files.paths.items():
        optimizer = optimizer_part(torch_zip.read(files, path, locate=False))
        if optimizer is None:
            raise CheckpointError("it holds no optimizer state (state and param_groups)", where=path)
        decoder = Decoder(path)
        for parameter, kind, value in states(optimizer):
            if local := decoder.decode(f"{parameter}.{kind}", value):
                rank_states.append(RankState(rank, path, parameter, kind, local))
    assert optimizer is not None, "a set of rank files is never empty"
    return optimizer, rank_states


def _counts_by_parameter(rank_states: Sequence[RankState], ranks: Sequence[int]) -> dict[Any, Shape]:
    """The parameter's number -> how many elements of its state each rank holds."""
    counts: dict[Any, dict[int, int]] = {}
    for state in rank_states:
        if state.local.shape:
            counts.setdefault(state.parameter, {})[state.rank] = math.prod(state.local.shape)
    return {parameter: tuple(by_rank.get(rank, 0) for rank in ranks) for parameter, by_rank in counts.items()}


def _state_runs(flat: FlatParameter, state: RankState) -> Iterator[FlatRun]:
    """The runs of a rank's optimizer state: the same elements as its runs of the flat parameter, without padding at the end."""
    stored, count = state.local.shards[0][1], math.prod(state.local.shape)
    for run in flat.runs:
        if run.rank == state.rank:
            if count < run.count:
                raise CheckpointError(f"its {state.kind} has {count:,} elements, the parameters beside it {run.count:,}", where=state.path)
            yield FlatRun(state.rank, state.path, run.start, run.count, stored)
