"""Contents: the tensors that a step found in the files of one model-parallel rank, and how the parts of all ranks make whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from reshard.canonical.optimizer_state import is_unnamed, state_kind
from reshard.containers.torch_zip import AnyTensor, Locations
from reshard.errors import CheckpointError
from reshard.geometry.value import value
from reshard.index.index import Kind, ParamGroup, Tensor
from reshard.index.shards import Shards, concatenated

from ..layout.states import Shape
from ..layout.tag import ModelRank
from ..layout.tensor_parallel import JoinRules
from .flat_buffers import pieces_of_copies


@value(eq=False, repr=False)
class ParameterPart:
    """A tensor as the files of one model-parallel rank hold it: a part of the whole tensor of that name, or all of it."""

    tensor: Tensor
    """Its pieces, in the part's own coordinates, under the parameter's name in the whole model."""
    rank: ModelRank
    """The rank. The parts of all tensor-parallel ranks make the whole; those of other pipeline stages are copies."""

    @property
    def key(self) -> tuple[Kind, str]:
        """The kind and the name of the whole tensor."""
        return self.tensor.kind, self.tensor.name

    def named(self, name: str) -> ParameterPart:
        """The part under another name."""
        return replace(self, tensor=replace(self.tensor, name=name))

    def __repr__(self) -> str:
        return f"<{self.tensor.kind} {self.tensor.name} {list(self.tensor.shape)} {self.tensor.dtype} of {self.rank}>"


@value(eq=False, repr=False)
class Contents:
    """What one step found in the files."""

    parts: tuple[ParameterPart, ...] = ()
    """Parts of parameters, masters and optimizer state."""
    shapeless: frozenset[str] = frozenset()
    """Parameters whose shapes are in no file: their masters are read as one row of elements."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the index."""
    param_groups: tuple[ParamGroup, ...] = ()
    """The optimizer's groups of parameters."""

    def shapes(self, kind: Kind) -> dict[str, Shape]:
        """The shape of the first part of each tensor of one kind, by name."""
        shapes: dict[str, Shape] = {}
        for part in self.parts:
            if part.tensor.kind == kind:
                shapes.setdefault(part.tensor.name, part.tensor.shape)
        return shapes

    def __repr__(self) -> str:
        return f"<{len(self.parts)} parts of {len({part.tensor.name for part in self.parts})} parameters, {len(self.notes)} notes>"


def merged(contents: Iterable[Contents]) -> Contents:
    """The contents of several steps as one. Model-parallel ranks list the same param groups, each with its own parameters."""
    steps = list(contents)
    groups = []
    for of_steps in zip_longest(*(step.param_groups for step in steps)):
        stored = [group for group in of_steps if group is not None]
        groups.append(replace(stored[0], names=tuple(dict.fromkeys(name for group in stored for name in group.names))))
    return Contents(
        tuple(part for step in steps for part in step.parts),
        frozenset().union(*(step.shapeless for step in steps)),
        tuple(note for step in steps for note in step.notes),
        tuple(groups),
    )


def whole_part(kind: Kind, name: str, tensor: AnyTensor, rank: ModelRank, locations: Locations) -> ParameterPart:
    """The part that a rank's file holds as one tensor."""
    return ParameterPart(Tensor(name, tensor.dtype, tensor.shape, kind, pieces_of_copies({0: tensor}, locations)), rank)


# The state that is a parameter's full-precision copy. The other states have the optimizer's names: "exp_avg", "step", ...
MASTER = "(master)"


def kind_and_name(parameter: str, state: str) -> tuple[Kind, str]:
    """The kind and the name of the tensor that is one state of a parameter."""
    return ("master", parameter) if state == MASTER else state_kind(parameter, parameter, state)


def joined_tensors(contents: Contents, rules: JoinRules, tp: int) -> Iterator[Tensor]:
    """Every tensor, joined over `tp` tensor-parallel ranks. The tensors of several pipeline stages under one name are copies.

    Raises: CheckpointError if a rank's part is missing, or the parts do not fit.
    """
    by_tensor: dict[tuple[Kind, str], dict[int, list[ParameterPart]]] = {}
    # A rank without attention heads has parts without elements, and no state of them.
    empty: dict[str, dict[int, Shape]] = {}
    for part in contents.parts:
        by_tensor.setdefault(part.key, {}).setdefault(part.rank.stage, []).append(part)
        if part.tensor.kind == "weight" and 0 in part.tensor.shape:
            empty.setdefault(part.tensor.name, {})[part.rank.tp_rank] = part.tensor.shape
    for (_, name), by_stage in by_tensor.items():
        whole, *copies = [_joined_stage(of_stage, empty.get(name, {}), rules, tp) for of_stage in by_stage.values()]
        for copy in copies:
            if copy.shape != whole.shape:
                raise CheckpointError(f"one pipeline stage holds {list(whole.shape)}, another {list(copy.shape)}", where=name)
        yield replace(whole, shards=whole.shards.with_copies([copy.shards for copy in copies])) if copies else whole


def _joined_stage(parts: Sequence[ParameterPart], empty: dict[int, Shape], rules: JoinRules, tp: int) -> Tensor:
    """A tensor of one pipeline stage. empty: the shapes of parts without elements, by tensor-parallel rank."""
    first = parts[0].tensor
    if len(dtypes := {str(part.tensor.dtype) for part in parts}) > 1:
        raise CheckpointError(f"its parts have the element types {', '.join(sorted(dtypes))}", where=first.name)
    by_rank: dict[int, list[ParameterPart]] = {}
    for part in parts:
        by_rank.setdefault(part.rank.tp_rank, []).append(part)
    shards = {rank: concatenated([part.tensor.shards for part in of_rank]) for rank, of_rank in by_rank.items()}
    if tp == 1 or is_unnamed(first) or not first.shape:  # a step count: a copy on each rank
        return replace(first, shards=_copies([*shards.values()])) if len(parts) > 1 else first
    shapes = {**empty, **{rank: of_rank[0].tensor.shape for rank, of_rank in by_rank.items()}}
    if len(shapes) < tp:
        raise CheckpointError(
            f"of {tp} tensor-parallel ranks only {', '.join(map(str, by_rank))} {'hold' if len(by_rank) > 1 else 'holds'} it",
            where=first.name,
            do="Copy the missing ranks' files from where the checkpoint was written",
        )
    joined = rules.joined(first.name, [shapes[rank] for rank in range(tp)])
    moved = [
        concatenated([shards[rank].moved(box, offsets) for box, offsets in moves])
        for rank, moves in enumerate(joined.moves)
        if moves and rank in shards
    ]
    return replace(first, shape=joined.shape, shards=_copies(moved) if joined.is_replicated else concatenated(moved))


def _copies(shards: Sequence[Shards]) -> Shards:
    return shards[0].with_copies(shards[1:])
