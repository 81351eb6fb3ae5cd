"""raw: a format of a third party. All tensors lie in one file, and a JSON file says where.

    weights.raw     the elements of each tensor in row-major order, each tensor at a multiple of `--alignment` bytes
    weights.json    {name: {"dtype": "BF16", "shape": [rows, columns], "byte_offset": 0}, ...}

read.py     the index
write.py    the layout

This module is light: reshard loads it to show the option in --help and to detect the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints, Option

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files

WEIGHTS, TABLE = "weights.raw", "weights.json"


class Raw(Format):
    name = "raw"
    summary = "one file of elements and a JSON table"
    owns = (WEIGHTS, TABLE)
    options = (Option("alignment", "number", "Start each tensor at a multiple of N bytes."),)

    def detect(self, files: Files) -> str | None:
        return f"{WEIGHTS} and {TABLE}" if {WEIGHTS, TABLE} <= set(files.list()) else None

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


FORMAT = Raw()
