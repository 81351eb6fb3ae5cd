"""How an index is drawn: the shard map (who holds which part of each tensor), the bytes of ranks and files, and the folded tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from reshard.geometry.quantities import nbytes_text, plural
from reshard.index.balance import share_rows, shares
from reshard.index.coverage import sharding_text
from reshard.index.fold import Fold
from reshard.index.index import Index, Tensor
from reshard.index.shards import primary_rows
from reshard.picture.drawing import Held, strips
from reshard.picture.page import Html, element, folded, joined, meter, table

# What a page shows of it; the rest is counted.
_MOST_ROWS, _MOST_FAMILIES, _MOST_BRANCHES, _MOST_SHARES = 256, 40, 6000, 256


def shard_map(tree: Fold) -> Html:
    """Ranks x tensors: a row for each rank, or for each file where the files do not say who held what. The families of alike tensors lie
    side by side, as wide as the logarithm of their bytes; within each, a strip shows which part of its most divided axis the rank holds."""
    families = sorted((leaf for _, leaf in tree.walk() if leaf.stored and leaf.stored[0].shape), key=lambda leaf: -leaf.nbytes)
    shown = [leaf for leaf in families if len(leaf.stored[0].shards) > 1][:_MOST_FAMILIES]
    if not shown:
        return Html("")
    in_order = [leaf for _, leaf in tree.walk() if any(leaf is each for each in shown)]
    widths = np.log2(np.array([max(leaf.nbytes, 2) for leaf in in_order], np.float64)) + 1
    edges = np.concatenate([np.zeros(1), np.cumsum(widths / widths.sum())])
    rows: dict[str, Held] = {}
    for leaf, left, right in zip(in_order, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        width = right - left - (right - left) * 0.06
        for holder, start, stop, is_copy in held_spans(leaf.stored[0]):
            rows.setdefault(holder, ([], []))[is_copy].append((left + start * width, left + stop * width))
    order = sorted(rows, key=_natural)
    picture = strips(
        {holder: rows[holder] for holder in order[:_MOST_ROWS]},
        title=f"Who holds what: {plural(len(order), 'row')}, {plural(len(in_order), 'family', 'families')} of tensors",
        dividers=edges[1:-1].tolist(),
    )
    names = table(
        ("", "tensors, from left to right", "count", "shape", "sharding"),
        [
            (number + 1, family_name(tree, leaf), leaf.tensors, str(list(leaf.stored[0].shape)), sharding_text(leaf.stored[0]))
            for number, leaf in enumerate(in_order)
        ],
    )
    notes = [f"{len(order) - _MOST_ROWS:,} more rows are not drawn."] if len(order) > _MOST_ROWS else []
    whole = len(families) - len([leaf for leaf in families if len(leaf.stored[0].shards) > 1])
    if whole:
        notes.append(f"{plural(whole, 'family', 'families')} in one piece {'is' if whole == 1 else 'are'} not drawn.")
    text = f"Dark: the first copy of a part; light: a replica of it. {' '.join(notes)}"
    return joined((picture, element("p", text, class_="dim"), folded("The tensors of the map", names)))


def tensor_map(tensor: Tensor) -> Html:
    """Who holds which part of one tensor."""
    rows: dict[str, Held] = {}
    for holder, start, stop, is_copy in held_spans(tensor):
        rows.setdefault(holder, ([], []))[is_copy].append((start, stop))
    order = sorted(rows, key=_natural)[:_MOST_ROWS]
    return strips({holder: rows[holder] for holder in order}, title=f"Who holds {tensor.name}")


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


def _natural(holder: str) -> tuple[str, int]:
    head, _, number = holder.rpartition(" ")
    return (head, int(number)) if number.isdecimal() else (holder, 0)


def family_name(tree: Fold, leaf: Fold) -> str:
    """The whole name of a leaf of the tree, such as "model.layers.{0..31}.mlp.up_proj.weight"."""
    path: list[str] = []
    for level, branch in tree.walk():
        path[level:] = [branch.name]
        if branch is leaf:
            return ".".join(path)
    return leaf.name


def share_table(index: Index, by: str) -> Html:
    """The stored bytes of each rank, file, kind, element type or layer, with bars; empty if the index does not tell."""
    found = shares(index, by)
    rows = share_rows(found, _MOST_SHARES, meter)
    if not rows:
        return Html("")
    more = element("p", f"{len(found) - len(rows):,} more are not shown.", class_="dim") if len(found) > len(rows) else ""
    return joined((table((by, "tensors", "bytes", "share", ""), rows), more))


def tree_list(tree: Fold) -> Html:
    """The folded tree: branches unfold, leaves say type, shape and cut."""
    left = [_MOST_BRANCHES]
    return joined(_branch(child, tree.nbytes, 0, left) for child in tree.children)


def _branch(branch: Fold, total: int, level: int, left: list[int]) -> Html:
    left[0] -= 1
    if left[0] < 0:
        return Html("") if left[0] < -1 else element("div", "more branches are not shown", class_="leaf dim")
    first: Sequence[Tensor] = branch.stored[:1]
    size = f"{nbytes_text(branch.nbytes)}, {plural(branch.tensors, 'tensor')}"
    about = "".join(f" {tensor.dtype} {list(tensor.shape)}, {sharding_text(tensor)};" for tensor in first)
    state = f" with {branch.state}" if branch.state else ""
    text = joined(
        (
            element("span", branch.name, class_="name", style=f"min-width:{max(20 - level, 8)}rem"),
            " ",
            meter(branch.nbytes / total if total else 0),
            element("span", f"{about} {size}{state}", class_="more"),
        )
    )
    if branch.stored:
        return element("div", text, class_="leaf")
    return folded(text, *(_branch(child, total, level + 1, left) for child in branch.children), is_open=level < 2)
