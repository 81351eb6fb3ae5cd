"""Judgements of quantized weights: scales that are no positive numbers, and groups of zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from reshard.canonical.content import Content
from reshard.canonical.dequantization import with_values
from reshard.engine.origins.decoded import component_values
from reshard.engine.origins.reader import reader
from reshard.engine.transfer import Pieces, Worker, strips
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.dtypes import F32
from reshard.geometry.quantities import plural
from reshard.health.elements import bad_scale
from reshard.health.findings import Finding, found
from reshard.index.name_parts import is_scale
from reshard.index.origin import Decoded, EncodedPart, Tensor
from reshard.models.quantization import quantization_of
from reshard.storage.files import Files

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
