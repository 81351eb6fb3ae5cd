"""Combiner: the elements of one tensor from those of the same tensor in several checkpoints, each in float64 and rounded once at the end.

    average           acc = w1*x1;  acc = acc + wi*xi         in the order of the inputs
    task-arithmetic   acc = x0;     acc = acc + wi*(xi - x0)  x0 is the base
    slerp             acc = c1*x1;  acc = acc + c2*x2         c1, c2: see `Turn`
    equal             x1, and every other input must hold the same elements

Every product, difference and sum is rounded to float64 by itself; nothing is fused. An element depends on the elements at its place alone
(with slerp, on two numbers of its tensor besides), so the result does not depend on blocks, strips or threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import Block, cast, cast_once, numpy_type
from reshard.engine.origins.mixed_sums import exact_sums, is_exact
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import FileRange, SlabPieces, Strip, Worker, bytes_of
from reshard.errors import CheckpointError
from reshard.geometry import precise
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.dtypes import BF16, DType
from reshard.index.origin import Mixed, Tensor
from reshard.plans.digests import CURRENT, Hash

Float64 = npt.NDArray[np.float64]
Words = Sequence[Block] | Block
"""The words of the same elements of each input: one array, if all have one type."""
Sums = tuple[float, float, float]
"""Of a part of two tensors: the sum of x*y, of x*x and of y*y."""
# Elements that are combined at once, so that their sums and products stay in the processor's cache.
_STRIP = 1 << 17
_ALMOST_PARALLEL = 0.9995
"""If the cosine of the angle is larger than this, or smaller than its negative, slerp is the straight line."""


class Combiner(Reader):
    """Reads the values of a tensor that come from several checkpoints."""

    def __init__(self, tensor: Tensor, origin: Mixed, dtype: DType, open_input: OpenInput, *_: object) -> None:
        super().__init__(tensor, dtype)
        self._mixed, self._inputs = origin, [open_input(input_tensor, input_tensor.values_dtype) for input_tensor in origin.inputs]
        self._turn = Turn(tensor.shape, origin.weights[1]) if origin.rule == "slerp" else None
        # A strip of each input is in memory at once. Together they have the bytes of one strip, which stay in the processor's cache; with
        # more than eight inputs they have the bytes of up to four strips, because shorter ones take more calls.
        self.itemsize *= max(min(len(self._inputs), 8), len(self._inputs) // 4)

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces of each input hold of a slab."""
        return SlabPieces(self.tensor, (), of_inputs=tuple(input_reader.within(slab, axis) for input_reader in self._inputs))

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the values of a box of each input."""
        return chain.from_iterable(input_reader.ranges(box, gap) for input_reader in self._inputs)

    def new_hashes(self) -> list[Hash]:
        """A new hash for each of the checkpoints."""
        return [CURRENT.new() for _ in self._inputs]

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip. Raises CheckpointError for a NaN or infinity in an input, and if inputs that must be equal are not."""
        mixed, turn = self._mixed, self._turn
        if turn and mixed.weights[1] in (0, 1):
            # An end of the arc is the input, bit for bit: a sum would lose the sign of a zero.
            end = int(mixed.weights[1])
            source = self._inputs[end]
            return put(cast(source.read(worker, pieces.of_inputs[end], strip), source.dtype, self.dtype), out)
        coefficients = turn.coefficients(lambda box: self._flat(worker, box)) if turn else mixed.weights
        inputs = self._words(worker, pieces, strip, hashes)
        if mixed.rule == "equal":
            for number, words in enumerate(inputs[1:], 1):
                check_equal(inputs[0], words, mixed, number, strip.box)
            return put(cast(inputs[0], self._inputs[0].dtype, self.dtype), out)
        result, is_finite = combine(mixed, coefficients, inputs, self.dtype)
        if not is_finite:  # an input has such an element, or the sum is too large
            for number, words in enumerate(inputs):
                check_finite(words, mixed, number, strip.box)
        return put(result.reshape(strip.sizes), out)

    def _words(self, worker: Worker, pieces: SlabPieces, strip: Strip, hashes: Sequence[Hash]) -> Words:
        """The elements of a strip of each input."""
        types = [input_reader.dtype for input_reader in self._inputs]
        is_one_type = {*types} == {types[0]}
        read = np.empty((len(types), *strip.sizes), types[0].word) if is_one_type else [np.empty(strip.sizes, kind.word) for kind in types]
        for source, of_input, words in zip(self._inputs, pieces.of_inputs, read, strict=True):
            source.read(worker, of_input, strip, words)
        for running, words in zip(hashes, read, strict=False):
            running.update(bytes_of(words))
        return read

    def _flat(self, worker: Worker, box: Box) -> tuple[Block, Block]:
        """The elements of a box of the first two inputs, as numbers in row-major order."""
        first, second = (input_reader.whole(worker, box).reshape(-1).view(numpy_type(input_reader.dtype)) for input_reader in self._inputs)
        return first, second


