"""Weights as bitsandbytes and torchao pack them, which only these libraries load: `dequantize=True` makes tensors of their values.

    bitsandbytes 0.50, 4 bits    x.weight [n / 2, 1], and below that name absmax, quant_map, quant_state.bitsandbytes__nf4 (JSON); with
                                 double quantization also nested_absmax and nested_quant_map
    bitsandbytes 0.50, 8 bits    x.weight int8 [out, in], x.SCB [out], x.weight_format
    torchao 0.18                 x._weight_qdata, x._weight_scale, x._weight_zero_point; the headers of the files hold the class of
                                 x.weight, its element type and the shape of its blocks

The shape and the settings of 4-bit weights are in small tensors of JSON, which are read when a conversion is planned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from reshard.canonical.content import Drop
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.dtypes import F32, DType, from_torch, signed_byte
from reshard.index.index import Index
from reshard.index.origin import Decoded, EncodedPart, Mapped, Tensor
from reshard.models.stored_forms import Component

ReadTensor = Callable[[Tensor], bytes]
_STATE, _CLASS, _NAMES = ".weight.quant_state.bitsandbytes__", "_weight_", "tensor_names"
_OF_TORCHAO = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_LEFT = "the settings of a weight that is no longer packed"
_MOST_STATE = 1 << 16
_OF_127 = 7.874015718698502e-3
"""1 / 127 (bitsandbytes 0.50, functional.int8_vectorwise_dequant)."""


def unpacked(index: Index, usual: DType, read: ReadTensor) -> tuple[Index, tuple[Drop, ...]]:
    """The index with the values of packed weights in their places, and what is left out of it.

    usual: the element type of values whose own type is not stored. read: the bytes of a small tensor.

    Raises: CheckpointError if what belongs to a weight is missing or contradicts itself; UnsupportedError for another form.
    """
    stored = {tensor.name: tensor for tensor in index.tensors}
    made: dict[str, Tensor] = {}
    drops: list[Drop] = []
    for name, tensor in stored.items():
        front, is_state, _ = name.partition(_STATE)
        if is_state:
            made[f"{front}.weight"] = _of_four_bits(f"{front}.weight", stored, _settings(tensor, read))
            drops.append(Drop.of(tensor, _LEFT))
        elif name.endswith(".SCB"):
            made[f"{name.removesuffix('.SCB')}.weight"] = _of_rows(name.removesuffix(".SCB"), tensor, stored, usual)
        elif name.endswith(".weight_format"):
            if read(tensor) != b"\0":  # "row"; the others are of old GPUs (bitsandbytes, nn/modules.py)
                raise UnsupportedError(
                    "the rows of the weight are in the order of a GPU", where=name, do="Save it with a newer bitsandbytes"
                )
            drops.append(Drop.of(tensor, _LEFT))
    made |= {name: _of_torchao(name, about, stored) for name, about in _classes(index.facts.headers)}
    inputs = {leaf.name for tensor in made.values() for leaf in tensor.leaves}
    unused = {drop.name for drop in drops}
    tensors = [made.get(name, tensor) for name, tensor in stored.items() if name in made or name not in inputs | unused]
    tensors += [tensor for name, tensor in made.items() if name not in stored]
    headers = {key: text for key, text in index.facts.headers.items() if key != _NAMES and _class_of(text) is None}
    return replace(index, tensors=tuple(tensors), facts=replace(index.facts, headers=headers)), tuple(drops)


def _part(tensors: Mapping[str, Tensor], name: str, weight: str, dtypes: tuple[str, ...]) -> Tensor:
    """A stored tensor of a packed weight. Raises CheckpointError if it is missing, or of another element type."""
    tensor = tensors.get(name)
    if tensor is None or (dtypes and tensor.dtype.name not in dtypes):
        stored = "it is missing" if tensor is None else f"it is stored as {tensor.dtype.name}, expected {' or '.join(dtypes)}"
        raise CheckpointError(stored, where=name, why=f"The values of {weight} depend on it", do="Copy the checkpoint again")
    return tensor


def _settings(tensor: Tensor, read: ReadTensor) -> dict[str, Any]:
    """The settings of a 4-bit weight. Raises CheckpointError if they are not those that bitsandbytes writes."""
    try:
        if tensor.nbytes > _MOST_STATE:
            raise ValueError("it is too long")
        about = json.loads(read(tensor))
        numbers = [about["blocksize"], *about["shape"], *([about["nested_blocksize"]] if "nested_blocksize" in about else ())]
        if not all(type(number) is int and 0 < number < 1 << 40 for number in numbers) or not about["shape"]:
            raise ValueError(f"its sizes are {numbers}")
        return {**about, "dtype": from_torch(str(about["dtype"]), where=tensor.name), "offset": float(about.get("nested_offset") or 0)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"it does not describe a weight: {error}", where=tensor.name, do="Copy the checkpoint again") from None


def _of_four_bits(name: str, stored: Mapping[str, Tensor], about: dict[str, Any]) -> Tensor:
    """A weight in blocks of 4-bit codes."""
    nested = "nested_blocksize" in about
    kinds = {"absmax": ("U8",) if nested else ("F32",), "quant_map": ("F32",)}
    kinds |= {"nested_absmax": ("F32",), "nested_quant_map": ("F32",)} if nested else {}
    codes, *beside = (_part(stored, name, name, ()), *(_part(stored, f"{name}.{kind}", name, kinds[kind]) for kind in kinds))
    shape, block, of_scales = tuple(about["shape"]), about["blocksize"], about.get("nested_blocksize", 0)
    elements = int(np.prod(shape, dtype=object))
    blocks = -(-elements // block)
    lengths = [blocks, 16, *((-(-blocks // of_scales), 256) if nested else ())]
    if codes.nbytes != -(-elements // 2) or [tensor.elements for tensor in beside] != lengths:
        raise CheckpointError(
            f"its codes have {codes.nbytes:,} bytes, and its tables {[tensor.elements for tensor in beside]} values; for the shape "
            f"{list(shape)} in blocks of {block} {-(-elements // 2):,} bytes and {lengths} are expected",
            where=name,
            do="Copy the checkpoint again",
        )
    scales, table, *of_nested = beside
    if nested:
        origin = Mapped("nested scales", scales, of_nested[0], of_nested[1], of_scales, offset=about["offset"])
        scales = replace(scales, dtype=F32, origin=origin)
    form = f"{str(about.get('quant_type')).upper()[:8]} (bitsandbytes)"
    return _computed(codes, name, shape, Mapped(form, codes, scales, table, block, about["dtype"]))


def _of_rows(module: str, factors: Tensor, stored: Mapping[str, Tensor], usual: DType) -> Tensor:
    """A weight in int8. Its scales are 127 times the factors of its rows."""
    name = f"{module}.weight"
    codes = _part(stored, name, name, ("I8",))
    if len(codes.shape) != 2 or factors.shape != codes.shape[:1] or factors.dtype.name != "F32":
        raise CheckpointError(f"it has the shape {list(factors.shape)}, and the weight {list(codes.shape)}", where=factors.name)
    return _computed(codes, name, codes.shape, Mapped("INT8 (bitsandbytes)", codes, factors, None, codes.shape[1], usual, unit=_OF_127))


def _classes(headers: Mapping[str, str | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The weights that torchao packed, and what the headers say of each."""
    for name, text in headers.items():
        about = _class_of(text)
        if about is not None and isinstance(about.get("_tensor_data_names"), list):
            yield name, about


