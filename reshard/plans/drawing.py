"""How a plan is drawn: who holds what in source and target, and how many bytes each target file takes from each source file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reshard.index.drawing import shard_map
from reshard.index.fold import fold
from reshard.index.shards import primary_rows
from reshard.picture.page import Html, element, joined

if TYPE_CHECKING:
    from reshard.plans.plan import Plan, Route


def plan_maps(plan: Plan) -> tuple[Html, Html]:
    """Who holds what in the source, and in the target."""
    model = plan.content.model
    order = model.weights if model else ()
    source, target = (fold(tensors, order) for tensors in ((each.source for each in plan.routes), (each.target for each in plan.routes)))
    return shard_map(source), shard_map(target)


def plan_picture(plan: Plan) -> Html:
    """Both maps, one above the other."""
    source, target = plan_maps(plan)
    return joined((element("h4", f"Source: {plan.source.format}"), source, element("h4", f"Target: {plan.layout.format}"), target))


def plan_transfers(routes: Iterable[Route]) -> dict[tuple[str, str], int]:
    """(source file, target file) -> bytes of the target that come from there. Replicas of a source are not read."""
    found: dict[tuple[str, str], int] = {}
    for route in routes:
        sources, targets = route.source.shards, route.target.shards
        rows = np.flatnonzero(primary_rows(sources))
        shared = _shared(sources.offsets[rows], sources.sizes[rows], targets.offsets, targets.sizes)
        for i, j in np.argwhere(shared > 0).tolist():
            key = sources.path(int(rows[i])), targets.path(j)
            found[key] = found.get(key, 0) + int(shared[i, j]) * route.target.dtype.itemsize
    return found


_Columns = npt.NDArray[Any]


def _shared(offsets: _Columns, sizes: _Columns, other: _Columns, other_sizes: _Columns) -> _Columns:
    """[n, m]: the elements that box i of one side and box j of the other share."""
    low = np.maximum(offsets[:, None], other[None])
    high = np.minimum((offsets + sizes)[:, None], (other + other_sizes)[None])
    volumes: _Columns = np.clip(high - low, 0, None).prod(axis=2, dtype=np.int64)
    return volumes
