"""What --json prints: one document, with the version of its schema; written in pieces, however long it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reshard.secrets import masked

from .spelling import with_flags
from .tables import standard_output

SCHEMA_VERSION = 1
"""Grows when a key goes away or changes its meaning. docs/reference/schemas has a schema for each command."""


class Streamed(list[Any]):
    """A list whose entries are made while they are printed, so that a document of 500,000 tensors needs the memory of one."""

    def __init__(self, make: Callable[[Any], Any], of: Sequence[Any]) -> None:
        super().__init__()
        self._make, self._of = make, of

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._of)

    def __len__(self) -> int:
        return len(self._of)


def show_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout, its schema version first."""
    with standard_output():
        for text in json.JSONEncoder(indent=2).iterencode({"schema_version": SCHEMA_VERSION, **document}):
            sys.stdout.write(with_flags(masked(text)))
        sys.stdout.write("\n")