def combine(mixed: Mixed, coefficients: Sequence[float], inputs: Words, dtype: DType) -> tuple[Block, bool]:
    """(the words of the combined elements in an element type, whether all of them were finite before they were rounded). Not for the rule
    "equal".

    coefficients: the factor of each input.
    """
    is_bfloat16 = isinstance(inputs, np.ndarray) and dtype == BF16 == mixed.inputs[0].values_dtype
    if is_bfloat16 and mixed.rule == "average" and is_exact(coefficients):
        return _in_float32(mixed, coefficients, np.reshape(inputs, (len(inputs), -1)))
    return _in_float64(mixed, coefficients, inputs, dtype)


def _in_float32(mixed: Mixed, coefficients: Sequence[float], inputs: Block) -> tuple[Block, bool]:
    """The combined elements, summed in float32. Those whose sum may be inexact there are computed in float64."""
    size, is_finite = inputs.shape[1], True
    result = np.empty(size, BF16.word)
    with np.errstate(all="ignore"):
        for start in range(0, size, _STRIP):
            part, words = inputs[:, start : start + _STRIP], result[start : start + _STRIP]
            doubtful = exact_sums(coefficients[0], part, words)
            if len(doubtful):
                words[doubtful], are_finite = _in_float64(mixed, coefficients, np.take(part, doubtful, axis=1), BF16)
                is_finite = is_finite and are_finite
    return result, is_finite


def _in_float64(mixed: Mixed, coefficients: Sequence[float], inputs: Words, dtype: DType) -> tuple[Block, bool]:
    """The combined elements, by the definition."""
    values = [words.reshape(-1).view(numpy_type(tensor.values_dtype)) for words, tensor in zip(inputs, mixed.inputs, strict=True)]
    size, is_finite, is_task = values[0].size, True, mixed.rule == "task-arithmetic"
    result = np.empty(size, dtype.word)
    kept = [np.empty(min(_STRIP, size)) for _ in range(3)]
    with np.errstate(all="ignore"):
        for start in range(0, size, _STRIP):
            rows = slice(start, min(start + _STRIP, size))
            sums, part, base = (buffer[: rows.stop - start] for buffer in kept)
            # numpy converts and multiplies in two steps faster than in one, which it does in small parts.
            np.copyto(sums, values[0][rows])
            if is_task:
                np.copyto(base, sums)
            else:
                np.multiply(sums, coefficients[0], out=sums)
            for of_input, factor in zip(values[1:], coefficients[1:], strict=True):
                np.copyto(part, of_input[rows])
                if is_task:
                    np.subtract(part, base, out=part)
                np.multiply(part, factor, out=part)
                np.add(sums, part, out=sums)
            # One number that is not finite makes the sum of all not finite.
            is_finite = is_finite and bool(np.isfinite(np.add.reduce(sums)) or np.isfinite(sums).all())
            result[rows] = cast_once(sums, dtype)
    return result, is_finite


def check_finite(words: Block, mixed: Mixed, number: int, box: Box) -> None:
    """Raises CheckpointError, with the input and the first such element, if an element is a NaN or infinite. words: those of a box."""
    with np.errstate(all="ignore"):
        values = words.reshape(-1).view(numpy_type(mixed.tensors[number].values_dtype)).astype(np.float64)
    where = np.flatnonzero(~np.isfinite(values))
    if len(where):
        value = "a NaN" if np.isnan(values[where[0]]) else "infinite"
        raise CheckpointError(
            f"element {_element(int(where[0]), box)} is {value} in {mixed.checkpoints[number]}",
            where=mixed.tensors[number].name,
            why="It would be in the result, whatever the other checkpoints hold there",
            do="Leave this checkpoint out; `reshard doctor --values` finds all such elements",
        )


