"""Mosaics against numpy: whatever is done to an array's description is done to the array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined, stacked

SHAPES = {"a": (6, 4), "b": (3, 4), "c": (6, 2)}
ARRAYS = {name: np.arange(100 * i, 100 * i + np.prod(shape)).reshape(shape) for i, (name, shape) in enumerate(SHAPES.items(), 1)}
PADDING = 0


def laid_out(mosaic):
    """The array that a mosaic describes, filled section by section."""
    flat = np.full(int(np.prod(mosaic.shape)), PADDING)
    for section in mosaic.sections():
        source = ARRAYS[section.name][section.box.index]
        for at in np.ndindex(source.shape):
            place = section.start + sum(i * step for i, step in zip(at, section.strides, strict=True))
            assert flat[place] == PADDING, "two sections claim an element"
            flat[place] = source[at]
    return flat.reshape(mosaic.shape)


def whole(name):
    return Mosaic.of(name, Box.whole(SHAPES[name])), ARRAYS[name]


@st.composite
def pairs(draw):
    """A mosaic and the array that it must describe, after a few random operations."""
    mosaic, array = whole(draw(st.sampled_from(sorted(SHAPES))))
    for operation in draw(st.lists(st.sampled_from(["cut", "transpose", "split", "merge", "pad", "stack", "squeeze"]), max_size=6)):
        axis = draw(st.integers(0, array.ndim - 1))
        size = array.shape[axis]
        if operation == "cut":
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            mosaic, array = mosaic.cut(axis, start, stop), array[(slice(None),) * axis + (slice(start, stop),)]
        elif operation == "transpose":
            mosaic, array = mosaic.transposed(), array.T
        elif operation == "split" and array.ndim < 4:
            inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            shape = (*array.shape[:axis], size // inner, inner, *array.shape[axis + 1 :])
            mosaic, array = mosaic.split(axis, inner), array.reshape(shape)
        elif operation == "merge" and axis + 1 < array.ndim:
            shape = (*array.shape[:axis], size * array.shape[axis + 1], *array.shape[axis + 2 :])
            mosaic, array = mosaic.merged(axis), np.ascontiguousarray(array).reshape(shape)
        elif operation == "pad":
            widths = [(0, 2 if each == axis else 0) for each in range(array.ndim)]
            mosaic, array = mosaic.padded(axis, size + 2), np.pad(array, widths, constant_values=PADDING)
        elif operation == "stack" and array.ndim < 4:
            mosaic, array = stacked([mosaic]), array[None]
        elif operation == "squeeze":
            mosaic, array = mosaic.squeezed(), np.atleast_1d(array.squeeze())
    return mosaic, array


@given(pairs())
def test_a_mosaic_says_where_every_element_lies(pair):
    mosaic, array = pair
    assert mosaic.shape == array.shape
    assert np.array_equal(laid_out(mosaic), array)


def test_arrays_are_joined_and_stacked():
    (a, array_a), (b, array_b), (c, array_c) = map(whole, "abc")
    assert np.array_equal(laid_out(joined([a, b])), np.concatenate([array_a, array_b]))
    assert np.array_equal(laid_out(joined([a, c], axis=1)), np.concatenate([array_a, array_c], axis=1))
    assert np.array_equal(laid_out(stacked([b, a.cut(0, 2, 5)])), np.stack([array_b, array_a[2:5]]))


def test_query_groups_are_what_reshape_and_cat_make_of_them():
    """Megatron's order: q and k of each group in turn; then rank 1 of 3."""
    (q, array_q), (k, array_k) = whole("a"), whole("b")
    groups = 3
    fused = joined([q.split(0, 2), k.split(0, 1)], axis=1).merged(0)
    expected = np.concatenate([array_q.reshape(groups, 2, 4), array_k.reshape(groups, 1, 4)], axis=1).reshape(9, 4)
    assert np.array_equal(laid_out(fused), expected)
    assert np.array_equal(laid_out(fused.part(0, 3, 1)), expected[3:6])


def test_an_item_is_what_was_stacked():
    arrays = [Mosaic.of(name, Box.whole((2, 3))) for name in "ab"]
    assert [stacked(arrays).item(number) for number in range(2)] == arrays
    experts = Mosaic.of("experts", Box.whole((4, 2, 3))).item(2)
    assert (experts.shape, experts.tiles[0].box.offsets, experts.tiles[0].axes) == ((2, 3), (2, 0, 0), (None, 0, 1))
    assert experts.transposed().shape == (3, 2)


def test_even_rows_first_turns_pairs_into_halves():
    array = Mosaic.of("q", Box.whole((8, 2))).with_even_first(0, 4)
    assert [tile.box.offsets[0] for tile in sorted(array.tiles, key=lambda tile: tile.at)] == [0, 2, 1, 3, 4, 6, 5, 7]
