"""Joining: which boxes travel from which source rank to which target rank, as columns. The boxes of alike layers are computed once.

    tensors of one form: the same boxes and strides on both sides, as q_proj of all layers has    -> the boxes that meet, once
    each of these tensors                                                                         -> ranks and addresses, by arithmetic

A thousand tensors of 512 FSDP ranks for eight tensor-parallel ranks are half a million boxes of some thirty forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from reshard.errors import ReshardError
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.shards import Shards
from reshard.live.plan.schedule import BoxForm
from reshard.plans.tasks import Route


@value(eq=False)
class Meetings:
    """Boxes of some tensors of one form. t tensors, each with n boxes, of which c source ranks each hold a copy."""

    forms: Columns
    """[n]: the form of each box, as an index into the forms of all."""
    source_ranks: Columns
    """[t, n, c]: the ranks that hold it, as indexes into the paths of the source."""
    source_addresses: Columns
    """[t, n, c]: where it starts in the memory of each of them, in bytes."""
    target_ranks: Columns
    """[t, n]: the file of the target that it belongs to, as an index into the paths of the target."""
    target_addresses: Columns
    """[t, n]: where it starts there, in bytes."""

    def __repr__(self) -> str:
        tensors, boxes, copies = self.source_ranks.shape
        return f"Meetings({plural(tensors, 'tensor')} of {plural(boxes, 'box', 'boxes')}, {plural(copies, 'copy', 'copies')} each)"


class Forms:
    """Numbers the forms of boxes."""

    def __init__(self) -> None:
        self.numbers: dict[BoxForm, int] = {}

    def number(self, form: BoxForm) -> int:
        """The number of a form, the same for equal forms."""
        return self.numbers.setdefault(form, len(self.numbers))


@value(eq=False)
class _Side:
    """The pieces of some tensors with n pieces each."""

    offsets: Columns
    """[t, n, ndim]: where each piece starts in its tensor."""
    sizes: Columns
    """[t, n, ndim]: how long it is."""
    strides: Columns
    """[t, n, ndim]: its strides, in elements."""
    files: Columns
    """[t, n]: the file that holds it."""
    addresses: Columns
    """[t, n]: where it starts there, in bytes."""

    @staticmethod
    def of(shards: Sequence[Shards]) -> _Side:
        located = [pieces.located() for pieces in shards]
        return _Side(
            np.stack([pieces.offsets for pieces in shards]),
            np.stack([pieces.sizes for pieces in shards]),
            np.stack([places.strides for places in located]),
            np.stack([places.files for places in located]),
            np.stack([places.byte_offsets for places in located]),
        )

    def forms(self) -> Columns:
        """[t, ...]: what tensors of one form have in common."""
        count = len(self.offsets)
        return np.concatenate([column.reshape(count, -1) for column in (self.offsets, self.sizes, self.strides)], axis=1)


def joined(routes: Sequence[Route], forms: Forms) -> Iterator[Meetings]:
    """The boxes of all routes that meet.

    Raises: ReshardError if elements of a target have no origin or two; a proven plan has none of these.
    """
    groups: dict[tuple[object, ...], list[Route]] = {}
    for route in routes:
        a, b = route.source.shards, route.target.shards
        key = len(a), len(b), a.sizes.shape[1], a.paths, b.paths, route.source.dtype, route.target.dtype
        groups.setdefault(key, []).append(route)
    for alike in groups.values():
        source, target = _Side.of([route.source.shards for route in alike]), _Side.of([route.target.shards for route in alike])
        of_tensors: Columns = np.concatenate([source.forms(), target.forms()], axis=1)
        _, first, form_of = np.unique(of_tensors, axis=0, return_index=True, return_inverse=True)
        for number, example in enumerate(first.tolist()):
            rows = np.flatnonzero(form_of.reshape(-1) == number)
            yield from _of_one_form(alike[example], source, target, example, rows, forms)


def _of_one_form(route: Route, source: _Side, target: _Side, example: int, rows: Columns, forms: Forms) -> Iterator[Meetings]:
    """The boxes of the tensors in these rows, which have the form of the example."""
    copies = _copies(source.offsets[example], source.sizes[example])
    offsets, sizes = source.offsets[example][copies[:, 0]], source.sizes[example][copies[:, 0]]
    starts = np.maximum(offsets[:, None], target.offsets[example][None])
    lengths = np.minimum((offsets + sizes)[:, None], (target.offsets[example] + target.sizes[example])[None]) - starts
    i, j = np.nonzero((lengths > 0).all(axis=2))
    starts, lengths = starts[i, j], lengths[i, j]
    needed = target.sizes[example].prod(axis=1)
    if (np.bincount(j, lengths.prod(axis=1), len(needed)).astype(np.int64) != needed).any():
        raise ReshardError("elements of this tensor have no origin, or more than one", where=route.name)
    source_strides, target_strides = source.strides[example][copies[i]], target.strides[example][j]
    same = (source_strides == source_strides[:, :1]).all(axis=(1, 2)) if len(i) else np.ones(0, np.bool_)
    # A copy with other strides is not the same box: the first one alone is used.
    for width, chosen in ((copies.shape[1], np.flatnonzero(same)), (1, np.flatnonzero(~same))):
        if not len(chosen):
            continue
        picked = copies[i[chosen], :width]
        before = ((starts[chosen][:, None] - source.offsets[example][picked]) * source.strides[example][picked]).sum(axis=2)
        beyond = ((starts[chosen] - target.offsets[example][j[chosen]]) * target_strides[chosen]).sum(axis=1)
        yield Meetings(
            _numbered(route, lengths[chosen], source_strides[chosen, 0], target_strides[chosen], forms),
            source.files[rows][:, picked],
            source.addresses[rows][:, picked] + before * route.source.dtype.itemsize,
            target.files[rows][:, j[chosen]],
            target.addresses[rows][:, j[chosen]] + beyond * route.target.dtype.itemsize,
        )


def _copies(offsets: Columns, sizes: Columns) -> Columns:
    """[boxes, copies]: the rows that hold each distinct box. All boxes are given as many copies as the one with fewest has."""
    filled = np.flatnonzero((sizes > 0).all(axis=1))
    boxes, group = np.unique(np.concatenate([offsets[filled], sizes[filled]], axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group, minlength=len(boxes))
    least = int(counts.min()) if len(counts) else 1
    first = np.cumsum(counts) - counts
    rows: Columns = filled[order][first[:, None] + np.arange(least)]
    return rows


def _numbered(route: Route, sizes: Columns, source_strides: Columns, target_strides: Columns, forms: Forms) -> npt.NDArray[np.int64]:
    """[n]: the number of the form of each box."""
    source, target = route.source.dtype, route.target.dtype
    distinct, inverse = np.unique(np.stack([sizes, source_strides, target_strides], axis=1), axis=0, return_inverse=True)
    numbers = [forms.number(BoxForm(tuple(size), tuple(a), tuple(b), source, target)) for size, a, b in distinct.tolist()]
    return np.array(numbers, np.int64)[inverse.reshape(-1)]