def _class_of(text: str | None) -> dict[str, Any] | None:
    """What an entry of a header says of a weight's class, plain tensors included; None for an entry of another kind."""
    if text is None or not text.startswith("{"):
        return None
    try:
        about = json.loads(text)
    except ValueError:
        return None
    return about if isinstance(about, dict) and "_type" in about else None


def _of_torchao(name: str, about: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Tensor:
    """A weight of one of torchao's classes in _OF_TORCHAO. Raises UnsupportedError for another class."""
    kind, data = str(about.get("_type")), about.get("_data")
    if kind not in _OF_TORCHAO or not isinstance(data, dict):
        raise UnsupportedError(
            f"it is a {kind[:60]} of torchao",
            where=name,
            why=f"{', '.join(_OF_TORCHAO)} are read",
            do="Dequantize it with torchao, or convert the model that it was made from",
        )
    front = f"{name.rpartition('.')[0]}.{_CLASS}"
    types = ("F8_E4M3", "F8_E5M2") if kind == "Float8Tensor" else ("I8",)
    codes = _part(stored, f"{front}qdata", name, types)
    block, dtype = data.get("block_size"), data.get("dtype")
    if not isinstance(block, list) or len(block) != len(codes.shape) or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(f"the header says that its blocks are {str(block)[:60]}, and its codes are {list(codes.shape)}", where=name)
    grid = tuple(-(-length // size) for length, size in zip(codes.shape, block, strict=True))
    packing = None if kind == "Float8Tensor" else signed_byte()
    axes = tuple(range(len(block)))
    parts = [EncodedPart(codes, Component("_weight_qdata", "codes", packing=packing), (1,) * len(block), axes)]
    beside: list[tuple[str, Literal["scale", "zero point"], tuple[str, ...]]] = [("scale", "scale", ("F32", "BF16", "F16"))]
    beside += [("zero_point", "zero point", ("I8",))] if f"{front}zero_point" in stored else []
    for word, use, allowed in beside:
        tensor = _part(stored, front + word, name, allowed)
        is_single = tensor.elements == 1
        if not is_single and tensor.shape != grid:
            raise CheckpointError(f"its shape is {list(tensor.shape)}, expected {list(grid)}", where=tensor.name)
        component = Component(f"_weight_{word}", use, packing=packing if use == "zero point" else None)
        parts.append(EncodedPart(tensor, component, (None,) * len(block) if is_single else tuple(block), () if is_single else axes))
    named = str(dtype.get("_data") if isinstance(dtype, dict) else dtype)
    return _computed(codes, name, codes.shape, Decoded(f"{kind} (torchao)", tuple(parts), from_torch(named, where=name)))


def _computed(codes: Tensor, name: str, shape: tuple[int, ...], origin: Decoded | Mapped) -> Tensor:
    """A weight whose values are computed. Raises UnsupportedError if its codes do not lie in one piece, in another shape than its own."""
    shards = codes.shards
    if shape != codes.shape:
        if len(shards) != 1:
            raise UnsupportedError(f"its codes lie in {len(shards)} pieces", where=name, do="Convert the checkpoint to hf first")
        shards = shards.replaced(offsets=np.zeros((1, len(shape)), np.int64), sizes=np.array([shape], np.int64))
    return replace(codes, name=name, shape=shape, origin=origin, shards=shards)
