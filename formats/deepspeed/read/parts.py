"""Parts: the tensors that the files of all model-parallel ranks hold, and how the parts of all ranks make whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import first_missing, listed
from reshard.canonical.optimizer_state import is_plain, is_unnamed, state_kind
from reshard.containers.distributed_tensors import Decoder
from reshard.containers.torch_zip import AnyTensor, Locations
from reshard.errors import CheckpointError
from reshard.geometry.quantities import plural
from reshard.index.index import Kind, ParamGroup, Tensor
from reshard.index.origin import Mixed
from reshard.index.shards import Shards, concatenated

from ..layout.states import Shape
from ..layout.tag import ModelRank
from ..layout.tensor_parallel import JoinRules
from .flat_buffers import pieces_of_copies

# The state that is a parameter's full-precision copy. The other states have the optimizer's names: "exp_avg", "step", ...
MASTER = "(master)"
StageParts = dict[int, list[Tensor]]
"""Tensor-parallel rank -> the parts of a tensor that its files hold, each in its own coordinates."""


class Parts:
    """The parts of all tensors, as far as the files have been read. What is known beside them goes into the builder of the index."""

    def __init__(self, builder: IndexBuilder) -> None:
        self.builder = builder
        """Takes notes, objects and param groups."""
        self.locations = Locations(builder.files)
        """Finds where tensors start in their files."""
        self.stages: dict[tuple[Kind, str], dict[int, StageParts]] = {}
        """Kind and name of a whole tensor -> pipeline stage -> its parts. The parts of all tensor-parallel ranks make the whole; those of
        other stages are copies."""
        self.summed: set[str] = set()
        """Parameters of which each tensor-parallel rank has a summand of its own."""
        self.shapeless: set[str] = set()
        """Parameters whose shapes are in no file: their masters are read as one row of elements."""

    def __repr__(self) -> str:
        count = sum(len(parts) for stages in self.stages.values() for stage in stages.values() for parts in stage.values())
        return f"<{count} parts of {len({name for _, name in self.stages})} parameters>"

    def add(self, rank: ModelRank, tensor: Tensor) -> None:
        """Add what a model-parallel rank holds of the whole tensor of that name: a part of it, or all of it."""
        self.stages.setdefault((tensor.kind, tensor.name), {}).setdefault(rank.stage, {}).setdefault(rank.tp_rank, []).append(tensor)

    def add_whole(self, rank: ModelRank, kind: Kind, name: str, stored: AnyTensor) -> None:
        """Add what a rank's file holds as one tensor."""
        self.add(rank, Tensor(name, stored.dtype, stored.shape, kind, pieces_of_copies({0: stored}, self.locations)))

    def add_other(self, kind: Kind, name: str, value: Any, path: str) -> None:
        """Add what a file holds in place of a plain tensor: what stands for an array of another class, or the name of an object."""
        if local := Decoder(path).decode(name, value):
            self.builder.add(kind, name, local, path)
        elif not is_plain(value):
            self.builder.add_objects([name])

    def add_param_groups(self, groups: Iterable[ParamGroup]) -> None:
        """Add a rank's param groups. Model-parallel ranks list the same ones, each with its own parameters."""
        merged = []
        for same in zip_longest(self.builder.param_groups, groups):
            listed = [group for group in same if group is not None]
            merged.append(replace(listed[0], names=tuple(dict.fromkeys(name for group in listed for name in group.names))))
        self.builder.param_groups = tuple(merged)

    def shapes(self, kind: Kind) -> dict[str, Shape]:
        """The shape of the first part of each tensor of one kind, by name."""
        return {key[1]: self.first_of(key).shape for key in self.stages if key[0] == kind}

    def first_of(self, key: tuple[Kind, str]) -> Tensor:
        """The first part of a tensor."""
        return next(iter(next(iter(self.stages[key].values())).values()))[0]

    def move(self, name: str, to: str, *, stage: int) -> None:
        """Give a weight another name and stage."""
        for of_stage in self.stages.pop(("weight", name), {}).values():
            for tp_rank, parts in of_stage.items():
                self.stages.setdefault(("weight", to), {}).setdefault(stage, {}).setdefault(tp_rank, []).extend(parts)

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Give all tensors of all kinds other names, in the param groups too."""
        self.stages = {(kind, new_name(name)): stages for (kind, name), stages in self.stages.items()}
        groups = self.builder.param_groups
        self.builder.param_groups = tuple(replace(group, names=tuple(map(new_name, group.names))) for group in groups)

    def add_second_names(self, tied: Mapping[str, str]) -> None:
        """Add the weight and the master of each tied parameter under its second name, too, unless the files have them there."""
        for alias, name in tied.items():
            for kind in ("weight", "master"):
                if (kind, alias) not in self.stages and (kind, name) in self.stages:
                    self.stages[kind, alias] = self.stages[kind, name]

    def join(self, rules: JoinRules, tp: int) -> None:
        """Give the builder every tensor, joined over `tp` tensor-parallel ranks. Those of several stages under one name are copies.

        Raises: CheckpointError if a rank's part is missing, or the parts do not fit.
        """
        for (_, name), stages in self.stages.items():
            whole, *copies = [self._joined_stage(name, stage, rules, tp) for stage in stages.values()]
            for copy in copies:
                if copy.shape != whole.shape:
                    raise CheckpointError(f"one pipeline stage holds {list(whole.shape)}, another {list(copy.shape)}", where=name)
            self.builder.add_tensor(replace(whole, shards=_copies([tensor.shards for tensor in (whole, *copies)])))
        if tp > 1 and self.summed:
            count = plural(len(self.summed), "bias", "biases")
            self.builder.add_notes([f"{count} of row-parallel layers: the sum of what the {tp} tensor-parallel ranks hold"])

    def _joined_stage(self, name: str, stage: StageParts, rules: JoinRules, tp: int) -> Tensor:
        """A tensor of one pipeline stage."""
        parts = [part for of_rank in stage.values() for part in of_rank]
        first = replace(parts[0], name=name)
        if len(dtypes := {str(part.dtype) for part in parts}) > 1:
            raise CheckpointError(f"its parts have the element types {', '.join(sorted(dtypes))}", where=name)
        shards = {rank: concatenated([part.shards for part in of_rank]) for rank, of_rank in stage.items()}
        if tp == 1 or is_unnamed(first) or not first.shape:  # a step count: a copy on each rank
            return replace(first, shards=_copies([*shards.values()]))
        shapes = {**self._empty_parts(name), **{rank: of_rank[0].shape for rank, of_rank in stage.items()}}
        if len(shapes) < tp:
            lacking = first_missing(shapes, tp)
            raise CheckpointError(
                f"of {tp} tensor-parallel ranks only {listed([*stage])} {'hold' if len(stage) > 1 else 'holds'} it, {listed(lacking)} "
                + ("does not" if len(lacking) == 1 else "do not"),
                where=name,
                why=f"It is in {', '.join(sorted({part.shards.path(0) for part in parts if len(part.shards)})[:4])}",
                do="Copy the missing ranks' files from where the checkpoint was written",
            )
        joined = rules.joined(name, [shapes[rank] for rank in range(tp)])
        moved = [
            concatenated([shards[rank].moved(box, offsets) for box, offsets in moves])
            for rank, moves in enumerate(joined.moves)
            if moves and rank in shards
        ]
        if joined.is_replicated and name in self.summed and first.kind in ("weight", "master"):
            summands = tuple(replace(first, shape=joined.shape, shards=of_rank) for of_rank in moved)
            paths = tuple(summand.shards.path(0) for summand in summands)
            return replace(summands[0], origin=Mixed("average", summands, paths, (1.0,) * tp))
        return replace(first, shape=joined.shape, shards=_copies(moved) if joined.is_replicated else concatenated(moved))

    def _empty_parts(self, name: str) -> dict[int, Shape]:
        """Tensor-parallel rank -> the shape of its part without elements: a rank without attention heads has one, and no state of it."""
        stages = self.stages.get(("weight", name), {}).values()
        return {rank: part.shape for stage in stages for rank, parts in stage.items() for part in parts if 0 in part.shape}


def _copies(shards: Sequence[Shards]) -> Shards:
    return shards[0].with_copies(shards[1:])


def kind_and_name(parameter: str, state: str) -> tuple[Kind, str]:
    """The kind and the name of the tensor that is one state of a parameter."""
    return ("master", parameter) if state == MASTER else state_kind(parameter, parameter, state)
