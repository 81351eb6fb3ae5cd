"""Parcels as changes: the oracle is numpy, which writes the new bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import RequestError
from reshard.live.wire.changes import WHOLE, apply, body_bytes, encode

BLOCK = 1 << 16


@st.composite
def parcels(draw):
    """A parcel before and after, some of whose bytes have changed."""
    nbytes = draw(st.sampled_from([1, 2, 7, 64, 1000, 2 * BLOCK - 2, 2 * BLOCK, 2 * BLOCK + 2, 5 * BLOCK + 6]))
    made = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    base = made.integers(0, 256, nbytes, np.uint8)
    places = made.integers(0, nbytes, draw(st.sampled_from([0, 1, 3, nbytes // 100, nbytes // 4, nbytes])))
    new = base.copy()
    new[places] ^= made.integers(1, 256, len(places), np.uint8)
    return base, new


@settings(max_examples=200, deadline=None)
@given(parcels(), st.booleans())
def test_changes_make_the_new_parcel_of_the_old_one(pair, is_odd):
    base, new = pair
    held = torch.zeros(len(base) + 1, dtype=torch.uint8)
    old = held[int(is_odd) : len(base) + int(is_odd)]  # it may start at an odd place
    old.copy_(torch.from_numpy(base.copy()))
    head, body = encode(torch.from_numpy(new.copy()), old)
    number = int(head)
    changed = -1 if len(base) % 2 else int((base.view("<u2") != new.view("<u2")).sum())
    if number == WHOLE:
        assert body.numpy().tobytes() == new.tobytes()
        assert changed < 0 or 4 * changed + 4 * -(-len(base) // 2 // BLOCK) + 4 >= len(base)
        return
    assert number == changed and (0 if body is None else len(body)) == body_bytes(len(base), number) < max(1, len(base))
    staged = torch.from_numpy(base.copy())
    if body is not None:
        apply(body, number, staged)
    assert staged.numpy().tobytes() == new.tobytes()


def test_without_what_the_receiver_holds_a_parcel_is_whole():
    new = torch.arange(64, dtype=torch.uint8)
    head, body = encode(new, None)
    assert int(head) == WHOLE and body is new


@pytest.mark.parametrize("number", [-2, 33, 1 << 40])
def test_more_changes_than_words_are_refused(number):
    with pytest.raises(RequestError, match="a parcel of 64 bytes claims"):
        body_bytes(64, number)


@pytest.mark.parametrize("place, value, what", [(0, 2, "do not hold 1 changes"), (4, 40, "lies outside"), (0, 255, "do not hold")])
def test_a_body_that_is_not_one_changes_nothing(place, value, what):
    base = torch.zeros(64, dtype=torch.uint8)
    new = base.clone()
    new[10] = 1
    head, body = encode(new, base)
    body[place] = value
    with pytest.raises(RequestError, match=what):
        apply(body, int(head), base)
    assert not base.any()
