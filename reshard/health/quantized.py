"""Judgements of quantized weights: scales that are no positive numbers, groups of zeros, and fused weights with unequal global scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from reshard.canonical.content import Content
from reshard.canonical.dequantization import with_values
from reshard.canonical.quantizing import fused_sets
from reshard.engine.origins.decoded import component_values
from reshard.engine.origins.reader import reader
from reshard.engine.transfer import Pieces, Worker, strips
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.dtypes import F32
from reshard.geometry.quantities import plural
from reshard.health.elements import bad_scale
from reshard.health.findings import Finding, found
from reshard.index.name_parts import family_of, is_scale
from reshard.index.origin import Decoded, EncodedPart, Tensor
from reshard.models.quantization import quantization_of
from reshard.storage.files import Files, read_range, side_by_side

# Elements that are decoded at once.
_ELEMENTS = 1 << 18


def quantized_weights(content: Content, config: Mapping[str, Any] | None, files: Files) -> Iterator[Finding]:
    """What is wrong with the scales and the groups of the quantized weights that the config describes. All of them are read.

    Scales that are stored as numbers under their usual names are judged with the other tensors (elements.py).
    """
    if quantization_of(config or {}) is None:
        return
    try:
        tensors = with_values(content, config).tensors
    except (CheckpointError, RequestError):
        return  # a missing component is found by its name
    worker = Worker(files, F32.itemsize)
    for tensor in tensors.values():
        if not isinstance(tensor.origin, Decoded):
            continue
        parts = tensor.origin.parts
        try:
            for part in parts:
                if part.component.use in ("scale", "divisor") and (part.component.exponents or not is_scale(part.tensor.name)):
                    # Where a bias is added, the sign of a scale says on which side of it the values lie.
                    yield from _scales(part, worker, any(other.component.use == "bias" for other in parts))
            yield from _groups_of_zeros(tensor, parts, worker)
        except CheckpointError:
            continue  # it was found when the stored tensors were read


def unequal_global_scales(content: Content, config: Mapping[str, Any] | None, files: Files) -> Iterator[Finding]:
    """Weights that engines join into one tensor, and whose global scales differ. Reads one number of each of these weights.

    An NVFP4 weight has a scale for each group of 16, and one for all of it. Of a joined tensor, vLLM 0.32 takes the largest global scale
    for q, k and v, or gate and up, and that of the gate for both matrices of an expert. It only logs a warning (compressed_tensors'
    `schemes/compressed_tensors_w4a4_nvfp4.py`, `compressed_tensors_moe_w4a4_nvfp4.py`; `modelopt.py`).
    """
    if quantization_of(config or {}) is None:
        return
    try:
        content = with_values(content, config)
    except (CheckpointError, RequestError):
        return  # a missing component is found by its name
    scales = {name: scale for name, tensor in content.tensors.items() if (scale := _global_scale(tensor))}
    sets = {names for names in fused_sets(content.model, scales).values() if len(names) > 1} if content.model else set()
    numbers = dict(
        side_by_side(files, lambda name: (name, _number(files, scales[name])), sorted({name for names in sets for name in names}))
    )
    unequal: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for names in sorted(sets):
        if len({numbers[name] for name in names} - {None}) > 1:
            unequal.setdefault(tuple(map(family_of, names)), []).append(names)
    for family, of_family in unequal.items():
        total, (module, _, _) = sum(tuple(map(family_of, names)) == family for names in sets), of_family[0][0].rsplit(".", 2)
        values = ", ".join(f"{name.rsplit('.', 2)[1]} {numbers[name]:.9g}" for name in of_family[0])
        detail = f"engines join the weights of {module} that have the global scales {values}; {len(of_family)} of {total} such sets differ"
        yield found("unequal-scales", detail, tensor=scales[of_family[0][-1]].name)


def _global_scale(tensor: Tensor) -> Tensor | None:
    """The one number that scales a whole weight whose groups have scales of their own."""
    parts = tensor.origin.parts if isinstance(tensor.origin, Decoded) else ()
    single = [part.tensor for part in parts if part.component.use in ("scale", "divisor") and part.component.is_single]
    has_groups = any(part.component.use == "scale" and not part.component.is_single for part in parts)
    return single[0] if has_groups and single and single[0].elements == 1 and single[0].dtype == F32 else None


def _number(files: Files, tensor: Tensor) -> float | None:
    """The value of one float32 number; None if it cannot be read, which is a finding of its own."""
    with contextlib.suppress(CheckpointError, IndexError):
        extent = tensor.shards.extent(0)
        return float(np.frombuffer(read_range(files, extent.path, extent.byte_offset, extent.dtype.itemsize), "<f4")[0])
    return None


def _scales(part: EncodedPart, worker: Worker, is_signed: bool) -> Iterator[Finding]:
    pieces, counts = Pieces(part.tensor), dict.fromkeys(("NaN", "infinite", "zero", "negative"), 0)
    for box in blocks(part.tensor.shape):
        values = component_values(part, worker.gather(pieces, box))
        for word, is_so in (
            ("NaN", np.isnan(values)),
            ("infinite", np.isinf(values)),
            ("zero", values == 0),
            ("negative", (values < 0) & (not is_signed)),
        ):
            counts[word] += int(is_so.sum())
    yield from bad_scale(part.tensor.name, part.tensor.elements, counts)


def _groups_of_zeros(tensor: Tensor, parts: Iterable[EncodedPart], worker: Worker) -> Iterator[Finding]:
    """Groups with a scale of their own, along one axis, whose elements are all zero."""
    sizes = next((part.block_shape for part in parts if part.component.use == "scale"), ())
    grouped = [(axis, size) for axis, size in enumerate(sizes) if size is not None and size > 1]
    if len(grouped) != 1:
        return
    (axis, size), values, zero, groups = grouped[0], reader(tensor, F32), 0, 0
    for box in _across(tensor.shape, axis):
        for strip, (pieces,) in strips(box, values):
            is_nonzero = values.read(worker, pieces, strip).reshape(strip.box.sizes).view(np.float32) != 0
            counts = np.add.reduceat(is_nonzero, range(0, is_nonzero.shape[axis], size), axis=axis)
            zero, groups = zero + int((counts == 0).sum()), groups + counts.size
    if zero:
        yield found("zero-groups", f"{zero:,} of {plural(groups, 'group')} of {size} elements are zero", tensor=tensor.name)


def _across(shape: tuple[int, ...], axis: int) -> Iterator[Box]:
    """The boxes of a tensor [..., out, in] that are whole along `axis`, one of the last two."""
    *stack, _, _ = shape
    other = 2 * len(shape) - 3 - axis
    lines = max(1, _ELEMENTS // max(1, shape[axis]))
    for index in product(*map(range, stack)):
        whole = Box((*index, 0, 0), (*(1,) * len(stack), *shape[-2:]))
        for start in range(0, shape[other], lines):
            yield whole.narrow(other, start, min(start + lines, shape[other]))
