"""Checks of the optimizer state against the weights. No value is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found
from reshard.index.index import Index, Kind, Tensor

_MOMENTS: tuple[Kind, ...] = ("moment1", "moment2")


def optimizer_state(index: Index) -> Iterator[Finding]:
    """Every trained weight has all its moments, with its own shape."""
    weights: Mapping[str, Tensor] = {**index.by_kind("master"), **index.by_kind("weight")}
    moments = {kind: index.by_kind(kind) for kind in _MOMENTS}
    trained = {name for tensors in moments.values() for name in tensors}
    if not trained:
        return
    for kind, tensors in moments.items():
        lacking = sorted(trained - tensors.keys())
        if tensors and lacking:
            other = next(each for each in _MOMENTS if each != kind)
            for name in lacking:
                yield found(
                    "missing-moment", f"it has {other} but no {kind}, which {plural(len(tensors), 'other parameter')} have", tensor=name
                )
        for name, tensor in tensors.items():
            weight = weights.get(name)
            if weight is None:
                yield found("lone-moment", f"there is a {kind} of {list(tensor.shape)}, but no weight of this name", tensor=name)
            elif tensor.shape != weight.shape:
                yield found("moment-shape", f"its {kind} is {list(tensor.shape)}, the weight is {list(weight.shape)}", tensor=name)
    yield from _masters_without_moments(index, trained)
    untrained = [name for name, weight in weights.items() if name not in trained and weight.dtype.floating]
    if untrained:
        yield found("no-moments", f"{plural(len(untrained), 'weight')} without optimizer state, such as {untrained[0]}")


def _masters_without_moments(index: Index, trained: set[str]) -> Iterator[Finding]:
    """An optimizer keeps a full-precision copy of exactly those weights that it trains, if it keeps any beside the model's."""
    stored = index.by_kind("weight")
    masters = [name for name in index.by_kind("master") if name in stored and name not in index.facts.tied]
    lacking = [name for name in masters if name not in trained]
    if Counter(name in trained for name in masters)[True] > len(lacking):
        for name in lacking:
            yield found("missing-moment", "the optimizer holds its full-precision copy, but no moments", tensor=name)
