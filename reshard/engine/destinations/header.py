"""RunHeader: which conversion writes a destination, as the record with which it begins says. The records are hostile input."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from reshard.geometry.value import value
from reshard.plans.route import BlockKey
from reshard.storage.files import inside
from reshard.storage.own_files import JOURNAL

_OF_PARTS = ("--part", "--parts")


@value
class RunHeader:
    """Which conversion writes a destination."""

    identity: str = ""
    """The identity of the plan."""
    replaces: tuple[str, ...] = ()
    """The files of an older checkpoint that are removed when the new one is complete."""
    to: str = "another format"
    """The format that is written."""
    nbytes: int = 0
    """The bytes of all blocks; 0 if the journal, of version 0.1.0, does not say it."""
    arguments: tuple[str, ...] = ()
    """The arguments of the `reshard` command that began it; empty if Python code did."""

    def record(self) -> dict[str, object]:
        """The JSON object of the record."""
        return {**asdict(self), "version": 1}

    @staticmethod
    def of(record: dict[str, Any]) -> RunHeader:
        """The header from the JSON object of a record. Raises ValueError or TypeError if reshard did not write it."""
        identity, to, nbytes = record.get("identity"), record.get("to", "another format"), record.get("nbytes", 0)
        return RunHeader(
            identity=text(identity),
            replaces=tuple(inside(text(path), where=JOURNAL) for path in record.get("replaces", ())),
            to=text(to),
            nbytes=natural(nbytes),
            arguments=tuple(map(text, record.get("arguments", ()))),
        )

    def command(self) -> str:
        """What finishes the conversion."""
        # The arguments come from a file. The name of the command does not, and the shell gets each argument quoted.
        if self.arguments[:1] != ("convert",):
            return "Repeat the conversion with --resume (in Python: resume=True)"
        options = [argument for argument in self.arguments if argument not in ("--resume", "--overwrite", "--if-changed")]
        return f"Finish it with `reshard {shlex.join([*_without_parts(options), '--resume'])}`"


def _without_parts(arguments: list[str]) -> Iterator[str]:
    """The arguments without --part and --parts: one process finishes what several have begun."""
    is_value = False
    for argument in arguments:
        if not is_value and argument.partition("=")[0] not in _OF_PARTS:
            yield argument
        is_value = argument in _OF_PARTS and not is_value


def blocks_of(record: Mapping[str, Any]) -> Iterator[tuple[BlockKey, bytes]]:
    """The finished blocks in a record, each with its digest. Raises ValueError or TypeError if reshard did not write it."""
    for route, block, digest in record.get("blocks", ()):
        yield (natural(route), natural(block)), bytes.fromhex(digest)


def natural(value: object) -> int:
    """A whole number that is not negative. Raises ValueError for another value."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:100]} is not a whole number")
    return value


def text(value: object) -> str:
    """A string. Raises ValueError for another value."""
    if not isinstance(value, str):
        raise ValueError("a text is expected")
    return value
