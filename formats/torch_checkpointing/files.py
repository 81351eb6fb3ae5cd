"""The items of a checkpoint whose files have the default names. Only names are looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.geometry.value import value

if TYPE_CHECKING:
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
