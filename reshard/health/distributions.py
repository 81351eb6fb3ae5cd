"""Judgements of whole matrices by their distribution: outliers among layers, and matrices that were never trained.

A fresh matrix is drawn from a normal distribution with one of a few standard deviations, or from a uniform one. Training changes both its
spread and its shape. The fourth moment tells shapes apart: divided by the squared variance it is 3 for a normal distribution and 1.8 for a
uniform one, with a standard error of sqrt(24 / n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found
from reshard.health.values import Measured
from reshard.index.name_parts import family_of, is_scale, layer_of

_FEWEST_LAYERS = 5
# An outlier differs from the median by at least this factor, and by this many robust standard deviations.
_FACTOR, _DEVIATIONS = 4.0, 8.0
# Fewer elements do not tell a distribution: of the whole model, and of one matrix.
_FEWEST_ELEMENTS, _FEWEST_OF_ONE = 1 << 12, 1 << 15


def norm_outliers(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Matrices whose root mean square is far from that of the same matrix in the other layers."""
    families: dict[str, list[tuple[Measured, float]]] = {}
    for entry in _matrices(measured):
        size = entry.statistics.root_mean_square
        if layer_of(entry.name) is not None and 0 < size < math.inf:
            families.setdefault(family_of(entry.name), []).append((entry, math.log(size)))
    for family in families.values():
        if len(family) < _FEWEST_LAYERS:
            continue
        middle = median(size for _, size in family)
        # 1.4826 times the median deviation is the standard deviation of a normal distribution.
        spread = 1.4826 * median(abs(size - middle) for _, size in family)
        for entry, size in family:
            if abs(size - middle) > max(math.log(_FACTOR), _DEVIATIONS * spread):
                others = f"the median of the {len(family)} layers or experts is {math.exp(middle):.3g}"
                detail = f"its root mean square is {math.exp(size):.3g}, {others}"
                yield found("norm-outlier", detail, tensor=entry.name)


def fresh_matrices(measured: Sequence[Measured], config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Matrices that look as initialization left them. If most do, one finding says so."""
    judged = [entry for entry in _matrices(measured) if entry.statistics.sample[0] >= _FEWEST_ELEMENTS]
    fresh = [(entry, distribution) for entry in judged if (distribution := _distribution(entry, config or {}))]
    if 2 * len(fresh) > len(judged):
        entry, distribution = fresh[0]
        matrices = plural(len(judged), "large matrix", "large matrices")
        detail = f"{len(fresh):,} of {matrices} look untrained, such as {entry.name} ({distribution})"
        yield found("fresh-model", detail)
        return
    for entry, distribution in fresh:
        if entry.statistics.sample[0] < _FEWEST_OF_ONE:
            continue
        yield found("fresh-tensor", f"its elements are {distribution}, as after initialization", tensor=entry.name)


def _matrices(measured: Sequence[Measured]) -> Iterator[Measured]:
    for entry in measured:
        is_weight = entry.tensor.kind in ("weight", "master") and entry.is_complete and not is_scale(entry.name)
        if is_weight and len(entry.tensor.shape) > 1 and entry.tensor.dtype.itemsize > 1 and not entry.statistics.nan:
            yield entry


def _distribution(entry: Measured, config: Mapping[str, Any]) -> str | None:
    """The initial distribution that a sample fits; None if it fits none."""
    statistics = entry.statistics
    count, total, squares, fourths = statistics.sample.tolist()
    mean, variance = total / count, squares / count
    if not 0 < variance < math.inf or abs(mean) > 4 * math.sqrt(variance / count):
        return None
    deviation, shape, error = math.sqrt(variance), fourths / count / variance**2, 4 * math.sqrt(24 / count)
    if abs(shape - 1.8) < error / 3 and statistics.sample_largest <= deviation * math.sqrt(3) * 1.02:
        return f"uniform up to {statistics.sample_largest:.3g}"
    if abs(shape - 3) < error:
        tolerance = 3 / math.sqrt(2 * count) + 0.002
        if any(abs(deviation / known - 1) < tolerance for known in _deviations(entry, config)):
            return f"normal with the standard deviation {deviation:.3g}"
    return None


def _deviations(entry: Measured, config: Mapping[str, Any]) -> Iterator[float]:
    """The standard deviations with which libraries initialize."""
    rows, columns = entry.tensor.shape[-2:]
    given, layers = config.get("initializer_range"), config.get("num_hidden_layers") or config.get("n_layer")
    for deviation in {0.02, given if isinstance(given, float) and given > 0 else 0.02}:
        yield deviation
        if isinstance(layers, int) and layers > 0:
            yield deviation / math.sqrt(2 * layers)  # matrices that add to the residual stream (GPT-2, Megatron)
    yield 1.0  # torch.nn.Embedding
    for fan in (rows, columns):
        yield math.sqrt(1 / fan)
        yield math.sqrt(2 / fan)
    yield math.sqrt(2 / (rows + columns))
