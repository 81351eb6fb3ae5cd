"""How changes are drawn: a map of layers and roles, the darker the more a weight changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reshard.measures.changes import Change, sum_of
from reshard.picture.drawing import heat_map
from reshard.picture.page import Html, element, joined

_LEAST = 1e-6
"""The relative change that is drawn lightest; ten times as much is a sixth darker."""


def change_map(changes: Sequence[Change]) -> Html:
    """Roles x layers: the relative L2 change of each, on a logarithmic scale. What belongs to no layer is the last column."""
    groups: dict[tuple[str, int | None], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.role, change.layer), []).append(change)
    cells = {key: sum_of("", parts) for key, parts in groups.items()}
    layers: list[int | None] = [*sorted({layer for _, layer in cells if layer is not None})]
    columns = [*layers, *([None] if any(layer is None for _, layer in cells) else [])]
    roles = list(dict.fromkeys(role for role, _ in cells))
    rows = [(role, [_shade(cells[role, layer]) if (role, layer) in cells else None for layer in columns]) for role in roles]
    picture = heat_map(["-" if layer is None else str(layer) for layer in columns], rows, title="Relative L2 change by layer and role")
    text = (
        "Columns are layers; - is what belongs to none. The palest cells did not change; the strongest changed by their whole length, and "
        "each sixth of the colour is a factor of 10."
    )
    return joined((picture, element("p", text, class_="dim")))


def _shade(change: Change) -> float:
    relative = change.relative
    if not change.changed or relative == 0:
        return 0.0
    return min(max(math.log(min(relative, 1.0) / _LEAST) / -math.log(_LEAST), 0.02), 1.0)
