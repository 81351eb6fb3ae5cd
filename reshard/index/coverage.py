"""Coverage: whether the pieces of a tensor cover it exactly once. Arithmetic on columns; nothing is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from reshard.errors import CheckpointError, IncompleteTensor, some
from reshard.geometry.boxes import Box
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns, distinct
from reshard.index.fold import cut_of
from reshard.index.index import Index, Tensor
from reshard.index.shards import PieceTable, primary_rows

# Limits of a tensor's name. Trees of names (fold.py) are as deep as a name has parts; names of real models have fewer than 20.
_LONGEST, _MOST_PARTS = 4096, 100
UNGATHERED = "Each rank of the run held a part of each weight, and the file was written without them"
GATHERED = "Give the folder that DeepSpeed wrote in the same save, global_step*; if there is none, the weights are lost"
"""What to do about weights of shape [0]."""


def check_index(index: Index) -> None:
    """Raises CheckpointError for the first name that cannot be used (`wrong_names`), or the first tensor that its primary boxes do not
    cover exactly once (`uncovered`)."""
    for error in wrong_names(index.tensors):
        raise error
    check_all_covered(index.tensors)


def wrong_names(tensors: Iterable[Tensor]) -> Iterator[CheckpointError]:
    """An error for each name that occurs twice in its kind, is not Unicode text or is too long."""
    names = [(tensor.kind, tensor.name) for tensor in tensors]
    if len(set(names)) < len(names):
        for (kind, name), count in Counter(names).items():
            if count > 1:
                why = "Nothing tells which of them is meant"
                yield CheckpointError(f"{count} tensors of the kind {kind} have this name", where=name, why=why)
    for _, name in names:
        if not name.isascii() and not _is_text(name):
            yield CheckpointError(
                "its name is not Unicode text", where=name, why="No format can store the name", do="Copy the checkpoint again"
            )
        if len(name) >= 2 * _MOST_PARTS and _is_too_long(name):
            yield CheckpointError(
                f"the name of this tensor has {plural(len(name), 'character')} in {plural(name.count('.') + 1, 'part')}; the limits are "
                f"{_LONGEST:,} characters and {_MOST_PARTS} parts",
                where=f"{name[:60]}...",
                do="Copy the checkpoint again",
            )


def _is_too_long(name: str) -> bool:
    return len(name) > _LONGEST or name.count(".") >= _MOST_PARTS


def _is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8. Pickles and JSON can hold halves of a surrogate pair, which cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_all_covered(tensors: Iterable[Tensor]) -> None:
    """Raises CheckpointError for the first tensor that its primary boxes do not cover exactly once."""
    for error in uncovered(tensors):
        raise error


def uncovered(tensors: Iterable[Tensor]) -> Iterator[CheckpointError]:
    """An error for each tensor that its primary boxes do not cover exactly once. Tensors that are cut in the same way are checked once."""
    in_one_piece: dict[int, tuple[PieceTable, list[Tensor]]] = {}
    covered: set[tuple[object, ...]] = set()
    for tensor in tensors:
        shards = tensor.shards
        if tensor.dtype.is_unread:
            continue  # an object without pieces
        if shards.stop - shards.start == 1 and shards.table.primary is None:
            if id(shards.table) not in in_one_piece:
                in_one_piece[id(shards.table)] = shards.table, []
            in_one_piece[id(shards.table)][1].append(tensor)
            continue
        cut = cut_of(tensor)
        if cut not in covered:
            if error := _fault(tensor):
                yield error
            else:
                covered.add(cut)
    for table, of_table in in_one_piece.values():
        yield from filter(None, map(_fault, _not_whole(table, of_table)))


def _fault(tensor: Tensor) -> CheckpointError | None:
    try:
        check_coverage(tensor)
    except CheckpointError as error:
        return error
    return None


def _not_whole(table: PieceTable, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, of one piece each, whose piece is not the whole tensor."""
    rows = np.array([tensor.shards.start for tensor in tensors])
    alike = [i for i, tensor in enumerate(tensors) if len(tensor.shape) == table.sizes.shape[1]]
    if len(alike) < len(tensors):
        return tensors
    shapes = np.array([tensor.shape for tensor in tensors], np.int64).reshape(table.sizes[rows].shape)
    whole = (table.sizes[rows] == shapes).all(axis=1) & (table.offsets[rows] == 0).all(axis=1)
    return [tensors[i] for i in np.flatnonzero(~whole).tolist()]


