"""Whole tensors, joined from the parts of tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard.errors import CheckpointError
from reshard.index.index import Tensor
from reshard.index.shards import Shards, concatenated

from ..layout.states import Shape
from ..layout.tensor_parallel import JoinRules
from .parts import Contents, ParameterPart


def joined_tensors(contents: Contents, rules: JoinRules, tp: int) -> Iterator[Tensor]:
    """Every tensor, joined over `tp` tensor-parallel ranks. The tensors of several pipeline stages under one name are copies.

    Raises: CheckpointError if a rank's part is missing, or the parts do not fit.
    """
    empty_shapes: dict[str, dict[int, Shape]] = {}
    for (name, rank), shape in contents.empty_shapes.items():
        empty_shapes.setdefault(name, {})[rank] = shape
    for (kind, name), parts in contents.by_tensor().items():
        by_stage: dict[int, list[ParameterPart]] = {}
        for part in parts:
            by_stage.setdefault(part.stage, []).append(part)
        (shape, shards), *copies = [_joined_stage(of_stage, empty_shapes.get(name, {}), rules, tp) for of_stage in by_stage.values()]
        for other_shape, _ in copies:
            if other_shape != shape:
                raise CheckpointError(f"one pipeline stage holds {list(shape)}, another {list(other_shape)}", where=name)
        yield Tensor(name, parts[0].dtype, shape, kind, shards.with_copies([copy for _, copy in copies]))
    yield from contents.unnamed


def _joined_stage(parts: Sequence[ParameterPart], empty_shapes: Mapping[int, Shape], rules: JoinRules, tp: int) -> tuple[Shape, Shards]:
    """The shape and the pieces of a tensor on one pipeline stage. empty_shapes: of parts without elements, by tensor-parallel rank."""
    name = parts[0].name
    if len(dtypes := {str(part.dtype) for part in parts}) > 1:
        raise CheckpointError(f"its parts have the element types {', '.join(sorted(dtypes))}", where=name)
    by_rank: dict[int, list[ParameterPart]] = {}
    for part in parts:
        by_rank.setdefault(part.tp_rank, []).append(part)
    shards = {rank: concatenated([part.shards for part in of_rank]) for rank, of_rank in by_rank.items()}
    if tp == 1:
        return parts[0].shape, shards[0]
    if not parts[0].shape:  # a step count: a copy on each rank
        first, *others = shards.values()
        return (), first.with_copies(others)
    shapes = {**empty_shapes, **{rank: of_rank[0].shape for rank, of_rank in by_rank.items()}}
    if len(shapes) < tp:
        raise CheckpointError(
            f"of {tp} tensor-parallel ranks only {', '.join(map(str, by_rank))} {'hold' if len(by_rank) > 1 else 'holds'} it",
            where=name,
            do="Copy the missing ranks' files from where the checkpoint was written",
        )
    joined = rules.joined(name, [shapes[rank] for rank in range(tp)])
    moved = [
        concatenated([shards[rank].moved(box, offsets) for box, offsets in moves])
        for rank, moves in enumerate(joined.moves)
        if moves and rank in shards
    ]
    return joined.shape, moved[0].with_copies(moved[1:]) if joined.is_replicated else concatenated(moved)
