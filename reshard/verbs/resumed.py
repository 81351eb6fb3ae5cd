"""What a run resumes from, on both sides of a comparison: masters and step counts, whichever way each format keeps them.

A weight without a master beside it is its own master. A step count is a tensor per parameter, or a setting of a param group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.canonical.optimizer_state import STEP, parameter_and_kind, state_key_of
from reshard.engine.compare import Comparison, Difference, Side
from reshard.geometry.quantities import plural


def compared_once(left: Side, right: Side) -> tuple[Side, Side]:
    """The sides with every weight that is its own master on one of them once: as a master if its element type differs, so that it is
    compared with the other side's full precision; as a weight if it is its own master on both."""
    own = [set(side.content.duplicate_masters) for side in (left, right)]
    a, b = left.content.tensors, right.content.tensors
    names = {key: parameter_and_kind(key)[0] for key in own[0] | own[1]}
    as_masters = {name for key, name in names.items() if key in a and key in b and a[name].dtype != b[name].dtype}
    as_weights = {key for key, name in names.items() if name not in as_masters and key in own[0] & own[1]}
    return _without(left, as_masters | as_weights), _without(right, as_masters | as_weights)


def _without(side: Side, keys: set[str]) -> Side:
    if not keys:
        return side
    tensors = {key: tensor for key, tensor in side.content.tensors.items() if key not in keys}
    return replace(side, content=replace(side.content, tensors=tensors))


def notes_on_masters(left: Side, right: Side) -> Iterator[str]:
    """A note if masters are compared with weights of the other side, which keeps no masters beside them."""
    own = {*left.content.duplicate_masters, *right.content.duplicate_masters}
    if count := len(own & left.content.tensors.keys() & right.content.tensors.keys()):
        yield f"{plural(count, 'weight')} without a master beside it: compared with the master of the other side, from which a run resumes"


def compare_counts(left: Side, right: Side, result: Comparison) -> None:
    """Compare the step counts that a side keeps as settings: with the other side's settings or tensors, as numbers."""
    settings = left.content.step_counts, right.content.step_counts
    names = dict.fromkeys((*settings[0], *settings[1]))
    if not names:
        return
    keys = {state_key_of(name, STEP) for name in names}
    result.differences = [difference for difference in result.differences if difference.name not in keys]
    for name in names:
        key = state_key_of(name, STEP)
        a, b = (_count(side, of_side, name, key) for side, of_side in zip((left, right), settings, strict=True))
        if a is None or b is None:
            kind, root = ("missing", right.files.root) if b is None else ("extra", left.files.root)
            result.differences.append(Difference(key, kind, f"{root} has no count of the steps"))
        elif a != b:
            result.differences.append(Difference(key, "values", f"{a:g} steps on the left, {b:g} on the right"))
    if (left.content.tensors.keys() ^ right.content.tensors.keys()) & keys:
        result.notes.append(f"the step counts of {plural(len(names), 'parameter')} are compared as numbers: only one side keeps tensors")


def _count(side: Side, settings: Mapping[str, int], name: str, key: str) -> float | None:
    """The step count of a parameter; None if the side has none."""
    if name in settings:
        return settings[name]
    return side.content.read_scalar(key) if key in side.content.tensors else None
