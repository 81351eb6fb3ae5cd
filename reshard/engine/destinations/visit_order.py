"""The order in which files are filled from front to back: all files that share tensors side by side.

    rank 0   | header | q rows 0.. | k | v | o columns 0.. | ...
    rank 1   | header | q rows n.. | k | v | o columns m.. | ...
                      ^ the blocks that meet these bytes of all ranks come next, so that a block that feeds several ranks is read once

An example: two ranks with one file each, a header of 100 bytes, then 800 bytes of q (rows) and 800 of o (columns).

    q   at 100 in both files   its job has the position min(100, 100) = 100
    o   at 900 in both files   its job has the position 900 and comes after that of q, whatever their order in the source

Each job writes its part to both ranks, so that both files grow side by side. If the job of o came first, 800 bytes of each rank would wait
in memory for q.

The files of a rank lie one behind the other; a piece's position is counted from the start of the rank's first file. Pieces of a tensor at
positions that are far apart (a table that the first and the last stage hold) are separate jobs: the tensor is read once for each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from operator import itemgetter

import numpy as np

from reshard.engine.blocks import Job
from reshard.engine.origins.reader import Tiles, reader
from reshard.engine.transfer import Pieces
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import grouped
from reshard.geometry.sections import Columns
from reshard.plans.layout import TargetFile
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route, files_sharing_tensors

# Pieces of one tensor that are closer than this are written by the same job. What comes first waits for what is before it.
_NEAR = 64 << 20

Pass = tuple[Sequence[TargetFile], Sequence[Job]]
"""Files that are open side by side, and the jobs that fill them, in the order of the files."""


def passes(plan: Plan, paths: Container[str], routes: Iterable[int], most_open: int, tiles: Tiles) -> Iterator[Pass]:
    """The passes that write the files in `paths`, and read each route that no file holds. most_open: the most files of a pass that are open
    at a time. routes: the indexes of those routes that the files hold, and of others. tiles: where the codes and scales of a weight meet.

    Where more ranks share tensors, their files are written in several passes, and what they share is read by each.
    """
    groups = [tuple(file for file in group if file.path in paths) for group in _groups(plan, most_open)]
    group_of = {file.path: number for number, group in enumerate(groups) for file in group}
    starts = _starts(plan.layout.files)
    of_groups: list[list[tuple[int, Job]]] = [[] for _ in groups]
    for i in routes:
        route = plan.routes[i]
        for number, rows in _clusters(route, group_of, starts):
            source, target = reader(route.source, route.target.dtype, tiles), Pieces(route.target, rows)
            for j, box in enumerate(blocks(route.target.shape)):
                met = [(piece.extent.path, piece.byte_offset_of(shared)) for piece, shared, _ in target.meeting(box)]
                # A scalar whose value is in the framing has no piece, and is read for its digest.
                if met or not len(rows):
                    position = min((starts[path] + offset for path, offset in met), default=0)
                    job = Job((i, j), route, source, target, box, frozenset(path for path, _ in met))
                    of_groups[number].append((position, job))
    for files, jobs in zip(groups, of_groups, strict=True):
        if files or jobs:
            yield files, [job for _, job in sorted(jobs, key=itemgetter(0))]


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
    """The files in groups, which are written one after the other. Files that share tensors are in one group, as long as at most `most` of
    them must be open."""
    by_path = {file.path: file for file in plan.layout.files}
    groups: list[tuple[TargetFile, ...]] = []
    for paths in files_sharing_tensors(plan.layout.files, plan.routes):
        group: list[TargetFile] = []
        for rank in _by_rank([by_path[path] for path in paths]):
            if group and most_open([*group, *rank]) > most:
                groups.append(tuple(group))
                group = []
            group += rank
        groups.append(tuple(group))
    return groups


def _by_rank(files: Sequence[TargetFile]) -> list[list[TargetFile]]:
    return list(grouped(files, lambda file: tuple(sorted(file.ranks.items()))).values())


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
    """The pieces of a tensor that one job writes together: (group of files, rows of the pieces)."""
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
    for place in wanted:
        if cluster and (place[0] != cluster[-1][0] or place[1] - cluster[-1][1] > _NEAR):
            yield cluster[0][0], np.array(sorted(row for _, _, row in cluster), np.int64)
            cluster = []
        cluster.append(place)
    if cluster:
        yield cluster[0][0], np.array(sorted(row for _, _, row in cluster), np.int64)
