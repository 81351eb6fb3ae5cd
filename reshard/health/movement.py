"""What changed between two saves of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

import numpy as np

from reshard.engine.pool import Effort
from reshard.engine.transfer import Block
from reshard.engine.walk import BlockPlace, Read, walk
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable
from reshard.health.findings import Finding, found, of_error
from reshard.index.index import Index, Kind, Tensor
from reshard.index.name_parts import expert_of, is_scale, is_stacked_experts
from reshard.storage.files import Files


@mutable
class Pair:
    """One tensor in two saves."""

    now: Tensor
    """The tensor in the checkpoint."""
    before: Tensor
    """The tensor in the earlier save."""
    moved: bool = False
    """Whether an element differs."""
    moved_slices: set[int] = field(default_factory=set)
    """The indices of the first axis at which an element differs; kept for stacked experts only."""
    is_complete: bool = True
    """Whether all blocks of both could be read."""


def pairs_of(now: Index, before: Index) -> tuple[list[Pair], list[Finding]]:
    """The tensors to compare, and findings for those that cannot be compared. Masters are compared where both have them: small steps of a
    weight can vanish in its rounding."""
    a, b = _best_copies(now), _best_copies(before)
    findings = [
        found("other-weights", f"it is in {'the checkpoint' if name in a else 'the earlier save'} only", tensor=name)
        for name in sorted(a.keys() ^ b.keys())
    ]
    pairs = []
    for name in (name for name in a if name in b):
        # One copy may be in another precision.
        x, y = next(((x, y) for x in a[name] for y in b[name] if (x.dtype, x.shape) == (y.dtype, y.shape)), (a[name][0], b[name][0]))
        if (x.dtype, x.shape) == (y.dtype, y.shape):
            pairs.append(Pair(x.without_replicas(), y.without_replicas()))
        else:
            detail = f"it is {x.dtype} {list(x.shape)}, in the earlier save {y.dtype} {list(y.shape)}"
            findings.append(found("other-weights", detail, tensor=name))
    return pairs, findings


def _best_copies(index: Index) -> Mapping[str, tuple[Tensor, ...]]:
    """The copies of each weight, the most precise first."""
    copies: dict[str, tuple[Tensor, ...]] = {}
    kinds: tuple[Kind, ...] = ("master", "weight")
    for kind in kinds:
        for name, tensor in index.by_kind(kind).items():
            copies[name] = (*copies.get(name, ()), tensor)
    return copies


def compare_pairs(pairs: list[Pair], files: tuple[Files, Files], effort: Effort) -> Iterator[Finding]:
    """Read both tensors of every pair and note what moved. Yields a finding for each tensor that cannot be read."""

    def measure(place: BlockPlace, read: Read) -> tuple[set[int] | None, Finding | None]:
        moved = set[int]()
        try:
            for box, (a, b) in read:
                moved |= _moved(a, b, box)
        except CheckpointError as error:
            return None, of_error(error)
        return moved, None

    def is_wanted(number: int) -> bool:
        return not pairs[number].moved or _has_slices(pairs[number])  # one difference is enough

    groups = [(pair.now, pair.before) for pair in pairs]
    for (number, _, _), (moved, fault) in walk(groups, files, lambda: measure, effort=effort, is_wanted=is_wanted):
        pair = pairs[number]
        if moved is None:
            pair.is_complete = False
        else:
            pair.moved = pair.moved or bool(moved)
            pair.moved_slices |= moved if _has_slices(pair) else set()
        if fault:
            yield fault


def _has_slices(pair: Pair) -> bool:
    return is_stacked_experts(pair.now.name, pair.now.shape)


def _moved(a: Block, b: Block, box: Box) -> set[int]:
    """The indices of the first axis at which an element differs; {0} for a scalar that does."""
    if np.array_equal(a, b):
        return set()
    if not box.sizes:
        return {0}
    return {box.offsets[0] + i for i in range(box.sizes[0]) if not np.array_equal(a[i], b[i])} if len(box.sizes) == 3 else {box.offsets[0]}


def still_tensors(pairs: list[Pair], trained: set[str]) -> Iterator[Finding]:
    """What did not move. trained: the names of the weights with optimizer state; empty if there is none."""
    judged = [pair for pair in pairs if pair.is_complete and pair.now.dtype.floating and not is_scale(pair.now.name)]
    if judged and not any(pair.moved for pair in judged):
        yield found("nothing-moved", f"all {plural(len(judged), 'weight')} have the same bits in both checkpoints")
        return
    dead = _still_experts(judged)
    for group, numbers in dead.items():
        for number in sorted(numbers):
            yield found("dead-expert", f"expert {number} has the same bits in both checkpoints", tensor=group.replace("*", str(number)))
    frozen: list[str] = []
    for pair in judged:
        name, expert = pair.now.name, expert_of(pair.now.name)
        if pair.moved or (expert and expert[1] in dead.get(expert[0], ())):
            continue
        if len(pair.now.shape) < 2 or (trained and name not in trained):
            frozen.append(name)
        else:
            yield found("never-moved", f"all {pair.now.elements:,} elements have the same bits in both checkpoints", tensor=name)
    if frozen:
        yield found("frozen", f"{plural(len(frozen), 'tensor')}, such as {frozen[0]}")


def _still_experts(pairs: list[Pair]) -> dict[str, set[int]]:
    """By group of experts, the experts of which nothing moved while another expert of the group did."""
    moved: dict[str, dict[int, bool]] = {}
    for pair in pairs:
        if expert := expert_of(pair.now.name):
            experts = moved.setdefault(expert[0], {})
            experts[expert[1]] = experts.get(expert[1], False) or pair.moved
        elif _has_slices(pair):
            moved[pair.now.name] = {i: i in pair.moved_slices for i in range(pair.now.shape[0])}
    return {
        group: {number for number, any_moved in experts.items() if not any_moved}
        for group, experts in moved.items()
        if any(experts.values())
    }
