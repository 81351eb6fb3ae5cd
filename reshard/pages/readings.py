"""Readings: the one sentence above a picture, computed from the values that it draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from reshard.geometry.quantities import nbytes_text, plural
from reshard.index.balance import ByteShare
from reshard.index.index import Index, Tensor
from reshard.index.name_parts import expert_of, is_stacked_experts, is_table, layer_of
from reshard.index.shards import primary_rows
from reshard.measures.changes import Change
from reshard.picture.drawing import shortened
from reshard.serving.capacity import DegreeReport
from reshard.training.memory import Estimate
from reshard.training.schedules import PipelineSchedule, bubbles

_MOST_OF = 0.8
"""The share of a role's change that its layers must have to be named."""
_EVEN = 0.005
"""The excess over the mean that is called none."""


def percent(share: float) -> str:
    """A share of 0 to 1, such as "72 %"; what is not nothing never reads as 0."""
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.2g} %"


def change_reading(changes: Sequence[Change]) -> str:
    """Where most of the change is: in a role, in some layers of it, or in layers of all roles."""
    has_sums = any(change.squares for change in changes)
    amounts, roles, by_layer = dict[tuple[str, int | None], float](), dict[str, float](), dict[int | None, float]()
    for change in changes:
        amount = change.squares if has_sums else change.changed
        amounts[change.role, change.layer] = amounts.get((change.role, change.layer), 0) + amount
        roles[change.role] = roles.get(change.role, 0) + amount
        by_layer[change.layer] = by_layer.get(change.layer, 0) + amount
    total = sum(roles.values())
    if not total:
        return "No weight changed."
    role, most = max(roles.items(), key=lambda pair: pair[1])
    of_role = {layer: amount for (name, layer), amount in amounts.items() if name == role}
    if most * 3 >= total or len(by_layer) == 1:
        first, last = _narrowest(of_role)
        layers = range(first, last + 1) if None not in of_role else None
        chosen = {(name, layer) for name, layer in amounts if name == role and (layers is None or layer in layers)}
        named = role + ("" if layers is None or len(of_role) == 1 == len(layers) else f" of {_layers(layers)}")
    else:
        first, last = _narrowest({layer: amount for layer, amount in by_layer.items() if layer is not None})
        layers = range(first, last + 1)
        chosen = {(name, layer) for name, layer in amounts if layer in layers}
        named = f"{_layers(layers)}, most of all in {role}"
    share = sum(amounts[key] for key in chosen) / total
    elements = sum(change.elements for change in changes)
    size = sum(change.elements for change in changes if (change.role, change.layer) in chosen) / elements if elements else 0.0
    what = "change" if has_sums else "changed elements"
    return f"{percent(share)} of the {what} is in {named}; {percent(size)} of the elements are there."


def _narrowest(amounts: Mapping[int | None, float]) -> tuple[int, int]:
    """The fewest neighbouring layers that have most of an amount; the first of several such."""
    layers = sorted(layer for layer in amounts if layer is not None)
    if not layers:
        return 0, 0
    needed = _MOST_OF * sum(amounts[layer] for layer in layers)
    best, start, held = (layers[0], layers[-1]), 0, 0.0
    for last in layers:
        held += amounts[last]
        while held - amounts[layers[start]] >= needed:
            held -= amounts[layers[start]]
            start += 1
        if held >= needed and last - layers[start] < best[1] - best[0]:
            best = layers[start], last
    return best


def _layers(layers: range) -> str:
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"


def share_reading(index: Index, by: str, shares: Sequence[ByteShare]) -> str:
    """Which rank, file or layer holds most, and of what it holds more than the others. What belongs to no layer is none of them."""
    divided = [share for share in shares if share.name != "no layer"]
    if len(divided) < 2:
        return f"The only {by} is {shortened(divided[0].name, 60)}." if divided else f"No tensor belongs to a {by}."
    total = sum(share.nbytes for share in divided)
    mean, largest = total / len(divided), max(divided, key=lambda share: share.nbytes)
    excess = largest.nbytes / mean - 1 if mean else 0.0
    names = plural(len(divided), by)
    if excess < _EVEN:
        return f"The {names} hold {nbytes_text(round(mean))} each" + (
            "." if excess == 0 else f"; they differ by less than {percent(_EVEN)}."
        )
    more = f"{percent(excess)} more than" if excess < 1 else f"{excess + 1:.2g} times"
    cause = _cause(index, by, largest.name, len(divided))
    because = f", because of {cause}" if cause else ""
    return f"Of the {names}, {shortened(largest.name, 60)} holds the most: {nbytes_text(largest.nbytes)}, {more} the mean{because}."


def _cause(index: Index, by: str, name: str, number: int) -> str:
    """What one of several holders has more of than the mean, if that is most of its excess; empty otherwise."""
    excess = Counter[str]()
    for tensor in index.tensors:
        if by != "layer" or layer_of(tensor.name) is not None:
            own, stored = _bytes_of(tensor, by, name)
            excess[_kind(tensor)] += own - stored / number  # type: ignore[assignment]
    cause, most = max(excess.items(), key=lambda pair: pair[1], default=("", 0))
    return cause if most > 0 and 2 * most >= sum(excess.values()) else ""


def _bytes_of(tensor: Tensor, by: str, name: str) -> tuple[int, int]:
    """The bytes of a tensor that a holder has, and all that are stored of it."""
    shards = tensor.shards
    volumes = shards.sizes.prod(axis=1)
    if by == "layer":
        own = volumes if layer_of(tensor.name) == int(name.rpartition(" ")[2]) else volumes[:0]
    elif by == "rank":
        own = volumes[shards.ranks == int(name.rpartition(" ")[2])] if shards.ranks is not None else volumes[:0]
    else:
        own = volumes[shards.files == shards.paths.index(name)] if name in shards.paths else volumes[:0]
    return int(own.sum()) * tensor.dtype.itemsize, int(volumes.sum()) * tensor.dtype.itemsize


