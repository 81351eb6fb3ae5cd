"""Element types: one table, and the only place that knows how frameworks spell them.

Elements are copied, compared and hashed as unsigned words of their size; their bits are not interpreted.

A file may hold a function of a weight in place of the weight itself. Its type is then that of the function's values, with the name of the
function: F32 of -exp. Casting the weight to this type computes the function (reshard/geometry/functions.py).

Several values may lie in one stored word, such as eight 4-bit integers in an I32. A Packing says which value a code of 2 to 8 bits stands
for, and in which order the codes of consecutive values lie in a word:

    NVFP4, MXFP4           two in a byte, the first one in the low bits
    compressed-tensors     eight in an I32, value i in the bits from 4i
    GPTQ                   the same, along the input features
    AWQ                    eight in an I32 along the output features, in the order 0 2 4 6 1 3 5 7
    MLX                    one after the other through the words of a row; those of 3, 5 and 6 bits also across the borders of words
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError
from reshard.geometry.functions import INVERTIBLE
from reshard.geometry.value import value


@value
class DType:
    """One element type."""

    name: str
    """Its name in safetensors, such as "BF16"."""
    itemsize: int
    """Bytes per element."""
    torch: str
    """Its attribute in the torch module, such as "bfloat16"."""
    storage: str
    """The storage class by which torch's pickles name it, such as "BFloat16Storage"; not used by torch without `has_storage_class`."""
    floating: bool
    """Whether it is a floating-point type. Complex types are not."""
    function: str = ""
    """The function whose values the elements are, one of functions.FUNCTIONS; empty: the elements are the weight's own values."""

    @property
    def is_unread(self) -> bool:
        """Whether it stands for an object that is not read (`unread`); `torch` is then the object's class."""
        return not self.itemsize

    @property
    def word(self) -> np.dtype[np.generic]:
        """The numpy type in which elements are moved: an unsigned integer of the same size, or raw bytes if no integer is that wide."""
        return np.dtype(f"<u{self.itemsize}" if self.itemsize <= 8 else f"V{self.itemsize}")

    @property
    def has_storage_class(self) -> bool:
        """Whether torch pickles a tensor of this type by its storage class. For newer types the pickle names the dtype instead
        (torch/storage.py, _new_dtypes)."""
        return not self.torch.startswith(("float8", "uint16", "uint32", "uint64"))

    def encoded(self, value: float) -> bytes:
        """The bytes of `value` as one element of F64, F32, F16 or BF16, rounded to nearest, ties to even (BF16: by way of F32).

        Raises: KeyError for another type, OverflowError for a value that is too large.
        """
        if self.name != "BF16":
            return struct.pack({"F64": "<d", "F32": "<f", "F16": "<e"}[self.name], value)
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        return struct.pack("<H", (word + 0x7FFF + (word >> 16 & 1)) >> 16)

    def decoded(self, element: bytes) -> float:
        """The number that the first bytes hold as one element of F64, F32, F16 or BF16. Raises KeyError for another type."""
        if self.name == "BF16":
            return float(struct.unpack("<f", b"\0\0" + element[:2])[0])
        return float(struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[self.name], element[: self.itemsize])[0])

    def number(self, element: bytes) -> float | None:
        """The number that the bytes hold as one element, as its shortest decimal: 0.001, not 0.0010000000474974513, for F32. None for types
        without numbers of Python."""
        codes = {dtype: code for code, dtype in _BY_NUMPY.items() if len(code) == 2}
        if self.name == "BF16" or codes.get(self, "c")[0] == "c":
            return self.decoded(element) if self.name == "BF16" else None
        scalar = np.frombuffer(element, f"<{codes[self]}")[0]
        return float(str(scalar)) if self.floating else scalar.item()

    def of(self, function: str) -> DType:
        """The type of the values of a function, stored in this type; of "", of the weight's own values."""
        return self if function == self.function else replace(self, function=function)

    def __str__(self) -> str:
        return f"{self.name} of {self.function}" if self.function else self.name

    def __repr__(self) -> str:
        return f"DType({self})"