def check_coverage(tensor: Tensor) -> None:
    """Raises CheckpointError unless the primary boxes of a tensor cover it exactly once. Replicas do not count."""
    shards, shape = tensor.shards, np.array(tensor.shape, np.int64)
    if len(shards) == 1 and shards.box(0) == Box.whole(tensor.shape):
        return
    if len(shards) and shards.sizes.shape[1] != len(shape):
        raise IncompleteTensor(
            f"its pieces have {shards.sizes.shape[1]} axes, and its shape is {list(tensor.shape)}",
            where=tensor.name,
            why="A file holds another tensor under this name",
            do="Copy the files again from where the checkpoint was written",
        )
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    # The columns of a tensor without pieces do not tell the number of axes, so they are reshaped.
    offsets, sizes = (column[rows].reshape(len(rows), len(shape)) for column in (shards.offsets, shards.sizes))
    stops = offsets + sizes
    if (stops > shape).any():
        row = int(rows[np.flatnonzero((stops > shape).any(axis=1))[0]])
        raise IncompleteTensor(
            f"the box {shards.box(row)} in {shards.path(row)} reaches beyond the tensor's shape {list(tensor.shape)}", where=tensor.name
        )
    region = Box.whole(tensor.shape)
    if _is_cut_once(offsets, stops, shape):
        return
    if region.volume and (fault := _first_fault(offsets, stops, rows, region, 0)):
        box, holders = fault
        if not len(holders):
            raise IncompleteTensor(
                f"{box} of {list(tensor.shape)} is in no file",
                where=tensor.name,
                why=f"The {len(rows)} stored boxes are in {some(sorted({shards.path(int(row)) for row in rows}), most=4)}; "
                "a part of the weight would be left unset",
                do="Copy the missing rank's file from where the checkpoint was written, or save it again",
            )
        first, second = (int(row) for row in holders[:2])
        raise IncompleteTensor(
            f"two stored boxes overlap without being equal: {shards.box(first)} in {shards.path(first)} and "
            f"{shards.box(second)} in {shards.path(second)}",
            where=tensor.name,
            why="They were saved under different shardings, or one of the files belongs to another save",
            do="Remove the files that do not belong to this save",
        )


def _is_cut_once(starts: Columns, stops: Columns, shape: Columns) -> bool:
    """Whether the boxes follow each other along one axis and are whole along the others. This is the common case, and quick to check."""
    cut = np.flatnonzero((stops - starts != shape).any(axis=0))
    if not len(starts) or len(cut) > 1:
        return False
    if not len(cut):
        return len(starts) == 1
    order = np.argsort(starts[:, cut[0]])
    begin, end = starts[order, cut[0]], stops[order, cut[0]]
    return bool(begin[0] == 0 and end[-1] == shape[cut[0]] and (begin[1:] == end[:-1]).all())


def _first_fault(starts: Columns, stops: Columns, rows: Columns, region: Box, axis: int) -> tuple[Box, Columns] | None:
    """The first box inside `region` that no row covers or several rows cover, with those rows; None if every element has one row.

    starts, stops: [n, ndim], the boxes of the rows. rows: [n], their numbers. axis: every row covers `region` along the axes before it.
    """
    if axis == len(region.sizes):
        return None if len(rows) == 1 else (region, rows)
    if not len(rows):
        return region, rows
    cuts = distinct(np.concatenate([starts[:, axis], stops[:, axis], [0, region.sizes[axis]]]))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, stops, rows = starts[order], stops[order], rows[order]
    if len(cuts) == 2:
        return _first_fault(starts, stops, rows, region, axis + 1)
    begin, checked = np.searchsorted(starts[:, axis], cuts[1:], side="left"), None
    for i in range(len(cuts) - 1):
        covering = np.flatnonzero(stops[: begin[i], axis] > cuts[i])
        slab = region.narrow(axis, int(cuts[i]), int(cuts[i + 1]))
        key = rows[covering].tobytes()
        if key == checked and len(covering):
            continue  # the same rows cover the slab before this one
        checked = key
        if fault := _first_fault(starts[covering], stops[covering], rows[covering], slab, axis + 1):
            return fault
    return None


def sharding_text(tensor: Tensor) -> str:
    """How a tensor is cut, for messages: "whole", "4 along axis 0", "2 x 4 along axes 0, 1" or "7 boxes, cut between elements".

    The number of copies follows, if there are several: "whole, 8 copies". A tensor without elements is "empty".
    """
    shards = tensor.shards
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    if not len(rows):
        return "empty"
    parts = [len(distinct(shards.offsets[rows, axis])) for axis in range(len(tensor.shape))]
    cut = [axis for axis, count in enumerate(parts) if count > 1]
    text = "whole"
    if cut:
        text = " x ".join(str(parts[axis]) for axis in cut) + f" along {'axis' if len(cut) == 1 else 'axes'} {', '.join(map(str, cut))}"
        if math.prod(parts) != len(rows):  # a flat buffer is cut between any two elements: a part of a row, rows, a part of a row
            text = f"{len(rows)} boxes, cut between elements"
    stored = int((shards.sizes > 0).all(axis=1).sum())
    copies, rest = divmod(stored, len(rows))
    if rest:
        return f"{text}, and {plural(stored - copies * len(rows), 'part')} once more"
    return text if copies == 1 else f"{text}, {copies} copies"


def is_ungathered(stored: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a weight has the shape [0] that parameters have under ZeRO-3 where they are not gathered."""
    return tuple(stored) == (0,) and tuple(expected) != (0,)


def wrong_shape(stored: Sequence[int], expected: Sequence[int]) -> str:
    """A sentence about a weight that does not have the shape that the config says."""
    cause = ": saved under ZeRO-3 without gathering" if is_ungathered(stored, expected) else ""
    return f"its shape is {list(stored)}, the config says {list(expected)}{cause}"


def check_gathered(tensors: Sequence[Tensor]) -> None:
    """Raises CheckpointError if all weights of a checkpoint have the shape [0]."""
    weights = [tensor for tensor in tensors if tensor.kind == "weight"] if tensors and tensors[0].shape == (0,) else []
    if len(weights) > 1 and all(tensor.shape == (0,) for tensor in weights):
        what = f"all {len(weights)} weights have the shape [0]: saved under ZeRO-3 without gathering"
        raise CheckpointError(what, where=weights[0].name, why=UNGATHERED, do=GATHERED)
