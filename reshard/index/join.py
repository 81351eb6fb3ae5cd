"""Join: which pieces of two tensors share elements. Arithmetic on columns; nothing is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from reshard.geometry.boxes import Box
from reshard.geometry.sections import Columns
from reshard.index.shards import Shards


def rows_meeting(offsets: Columns, stops: Columns, box: Box) -> npt.NDArray[np.int64]:
    """The rows whose boxes share an element with `box`, in order. offsets, stops: [n, ndim], the boxes of the rows."""
    starts_before = (offsets < np.array(box.stops, np.int64)).all(axis=1)
    ends_after = (stops > np.array(box.offsets, np.int64)).all(axis=1)
    rows = np.flatnonzero(starts_before & ends_after & (stops > offsets).all(axis=1))
    return rows.astype(np.int64, copy=False)


def meetings(left: Shards, right: Shards) -> Iterator[tuple[int, int, Box]]:
    """Every pair (row of left, row of right) whose boxes share elements, with the box that they share, in the order of the left rows."""
    stops = right.offsets + right.sizes
    for i in range(len(left)):
        box = left.box(i)
        for j in rows_meeting(right.offsets, stops, box).tolist():
            shared = box.intersect(right.box(j))
            assert shared is not None
            yield i, j, shared