def check_equal(first: Block, other: Block, mixed: Mixed, number: int, box: Box) -> None:
    """Raises CheckpointError, with the input and the first element, if two inputs hold other elements. first, other: those of a box."""
    different = np.flatnonzero(first.reshape(-1) != other.reshape(-1))
    if len(different):
        source = mixed.tensors[number]
        raise CheckpointError(
            f"element {_element(int(different[0]), box)} differs in {mixed.checkpoints[0]} and {mixed.checkpoints[number]}",
            where=source.name,
            why=f"It is {source.dtype}: such elements are not combined, and must be equal in all checkpoints",
            do=f"Leave it out with `exclude=` '{source.name}', or give checkpoints that agree",
        )


def _element(position: int, box: Box) -> list[int]:
    """The coordinates of the element at that position of a box."""
    if not box.sizes:
        return []
    return [start + int(i) for start, i in zip(box.offsets, np.unravel_index(position, box.sizes), strict=True)]


class Turn:
    """The two coefficients of slerp for a tensor, from a pass over both inputs that the workers share.

    c = sum(x*y) / (sqrt(sum(x*x)) * sqrt(sum(y*y))), cut to -1..1. If |c| > 0.9995 or a tensor is zero: c1 = 1 - t, c2 = t. Otherwise, with
    a = acos(c): c1 = sin((1 - t) * a) / sin(a), c2 = sin(t * a) / sin(a), which are computed to more digits and rounded once.

    Each sum is made of chunks: 65,536 elements in row-major order from the start of each block of the fingerprint (boxes.blocks), the last
    one filled up with zeros. In a chunk, the second half is added to the first until one number is left; the chunks' sums are added exactly
    and rounded once (math.fsum). So the order does not depend on threads, strips or the processor.
    """

    _CHUNK = 1 << 16

    def __init__(self, shape: tuple[int, ...], t: float) -> None:
        self._t, self._boxes = t, list(blocks(shape))
        self._sums: dict[int, list[Sums]] = {}
        self._begun, self._changed = 0, threading.Condition()
        self._error: BaseException | None = None

    def coefficients(self, read: Callable[[Box], tuple[Block, Block]]) -> tuple[float, float]:
        """The coefficients. Workers that ask at the same time share the work, and all wait for the last block.

        read: the elements of a box of both inputs, in row-major order, in any floating-point type. Raises: what `read` raises, in every
        worker that waits.
        """
        while (number := self._next()) is not None:
            try:
                sums = self._sums_of(*read(self._boxes[number]))
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                raise
            with self._changed:
                self._sums[number] = sums
                self._changed.notify_all()
        with self._changed:
            while len(self._sums) < len(self._boxes):
                if self._error:
                    raise self._error
                self._changed.wait()
        return self._of_sums()

    def _next(self) -> int | None:
        with self._changed:
            if self._begun == len(self._boxes) or self._error:
                return None
            self._begun += 1
            return self._begun - 1

    def _sums_of(self, x: Block, y: Block) -> list[Sums]:
        """The sums of each chunk of a block."""
        with np.errstate(all="ignore"):
            starts = range(0, len(x), self._CHUNK)
            parts = (tuple(vector[start : start + self._CHUNK].astype(np.float64) for vector in (x, y)) for start in starts)
            return [(self._total(a * b), self._total(a * a), self._total(b * b)) for a, b in parts]

    def _total(self, products: Float64) -> float:
        """The sum of a chunk, by halves."""
        if len(products) < self._CHUNK:
            products = np.concatenate([products, np.zeros(self._CHUNK - len(products))])
        while len(products) > 1:
            half = len(products) // 2
            products = products[:half] + products[half:]
        return float(products[0])

    def _of_sums(self) -> tuple[float, float]:
        """The coefficients, once all sums are there."""
        chunks = [sums for of_box in self._sums.values() for sums in of_box]
        if not all(map(math.isfinite, (number for sums in chunks for number in sums))):
            return 1 - self._t, self._t  # an input that holds a NaN is refused when its elements are read
        dot, xx, yy = (math.fsum(sums[i] for sums in chunks) for i in range(3))
        cosine = max(-1.0, min(1.0, dot / (math.sqrt(xx) * math.sqrt(yy)))) if xx and yy else 1.0
        if abs(cosine) > _ALMOST_PARALLEL:
            return 1 - self._t, self._t
        angle = precise.angle_of(cosine)
        t, whole = precise.decimal(self._t), precise.sine(angle)
        return float(precise.sine((1 - t) * angle) / whole), float(precise.sine(t * angle) / whole)
