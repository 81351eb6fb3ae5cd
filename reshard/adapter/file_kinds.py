"""The kinds of files beside a model's weights (file_kinds.yaml): which of them do not go along with a target, and why.

A list of the files that a model needs lags behind the libraries that read them. So every small file goes along, unless a rule or its
content says why not; and whatever is left is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from reshard.plans.layout import LeftFile

MOST_BYTES = 64 << 20
"""Longer files are left: their content is held in memory while a conversion is planned."""
# Pickles, and archives that can hold one; GGUF and HDF5, whatever their names say.
HEADS = (b"\x80", b"PK\x03\x04", b"\x1f\x8b", b"GGUF", b"\x89HDF")


@cache
def kinds() -> Mapping[str, Mapping[str, Any]]:
    """What file_kinds.yaml says of each kind."""
    import yaml

    document: Mapping[str, Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return document


def kind_of(name: str) -> str:
    """The kind of a file, or with a slash at its end of a folder, by the last part of its name; empty if no rule fits."""
    last = name.rstrip("/").rpartition("/")[2].lower() + "/" * name.endswith("/")
    return next((kind for kind, rule in kinds().items() if any(fnmatchcase(last, glob) for glob in rule.get("names", "").split())), "")


def left(name: str, kind: str) -> LeftFile:
    """A file of that kind that is left."""
    return LeftFile(name, kind, kinds()[kind]["why"])
