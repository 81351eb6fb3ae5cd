"""TOML on Python 3.10, which has no tomllib: pytest brings tomli there."""

from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:
        import tomli as tomllib
    return tomllib.loads(path.read_text())
