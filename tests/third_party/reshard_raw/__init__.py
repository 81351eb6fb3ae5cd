"""raw: a format of a third party. All tensors lie in one file, and a JSON file says where.

    weights.raw     the elements of each tensor in row-major order, each tensor at a multiple of `--alignment` bytes
    weights.json    {name: {"dtype": "BF16", "shape": [rows, columns], "byte_offset": 0}, ...}

read.py     the index
write.py    the layout

This module is light: reshard loads it to show the option in --help and to detect the format. read.py and write.py are found by their names.
"""

from __future__ import annotations

from reshard.adapter.format import Format, Option
from reshard.storage.files import Files

WEIGHTS, TABLE = "weights.raw", "weights.json"


class Raw(Format):
    name = "raw"
    summary = "one file of elements and a JSON table"
    owns = (WEIGHTS, TABLE)
    options = (Option("alignment", "number", "Start each tensor at a multiple of N bytes."),)

    def detect(self, files: Files) -> str | None:
        return f"{WEIGHTS} and {TABLE}" if {WEIGHTS, TABLE} <= set(files.list()) else None


FORMAT = Raw()
