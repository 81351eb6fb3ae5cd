"""The files of an item, one for each rank, by their default names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.geometry.value import value
from reshard.storage.files import Files

METADATA = "metadata.pkl"
TORCH, SAFETENSORS, JSON = "TorchSerialization", "SafetensorsSerialization", "JsonSerialization"
_NUMBERED = re.compile(r"(?P<item>[\w-]+?)_(?P<rank>\d{1,6})\.(pt|json)")


@value
class ItemFile:
    """The file of an item on one rank."""

    path: str
    """Where it is."""
    serialization: str
    """The package's name for the file's format, such as TORCH."""


# Rank -> the file of an item
ItemFiles = Mapping[int, ItemFile]


def default_file(item: str, rank: int) -> ItemFile:
    """The file of an item on a rank, unless its layout names another one."""
    return ItemFile(f"{item}_{rank}.pt", TORCH)


def numbered_items(files: Files) -> dict[str, ItemFiles]:
    """Item -> its files, for files with the default names."""
    items: dict[str, dict[int, ItemFile]] = {}
    for path in files.list():
        if match := _NUMBERED.fullmatch(path):
            serialization = TORCH if path.endswith(".pt") else JSON
            items.setdefault(match["item"], {})[int(match["rank"])] = ItemFile(path, serialization)
    return dict(items)
