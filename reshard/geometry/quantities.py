"""Quantities as people write them: 512MiB, 5GB, 7B, 3 files."""

from __future__ import annotations

import re
from fractions import Fraction

from reshard.errors import RequestError

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def plural(number: int, one: str, several: str | None = None) -> str:
    """A count with its noun: "1 file", "3 files", "2 boxes"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def parse_size(value: str | int, option: str) -> int:
    """The number of bytes that a text such as 512MiB, 5GB or 1000000 means. An integer is returned unchanged.

    Raises: RequestError, naming the option, for any other text.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(value).lower())
    if not match:
        raise RequestError(f"{option} {value}: expected a number of bytes such as 512MiB or 5GB")
    return int(Fraction(match[1]) * _BYTES[match[2] or ""])


def parse_count(value: str | int, option: str) -> int:
    """The count that a text such as 7B, 1.5M or 7000000000 means. An integer is returned unchanged.

    Raises: RequestError, naming the option, for any other text, and for a text that means 0.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", str(value).lower())
    number = round(Fraction(match[1]) * _COUNTS[match[2]]) if match else 0
    if not number:
        raise RequestError(f"{option} {value}: expected a number such as 7B or 350M")
    return number
