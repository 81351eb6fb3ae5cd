import math

import numpy as np
import pytest
from helpers.random_shardings import grids, partitions, shapes
from hypothesis import given
from hypothesis import strategies as st

import reshard.geometry.boxes
from reshard.geometry.boxes import Box, blocks, flat_boxes, row_major


@given(st.data(), shapes())
def test_any_split_rejoined_is_the_identity(data, shape):
    values = np.arange(math.prod(shape)).reshape(shape)
    again = np.full(shape, -1)
    for box in data.draw(partitions(shape)):
        assert (again[box.index] == -1).all()
        again[box.index] = values[box.index]
    assert (again == values).all()


@given(st.data(), shapes())
def test_flat_ranges_hold_exactly_their_elements_in_order(data, shape):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    values = np.arange(count).reshape(shape)
    found = [element for box in flat_boxes(shape, start, stop) for element in values[box.index].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(list(flat_boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(st.data(), shapes())
def test_intersection_holds_what_both_hold(data, shape):
    a, b = (data.draw(st.sampled_from(data.draw(grids(shape)))) for _ in range(2))
    marks = np.zeros(shape, int)
    marks[a.index] += 1
    marks[b.index] += 1
    shared = a.intersect(b)
    assert (shared.volume if shared else 0) == (marks == 2).sum()
    if shared:
        assert (marks[shared.index] == 2).all() and a.contains(shared) and b.contains(shared)


@pytest.mark.parametrize("most", [1, 2, 7, 30, 1000])
@given(shapes(max_dims=4, most=6))
def test_blocks_are_contiguous_cover_in_order_and_are_small(most, shape):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard.geometry.boxes, "BLOCK_ELEMENTS", most)
        found = list(blocks(shape))
    values = np.arange(math.prod(shape)).reshape(shape)
    assert [e for box in found for e in values[box.index].reshape(-1).tolist()] == list(range(math.prod(shape)))
    assert all(box.volume <= most for box in found)


def test_a_tensor_without_elements_has_no_blocks():
    assert list(blocks((0, 5))) == [] and list(blocks((5, 0))) == []


@given(shapes())
def test_row_major_strides_are_numpys(shape):
    values = np.zeros(shape, np.uint8)
    assert all(s == n or size == 1 for s, n, size in zip(row_major(shape), values.strides, shape, strict=True))


def test_boxes_refuse_what_lies_outside():
    with pytest.raises(ValueError):
        Box((0,), (4,)).narrow(0, 2, 5)
    with pytest.raises(ValueError):
        Box((-1,), (4,))
    with pytest.raises(ValueError):
        Box((0,), (4,)).split(0, 3)
    with pytest.raises(ValueError):
        list(flat_boxes((2, 2), 0, 5))
