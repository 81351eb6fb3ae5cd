"""Quantities as people write them: 512MiB, 5GB, 7B, 3 files; and groups of what is counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from reshard.errors import RequestError

Key = TypeVar("Key")
Value = TypeVar("Value")

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# A smaller number of bytes needs a unit. GPU tools print 80000 for 80000 MB.
_LEAST_WITHOUT_UNIT = 1 << 20
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def plural(number: int, one: str, several: str | None = None) -> str:
    """A count with its noun: "1 file", "3 files", "2 boxes"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """The values of each key, in their order. The keys are in the order in which they first occur."""
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def by_numbers(name: str) -> list[tuple[int, str]]:
    """The key that sorts names as people count: rank 2 before rank 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def number_runs(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers as runs of neighbours: ["0-3", "7"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def parse_size(value: str | int, option: str) -> int:
    """The number of bytes that a text such as 512MiB, 5GB or 5000000 means. An integer is returned unchanged.

    Raises: RequestError, naming the option, for any other text, and for a small number without a unit: nobody means 5 bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(([kmgt]i?)?b?)", str(value).lower())
    if not match:
        raise RequestError(f"{option} {value}: expected a number of bytes such as 512MiB or 5GB")
    from fractions import Fraction

    number = Fraction(match[1])
    if not match[2] and 0 < number < _LEAST_WITHOUT_UNIT:
        unit = "GB" if number < 1000 else "MB"
        raise RequestError(
            f"{option} {value}: the unit is missing", do=f"Did you mean {match[1]}{unit}? To mean that many bytes, write {match[1]}B"
        )
    return int(number * _BYTES[match[3] or ""])


def parse_count(value: str | int, option: str) -> int:
    """The count that a text such as 7B, 1.5M or 7000000000 means. An integer is returned unchanged.

    Raises: RequestError, naming the option, for any other text, for a text that means 0, and for a small number without a unit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    from fractions import Fraction

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", str(value).lower())
    number = round(Fraction(match[1]) * _COUNTS[match[2]]) if match else 0
    if not number:
        raise RequestError(f"{option} {value}: expected a number such as 7B or 350M")
    if match and not match[2] and number < 1000:
        raise RequestError(f"{option} {value}: the unit is missing", do=f"Did you mean {match[1]}B?")
    return number


def nbytes_text(nbytes: int, digits: int = 3) -> str:
    """1.5 GB, 148 kB, 12 B: three digits, where nothing else is said, and decimal units."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 - 0.5 * 10 ** (3 - digits) or unit == "PB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.{digits}g} {unit}"
