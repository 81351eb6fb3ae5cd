"""The configs of well-known models by name, to plan with on a machine that has none of them: known_models.json.

A row names the repository on the Hugging Face Hub whose config.json it repeats: the keys that decide shapes and element types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from reshard.errors import RequestError, nearest


def known_config(name: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The config of a well-known model, by its name or its repository, in any case; None for any other text, and for a path that exists."""
    wanted = os.fspath(name).lower()
    row = next((row for known, row in _rows().items() if wanted in (known, row["source"].lower())), None)
    return None if row is None or os.path.exists(name) else row["config"]


def known_names() -> tuple[str, ...]:
    """The names of all of them, sorted."""
    return tuple(_rows())


def with_known_name(error: RequestError, path: str | os.PathLike[str]) -> RequestError:
    """The error for a path that does not exist, with the well-known model that may have been meant."""
    near = nearest(os.fspath(path), known_names()) if error.id == "not-found" else None
    if near and not os.path.exists(path):
        error.do = (
            f"Did you mean {near}? `reshard degrees` and `reshard estimate` know it, and {len(known_names()) - 1} other models, by name"
        )
    return error


@cache
def _rows() -> Mapping[str, Any]:
    rows: Mapping[str, Any] = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return rows
