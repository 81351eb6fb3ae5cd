"""Casts are torch's, bit by bit."""

import numpy as np
import pytest

from reshard.engine.casts import cast
from reshard.geometry.dtypes import from_torch

F32, BF16 = from_torch("float32", where=""), from_torch("bfloat16", where="")
SPECIAL = [
    0,
    1 << 31,
    1,
    0x7F800000,
    0xFF800000,
    0x7F7FFFFF,
    0x7F7F8000,
    0x00008000,
    0x00018000,
    0x3F808000,
    0x3F818000,
    0x3F807FFF,
    0x3F808001,
]


def by_torch(words):
    import torch

    return torch.from_numpy(words.view(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("count", [1, 13, 1 << 15, (1 << 15) + 1, 300_000])
def test_bfloat16_is_rounded_as_torch_rounds(count):
    words = np.random.default_rng(count).integers(0, 1 << 32, count, np.uint32)
    words = np.where((words & 0x7FFFFFFF) > 0x7F800000, words & 0x7F7FFFFF, words).astype(np.uint32)
    words[: len(SPECIAL)] = SPECIAL[:count]
    assert np.array_equal(cast(words, F32, BF16), by_torch(words))


def test_a_nan_stays_one_with_torchs_bits():
    words = np.array([0x3F800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF] * 100, np.uint32)
    assert np.array_equal(cast(words, F32, BF16), by_torch(words))


def test_shapes_are_kept():
    assert cast(np.zeros((3, 0, 2), np.uint32), F32, BF16).shape == (3, 0, 2)
    assert cast(np.zeros((), np.uint32), F32, BF16).shape == ()
