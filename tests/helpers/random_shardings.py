"""Random tensors and shardings, shared by the property tests. Sizes are small and mostly prime, so that a swapped axis cannot hide."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import strategies as st

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_safetensors

DTYPES = [from_safetensors(name, where="test") for name in ("BF16", "F32", "U8", "I64", "F8_E4M3", "BOOL")]


def shapes(min_dims: int = 0, max_dims: int = 3, most: int = 11) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, most), min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes() -> st.SearchStrategy[DType]:
    return st.sampled_from(DTYPES)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A cut of a tensor along each axis at random places: a grid of disjoint boxes that cover it."""
    boxes = [Box.whole(shape)]
    for axis, size in enumerate(shape):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        boxes = [box.narrow(axis, a, b) for box in boxes for a, b in pairwise(cuts)]
    return boxes


@st.composite
def guillotines(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A partition that is no grid: boxes cut again and again, each along its own axis."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.sizes[axis] - 1))
        boxes += [box.narrow(axis, 0, at), box.narrow(axis, at, box.sizes[axis])]
    return boxes


@st.composite
def flats(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of flat ranges, as ZeRO and FSDP1 cut: elements a..b in row-major order."""
    from reshard.geometry.boxes import flat_boxes

    count = math.prod(shape)
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=4))})
    return [box for a, b in pairwise(cuts) for box in flat_boxes(shape, a, b)]


def partitions(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    """Any way to cut a tensor into disjoint boxes that cover it."""
    return st.one_of(grids(shape), guillotines(shape), flats(shape))
