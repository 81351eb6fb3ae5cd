"""Merged bfloat16 words by a matrix library have the bits of the rule: each product and each sum rounded to float32, in order."""

import numpy as np
import pytest

from reshard.engine.casts import cast, values_beyond
from reshard.engine.origins import merged_words as module
from reshard.engine.origins.merged_words import FactorColumns, merged_words
from reshard.geometry.dtypes import BF16, F32


def _by_the_rule(base, rows, columns, scale):
    delta = np.zeros(base.shape, np.float32)
    for k in range(len(columns)):
        delta = delta + rows[:, k : k + 1] * columns[k]
    return cast((base + delta * np.float32(scale)).view(F32.word), F32, BF16)


def _factors(kind, rank, height=48, width=160):
    draw = np.random.default_rng(rank)
    base = draw.standard_normal((height, width), np.float32) * np.float32(0.02)
    rows, columns = draw.standard_normal((height, rank), np.float32), draw.standard_normal((rank, width), np.float32)
    if kind == "trained":
        rows, columns = rows * np.float32(0.01), columns * np.float32(0.02)
    elif kind == "new":  # PEFT begins with B = 0
        rows[:] = 0
    elif kind == "canceling":
        rows[:, 1::2], columns[1::2] = rows[:, : rank // 2 * 2 : 2], -columns[: rank // 2 * 2 : 2] * np.float32(1 + 2.0**-12)
    elif kind == "ties":  # sums of few bits, many of which lie half-way between two bfloat16 numbers
        base, rows, columns = (np.round(values * 16) / 16 for values in (base * 50, rows, columns))
    elif kind == "tiny":
        base, rows, columns = base * np.float32(1e-36), rows * np.float32(1e-20), columns * np.float32(1e-20)
    elif kind == "huge":
        rows, columns = rows * np.float32(1e19), columns * np.float32(1e19)
    elif kind == "not numbers":
        base[3, 5], base[7, 9], rows[11, 0], columns[0, 2] = np.nan, np.inf, np.inf, np.nan
    return base, rows, columns


@pytest.mark.parametrize("rank", [1, 7, 64])
@pytest.mark.parametrize("kind", ["wide", "trained", "new", "canceling", "ties", "tiny", "huge", "not numbers"])
@pytest.mark.parametrize("scale", [2.0, 0.3, -1e-3])
def test_the_words_are_those_of_the_rule(kind, rank, scale):
    base, rows, columns = _factors(kind, rank)
    values_beyond()
    with np.errstate(all="ignore"):
        expected, beyond = _by_the_rule(base, rows, columns, scale), values_beyond()
    words = merged_words(base, rows, FactorColumns.of(columns), scale)
    np.testing.assert_array_equal(words, expected)
    assert values_beyond() == beyond


def test_few_elements_of_a_trained_adapter_are_computed_by_the_rule(monkeypatch):
    counts, by_rule = [], module._by_rule
    monkeypatch.setattr(module, "_by_rule", lambda *given: (counts.append(len(given[-1])), by_rule(*given))[1])
    base, rows, columns = _factors("trained", 64)
    merged_words(base, rows, FactorColumns.of(columns), 2.0)
    assert 0 < sum(counts) < base.size / 20
