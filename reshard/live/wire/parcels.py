"""Parcels: how the boxes of a way are cut into what is sent at once. Both ends find the same parcels from the schedule alone.

A parcel is boxes of one way, in their order, without gaps, of at most `most` bytes. A longer box is cut along its first axes. A box of
ALONE bytes or more shares no parcel, since it may lie contiguous, and then it is sent from where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.geometry.value import value
from reshard.live.plan.schedule import BoxForm, Schedule, Way

PARCEL = 32 << 20
"""Bytes of a parcel at most."""
PARCEL_OF_CHANGES = 8 << 20
"""The same where changes are looked for, which takes some times its bytes of memory."""
ALONE = 1 << 20
"""A box of so many bytes has parcels of its own, since it may lie contiguous."""


@value
class PackedBox:
    """A box, or a part of one, in a parcel."""

    form: BoxForm
    """The form of the whole box."""
    sizes: tuple[int, ...]
    """Elements along each axis of this part."""
    source: int
    """The source's tensor, as an index into the schedule's sources."""
    source_start: int
    """Where the part starts in it, in elements."""
    target: int
    """The target's tensor, as an index into the schedule's targets."""
    target_start: int
    """Where the part starts in it, in elements."""
    start: int
    """Where its bytes start in the parcel."""
    nbytes: int
    """Its bytes in the parcel."""


@value
class Parcel:
    """What is sent at once."""

    boxes: tuple[PackedBox, ...]
    nbytes: int


def parcels(schedule: Schedule, way: Way, most: int = PARCEL) -> Iterator[Parcel]:
    """The parcels of a way, in their order."""
    boxes: list[PackedBox] = []
    filled = 0
    columns = (way.forms, way.source_tensors, way.source_starts, way.target_tensors, way.target_starts)
    for form_index, source, source_start, target, target_start in zip(*(column.tolist() for column in columns), strict=True):
        form = schedule.forms[form_index]
        for sizes, nbytes, from_start, to_start in _parts(form, form.sizes, form.nbytes, most):
            if boxes and (filled + nbytes > most or nbytes >= ALONE or boxes[-1].nbytes >= ALONE):
                yield Parcel(tuple(boxes), filled)
                boxes, filled = [], 0
            boxes.append(PackedBox(form, sizes, source, source_start + from_start, target, target_start + to_start, filled, nbytes))
            filled += nbytes
    if boxes:
        yield Parcel(tuple(boxes), filled)


def _parts(form: BoxForm, sizes: tuple[int, ...], nbytes: int, most: int, axis: int = 0) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """Parts of a box of at most `most` bytes: sizes, bytes, and where each starts in the box in the source and in the target. The plan has
    cut boxes that a recipe computes already, where blocks end."""
    if nbytes <= most or axis == len(sizes) or form.derived:
        yield sizes, nbytes, 0, 0
        return
    row = nbytes // sizes[axis]
    step = max(1, most // row)
    for start in range(0, sizes[axis], step):
        count = min(step, sizes[axis] - start)
        part = (*sizes[:axis], count, *sizes[axis + 1 :])
        for inner, inner_nbytes, from_start, to_start in _parts(form, part, count * row, most, axis + 1):
            yield inner, inner_nbytes, from_start + start * form.source_strides[axis], to_start + start * form.target_strides[axis]
