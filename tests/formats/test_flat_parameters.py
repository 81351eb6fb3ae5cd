"""Parameters laid end to end: packed, aligned as FSDP1 aligns them, or not to be explained."""

from importlib import import_module

import pytest

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.plans.layout import row_shard

find_slots = import_module("reshard.formats.fsdp_local.flat_parameters").find_slots
ODD = [("a", (7,)), ("b", (3, 5)), ("c", (1,))]


def starts(elements, ranks):
    return [slot.start for slot in find_slots(ODD, elements, ranks, where="w")]


def test_packed():
    assert starts(23, 4) == [0, 7, 22]


def test_aligned_and_padded_to_the_ranks():
    """Of float32, 16 bytes are 4 elements: 7 -> 8, 15 -> 16, and 25 elements are padded to the next multiple of the ranks."""
    assert starts(25, 5) == [0, 8, 24]
    assert starts(28, 4) == [0, 8, 24]


def test_another_model_does_not_fit():
    for elements in (22, 24, 40):
        with pytest.raises(CheckpointError, match="`model="):
            starts(elements, 2 if elements != 24 else 5)


def test_rows_go_to_the_ranks_in_order():
    assert [row_shard((10, 2), 4, rank) for rank in range(4)] == [
        Box((0, 0), (3, 2)),
        Box((3, 0), (3, 2)),
        Box((6, 0), (3, 2)),
        Box((9, 0), (1, 2)),
    ]
    assert [row_shard((2,), 3, rank) for rank in range(3)] == [Box((0,), (1,)), Box((1,), (1,)), None]
    assert [row_shard((), 2, rank) for rank in range(2)] == [Box((), ()), None]
    assert [row_shard((0, 4), 2, rank) for rank in range(2)] == [Box((0, 0), (0, 4)), None]