def _kind(tensor: Tensor) -> str:
    if is_table(tensor.name):
        return "the vocabulary"
    if expert_of(tensor.name) or is_stacked_experts(tensor.name, tensor.shape):
        return "the experts"
    return "its layers" if layer_of(tensor.name) is not None else "tensors outside of layers"


def layers_reading(cells: Mapping[str, Mapping[int, int]]) -> str:
    """The largest part of layers, and whether layers are equal. cells: the bytes of each part in each layer."""
    layers = Counter[int]()
    for row in cells.values():
        layers.update(row)
    part = max(cells, key=lambda name: sum(cells[name].values()))
    share, low, high = percent(sum(cells[part].values()) / (layers.total() or 1)), min(layers.values()), max(layers.values())
    first = f"{shortened(part, 60)} is {share} of the bytes of {plural(len(layers), 'layer')}"
    if low == high:
        return f"{first}; each layer has {nbytes_text(high)}."
    smallest, largest = (next(layer for layer in sorted(layers) if layers[layer] == nbytes) for nbytes in (low, high))
    return f"{first}; layer {smallest} has the least, {nbytes_text(low)}, and layer {largest} the most, {nbytes_text(high)}."


def holders_reading(holders: int, tensors: Iterable[tuple[str, Tensor, int]]) -> str:
    """How much of what ranks or files hold is a replica. tensors: (family, one of its tensors, how many it has)."""
    stored, copies = 0, Counter[str]()
    for name, tensor, count in tensors:
        shards = tensor.shards
        volumes = shards.sizes.prod(axis=1) * tensor.dtype.itemsize * count
        stored += int(volumes.sum())
        copies[name] += int(volumes[~primary_rows(shards)].sum())
    if not copies.total():
        return "One holder has all of it." if holders == 1 else f"{holders:,} holders have a part each; no part is held twice."
    name, most = copies.most_common(1)[0]
    return (
        f"{percent(copies.total() / stored)} of what {plural(holders, 'holder')} have is a replica; "
        f"{percent(most / copies.total())} of the replicas are of {shortened(name, 60)}."
    )


def reads_reading(sums: Mapping[tuple[str, str], int]) -> str:
    """From how many files the target files read. sums: the bytes by (source file, target file)."""
    targets: dict[str, list[int]] = {}
    for (_, target), nbytes in sums.items():
        targets.setdefault(target, []).append(nbytes)
    sources, counts = len({source for source, _ in sums}), sorted(map(len, targets.values()))
    number = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    share = percent(sum(map(max, targets.values())) / (sum(sums.values()) or 1))
    return f"A target file reads from {number} of {plural(sources, 'source file')}; {share} of its bytes come from the one that gives most."


def degrees_reading(report: DegreeReport) -> str:
    """The fewest GPUs that are enough, and what is left beside the weights; or how much is missing."""
    legal = [(row, row.fullest) for row in report.rows if row.fullest is not None]
    memory, best = report.memory, report.smallest_that_fits
    if not legal:
        return ""
    if memory is None:
        ends = [choose(legal, key=lambda pair: pair[1].weights) for choose in (max, min)]
        most, least = (f"{nbytes_text(stage.weights)} at TP {row.parallel.tp} PP {row.parallel.pp}" for row, stage in ends)
        return f"The fullest GPU holds {most} and {least}."
    if best is None or best.fullest is None or best.capacity is None:
        row, stage = min(legal, key=lambda pair: pair[1].weights)
        return f"None of these sizes fits: at {row.parallel} a GPU holds {nbytes_text(stage.weights)} of weights."
    share = percent(best.fullest.weights / memory.usable)
    return f"{best.parallel} is enough: its weights take {share} of what the engine may use, and {best.capacity.tokens:,} tokens fit."


def memory_reading(estimate: Estimate, gpu_memory: int | None) -> str:
    """What takes most of the fullest rank, and which ZeRO stage is the first that fits."""
    first = estimate.strategies[0].fullest
    parts = {name: getattr(first, name) or 0 for name in ("weights", "gradients", "optimizer", "activations", "transient")}
    largest = max(parts, key=lambda name: parts[name])
    named = {"optimizer": "the optimizer state", "transient": "what is needed for a moment"}.get(largest, largest)
    text = f"With {_zero(estimate.strategies[0].zero)} {percent(parts[largest] / (first.total or 1))} of the fullest rank is {named}"
    if gpu_memory is None:
        last = estimate.strategies[-1]
        return f"{text}; {_zero(last.zero)} needs {percent(last.fullest.total / (first.total or 1))} of its bytes."
    fits = next((strategy.zero for strategy in estimate.strategies if strategy.fullest.total <= gpu_memory), None)
    return f"{text}; " + ("no ZeRO stage fits." if fits is None else f"{_zero(fits)} is the first that fits.")


def _zero(stage: int) -> str:
    return f"ZeRO-{stage}" if stage else "DDP"


def bubble_reading(schedules: Sequence[PipelineSchedule]) -> str:
    """How long the longest pipeline waits, and with how many microbatches that is less than a tenth of the time."""
    schedule = max(schedules, key=lambda schedule: schedule.stages)
    points, number = bubbles(schedule), plural(schedule.microbatches, "microbatch", "microbatches")
    few = next((count for count, share in points if share < 0.1), None)
    now = dict(points)[schedule.microbatches]
    from_there = f"; from {plural(few, 'microbatch', 'microbatches')} on it is less than 10 %" if few and now >= 0.1 else ""
    return f"PP {schedule.stages} waits {percent(now)} of the time at {number}{from_there}."
