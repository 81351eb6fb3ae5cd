"""Versions of serving engines: comparable numbers, and notes about what was not measured."""

from __future__ import annotations

import re

from reshard.errors import RequestError
from reshard.models.model import Model

Numbers = tuple[int, ...]


def version_numbers(version: str, newest: str) -> Numbers:
    """The numbers at the start of a version: 0.32.1rc1 is (0, 32, 1).

    Raises: RequestError, with `newest` as the example, for a text that is not a version.
    """
    if not re.fullmatch(r"v?\d+(\.\d+)*([a-z+.-].*)?", version):
        raise RequestError(f"--engine-version {version}: a version such as {newest} is expected")
    return tuple(int(word) for word in re.match(r"v?([\d.]+)", version)[1].strip(".").split("."))  # type: ignore[index]


def about_version(engine: str, version: str, newest: str, model: Model, *, is_known: bool) -> tuple[str, ...]:
    """Notes about what was not measured: a version after `newest`, or the engine's class of the model. is_known: the class was measured."""
    notes = []
    if version_numbers(version, newest) > version_numbers(newest, newest):
        notes.append(f"{engine} {version} is newer than the newest version that was measured, {newest}")
    if not is_known:
        model_type = model.architecture.model_type
        notes.append(f"{engine}'s own class for {model_type} was not compared; it may name or fuse tensors in another way")
    return tuple(notes)
