"""Balance: which of the ranks that hold a copy of a box sends it. The choice is deterministic, and no rank sends more than its share.

Boxes with the same holders are shared out among these. Sets with few holders come first, since they have least choice; then the boxes of
each set fill up those of its ranks that have least to send, as water does:

    sent so far    rank 0: 6   rank 1: 2   rank 2: 3          to share out among the three: 10
    then           rank 0: 7   rank 1: 7   rank 2: 7          they take 1, 5 and 4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reshard.geometry.sections import Columns


def chosen_holders(holders: Sequence[Columns], nbytes: Sequence[Columns], ranks: int, times: int) -> list[Columns]:
    """For each group of boxes, [times, n]: which of its holders sends each box, for each of the `times` targets that receive it.

    holders: of each group, [n, c]: the ranks that hold a copy. nbytes: of each group, [n]. ranks: the number of ranks.
    """
    load = np.zeros(ranks, np.int64)
    chosen = [np.zeros((times, len(held_by)), np.int64) for held_by in holders]
    sets: dict[bytes, list[tuple[int, Columns]]] = {}
    for number, held_by in enumerate(holders):
        if held_by.shape[1] == 1:
            np.add.at(load, held_by[:, 0], nbytes[number] * times)
            continue
        distinct, of_box = np.unique(np.sort(held_by, axis=1), axis=0, return_inverse=True)
        for i, members in enumerate(distinct.astype(np.int64)):
            sets.setdefault(members.tobytes(), []).append((number, np.flatnonzero(of_box.reshape(-1) == i)))
    for key in sorted(sets, key=lambda packed: (len(packed), packed)):
        members = np.unique(np.frombuffer(key, np.int64))
        sizes = np.concatenate([nbytes[number][rows] for number, rows in sets[key]])
        shares = _filled_up(load[members], int(sizes.sum()) * times)
        ends = np.cumsum(shares)
        # A box goes to the rank in whose share its middle lies.
        middles = np.cumsum(np.tile(sizes, times)) - np.tile(sizes, times) / 2
        senders = members[np.minimum(np.searchsorted(ends, middles, side="right"), len(members) - 1)].reshape(times, -1)
        np.add.at(load, senders.reshape(-1), np.tile(sizes, times))
        start = 0
        for number, rows in sets[key]:
            of_rows = senders[:, start : start + len(rows)]
            chosen[number][:, rows] = (holders[number][rows][None] == of_rows[:, :, None]).argmax(axis=2)
            start += len(rows)
    return chosen


def _filled_up(load: npt.NDArray[np.int64], amount: int) -> npt.NDArray[np.float64]:
    """How much of an amount each rank takes, so that those with least come to one level."""
    order = np.argsort(load, kind="stable")
    levels = load[order].astype(np.float64)
    shares = np.zeros(len(load), np.float64)
    for count in range(len(load), 0, -1):
        level = (levels[:count].sum() + amount) / count
        if level >= levels[count - 1]:
            shares[order[:count]] = level - levels[:count]
            break
    return shares
