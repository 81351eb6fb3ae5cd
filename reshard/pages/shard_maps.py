"""How an index is drawn: the shard map (who holds which part of each tensor), the bytes of ranks and files, and the folded tree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from reshard.geometry.quantities import by_numbers, nbytes_text, plural
from reshard.index.coverage import sharding_text
from reshard.index.fold import Fold
from reshard.index.index import Index, Tensor
from reshard.index.name_parts import layer_of, part_of_layer
from reshard.index.shards import primary_rows
from reshard.pages.readings import holders_reading, layers_reading
from reshard.picture.drawing import Held, Span, heat_map, shortened, strips
from reshard.picture.page import Html, element, folded, joined, legend, meter, said, table

# What a page shows of it; the rest is counted.
_MOST_ROWS, _MOST_FAMILIES, _MOST_BRANCHES = 32, 40, 6000
_TOUCH = 1e-9
"""The gap between two spans, as a share of the width, that is none."""


def shard_map(tree: Fold) -> Html:
    """Ranks x tensors: a row for each rank, or for each file where the files do not say who held what. The families of alike tensors lie
    side by side, as wide as the logarithm of their bytes; within each, a strip shows which part of its most divided axis the rank holds."""
    families = sorted((leaf for _, leaf in tree.walk() if leaf.stored and leaf.stored[0].shape), key=lambda leaf: -leaf.nbytes)
    shown = [leaf for leaf in families if len(leaf.stored[0].shards) > 1][:_MOST_FAMILIES]
    if not shown:
        return Html("")
    in_order = [leaf for _, leaf in tree.walk() if any(leaf is drawn for drawn in shown)]
    widths = np.log2(np.array([max(leaf.nbytes, 2) for leaf in in_order], np.float64)) + 1
    edges = np.concatenate([np.zeros(1), np.cumsum(widths / widths.sum())])
    places = zip(in_order, edges[:-1].tolist(), np.diff(edges).tolist(), strict=True)
    rows = _held((leaf.stored[0], left, width * 0.94) for leaf, left, width in places)
    title = f"Who holds what: {plural(len(rows), 'row')}, {plural(len(in_order), 'family', 'families')} of tensors"
    picture = strips(lanes(rows), title=title, dividers=edges[1:-1].tolist())
    names = table(
        ("", "tensors, from left to right", "count", "shape", "sharding"),
        [
            (number + 1, family_name(tree, leaf), leaf.count, str(list(leaf.stored[0].shape)), sharding_text(leaf.stored[0]))
            for number, leaf in enumerate(in_order)
        ],
    )
    notes = [f"Each row stands for {-(-len(rows) // _MOST_ROWS)} of {len(rows):,} holders."] if len(rows) > _MOST_ROWS else []
    whole = len([leaf for leaf in families if len(leaf.stored[0].shards) == 1])
    if whole:
        notes.append(f"Not drawn: {plural(whole, 'kind')} of tensor that nobody has cut.")
    has_replicas = any(copies for _, copies in rows.values())
    keys = legend(("a", "a part of a tensor"), *([("b", "a replica of it")] if has_replicas else []))
    note = element("p", " ".join(notes), class_="dim") if notes else ""
    sentence = said(holders_reading(len(rows), [(leaf.name, tensor, leaf.names) for leaf in in_order for tensor in leaf.stored[:1]]))
    return joined((sentence, picture, keys, note, folded("The tensors of the map", names)))


def lanes(rows: Mapping[str, Held]) -> dict[str, Held]:
    """Rows in their order, together as lanes of neighbours where they are more than are drawn."""
    drawn: dict[str, Held] = {}
    for name, lane in lanes_of([*rows], _MOST_ROWS).items():
        for spans, more in zip(drawn.setdefault(lane, ([], [])), rows[name], strict=True):
            spans += more
    return {lane: (_united(parts), _united(copies)) for lane, (parts, copies) in drawn.items()}


def _united(spans: list[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    united: list[Span] = []
    for start, stop in sorted(spans):
        if united and start <= united[-1][1] + _TOUCH:
            united[-1] = united[-1][0], max(stop, united[-1][1])
        else:
            united.append((start, stop))
    return united


def lanes_of(names: Sequence[str], most: int) -> dict[str, str]:
    """The lane of each row: itself, or one of neighbours, called after the first and the last, where there are more rows than `most`."""
    together = max(-(-len(names) // most), 1)
    groups = [names[start : start + together] for start in range(0, len(names), together)]
    return {name: group[0] if len(group) == 1 else f"{group[0]} .. {group[-1]}" for group in groups for name in group}


def layer_map(index: Index) -> Html:
    """What layers hold: a row for each weight of a layer, a column for each layer, by bytes on a logarithmic scale. Empty without any."""
    cells: dict[str, dict[int, int]] = {}
    for tensor in index.tensors:
        layer = layer_of(tensor.name) if tensor.kind in ("weight", "master") else None
        if layer is not None:
            row = cells.setdefault(part_of_layer(tensor.name).removesuffix(".weight"), {})
            row[layer] = row.get(layer, 0) + tensor.nbytes
    layers = sorted({layer for row in cells.values() for layer in row})
    if not layers:
        return Html("")
    most = max(max(row.values()) for row in cells.values())
    scale = math.log2(max(most, 2))
    shown = sorted(cells, key=lambda name: -sum(cells[name].values()))[:_MOST_FAMILIES]
    rows = [(shortened(name, 44), [_on(scale, cells[name].get(layer)) for layer in layers]) for name in cells if name in shown]
    picture = heat_map(
        [str(layer) for layer in layers],
        rows,
        title="Bytes of each weight in each layer",
        axes=("weight", "layer"),
        scale=("0 B", f"{nbytes_text(most)}, logarithmic"),
    )
    more = f"{len(cells) - len(shown):,} smaller ones are not drawn." if len(cells) > len(shown) else ""
    return joined((said(layers_reading(cells)), picture, element("p", more, class_="dim") if more else ""))


def _on(scale: float, nbytes: int | None) -> float | None:
    return None if nbytes is None else math.log2(max(nbytes, 1)) / scale


def tensor_map(tensor: Tensor) -> Html:
    """Who holds which part of one tensor."""
    rows = _held([(tensor, 0.0, 1.0)])
    sentence = said(holders_reading(len(rows), [(tensor.name, tensor, 1)]))
    return joined((sentence, strips(lanes(rows), title=f"Who holds {tensor.name}")))


def _held(places: Iterable[tuple[Tensor, float, float]]) -> dict[str, Held]:
    """What each holder has, the holders in order. places: (tensor, where its strip starts, its width)."""
    rows: dict[str, Held] = {}
    for tensor, left, width in places:
        for holder, start, stop, is_copy in held_spans(tensor):
            rows.setdefault(holder, ([], []))[is_copy].append((left + start * width, left + stop * width))
    return {holder: rows[holder] for holder in sorted(rows, key=by_numbers)}


def held_spans(tensor: Tensor) -> Iterator[tuple[str, float, float, bool]]:
    """For each piece: its holder, the part of the axis that is divided most, as shares of it, and whether it is a replica."""
    shards = tensor.shards
    axis = divided_axis(tensor)
    size = max(tensor.shape[axis], 1) if tensor.shape else 1
    primary, ranks = primary_rows(shards), shards.ranks
    offsets, sizes = (shards.offsets[:, axis], shards.sizes[:, axis]) if tensor.shape else (np.zeros(len(shards)), np.ones(len(shards)))
    for i, (offset, length) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
        if length:
            holder = f"rank {ranks[i]}" if ranks is not None else shards.path(i)
            yield holder, offset / size, (offset + length) / size, not primary[i]


def divided_axis(tensor: Tensor) -> int:
    """The axis along which a tensor is cut into most parts; the first one if it is whole."""
    return max(range(len(tensor.shape)), key=lambda axis: (len(np.unique(tensor.shards.offsets[:, axis])), -axis), default=0)


def family_name(tree: Fold, leaf: Fold) -> str:
    """The whole name of a leaf of the tree, such as "model.layers.{0..31}.mlp.up_proj.weight"."""
    path: list[str] = []
    for level, branch in tree.walk():
        path[level:] = [branch.name]
        if branch is leaf:
            return ".".join(path)
    return leaf.name


def tree_list(tree: Fold) -> Html:
    """The folded tree: branches unfold, leaves say type, shape and cut."""
    left = [_MOST_BRANCHES]
    return joined(_branch(child, tree.nbytes, 0, left) for child in tree.children)


def _branch(branch: Fold, total: int, level: int, left: list[int]) -> Html:
    left[0] -= 1
    if left[0] < 0:
        return Html("") if left[0] < -1 else element("div", "more branches are not shown", class_="row dim")
    first: Sequence[Tensor] = branch.stored[:1]
    size = f"{nbytes_text(branch.nbytes)}, {plural(branch.tensors, 'tensor')}"
    about = "".join(f"{tensor.dtype} {list(tensor.shape)}, {sharding_text(tensor)}; " for tensor in first)
    state = f" with {branch.state}" if branch.state else ""
    text = joined(
        (
            element("span", branch.name, class_="name"),
            meter(branch.nbytes / total if total else 0),
            element("span", f"{about}{size}{state}", class_="more"),
        )
    )
    style = f"--l:{level}"
    if branch.stored:
        return element("div", text, class_="row", style=style)
    children = (_branch(child, total, level + 1, left) for child in branch.children)
    return folded(text, *children, is_open=level < 2, class_="row", style=style)