# Names: safetensors 0.8 (tensor.rs, enum Dtype). Types narrower than a byte (F4, F6_*) are left out: several elements share a byte, so a
# box of them may start in the middle of a byte.
_TABLE = (
    DType("F64", 8, "float64", "DoubleStorage", True),
    DType("F32", 4, "float32", "FloatStorage", True),
    DType("F16", 2, "float16", "HalfStorage", True),
    DType("BF16", 2, "bfloat16", "BFloat16Storage", True),
    DType("F8_E4M3", 1, "float8_e4m3fn", "Float8_e4m3fnStorage", True),
    DType("F8_E5M2", 1, "float8_e5m2", "Float8_e5m2Storage", True),
    DType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "Float8_e4m3fnuzStorage", True),
    DType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "Float8_e5m2fnuzStorage", True),
    DType("F8_E8M0", 1, "float8_e8m0fnu", "Float8_e8m0fnuStorage", True),
    DType("I64", 8, "int64", "LongStorage", False),
    DType("I32", 4, "int32", "IntStorage", False),
    DType("I16", 2, "int16", "ShortStorage", False),
    DType("I8", 1, "int8", "CharStorage", False),
    DType("U64", 8, "uint64", "UInt64Storage", False),
    DType("U32", 4, "uint32", "UInt32Storage", False),
    DType("U16", 2, "uint16", "UInt16Storage", False),
    DType("U8", 1, "uint8", "ByteStorage", False),
    DType("BOOL", 1, "bool", "BoolStorage", False),
    DType("C64", 8, "complex64", "ComplexFloatStorage", False),
    DType("C128", 16, "complex128", "ComplexDoubleStorage", False),
)
# Types that torch has and safetensors does not.
_NOT_IN_SAFETENSORS = {"C128"}

_ALL = {dtype.name: dtype for dtype in _TABLE}
_BY_NAME = {name: dtype for name, dtype in _ALL.items() if name not in _NOT_IN_SAFETENSORS}
_BY_TORCH = {dtype.torch: dtype for dtype in _TABLE} | {
    alias: _ALL[name]
    for alias, name in {
        "float": "F32", "double": "F64", "half": "F16", "long": "I64", "int": "I32", "short": "I16",
        "cfloat": "C64", "cdouble": "C128",
    }.items()
}  # fmt: skip
# Storages of quantized tensors (torch/ao): the bytes of their codes. Two or four codes may share a byte.
_CODES = {"QInt8Storage": "I8", "QUInt8Storage": "U8", "QInt32Storage": "I32", "QUInt4x2Storage": "U8", "QUInt2x4Storage": "U8"}
_BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE} | {storage: _ALL[name] for storage, name in _CODES.items()}
_BY_NUMPY = {f"{name[0].lower()}{dtype.itemsize}": dtype for name, dtype in _ALL.items() if name[1:].isdecimal()}
_BY_NUMPY |= {"b1": _ALL["BOOL"]} | {f"ml_dtypes.{dtype.torch}": dtype for dtype in _TABLE}
_BY_USER = (
    _BY_TORCH
    | {dtype.name.lower(): dtype for dtype in _TABLE}
    | {
        "fp32": _BY_NAME["F32"],
        "fp16": _BY_NAME["F16"],
        "fp64": _BY_NAME["F64"],
        "fp8": _BY_NAME["F8_E4M3"],
        "fp8_e4m3": _BY_NAME["F8_E4M3"],
        "fp8_e5m2": _BY_NAME["F8_E5M2"],
    }
)


