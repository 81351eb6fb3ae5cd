"""Keys with which declarations for reshard 0.2 stated single rules of an engine's class, as rows of `assumes` and `refuses`.

    tp_at_most_experts: true     refuses: {sparse_layers and tp > experts: "{tp} ranks are more than its {experts} experts"}
    one_stage: KEY               refuses: {pp > 1 and KEY: ...}

keys_of_0_2.yaml lists them. reshard 0.4 will not read them (docs/reference/versions.md).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from reshard.models.declared.node import Node, parse
from reshard.storage.files import LocalFiles, read_whole

LOGGER = logging.getLogger("reshard")
_KEYS = Path(__file__).with_name("keys_of_0_2.yaml")


@cache
def _rows() -> Any:
    """Key -> the section in its place -> the rows there."""
    return parse(read_whole(LocalFiles(_KEYS), _KEYS.name, limit=1 << 16), _KEYS.name).value


def in_rows(node: Node) -> Node:
    """The keys of an engine with rows in place of such keys. Each of them is warned about."""
    keys = node.mapping()
    value = {key: inner.value for key, inner in keys.items() if key not in _rows()}
    for old in (inner for key, inner in keys.items() if key in _rows()):
        ((section, rows),) = _rows()[old.path[-1]].items()
        LOGGER.warning(
            str(old.error(f"reshard 0.4 will not read `{old.path[-1]}`", do=f"Write a row of `{section}`")),
            extra={"event": "old-key", "fields": {"key": old.path[-1], "section": section}},
        )
        rows = replace(old, value=_with(rows, old.value)).mapping()
        stated = node.inner(section, value.get(section, {})).mapping()
        value[section] = {row: inner.value for row, inner in {**stated, **rows}.items()}
    return replace(node, value=value)


def _with(rows: Any, value: Any) -> Any:
    """The rows with the value of the key in place of VALUE. A key that is true has no value to name."""
    if rows == "VALUE":
        return value
    if value is False:
        return {}
    named = " and VALUE" if value is True else "VALUE"
    return {row.replace(named, "" if value is True else str(value)): text.replace("VALUE", str(value)) for row, text in rows.items()}
