"""Balance: how the stored bytes of an index divide among its ranks, files, kinds, element types and layers. Replicas count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from reshard.geometry.quantities import by_numbers
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor
from reshard.index.name_parts import layer_of
from reshard.index.shards import PieceTable


@value
class ByteShare:
    """A part of the stored bytes."""

    name: str
    """The rank, file, kind, element type or layer."""
    tensors: int
    """How many tensors it has, or has a piece of."""
    nbytes: int
    """Its stored bytes."""


def _layer(tensor: Tensor) -> str:
    layer = layer_of(tensor.name)
    return "no layer" if layer is None else f"layer {layer}"


_OF_TENSORS: dict[str, Callable[[Tensor], str]] = {
    "kind": lambda tensor: tensor.kind,
    "dtype": lambda tensor: tensor.dtype.name,
    "layer": _layer,
}
BY = ("kind", "rank", "file", "dtype", "layer")
"""What bytes can be divided by."""


def shares(index: Index, by: str) -> tuple[ByteShare, ...]:
    """The stored bytes of an index, divided by one of BY: ranks, files and layers in order, others as they occur first. Ranks are empty if
    the files do not say who held what."""
    if by in _OF_TENSORS:
        divided = _by_tensor(index, _OF_TENSORS[by])
        return tuple(sorted(divided, key=_number)) if by == "layer" else tuple(divided)
    return tuple(_by_piece(index, by))


def _number(share: ByteShare) -> tuple[bool, int]:
    word = share.name.rpartition(" ")[2]
    return not word.isdecimal(), int(word) if word.isdecimal() else 0


def _by_tensor(index: Index, key: Callable[[Tensor], str]) -> Iterator[ByteShare]:
    sizes = _stored_bytes(index)
    groups: dict[str, list[int]] = {}
    for tensor, nbytes in zip(index.tensors, sizes, strict=True):
        group = groups.setdefault(key(tensor), [0, 0])
        group[0] += 1
        group[1] += nbytes
    return (ByteShare(name, count, nbytes) for name, (count, nbytes) in groups.items())


def _stored_bytes(index: Index) -> Iterator[int]:
    """The bytes of all pieces of each tensor."""
    volumes: dict[int, Any] = {}
    for tensor in index.tensors:
        shards = tensor.shards
        if len(shards) == 1:
            yield tensor.nbytes
            continue
        sums = volumes.get(id(shards.table))
        if sums is None:
            sums = volumes[id(shards.table)] = np.concatenate([np.zeros(1, np.int64), np.cumsum(_volumes(shards.table))])
        yield int(sums[shards.stop] - sums[shards.start]) * tensor.dtype.itemsize


def _volumes(table: PieceTable) -> Any:
    return table.sizes.prod(axis=1, dtype=np.int64)


def _of_tables(index: Index) -> Iterator[tuple[PieceTable, list[Tensor]]]:
    """The tensors of each table. Tensors that have rows in common, such as step counts that are one number in the files, come in separate
    turns."""
    turns: dict[tuple[int, int], tuple[PieceTable, list[Tensor]]] = {}
    used: dict[int, Any] = {}
    for tensor in index.tensors:
        table, window = tensor.shards.table, slice(tensor.shards.start, tensor.shards.stop)
        rows = used.setdefault(id(table), np.zeros(len(table), np.int64))
        turn = int(rows[window].max(initial=0))
        rows[window] = turn + 1
        turns.setdefault((id(table), turn), (table, []))[1].append(tensor)
    yield from turns.values()


def _by_piece(index: Index, by: str) -> Iterator[ByteShare]:
    """By the rank or the file that holds each piece. Tensors of one table are counted together."""
    counted: dict[str, list[int]] = {}
    for table, tensors in _of_tables(index):
        holders = table.ranks if by == "rank" else table.files
        if holders is None:
            continue
        # [n]: the element size of each row of the table, and the tensor that it is a piece of.
        itemsizes, owners = np.zeros(len(table), np.int64), np.full(len(table), -1, np.int64)
        for number, tensor in enumerate(tensors):
            window = slice(tensor.shards.start, tensor.shards.stop)
            itemsizes[window], owners[window] = tensor.dtype.itemsize, number
        used = np.flatnonzero(owners >= 0)
        numbers, inverse = np.unique(holders[used], return_inverse=True)
        nbytes = np.zeros(len(numbers), np.int64)
        np.add.at(nbytes, inverse, _volumes(table)[used] * itemsizes[used])
        pairs = np.unique(inverse.astype(np.int64) * len(tensors) + owners[used])
        counts = np.bincount(pairs // max(len(tensors), 1), minlength=len(numbers))
        for holder, size, count in zip(numbers.tolist(), nbytes.tolist(), counts.tolist(), strict=True):
            group = counted.setdefault(f"rank {holder}" if by == "rank" else table.paths[holder], [0, 0])
            group[0] += count
            group[1] += size
    return (ByteShare(name, *counted[name]) for name in sorted(counted, key=by_numbers))
