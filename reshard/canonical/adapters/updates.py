"""The value of an adapter: a set of low-rank updates of canonical weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.canonical.content import Drop
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.value import value
from reshard.index.origin import LowRankProduct, Tensor, Weighted


@value(eq=False)
class Update:
    """What an adapter adds to one matrix of the base: scale * (B x A)."""

    module: str
    """The module, or the parameter of all experts, by its name in the model: "model.layers.0.mlp.experts.gate_up_proj"."""
    array: Mosaic
    """[out features, in features]: the canonical weights that it changes."""
    a: Tensor
    """[r, in features]"""
    b: Tensor
    """[rows, r]. Row i belongs to row `first_row + row_step * i` of the array."""
    alpha: float
    """lora_alpha."""
    scale: float
    """The factor of the product: alpha / r, or alpha / sqrt(r)."""
    expert: int | None = None
    """The number of the expert; None for a matrix of no routed expert."""
    first_row: int = 0
    """The first row of the array that it changes."""
    row_step: int = 1
    """2 for gate or up of a class in which the rows of the two alternate (gpt-oss)."""
    magnitude: Tensor | None = None
    """[out features] with DoRA: the length of each row after the merge; None without DoRA."""

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def rows(self, first: int, count: int, step: int, module: str) -> Update:
        """The part of the update for some rows of its matrix, as an update of another module."""
        b = part(self.b, (first, 0), ((count, 0, step), (self.rank, 1, 1)))
        return replace(self, module=module, b=b, first_row=first, row_step=step)

    def products(self, weight: float = 1.0) -> Iterator[tuple[Tile, LowRankProduct]]:
        """What it adds to each canonical weight, at the tile of that weight. weight: the factor of the whole adapter."""
        for tile in self.array.tiles:
            (start, stop), columns = tile.span(0), tile.span(1)
            first, last = (-(-(row - self.first_row) // self.row_step) for row in (start, stop))
            first, last = max(first, 0), min(last, self.b.shape[0])
            if first >= last:
                continue
            begin = self.first_row + self.row_step * first - start
            inner = tile.cut(0, start + begin, start + begin + (last - first - 1) * self.row_step + 1)
            assert inner is not None
            lengths = None if self.magnitude is None else part(self.magnitude, (first,), ((last - first, 0, 1),))
            scale = self.scale * weight
            if _is_turned(tile):
                rows = part(self.a, (0, columns[0]), ((columns[1] - columns[0], 1, 1), (self.rank, 0, 1)))
                turned = part(self.b, (first, 0), ((self.rank, 1, 1), (last - first, 0, 1)))
                yield tile, LowRankProduct(inner.box, rows, turned, scale, lengths, (1, self.row_step))
            else:
                rows = part(self.b, (first, 0), ((last - first, 0, 1), (self.rank, 1, 1)))
                turned = part(self.a, (0, columns[0]), ((self.rank, 0, 1), (columns[1] - columns[0], 1, 1)))
                yield tile, LowRankProduct(inner.box, rows, turned, scale, lengths, (self.row_step, 1))


@value(eq=False)
class BiasUpdate:
    """What lora_bias adds to a bias: scale * b."""

    array: Mosaic
    """[out features]: the canonical biases."""
    b: Tensor
    """[out features]"""
    scale: float
    """The factor."""

    def products(self, weight: float = 1.0) -> Iterator[tuple[Tile, LowRankProduct]]:
        """What it adds to each canonical bias, at its tile."""
        for tile in self.array.tiles:
            start, stop = tile.span(0)
            row = part(self.b, (start,), ((1, 0, 1), (stop - start, 0, 1)))
            yield tile, LowRankProduct(tile.box, None, row, self.scale * weight)


@value(eq=False)
class Adapter:
    """A LoRA adapter, whatever the form in which it is stored."""

    updates: tuple[Update | BiasUpdate, ...]
    """What is added to the weights, in the order of the stored tensors."""
    replaced: Mapping[str, tuple[Mosaic, Tensor]]
    """The weights that it holds whole, by stored name: modules_to_save and trained biases; each with the weights that it replaces."""
    trained_rows: Mapping[str, tuple[Mosaic, Tensor, tuple[int, ...]]]
    """Single rows of embeddings that it holds, by stored name: the embedding, the rows [n, hidden], their numbers."""
    drops: tuple[Drop, ...]
    """Its tensors that are not needed."""


def part(tensor: Tensor, at: tuple[int, ...], axes: tuple[tuple[int, int, int], ...]) -> Tensor:
    """A strided part of a tensor, as a tensor of the same name. at, axes: as for `Shards.strided`."""
    if not any(at) and axes == tuple((size, axis, 1) for axis, size in enumerate(tensor.shape)):
        return tensor  # all of it: an adapter of many experts has a hundred thousand such factors
    origin = tensor.origin.of_parts(lambda term: part(term, at, axes)) if isinstance(tensor.origin, Weighted) else tensor.origin
    return replace(tensor, shape=tuple(size for size, _, _ in axes), shards=tensor.shards.strided(at, axes), origin=origin)


def item(tensor: Tensor, number: int) -> Tensor:
    """A matrix of a tensor of three axes, as a tensor of the same name."""
    origin = tensor.origin.of_parts(lambda term: item(term, number)) if isinstance(tensor.origin, Weighted) else tensor.origin
    inner = Box((number, 0, 0), (1, *tensor.shape[1:]))
    moved = tensor.shards.moved(inner, (0, 0, 0))
    rows, columns = tensor.shape[1:]
    shards = moved.strided((0, 0, 0), ((rows, 1, 1), (columns, 2, 1)))
    return replace(tensor, shape=(rows, columns), shards=shards, origin=origin)


def transposed(tensor: Tensor) -> Tensor:
    """A matrix with its axes exchanged; no byte moves before it is read."""
    rows, columns = tensor.shape
    return part(tensor, (0, 0), ((columns, 1, 1), (rows, 0, 1)))


def _is_turned(tile: Tile) -> bool:
    """Whether the canonical tensor holds the transpose of the array, in its last two axes."""
    return tile.axes[-1] == 0 or (len(tile.axes) > 1 and tile.axes[-2] == 1)
