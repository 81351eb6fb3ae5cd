"""How the tensor-parallel ranks' parts of a parameter make the whole one.

The model file says it by patterns over names (`universal_checkpoint_info`, written by AutoTP and Megatron-DeepSpeed), or by an affine
map: for every rank the boxes that it holds. Where it says nothing, shapes from the model's config tell the axis, or the names are
Megatron's. What none of them knows is refused: joined along the wrong axis a weight looks like any other.
Source: deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices, and affine.py (0.19.8); for Megatron's names without patterns
deepspeed/checkpoint/deepspeed_checkpoint.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.containers.inert_pickle import Inert
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major

from .states import Shape

# A box of a rank's part, and where it starts in the whole.
Move = tuple[Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Whole:
    """The shape of a joined parameter and, for every tensor-parallel rank, where the boxes of its part go. copies: all hold the same."""

    shape: Shape
    moves: tuple[tuple[Move, ...], ...]
    copies: bool = False


class Joins:
    """The rules of one checkpoint. info: the model file's patterns; shapes: global ones by name, where a config is known."""

    def __init__(self, info: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> None:
        self._info, self._shapes, self._where = info, shapes, where
        maps = info.get("affine_map")
        self._maps = maps.get("params", {}) if isinstance(maps, Mapping) else {}
        if isinstance(maps, Mapping) and maps.get("version", 1) != 1:
            raise CheckpointError(f"its affine map has the version {maps.get('version')}, known is 1", where=where)

    def whole(self, name: str, parts: Sequence[Shape]) -> Whole:
        """How the parts of a parameter, one shape per tensor-parallel rank, lie in the whole.

        Raises: CheckpointError if nothing tells, or what tells does not fit the shapes.
        """
        if len(parts) == 1:
            return Whole(parts[0], (((Box.whole(parts[0]), (0,) * len(parts[0])),),))
        if says(self._info, "autotp_unsupported_parameter_patterns", name):
            raise CheckpointError("DeepSpeed itself notes that it cannot say how its ranks' parts make a whole", where=name)
        if described := next((value for pattern, value in self._maps.items() if _matches(pattern, name)), None):
            return _by_map(name, described, parts)
        found = self._by_patterns(name, parts) if self._info else self._without_patterns(name, parts)
        if says(self._info, "vocabulary_parameter_patterns", name):
            found = _cut_to(found, self._info.get("original_vocab_size"), name)
        return found

    def _by_patterns(self, name: str, parts: Sequence[Shape]) -> Whole:
        if says(self._info, "tp_replicated_parameter_patterns", name) or says(self._info, "parameter_to_average_patterns", name):
            return _replicated(name, parts)
        if says(self._info, "parameter_with_2_sub_params_cat_dim_0", name):
            return _fused(name, parts, 0, [[part[0] // 2 for part in parts] for _ in range(2)])
        for described in self._info.get("parameter_with_sub_params") or ():
            sub = _attributes(described)
            for pattern in sub.get("patterns") or ():
                if _matches(pattern, name):
                    return _fused(name, parts, int(sub["partition_dim"]), self._widths(pattern, sub, parts))
        return _concatenated(name, parts, 1 if says(self._info, "parameter_with_row_parallelism_patterns", name) else 0)

    def _widths(self, pattern: str, sub: Mapping[str, Any], parts: Sequence[Shape]) -> list[list[int]]:
        """The width of every sub-parameter on every rank: recorded from version 0.4 on; before, all are split evenly."""
        recorded = self._info.get("sub_param_shard_widths") or {}
        if pattern in recorded:
            return [list(widths) for widths in recorded[pattern]]
        axis = int(sub["partition_dim"])
        spec = sub["shape"][axis]
        full = sum(part[axis] for part in parts)
        sizes = list(spec) if isinstance(spec, tuple | list) else [full // spec] * spec
        return [[size // len(parts)] * len(parts) for size in sizes]

    def _without_patterns(self, name: str, parts: Sequence[Shape]) -> Whole:
        if (shape := self._shapes.get(name.removeprefix("module."))) is not None:
            return _by_shape(name, parts, shape)
        if len(parts[0]) == 1 and re.fullmatch(r"\d+\.(weight|bias)", name):
            return _replicated(name, parts)  # a layer of a pipeline that has nothing else: the final norm
        for pattern, axis in _MEGATRON:
            if pattern.search(name):
                return _replicated(name, parts) if axis is None else _concatenated(name, parts, axis)
        raise CheckpointError(
            f"nothing tells how the {len(parts)} tensor-parallel ranks' parts of it, {list(parts[0])} each, make the whole",
            where=f"{name} in {self._where}",
            why="The file has no universal_checkpoint_info, and the name is none of Megatron's; joined along the wrong axis the weight "
            "would look right and be wrong",
            do="Give the model's config with --model DIR, so that the whole shapes are known",
        )


# Megatron's names -> the axis that its ranks cut, None where each holds all: the rules of DeepSpeedCheckpoint, and column-parallel biases.
# Of no other names: AutoTP before 0.19 noted nothing, cut q_proj and left lm_head whole.
_MEGATRON: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), axis)
    for pattern, axis in (
        (r"word_embeddings\.weight$", 0),
        (r"(word_embeddings\.norm|layernorm|layer_norm|position_embeddings)[^.]*\.(weight|bias)$", None),
        (r"(attention\.dense|dense_4h_to_h)\.bias$", None),
        (r"(attention\.dense|dense_4h_to_h)\.weight$", 1),
        (r"(query_key_value|attention\.query|attention\.key_value|dense_h_to_4h)\.(weight|bias)$", 0),
    )
)


def _replicated(name: str, parts: Sequence[Shape]) -> Whole:
    if len(set(parts)) > 1:
        raise _unfitting(name, parts, "every rank should hold the whole of it")
    return Whole(parts[0], tuple(((Box.whole(part), (0,) * len(part)),) for part in parts), copies=True)


def _concatenated(name: str, parts: Sequence[Shape], axis: int) -> Whole:
    if any(len(part) <= axis for part in parts):
        raise _unfitting(name, parts, f"they should follow each other along axis {axis}")
    return _fused(name, parts, axis, [[part[axis] for part in parts]])


def _fused(name: str, parts: Sequence[Shape], axis: int, widths: Sequence[Sequence[int]]) -> Whole:
    """Sub-parameters side by side along an axis, each of them cut over the ranks. widths: [sub-parameter][rank]."""
    per_rank = [sum(width[rank] for width in widths if rank < len(width)) for rank in range(len(parts))]
    rest = {part[:axis] + part[axis + 1 :] for part in parts}
    if len(rest) > 1 or any(part[axis] != total for part, total in zip(parts, per_rank, strict=True)):
        raise _unfitting(name, parts, f"along axis {axis} they should be {per_rank} wide, and equal along the others")
    moves: list[list[Move]] = [[] for _ in parts]
    inside, at = [0] * len(parts), 0
    for width in widths:
        for rank, size in enumerate(width):
            if size:
                box = Box.whole(parts[rank]).narrow(axis, inside[rank], inside[rank] + size)
                moves[rank].append((box, tuple(at if i == axis else 0 for i in range(len(parts[rank])))))
            inside[rank] += size
            at += size
    shape = (*parts[0][:axis], at, *parts[0][axis + 1 :])
    return Whole(shape, tuple(map(tuple, moves)))


def _by_shape(name: str, parts: Sequence[Shape], shape: Shape) -> Whole:
    """The axis along which the parts add up to a shape that is known, of a weight that is not fused."""
    if all(part == shape for part in parts):
        return _replicated(name, parts)
    for axis in range(len(shape)):
        if all(len(part) == len(shape) for part in parts) and sum(part[axis] for part in parts) == shape[axis]:
            whole = _concatenated(name, parts, axis)
            if whole.shape == shape:
                return whole
    raise _unfitting(name, parts, f"they do not make {list(shape)}, as the config has it")


def _by_map(name: str, described: Any, parts: Sequence[Shape]) -> Whole:
    """From an affine map: pieces, each a strided view of the whole and of one rank's part, that must be boxes in both."""
    found = _attributes(described)
    shape, ranks = tuple(found.get("logical_shape") or ()), found.get("ranks") or {}
    moves: list[tuple[Move, ...]] = []
    for rank, part in enumerate(parts):
        on_rank: list[Move] = []
        own = _attributes(ranks.get(rank, ranks.get(str(rank))))
        for piece in map(_attributes, own.get("pieces") or ()):
            if piece.get("scale", 1.0) != 1.0:
                raise CheckpointError(
                    f"its rank {rank} holds the values times {piece['scale']}",
                    where=name,
                    why="Undoing that would change bits, and reshard copies them",
                    do="Convert it with DeepSpeed's ds_to_universal first",
                )
            sizes = tuple(piece["shape"])
            if not math.prod(sizes):
                continue
            (offset, strides), (own_offset, own_strides) = piece["source"], piece["dest"]
            there, here = box_of(shape, offset, sizes, strides), box_of(part, own_offset, sizes, own_strides)
            if there is None or here is None or there.sizes != here.sizes:
                raise CheckpointError(f"a piece of it on rank {rank} is no box of the whole: {sizes}", where=name)
            on_rank.append((here, there.offsets))
        moves.append(tuple(on_rank))
    covered = [math.prod(box.sizes) for on_rank in moves for box, _ in on_rank]
    copies = len(set(moves)) == 1 and sum(covered) == len(parts) * math.prod(shape)
    if not copies and sum(covered) != math.prod(shape):
        raise _unfitting(name, parts, f"its affine map has pieces of {sum(covered):,} elements in all, for {list(shape)}")
    return Whole(shape, tuple(moves), copies)


def box_of(shape: Shape, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box of a row-major tensor that a strided view of it walks through in order; None if it is none."""
    first, last = _at(shape, offset), _at(shape, offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)))
    if first is None or last is None or any(a > b for a, b in zip(first, last, strict=True)):
        return None
    box = Box(first, tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
    return box if _merged(box.sizes, row_major(shape)) == _merged(sizes, strides) else None


def _at(shape: Shape, offset: int) -> tuple[int, ...] | None:
    found = []
    for step in row_major(shape):
        index, offset = divmod(offset, step)
        found.append(index)
    return tuple(found) if all(0 <= i < size for i, size in zip(found, shape, strict=True)) and not offset else None


def _merged(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """(size, stride) per axis, with axes that are walked as one taken together."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def _cut_to(found: Whole, rows: Any, name: str) -> Whole:
    """Without the rows that pad the vocabulary."""
    if type(rows) is not int or not 0 < rows <= found.shape[0]:
        raise CheckpointError(f"it has {found.shape[0]} rows, universal_checkpoint_info says original_vocab_size {rows}", where=name)
    kept = []
    for moves in found.moves:
        within = [(box, at, min(box.sizes[0], rows - at[0])) for box, at in moves if at[0] < rows]
        kept.append(tuple((box.narrow(0, 0, size), at) for box, at, size in within))
    return Whole((rows, *found.shape[1:]), tuple(kept), found.copies)


def _unfitting(name: str, parts: Sequence[Shape], what: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor-parallel ranks hold {', '.join(str(list(part)) for part in parts)}; {what}",
        where=name,
        why="The files are from different runs, or say wrongly how they were cut",
        do="Keep the files of one save only",
    )


def _attributes(value: Any) -> Mapping[Any, Any]:
    """A dict, or the attributes of an object such as SubparamShape."""
    if isinstance(value, Inert):
        return value.state if isinstance(value.state, Mapping) else {}
    return value if isinstance(value, Mapping) else {}


def says(info: Mapping[str, Any], key: str, name: str) -> bool:
    """Whether universal_checkpoint_info lists a parameter under that key."""
    return any(_matches(pattern, name) for pattern in info.get(key) or ())


# A repeated group can make matching take for ever; DeepSpeed writes none.
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def _matches(pattern: Any, name: str) -> bool:
    """Whether one of DeepSpeed's patterns, Python's regular expressions, fits from the name's start on."""
    if not isinstance(pattern, str) or len(pattern) > 1000 or _REPEATED_GROUP.search(pattern):
        raise CheckpointError(f"universal_checkpoint_info has the pattern {str(pattern)[:100]!r}, which is none of DeepSpeed's", where=name)
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"universal_checkpoint_info has the pattern {pattern[:100]!r}: {error}", where=name) from None
