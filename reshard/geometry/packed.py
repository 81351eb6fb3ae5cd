"""Packed elements: several values in one stored word, such as eight 4-bit integers in an I32.

A packing says which value a code of 4 or 8 bits stands for, and in which order the codes of consecutive values lie in a word:

    NVFP4, MXFP4           two in a byte, the first one in the low bits
    compressed-tensors     eight in an I32, value i in the bits from 4i
    GPTQ                   the same, along the input features
    AWQ                    eight in an I32 along the output features, in the order 0 2 4 6 1 3 5 7
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.value import value

Block = npt.NDArray[Any]

# The values of a 4-bit float with 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@value
class Packing:
    """How consecutive values along one axis of a weight lie in a stored word."""

    name: str
    """The element type of the values: "FP4", "INT4"."""
    values: tuple[float, ...]
    """The value of each code."""
    places: tuple[int, ...]
    """For each consecutive value, the place of its code in the word: place p is the bits from p times the bits of a code."""
    axis: int
    """The axis of the weight [out, in] along which the values of a word follow each other."""
    words: tuple[int, ...] = ()
    """(n,): the stored array has a last axis of n words, which together hold the values that follow each other."""

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return len(self.values).bit_length() - 1

    @property
    def in_order(self) -> bool:
        """Whether consecutive values lie in consecutive bits: then each byte holds the values of 8 bits, since words are little-endian."""
        return self.places == tuple(range(len(self.places)))

    @property
    def count(self) -> int:
        """The number of values that one place of the stored array holds, its last axis of words included."""
        return len(self.places) * math.prod(self.words)

    @property
    def values_of_bytes(self) -> npt.NDArray[np.float32]:
        """[256, values in a byte]: the values that each byte holds, if they are in order."""
        return _values_of_bytes(self.values).view(np.float32).reshape(256, -1)

    def unpacked(self, words: Block, axis: int) -> npt.NDArray[np.float32]:
        """The values in float32. words: a stored array. axis: its axis along which values are packed; it becomes `count` times as long."""
        if self.words:
            assert axis == words.ndim - 2, "the words of a place follow each other in its last axis"
            words = words.reshape(*words.shape[:-2], -1)
        if axis == words.ndim - 1 and self.in_order:
            pairs = np.take(_values_of_bytes(self.values), np.ascontiguousarray(words).view(np.uint8))
            values: npt.NDArray[np.float32] = pairs.view(np.float32)
            return values
        before, after = words.shape[: axis + 1], words.shape[axis + 1 :]
        codes = np.empty((*before, len(self.places), *after), np.uint8)
        for i, place in enumerate(self.places):
            code = words >> words.dtype.type(place * self.bits)
            code &= words.dtype.type(len(self.values) - 1)
            np.moveaxis(codes, axis + 1, 0)[i] = code
        codes = codes.reshape(*before[:-1], -1, *after)
        first, last = self.values[0], self.values[-1]
        if last - first == len(self.values) - 1:  # integers in their order
            found = codes.astype(np.float32)
            found += np.float32(first)
            return found
        looked_up: npt.NDArray[np.float32] = np.take(np.array(self.values, np.float32), codes)
        return looked_up


@lru_cache(maxsize=8)
def _values_of_bytes(values: tuple[float, ...]) -> Block:
    """The values of all codes in each byte, as one element of as many bytes as they have in float32."""
    bits = len(values).bit_length() - 1
    codes = (np.arange(256)[:, None] >> np.arange(0, 8, bits)) & (len(values) - 1)
    table = np.array(values, np.float32)[codes]
    words: Block = table.view(np.uint64 if bits == 4 else np.uint32).reshape(256)
    return words


def fp4(*, words: tuple[int, ...] = ()) -> Packing:
    """4-bit floats (E2M1), two in a byte."""
    return Packing("FP4", (*_E2M1, *(-value for value in _E2M1)), (0, 1), 1, words)


def integers(bits: int, offset: int, *, axis: int = 1, places: tuple[int, ...] | None = None) -> Packing:
    """Integers in words of 32 bits. A code is the integer minus `offset`."""
    return Packing(f"INT{bits}", tuple(float(code + offset) for code in range(1 << bits)), places or tuple(range(32 // bits)), axis)
