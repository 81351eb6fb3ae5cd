"""Where DTensors belong: the arithmetic of meshes against slices taken step by step, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import CheckpointError
from reshard.geometry.meshes import Mesh, Replicated, Sharded, StridedSharded, chunk, distribution


def pieces(array, parts, axis):
    """torch.chunk, by numpy: runs of ceil(n / parts), the last ones shorter or empty."""
    most = -(-array.shape[axis] // parts)
    return [np.take(array, range(min(i * most, array.shape[axis]), min((i + 1) * most, array.shape[axis])), axis) for i in range(parts)]


@given(st.integers(0, 60), st.integers(1, 9))
def test_runs_tile_the_axis_in_order(length, parts):
    runs = [chunk(length, parts, i) for i in range(parts)]
    assert sum(size for _, size in runs) == length
    assert all(start + size == (runs[i + 1][0] if i + 1 < parts else length) for i, (start, size) in enumerate(runs))


@given(st.lists(st.integers(0, 17), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_plain_shards_cut_from_left_to_right(shape, sizes, data):
    axes = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in sizes]
    coordinates = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    expected = np.arange(int(np.prod(shape))).reshape(shape)
    for size, axis, at in zip(sizes, axes, coordinates, strict=True):
        if axis is not None:
            expected = pieces(expected, size, axis)[at]
    mesh = Mesh(tuple("abc"[: len(sizes)]), tuple(sizes))
    found = distribution(mesh, tuple(Replicated() if axis is None else Sharded(axis) for axis in axes))
    box = found.box(tuple(shape), coordinates)
    assert np.array_equal(np.arange(int(np.prod(shape))).reshape(shape)[box.index], expected)


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_strided_shards_cut_after_the_dimensions_to_their_right(rows, replicas, dp, tp, data):
    """Replicate x _StridedShard x Shard, as FSDP2 makes them over tensor parallelism, whatever divides."""
    at = tuple(data.draw(st.integers(0, size - 1)) for size in (replicas, dp, tp))
    array = np.arange(rows)
    expected = pieces(pieces(array, tp, 0)[at[2]], dp, 0)[at[1]]
    mesh = Mesh(("replicate", "dp", "tp"), (replicas, dp, tp))
    box = distribution(mesh, (Replicated(), StridedSharded(0, tp), Sharded(0))).box((rows,), at)
    assert np.array_equal(array[box.index], expected)


def test_two_strided_shards_cut_from_right_to_left():
    array, mesh = np.arange(24), Mesh(("a", "b", "c"), (2, 3, 2))
    found = distribution(mesh, (StridedSharded(0, 6), StridedSharded(0, 2), Sharded(0)))
    expected = pieces(pieces(pieces(array, 2, 0)[1], 3, 0)[2], 2, 0)[0]
    assert np.array_equal(array[found.box((24,), (0, 2, 1)).index], expected)


def test_a_recorded_order_of_cuts_is_followed():
    array, mesh = np.arange(12), Mesh(("a", "b"), (2, 3))
    found = distribution(mesh, (Sharded(0), Sharded(0)), (1, 0))
    assert np.array_equal(array[found.box((12,), (1, 2)).index], pieces(pieces(array, 3, 0)[2], 2, 0)[1])


@pytest.mark.parametrize("placements", [(StridedSharded(0, 3), Sharded(0)), (StridedSharded(0, 2), Replicated())])
def test_a_factor_that_the_mesh_does_not_explain_is_refused(placements):
    with pytest.raises(CheckpointError, match="into"):
        distribution(Mesh(("dp", "tp"), (2, 2)), placements)


def test_placements_and_dimensions_must_be_as_many():
    with pytest.raises(CheckpointError, match="1 placements on a mesh of 2 dimensions"):
        distribution(Mesh(("dp", "tp"), (2, 2)), (Sharded(0),))