BF16, F16, F32, F64, F8, E8M0, I32, U8 = (_ALL[name] for name in ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E8M0", "I32", "U8"))
# What libraries call the bytes of packed codes and of exponents: DeepSeek-V4 is published with I8 and F8_E8M0, and vLLM holds U8.
_BYTES = frozenset({"U8", "I8", "F8_E8M0"})


def are_same_bytes(one: DType, other: DType) -> bool:
    """Whether two element types name the same bytes: those of packed codes or of exponents, which no cast changes."""
    return one == other or {one.name, other.name} <= _BYTES


def from_safetensors(name: str, *, where: str) -> DType:
    """The dtype that a safetensors header calls `name`.

    Raises: CheckpointError for an unknown name, with the list of known names.
    """
    return _look_up(_BY_NAME, name, where)


def is_in_safetensors(dtype: DType) -> bool:
    """Whether a safetensors file can hold elements of this type."""
    return dtype.name in _BY_NAME


def from_torch(name: str, *, where: str) -> DType:
    """The dtype called `torch.<name>`. Raises CheckpointError for an unknown name."""
    return _look_up(_BY_TORCH, name.removeprefix("torch."), where)


def from_numpy(name: str) -> DType | None:
    """The dtype that numpy's pickles call "f4", "b1" or, of the package ml_dtypes, "ml_dtypes.bfloat16"; None if torch has no such type."""
    return _BY_NUMPY.get(name)


def unread(class_name: str) -> DType:
    """What stands for the element type of a stored object that is array-like, and that reshard does not read as a tensor.

    class_name: its class, with the module. The name of the type is that of the class; its elements have no bytes.
    """
    return DType(class_name.rpartition(".")[2], 0, class_name, "", True)


def from_storage(name: str, *, where: str) -> DType:
    """The dtype of a legacy storage class, such as BFloat16Storage. Raises CheckpointError for an unknown name."""
    return _look_up(_BY_STORAGE, name, where)


def from_user(name: str) -> DType | None:
    """The dtype that a person calls bf16, bfloat16, BF16 or fp8; None for an unknown name."""
    return _BY_USER.get(name.lower().removeprefix("torch."))


def can_cast(source: DType, target: DType) -> bool:
    """Whether elements can be given in another type. Weights follow from the values of a function of them only if it is invertible."""
    return source == target or (source.floating and target.floating and source.function in ("", target.function, *INVERTIBLE))


# The usual words for the floating-point types of weights.
FLOATING_WORDS = ("bf16", "fp16", "fp32", "fp64", "fp8", "fp8_e4m3", "fp8_e5m2")
# All words that `from_user` takes for floating-point types: also their names in torch and safetensors.
FLOATING_SPELLINGS = tuple(word for word, dtype in _BY_USER.items() if dtype.floating)


def _look_up(table: dict[str, DType], name: str, where: str) -> DType:
    try:
        return table[name]
    except (KeyError, TypeError):
        raise CheckpointError(
            f"the element type {name!r} is unknown",
            where=where,
            why=f"Known types are {', '.join(table)}",
            do="Check that the file is complete; a new type needs a row in reshard/geometry/dtypes.py",
        ) from None


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
    """For each consecutive value, the place of its code in the word: place p is the bits from p times the bits of a code. Empty: the codes
    follow each other bit by bit through a run of words, and some lie in two words."""
    axis: int
    """The axis of the weight [out, in] along which the values of a word follow each other."""
    words: tuple[int, ...] = ()
    """(n,): the stored array has a last axis of n words, which together hold the values that follow each other."""
    run: int = 1
    """The number of neighbouring words, along the axis, that hold a whole number of values: 3 words of 32 bits hold 32 codes of 3 bits."""

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return len(self.values).bit_length() - 1

    @property
    def in_order(self) -> bool:
        """Whether consecutive values lie in consecutive bits: then each byte holds the values of 8 bits, since words are little-endian."""
        return bool(self.places) and self.places == tuple(range(len(self.places)))

    @property
    def count(self) -> int:
        """The number of values that one place of the stored array holds, its last axis of words included; of a run, all its words."""
        return len(self.places) * math.prod(self.words) if self.places else 32 * self.run // self.bits

    @property
    def values_of_bytes(self) -> npt.NDArray[np.float32]:
        """[256, values in a byte]: the values that each byte holds, if they are in order."""
        return _values_of_bytes(self.values).view(np.float32).reshape(256, -1)

    def unpacked(self, words: Block, axis: int) -> npt.NDArray[np.float32]:
        """The values in float32. words: a stored array. axis: that along which values are packed; a word or run becomes `count` values."""
        if self.words:
            assert axis == words.ndim - 2, "the words of a place follow each other in its last axis"
            words = words.reshape(*words.shape[:-2], -1)
        if axis == words.ndim - 1 and self.in_order:
            pairs = np.take(_values_of_bytes(self.values), np.ascontiguousarray(words).view(np.uint8))
            values: npt.NDArray[np.float32] = pairs.view(np.float32)
            return values
        if not self.places:
            assert axis == words.ndim - 1, "a run of words lies in the last axis"
            return _values_of_bits(words, self.bits)
        before, after = words.shape[: axis + 1], words.shape[axis + 1 :]
        codes = np.empty((*before, len(self.places), *after), np.uint8)
        for i, place in enumerate(self.places):
            code = words >> words.dtype.type(place * self.bits)
            code &= words.dtype.type(len(self.values) - 1)
            np.moveaxis(codes, axis + 1, 0)[i] = code
        codes = codes.reshape(*before[:-1], -1, *after)
        first, last = self.values[0], self.values[-1]
        if last - first == len(self.values) - 1:  # integers in their order
            numbers = codes.astype(np.float32)
            numbers += np.float32(first)
            return numbers
        looked_up: npt.NDArray[np.float32] = np.take(np.array(self.values, np.float32), codes)
        return looked_up


def _values_of_bits(words: Block, bits: int) -> npt.NDArray[np.float32]:
    """The integers of `bits` bits each that follow each other in the last axis of an array of little-endian words.

    An example with 3 bits: three bytes b0 b1 b2 are the number b0 + 2^8 b1 + 2^16 b2, whose bits 0 to 2 are the first of eight codes.
    """
    of_group = math.lcm(bits, 8) // 8
    groups = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-1], -1, of_group).astype(np.uint64)
    numbers = (groups << np.arange(0, 8 * of_group, 8, dtype=np.uint64)).sum(-1, dtype=np.uint64)
    codes = (numbers[..., None] >> np.arange(0, 8 * of_group, bits, dtype=np.uint64)) & np.uint64((1 << bits) - 1)
    values: npt.NDArray[np.float32] = codes.reshape(*words.shape[:-1], -1).astype(np.float32)
    return values


@lru_cache(maxsize=8)
def _values_of_bytes(values: tuple[float, ...]) -> Block:
    """The values of all codes in each byte, as one element of as many bytes as they have in float32."""
    bits = len(values).bit_length() - 1
    codes = (np.arange(256)[:, None] >> np.arange(0, 8, bits)) & (len(values) - 1)
    table = np.array(values, np.float32)[codes]
    words: Block = table.view({1: "V32", 2: np.complex128, 4: np.uint64, 8: np.uint32}[bits]).reshape(256)
    return words


def fp4(*, count: int = 2, words: tuple[int, ...] = ()) -> Packing:
    """4-bit floats (E2M1), `count` of them in a word: two in a byte."""
    return Packing("FP4", (*_E2M1, *(-value for value in _E2M1)), tuple(range(count)), 1, words)


def fp8(*, count: int) -> Packing:
    """8-bit floats (E4M3), `count` of them in a word."""
    positive = [math.ldexp(code % 8 + (8 if code >= 8 else 0), max(code // 8, 1) - 10) for code in range(127)] + [math.nan]
    return Packing("FP8", (*positive, *(-value for value in positive)), tuple(range(count)), 1)


def integers(bits: int, offset: int, *, axis: int = 1, places: tuple[int, ...] | None = None) -> Packing:
    """Integers in words of 32 bits. A code is the integer minus `offset`."""
    return Packing(f"INT{bits}", tuple(float(code + offset) for code in range(1 << bits)), places or tuple(range(32 // bits)), axis)


def signed_byte() -> Packing:
    """Signed integers of 8 bits, each in a byte of its own."""
    return Packing("INT8", (*map(float, range(128)), *map(float, range(-128, 0))), (0,), 1)


def bit_run(bits: int) -> Packing:
    """Integers from 0 on whose codes follow each other in words of 32 bits, also across their borders where 32 is no multiple of `bits`."""
    if 32 % bits == 0:
        return integers(bits, 0)
    return Packing(f"INT{bits}", tuple(map(float, range(1 << bits))), (), 1, run=math.lcm(32, bits) // 32)
