"""The order of the schedule *gather*: every target file from front to back, all files that share tensors side by side.

    rank 0   | header | q rows 0.. | k | v | o columns 0.. | ...
    rank 1   | header | q rows n.. | k | v | o columns m.. | ...
                      ^ the blocks that meet this band of all ranks come next, so that a block that feeds several ranks is read once

The files of a rank lie one behind the other; a piece's position is counted from the start of the rank's first file. Pieces of a tensor at
positions that are far apart (a table that the first and the last stage hold) are separate visits: the tensor is read once for each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from reshard.engine.recipes.quantizer import Bands
from reshard.engine.transfer import Pieces
from reshard.engine.values import Values
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.plans.file_tasks import files_sharing_tensors
from reshard.plans.layout import TargetFile
from reshard.plans.plan import Plan, Route

# Pieces of one tensor that are closer than this are written by the same visit. What comes first waits for what is before it.
_NEAR = 64 << 20


@value
class Visit:
    """A block that is read once, and written to those of its pieces that lie at about one position."""

    key: tuple[int, int]
    """The index of its route in the plan, and of the block in its tensor."""
    route: Route
    """The route of its tensor."""
    source: Values
    """The values that are read."""
    target: Pieces
    """The pieces that are written."""
    box: Box
    """The block, in the coordinates of the canonical tensor."""
    paths: frozenset[str]
    """The files that it writes to."""

    @property
    def nbytes(self) -> int:
        """The bytes of the block in the target's element type."""
        return self.box.volume * self.route.target.dtype.itemsize


@value
class Pass:
    """Files that are open side by side, and the visits that fill them."""

    files: tuple[TargetFile, ...]
    """The files."""
    visits: tuple[Visit, ...]
    """The visits in the order of the files."""


def passes(plan: Plan, paths: Container[str], routes: Iterable[int], most_open: int, bands: Bands) -> Iterator[Pass]:
    """The passes that write the files in `paths`, and read each route that no file holds. most_open: the most files of a pass that are open
    at a time. routes: the indexes of those routes that the files hold, and of others. bands: where the codes and scales of a weight meet.

    Where more ranks share tensors, their files are written in several passes, and what they share is read by each.
    """
    groups = _groups(plan, most_open)
    of_group = [tuple(file for file in group if file.path in paths) for group in groups]
    group_of = {file.path: number for number, group in enumerate(of_group) for file in group}
    starts = _starts(plan.layout.files)
    visits: list[list[tuple[int, int, Visit]]] = [[] for _ in groups]
    for i in routes:
        route = plan.routes[i]
        for number, rows in _clusters(route, group_of, starts):
            source, target = Values(route.source, route.target.dtype, bands), Pieces(route.target, rows)
            for j, box in enumerate(blocks(route.target.shape)):
                met = [(piece.extent.path, piece.byte_offset_of(shared)) for piece, shared, _ in target.meeting(box)]
                # A scalar whose value is in the framing has no piece, and is read for its digest.
                if met or not len(rows):
                    at = min((starts[path] + offset for path, offset in met), default=0)
                    visits[number].append(
                        (at, len(visits[number]), Visit((i, j), route, source, target, box, frozenset(p for p, _ in met)))
                    )
    for files, found in zip(of_group, visits, strict=True):
        if files or found:
            yield Pass(files, tuple(visit for _, _, visit in sorted(found, key=lambda each: each[:2])))


def most_open(files: Sequence[TargetFile]) -> int:
    """The most files that are open at a time if all of them are written side by side."""
    starts = _starts(files)
    edges = sorted(edge for file in files for edge in ((starts[file.path], 1), (starts[file.path] + file.nbytes, -1)))
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def _groups(plan: Plan, most: int) -> list[tuple[TargetFile, ...]]:
    """The files in groups that are written one after the other: those that share tensors together, as far as so many may be open."""
    by_path = {file.path: file for file in plan.layout.files}
    groups: list[tuple[TargetFile, ...]] = []
    for paths in files_sharing_tensors(plan):
        group: list[TargetFile] = []
        for rank in _by_rank([by_path[path] for path in paths]):
            if group and most_open([*group, *rank]) > most:
                groups.append(tuple(group))
                group = []
            group += rank
        groups.append(tuple(group))
    return groups


def _by_rank(files: Sequence[TargetFile]) -> list[list[TargetFile]]:
    ranks: dict[object, list[TargetFile]] = {}
    for file in files:
        ranks.setdefault(tuple(sorted(file.ranks.items())), []).append(file)
    return list(ranks.values())


def _starts(files: Sequence[TargetFile]) -> dict[str, int]:
    """The position of each file: the bytes of its rank's files before it."""
    starts: dict[str, int] = {}
    for rank in _by_rank(files):
        end = 0
        for file in rank:
            starts[file.path] = end
            end += file.nbytes
    return starts


def _clusters(route: Route, group_of: dict[str, int], starts: dict[str, int]) -> Iterator[tuple[int, Columns]]:
    """The pieces of a tensor that one visit writes together: (group of files, rows of the pieces)."""
    shards = route.target.shards
    wanted = [
        (group_of[path], starts[path] + int(position), row)
        for row, (file, position) in enumerate(zip(shards.files.tolist(), shards.positions.tolist(), strict=True))
        if (path := shards.paths[file]) in group_of
    ]
    wanted.sort()
    if not len(shards):
        yield 0, np.zeros(0, np.int64)
    cluster: list[tuple[int, int, int]] = []
    for each in wanted:
        if cluster and (each[0] != cluster[-1][0] or each[1] - cluster[-1][1] > _NEAR):
            yield cluster[0][0], np.array(sorted(row for _, _, row in cluster), np.int64)
            cluster = []
        cluster.append(each)
    if cluster:
        yield cluster[0][0], np.array(sorted(row for _, _, row in cluster), np.int64)
