"""Element types: one table, and the only place that knows how frameworks spell them.

Elements are copied, compared and hashed as unsigned words of their size; their bits are not interpreted.

A file may hold a function of a weight in place of the weight itself. Its type is then that of the function's values, with the name of the
function: F32 of -exp. Casting the weight to this type computes the function (reshard/geometry/functions.py).
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

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
_BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE}
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


BF16, F32, F8, E8M0, I32 = (_ALL[name] for name in ("BF16", "F32", "F8_E4M3", "F8_E8M0", "I32"))


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
