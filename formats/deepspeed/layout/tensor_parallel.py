"""How the parts of a parameter on tensor-parallel ranks make the whole parameter.

The model file describes it by patterns over names (`universal_checkpoint_info`, written by AutoTP and Megatron-DeepSpeed) or by an affine
map. Without them, the split axis follows from the whole shapes in the model's config, or from Megatron's names. Any other parameter is
refused: a weight that is joined along the wrong axis still looks like a weight.

An affine map describes the parts by strided views, (offset, strides) in elements. Each piece must be a box of both tensors.

    {"version": 1, "params": {<pattern over names>: {
        "logical_shape": shape of the whole parameter,
        "ranks": {tensor-parallel rank: {"pieces": [{"shape": sizes, "source": view of the whole, "dest": view of the rank's part,
                                                     "scale": 1.0}, ...]}}}}}

Source: deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices, and affine.py (0.19.8); for Megatron's names without patterns
deepspeed/checkpoint/deepspeed_checkpoint.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.containers.inert_pickle import Inert
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.value import value

from .states import Shape

# A box of a rank's part, and the offsets of that box in the whole parameter.
Move = tuple[Box, tuple[int, ...]]


@value
class JoinedParameter:
    """A parameter joined from the parts of its tensor-parallel ranks."""

    shape: Shape
    """The whole shape."""
    moves: tuple[tuple[Move, ...], ...]
    """For each tensor-parallel rank, the boxes of its part and their offsets in the whole."""
    is_replicated: bool = False
    """Whether every rank holds the whole parameter."""


@value(repr=False)
class JoinRules:
    """The rules by which one checkpoint joins tensor-parallel parts."""

    info: Mapping[str, Any]
    """The model file's universal_checkpoint_info; empty if there is none."""
    shapes: Mapping[str, Shape]
    """Whole shapes by name, from the model's config; empty if there is none."""
    where: str
    """The model file, for messages."""

    def __post_init__(self) -> None:
        affine_map = self.info.get("affine_map")
        if isinstance(affine_map, Mapping) and affine_map.get("version", 1) != 1:
            raise CheckpointError(f"its affine map has the version {affine_map.get('version')}; reshard reads version 1", where=self.where)

    def __repr__(self) -> str:
        return f"<join rules: {len(self.info)} entries in {self.where}, {len(self.shapes)} shapes from the config>"

    def joined(self, name: str, parts: Sequence[Shape]) -> JoinedParameter:
        """How the parts of a parameter make the whole. parts: the shapes on the tensor-parallel ranks.

        Raises: CheckpointError if no rule applies, or the rule does not fit the shapes.
        """
        if is_listed(self.info, "autotp_unsupported_parameter_patterns", name):
            raise CheckpointError("DeepSpeed notes that it does not know how the ranks' parts make the whole", where=name)
        affine_map = self.info.get("affine_map")
        by_pattern = affine_map.get("params", {}) if isinstance(affine_map, Mapping) else {}
        if description := next((described for pattern, described in by_pattern.items() if _matches(pattern, name)), None):
            return _from_affine_map(name, description, parts)
        joined = self._by_patterns(name, parts) if self.info else self._without_patterns(name, parts)
        if is_listed(self.info, "vocabulary_parameter_patterns", name):
            joined = _without_vocab_padding(joined, self.info.get("original_vocab_size"), name)
        return joined

    def _by_patterns(self, name: str, parts: Sequence[Shape]) -> JoinedParameter:
        info = self.info
        if is_listed(info, "tp_replicated_parameter_patterns", name) or is_listed(info, "parameter_to_average_patterns", name):
            return _replicated(name, parts)
        if is_listed(info, "parameter_with_2_sub_params_cat_dim_0", name):
            return _fused(name, parts, 0, [[part[0] // 2 for part in parts] for _ in range(2)])
        for fused in map(_attributes, info.get("parameter_with_sub_params") or ()):
            for pattern in fused.get("patterns") or ():
                if _matches(pattern, name):
                    return _fused(name, parts, int(fused["partition_dim"]), self._sub_parameter_widths(pattern, fused, parts))
        return _concatenated(name, parts, 1 if is_listed(info, "parameter_with_row_parallelism_patterns", name) else 0)

    def _sub_parameter_widths(self, pattern: str, fused: Mapping[Any, Any], parts: Sequence[Shape]) -> list[list[int]]:
        """[sub-parameter][rank]: widths along the split axis. Version 0.4 records them; earlier versions split evenly."""
        recorded = self.info.get("sub_param_shard_widths") or {}
        if pattern in recorded:
            return [list(widths) for widths in recorded[pattern]]
        axis = int(fused["partition_dim"])
        # One size per sub-parameter, or the number of equal sub-parameters.
        sizes = fused["shape"][axis]
        if not isinstance(sizes, tuple | list):
            sizes = [sum(part[axis] for part in parts) // sizes] * sizes
        return [[size // len(parts)] * len(parts) for size in sizes]

    def _without_patterns(self, name: str, parts: Sequence[Shape]) -> JoinedParameter:
        if (shape := self.shapes.get(name.removeprefix("module."))) is not None:
            return _of_known_shape(name, parts, shape)
        if len(parts[0]) == 1 and re.fullmatch(r"\d+\.(weight|bias)", name):
            return _replicated(name, parts)  # a pipeline layer with nothing else: the final norm
        for pattern, axis in _MEGATRON_AXES:
            if pattern.search(name):
                return _replicated(name, parts) if axis is None else _concatenated(name, parts, axis)
        raise CheckpointError(
            f"nothing tells how the parts of {len(parts)} tensor-parallel ranks, {list(parts[0])} each, make the whole",
            where=f"{name} in {self.where}",
            why="The file has no universal_checkpoint_info, and the name is not one of Megatron's; joined along the wrong axis the weight "
            "would look right and be wrong",
            do="Give the model's config with `model=DIR`, so that the whole shapes are known",
        )


# Megatron's names -> the axis that tensor-parallel ranks split; None: replicated. The rules of DeepSpeedCheckpoint, and column-parallel
# biases. They apply to no other names: AutoTP before 0.19 recorded nothing, split q_proj and replicated lm_head.
_MEGATRON_AXES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), axis)
    for pattern, axis in (
        (r"word_embeddings\.weight$", 0),
        (r"(word_embeddings\.norm|layernorm|layer_norm|position_embeddings)[^.]*\.(weight|bias)$", None),
        (r"(attention\.dense|dense_4h_to_h)\.bias$", None),
        (r"rotary_emb\.inv_freq$", None),
        (r"(attention\.dense|dense_4h_to_h)\.weight$", 1),
        (r"(query_key_value|attention\.query|attention\.key_value|dense_h_to_4h)\.(weight|bias)$", 0),
    )
)


def _replicated(name: str, parts: Sequence[Shape]) -> JoinedParameter:
    if len(set(parts)) > 1:
        raise _unfitting(name, parts, "every rank should hold the whole parameter")
    whole = (Box.whole(parts[0]), (0,) * len(parts[0]))
    return JoinedParameter(parts[0], ((whole,),) * len(parts), is_replicated=True)


def _concatenated(name: str, parts: Sequence[Shape], axis: int) -> JoinedParameter:
    if any(len(part) <= axis for part in parts):
        raise _unfitting(name, parts, f"they should be concatenated along axis {axis}")
    return _fused(name, parts, axis, [[part[axis] for part in parts]])


def _fused(name: str, parts: Sequence[Shape], axis: int, widths: Sequence[Sequence[int]]) -> JoinedParameter:
    """Sub-parameters concatenated along an axis, each split over the ranks. widths: [sub-parameter][rank]."""
    part_widths = [sum(of_ranks[rank] for of_ranks in widths if rank < len(of_ranks)) for rank in range(len(parts))]
    other_axes = {part[:axis] + part[axis + 1 :] for part in parts}
    if len(other_axes) > 1 or any(part[axis] != width for part, width in zip(parts, part_widths, strict=True)):
        raise _unfitting(name, parts, f"along axis {axis} their sizes should be {part_widths}, along the others equal")
    moves: list[list[Move]] = [[] for _ in parts]
    part_offsets, whole_offset = [0] * len(parts), 0
    for of_ranks in widths:
        for rank, width in enumerate(of_ranks):
            if width:
                box = Box.whole(parts[rank]).narrow(axis, part_offsets[rank], part_offsets[rank] + width)
                moves[rank].append((box, tuple(whole_offset if i == axis else 0 for i in range(len(parts[rank])))))
            part_offsets[rank] += width
            whole_offset += width
    return JoinedParameter((*parts[0][:axis], whole_offset, *parts[0][axis + 1 :]), tuple(map(tuple, moves)))


def _of_known_shape(name: str, parts: Sequence[Shape], shape: Shape) -> JoinedParameter:
    """A parameter that is not fused: split along the axis on which the parts add up to its known shape."""
    if all(part == shape for part in parts):
        return _replicated(name, parts)
    for axis in range(len(shape)):
        if all(len(part) == len(shape) for part in parts) and sum(part[axis] for part in parts) == shape[axis]:
            joined = _concatenated(name, parts, axis)
            if joined.shape == shape:
                return joined
    raise _unfitting(name, parts, f"they do not make {list(shape)}, the shape in the config")


def _without_vocab_padding(joined: JoinedParameter, true_vocab: Any, name: str) -> JoinedParameter:
    padded_vocab = joined.shape[0]
    if type(true_vocab) is not int or not 0 < true_vocab <= padded_vocab:
        raise CheckpointError(
            f"it has {padded_vocab} rows, and original_vocab_size in universal_checkpoint_info is {true_vocab}", where=name
        )
    moves = tuple(
        tuple(
            (box.narrow(0, 0, min(box.sizes[0], true_vocab - offsets[0])), offsets) for box, offsets in of_rank if offsets[0] < true_vocab
        )
        for of_rank in joined.moves
    )
    return JoinedParameter((true_vocab, *joined.shape[1:]), moves, joined.is_replicated)


def _unfitting(name: str, parts: Sequence[Shape], what: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor-parallel ranks hold {', '.join(str(list(part)) for part in parts)}; {what}",
        where=name,
        why="The files are from different runs, or their description of the split is wrong",
        do="Keep the files of one save only",
    )


def is_listed(info: Mapping[str, Any], key: str, name: str) -> bool:
    """Whether universal_checkpoint_info lists a parameter under that key."""
    return any(_matches(pattern, name) for pattern in info.get(key) or ())


# Matching a repeated group can take exponential time; DeepSpeed writes no such patterns.
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def _matches(pattern: Any, name: str) -> bool:
    """Whether one of DeepSpeed's regular expressions matches at the start of the name."""
    if not isinstance(pattern, str) or len(pattern) > 1000 or _REPEATED_GROUP.search(pattern):
        raise CheckpointError(
            f"universal_checkpoint_info has the pattern {str(pattern)[:100]!r}, which DeepSpeed does not write", where=name
        )
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"universal_checkpoint_info has the pattern {pattern[:100]!r}: {error}", where=name) from None


def _from_affine_map(name: str, description: Any, parts: Sequence[Shape]) -> JoinedParameter:
    shape, ranks = tuple(_attributes(description).get("logical_shape") or ()), _attributes(description).get("ranks") or {}
    pieces = [_attributes(ranks.get(rank, ranks.get(str(rank)))).get("pieces") or () for rank in range(len(parts))]
    moves = tuple(tuple(_moves(name, shape, rank, parts[rank], of_rank)) for rank, of_rank in enumerate(pieces))
    elements = sum(box.volume for of_rank in moves for box, _ in of_rank)
    is_replicated = len(set(moves)) == 1 and elements == len(parts) * math.prod(shape)
    if not is_replicated and elements != math.prod(shape):
        raise _unfitting(name, parts, f"the pieces of its affine map have {elements:,} elements in total, for the shape {list(shape)}")
    return JoinedParameter(shape, moves, is_replicated)


def _moves(name: str, shape: Shape, rank: int, part: Shape, pieces: Iterable[Any]) -> Iterator[Move]:
    """The boxes of a rank's part. Raises CheckpointError for a piece that is scaled, or is not a box."""
    for piece in map(_attributes, pieces):
        if piece.get("scale", 1.0) != 1.0:
            raise CheckpointError(
                f"its tensor-parallel rank {rank} holds the values times {piece['scale']}",
                where=name,
                why="Undoing the scale would change bits, and reshard copies bits",
                do="Convert the checkpoint with DeepSpeed's ds_to_universal first",
            )
        sizes = _numbers(piece.get("shape"))
        (whole_offset, whole_strides), (part_offset, part_strides) = _view(piece.get("source")), _view(piece.get("dest"))
        if sizes is None or whole_strides is None or part_strides is None or not len(sizes) == len(whole_strides) == len(part_strides):
            raise CheckpointError(
                f"the model file describes a piece of it on tensor-parallel rank {rank} without the shape and strides of a view",
                where=name,
                why="Its place in the whole parameter is not known",
                do="Copy the model files again",
            )
        if not math.prod(sizes):
            continue
        whole_box, part_box = box_of_view(shape, whole_offset, sizes, whole_strides), box_of_view(part, part_offset, sizes, part_strides)
        if whole_box is None or part_box is None or whole_box.sizes != part_box.sizes:
            raise CheckpointError(f"a piece of {sizes} elements on tensor-parallel rank {rank} is not a box of the whole", where=name)
        yield part_box, whole_box.offsets


def _attributes(value: Any) -> Mapping[Any, Any]:
    """The entries of a dict, or the attributes of an object such as SubparamShape; empty for anything else."""
    if isinstance(value, Inert):
        return value.state if isinstance(value.state, Mapping) else {}
    return value if isinstance(value, Mapping) else {}


def _numbers(value: Any) -> tuple[int, ...] | None:
    """The value if it is a list or tuple of non-negative whole numbers."""
    is_list = isinstance(value, tuple | list) and all(type(number) is int and number >= 0 for number in value)
    return tuple(value) if is_list else None


def _view(value: Any) -> tuple[int, tuple[int, ...] | None]:
    """The offset and the strides of a view; None in place of the strides if the value is not a view."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and type(value[0]) is int and value[0] >= 0
    return (value[0], _numbers(value[1])) if is_pair else (0, None)


def box_of_view(shape: Shape, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box of a row-major tensor that a strided view walks through in order; None if the view is not a box."""
    first = _coordinates(shape, offset)
    last = _coordinates(shape, offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)))
    if first is None or last is None or any(start > end for start, end in zip(first, last, strict=True)):
        return None
    box = Box(first, tuple(end - start + 1 for start, end in zip(first, last, strict=True)))
    return box if _merged_axes(box.sizes, row_major(shape)) == _merged_axes(sizes, strides) else None


def _coordinates(shape: Shape, offset: int) -> tuple[int, ...] | None:
    """The coordinates of an element of a row-major tensor; None if the element lies outside."""
    coordinates = []
    for stride in row_major(shape):
        coordinate, offset = divmod(offset, stride)
        coordinates.append(coordinate)
    is_inside = not offset and all(0 <= coordinate < size for coordinate, size in zip(coordinates, shape, strict=True))
    return tuple(coordinates) if is_inside else None


def _merged_axes(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """(size, stride) per axis. Neighbouring axes that are contiguous count as one axis; axes of one element are left out."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes
