"""The entry points of the installed packages, read from the files that installers write.

`importlib.metadata` knows the same and more. Its import, with email, csv, zipfile and tempfile, takes a tenth of the time of a short
command, so it is asked only where packages are not plain folders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any

from reshard.geometry.value import value

_FOLDERS = (".dist-info", ".egg-info")


@value
class EntryPoint:
    """An object that a package offers to others."""

    name: str
    """Its name in the group."""
    value: str
    """Where it is: module:attribute."""
    package: str | None
    """The package that offers it."""

    def load(self) -> Any:
        """The object. Raises any exception that the import of its module raises."""
        module, _, attribute = self.value.partition(":")
        found: Any = import_module(module.strip())
        for name in filter(None, attribute.partition("[")[0].strip().split(".")):
            found = getattr(found, name)
        return found


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name. As in `importlib.metadata`, the first folder of sys.path that has a package counts."""
    if _has_other_packages():
        from importlib import metadata

        points = [
            EntryPoint(point.name, point.value, point.dist.name if point.dist else None) for point in metadata.entry_points(group=group)
        ]
    else:
        points = [
            EntryPoint(name, value, package) for package, text in _texts().items() for found, name, value in _parsed(text) if found == group
        ]
    return sorted(points, key=lambda point: point.name)


def _has_other_packages() -> bool:
    """Whether packages may lie elsewhere than in folders of sys.path: in zip files, or where an import hook finds them."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder and "find_distributions" in dir(finder)]
    return bool(finders) or any(os.path.isfile(path) for path in sys.path)


def _texts() -> dict[str, str]:
    """The content of entry_points.txt by package."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            base, suffix = os.path.splitext(entry)
            package = base.partition("-")[0].lower().replace("_", "-").replace(".", "-")
            if suffix in _FOLDERS and package not in found:
                try:
                    with open(os.path.join(folder, entry, "entry_points.txt"), encoding="utf-8") as file:
                        found[package] = file.read()
                except OSError:
                    found[package] = ""
    return found


def _parsed(text: str) -> Iterator[tuple[str, str, str]]:
    """(group, name, value) of each line of an entry_points.txt."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()
