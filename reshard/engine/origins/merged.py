"""Merger: the values of a weight with a LoRA adapter, base + scale * (rows x columns) in float32, rounded once (canonical/merging.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.origins.merged_words import FactorColumns, merged_words
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import SlabPieces, Strip, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.low_rank import Float32, add_products, row_lengths
from reshard.index.origin import LowRankProduct, Merged, Tensor
from reshard.plans.digests import Hash

# The most elements of a factor that stay in memory while a tensor is read.
_MOST_KEPT = 1 << 20


class Merger(Reader):
    """Reads the values of a weight with a LoRA adapter."""

    def __init__(self, tensor: Tensor, origin: Merged, dtype: DType, open_input: OpenInput, *_: object) -> None:
        self._source = open_input(origin.base, F32)
        super().__init__(tensor, dtype, self._source)
        self._products = [_Product(product, open_input) for product in origin.products]

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip."""
        if self.dtype == BF16 and (term := self._only(strip.box)) is not None:
            factors = term.factors(worker, strip.box)
            base = self._source.read(worker, pieces, strip).view(np.float32).reshape(strip.box.sizes)
            return put(merged_words(base, *factors, term.product.scale).reshape(strip.sizes), out)
        # A copy, because the factors are read into the worker's buffers.
        values = self._source.read(worker, pieces, strip).copy().view(np.float32).reshape(strip.box.sizes)
        self._add(worker, strip.box, values)
        return put(cast(values.view(F32.word), F32, self.dtype).reshape(strip.sizes), out)

    def _only(self, box: Box) -> _Product | None:
        """The product that alone is added to all values of a box, if there is one."""
        terms = [term for term in self._products if term.product.box.intersect(box) is not None]
        return terms[0] if len(terms) == 1 and terms[0].is_added_to(box) else None

    def _add(self, worker: Worker, box: Box, values: Float32) -> None:
        """Add the products to the values of a box."""
        with np.errstate(all="ignore"):
            for term in self._products:
                shared = term.product.box.intersect(box)
                if shared is None:
                    continue
                part = values[shared.relative_to(box.offsets).index]
                matrix = part.reshape(1, -1) if part.ndim == 1 else part[(0,) * (part.ndim - 2)]
                if term.product.steps != (1, 1):
                    term.add_by_steps(worker, shared, matrix)
                    continue
                if term.product.replaces:
                    matrix[:] = 0
                matrix += term.of(worker, shared)
                if term.product.magnitude is not None:
                    matrix *= self._dora_factors(worker, term, shared, matrix)
            if self.dtype == F32:
                values[np.isnan(values)] = np.nan

    def _dora_factors(self, worker: Worker, product: _Product, box: Box, updated: Float32) -> Float32:
        """The factor of each row of a box with DoRA: its magnitude by the length of the whole row. updated: the values of the box."""
        rows = Box((box.offsets[0], 0), (box.sizes[0], self.tensor.shape[1]))
        if rows != box:
            updated = _values(self._source, worker, rows) + product.of(worker, rows)
        return product.magnitude(worker, box) / row_lengths(updated)[:, None]


class _Product:
    """Computes a product. A small factor of the columns is read once."""

    def __init__(self, product: LowRankProduct, open_input: OpenInput) -> None:
        self.product, self._columns = product, open_input(product.columns, F32)
        self._rows, self._magnitude = (open_input(factor, F32) if factor else None for factor in (product.rows, product.magnitude))
        self._kept: FactorColumns | None = None

    def is_added_to(self, box: Box) -> bool:
        """Whether it is a product of two factors that is added to all values of a box of two axes, and that of the columns is kept."""
        product = self.product
        is_sum = not product.replaces and product.magnitude is None and product.rows is not None and product.steps == (1, 1)
        return is_sum and len(box.sizes) == 2 and product.box.contains(box) and product.columns.elements <= _MOST_KEPT

    def factors(self, worker: Worker, box: Box) -> tuple[Float32, FactorColumns]:
        """The factors of the product in a box."""
        (first, left), (height, width) = box.relative_to(self.product.box.offsets).offsets, box.sizes
        assert self._rows is not None
        rows = _values(self._rows, worker, Box((first, 0), (height, self.product.columns.shape[0])))
        return rows, self._whole_columns(worker).narrow(slice(left, left + width))

    def of(self, worker: Worker, box: Box) -> Float32:
        """The product in a box, which lies in that of the product: an array of two axes."""
        local = box.relative_to(self.product.box.offsets)
        (first, height), (left, width) = [(0, 1), *zip(local.offsets, local.sizes, strict=True)][-2:]
        return self._of(worker, first, height, left, width)

    def add_by_steps(self, worker: Worker, box: Box, matrix: Float32) -> None:
        """Add the product to those rows and columns of a box, which lies in that of the product, that it belongs to.

        With step 2, the elements 3..6 of a box are its 3rd to 6th; of these the 4th and the 6th are elements 2 and 3 of the product.
        """
        local = box.relative_to(self.product.box.offsets)
        spans = [
            (-(-offset // step), -(-(offset + size) // step), -offset % step)
            for offset, size, step in zip(local.offsets[-2:], local.sizes[-2:], self.product.steps, strict=True)
        ]
        (first, last, top), (left, right, edge) = spans
        if first < last and left < right:
            rows, columns = self.product.steps
            matrix[top::rows, edge::columns] += self._of(worker, first, last - first, left, right - left)

    def _of(self, worker: Worker, first: int, height: int, left: int, width: int) -> Float32:
        """The rows first..first + height and the columns left..left + width of the product."""
        rank = self.product.columns.shape[0]
        delta = np.zeros((height, width), np.float32)
        rows = None if self._rows is None else _values(self._rows, worker, Box((first, 0), (height, rank)))
        if self.product.columns.elements <= _MOST_KEPT:
            add_products(delta, rows, self._whole_columns(worker).values[:, left : left + width])
        else:
            step = max(1, _MOST_KEPT // width)
            for start in range(0, rank, step):
                columns = _values(self._columns, worker, Box((start, left), (min(step, rank - start), width)))
                add_products(delta, None if rows is None else rows[:, start : start + step], columns)
        delta *= np.float32(self.product.scale)
        return delta

    def _whole_columns(self, worker: Worker) -> FactorColumns:
        """The factor of the columns, which is kept."""
        if self._kept is None:
            self._kept = FactorColumns.of(_values(self._columns, worker, Box.whole(self.product.columns.shape)))
        return self._kept

    def magnitude(self, worker: Worker, box: Box) -> Float32:
        """The magnitude of each row of a box, as an array of one column."""
        assert self._magnitude is not None
        local = box.relative_to(self.product.box.offsets)
        return _values(self._magnitude, worker, Box(local.offsets[:1], local.sizes[:1]))[:, None]


def _values(factor: Reader, worker: Worker, box: Box) -> Float32:
    """The values of a box of a factor."""
    return factor.whole(worker, box).view(np.float32)
