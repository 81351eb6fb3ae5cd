"""Versions of serving engines: as numbers that compare, and what to tell of one that was not measured."""

from __future__ import annotations

import re

from reshard.errors import RequestError
from reshard.models.model import Model

Numbers = tuple[int, ...]


def version_numbers(version: str, newest: str) -> Numbers:
    """The numbers at the start of a version such as 0.32.1rc1. Raises RequestError, showing `newest`, for what is no version."""
    if not re.fullmatch(r"v?\d+(\.\d+)*([a-z+.-].*)?", version):
        raise RequestError(f"--engine-version {version}: a version such as {newest} is expected")
    return tuple(int(word) for word in re.match(r"v?([\d.]+)", version)[1].strip(".").split("."))  # type: ignore[index]


def about_version(engine: str, version: str, newest: str, model: Model, *, is_known: bool) -> list[str]:
    """What was not compared: a version after the newest one that was measured, a model whose class was not (`is_known`)."""
    notes = []
    if version_numbers(version, newest) > version_numbers(newest, newest):
        notes.append(f"{engine} {version} is newer than the newest one measured, {newest}")
    if not is_known:
        notes.append(f"{engine}'s own class for {model.architecture.model_type} was not compared; it may call or fuse tensors otherwise")
    return notes
