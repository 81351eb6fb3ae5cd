import numpy as np
import pytest
from helpers.random_shardings import partitions, shapes
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.index.coverage import check_coverage, sharding_text
from reshard.index.index import Tensor
from reshard.index.shards import Shards, primary_rows

BF16 = from_safetensors("BF16", where="test")


def tensor(shape, boxes):
    pieces = [Piece(box, Extent(f"rank{i}.bin", 0, row_major(box.sizes), BF16)) for i, box in enumerate(boxes)]
    return Tensor("model.norm.weight", BF16, shape, "weight", Shards.of(pieces))


@given(st.data(), shapes(min_dims=1))
def test_any_partition_in_any_order_with_replicas_is_whole(data, shape):
    boxes = [box for box in data.draw(partitions(shape)) if box.volume]
    copies = data.draw(st.lists(st.sampled_from(boxes), max_size=3))
    everything = data.draw(st.permutations(boxes + copies))
    check_coverage(tensor(shape, everything))
    assert primary_rows(tensor(shape, everything).shards).sum() == len(boxes)


@given(st.data(), shapes(min_dims=1))
def test_a_hole_is_found_and_named(data, shape):
    boxes = [box for box in data.draw(partitions(shape)) if box.volume]
    lost = data.draw(st.sampled_from(boxes))
    with pytest.raises(CheckpointError, match="is in no file") as caught:
        check_coverage(tensor(shape, [box for box in boxes if box != lost]))
    assert caught.value.where == "model.norm.weight"


@given(st.data(), shapes(min_dims=1))
def test_an_overlap_is_found_and_both_files_are_named(data, shape):
    boxes = [box for box in data.draw(partitions(shape)) if box.volume]
    larger = [b for b in boxes if any(offset + size < n for offset, size, n in zip(b.offsets, b.sizes, shape, strict=True))]
    assume(larger)
    box = data.draw(st.sampled_from(larger))
    axis = next(a for a in range(len(shape)) if box.stops[a] < shape[a])
    grown = Box(box.offsets, (*box.sizes[:axis], box.sizes[axis] + 1, *box.sizes[axis + 1 :]))
    with pytest.raises(CheckpointError, match=r"overlap without being equal.*rank\d+\.bin.*rank\d+\.bin"):
        check_coverage(tensor(shape, [grown if b == box else b for b in boxes]))


def test_a_box_beyond_the_shape_is_refused():
    with pytest.raises(CheckpointError, match="beyond the tensor's shape"):
        check_coverage(tensor((4, 4), [Box((0, 0), (4, 5))]))


def test_pieces_with_other_axes_are_named():
    with pytest.raises(CheckpointError, match=r"its pieces have 1 axes, and its shape is \[\]"):
        check_coverage(tensor((), [Box((0,), (4,))]))


def test_empty_shards_count_for_nothing():
    check_coverage(tensor((4, 2), [Box((0, 0), (4, 2)), Box((4, 0), (0, 2)), Box((4, 0), (0, 2))]))


def test_a_tensor_without_elements_needs_no_piece():
    check_coverage(tensor((0, 5), []))


def test_the_text_says_how_a_tensor_is_cut():
    whole = Box.whole((8, 6))
    assert sharding_text(tensor((8, 6), [whole])) == "whole"
    assert sharding_text(tensor((8, 6), whole.split(0, 4))) == "4 along axis 0"
    grid = [box for row in whole.split(0, 2) for box in row.split(1, 3)]
    assert sharding_text(tensor((8, 6), grid)) == "2 x 3 along axes 0, 1"
    assert sharding_text(tensor((8, 6), [*whole.split(0, 2)] * 2)) == "2 along axis 0, 2 copies"


@given(st.data(), shapes(min_dims=1, max_dims=2))
def test_the_pieces_of_a_strided_part_hold_its_elements(data, shape):
    """Each piece in a file of its own, which holds the numbers of its elements in the whole tensor."""
    whole, boxes = np.arange(np.prod(shape)).reshape(shape), [box for box in data.draw(partitions(shape)) if box.volume]
    files = {f"rank{i}.bin": whole[box.relative_to((0,) * len(shape)).index].ravel() for i, box in enumerate(boxes)}
    at = [data.draw(st.integers(0, size - 1)) for size in shape]
    steps = [data.draw(st.integers(1, 4)) for _ in shape]
    sizes = [data.draw(st.integers(1, (size - first - 1) // step + 1)) for size, first, step in zip(shape, at, steps, strict=True)]
    order = data.draw(st.permutations(range(len(shape))))
    part = tensor(shape, boxes).shards.strided(at, [(sizes[axis], axis, steps[axis]) for axis in order])
    found = np.full([sizes[axis] for axis in order], -1)
    for i in range(len(part)):
        box, extent = part.box(i), part.extent(i)
        first = files[extent.path][extent.byte_offset // 2 :]
        strides = [stride * first.itemsize for stride in extent.strides]
        found[box.index] = np.lib.stride_tricks.as_strided(first, box.sizes, strides)
    expected = whole[tuple(slice(first, None, step) for first, step in zip(at, steps, strict=True))][tuple(map(slice, sizes))]
    assert np.array_equal(found, expected.transpose(order))
