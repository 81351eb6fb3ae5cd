"""Node: a value of a user's file, and where it stands, so that whatever is wrong with it can be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError
from reshard.models.architecture import Dimension

_TERM = r"(?:[a-z_][a-z0-9_]*|[1-9][0-9]{0,9})"
_EXPRESSION = re.compile(rf"\s*{_TERM}(?:\s*[*/+]\s*{_TERM})*\s*")


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file, and the keys that lead to it."""

    value: Any
    path: tuple[str, ...]
    file: str
    lines: Mapping[tuple[str, ...], int]

    def wrong(self, what: str, *, why: str | None = None, do: str | None = None) -> RequestError:
        line = next((self.lines[self.path[:n]] for n in range(len(self.path), 0, -1) if self.path[:n] in self.lines), None)
        place = f"{self.file}, line {line}" if line else self.file
        return RequestError(what, where=": ".join([place, *([" > ".join(self.path)] if self.path else [])]), why=why, do=do)

    def inner(self, key: str, value: Any) -> Node:
        return Node(value, (*self.path, key), self.file, self.lines)

    def mapping(self, known: Sequence[str] = ()) -> dict[str, Node]:
        """The values of a mapping by key; `known`: of these keys only."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"{shown(self.value)} stands here, keys with values are expected", do=among(known))
        found = {key: self.inner(key, value) for key, value in self.value.items()}
        for key, at in found.items():
            if known and key not in known:
                raise at.wrong(f"there is no key {key!r} here", do=among(known))
        return found

    def items(self) -> list[Node]:
        """The items of a list; a single value is a list of one."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [self.inner(str(i), value) if isinstance(self.value, list) else self for i, value in enumerate(values)]

    def word(self, pattern: str = r"\S+", expected: str = "a word") -> str:
        if not isinstance(self.value, str) or not re.fullmatch(pattern, self.value):
            hint = "; what YAML takes for something else goes into quotes" if isinstance(self.value, bool) else ""
            raise self.wrong(f"{shown(self.value)} stands here, {expected} is expected{hint}")
        return self.value

    def one_of(self, known: Sequence[str]) -> str:
        if self.value not in known or not isinstance(self.value, str):
            raise self.wrong(f"{shown(self.value)} stands here", do=among(known))
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong(f"{shown(self.value)} stands here, true or false is expected")
        return self.value

    def number(self, least: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value < 1 << 31:
            raise self.wrong(f"{shown(self.value)} stands here, a whole number from {least} on is expected")
        return self.value


def shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else repr(value)[:80]


def among(known: Sequence[str]) -> str | None:
    return f"Known are {', '.join(known)}" if known else None


def expression(at: Node, dimensions: Mapping[str, Dimension], *, what: str | None = None, optional: bool = False) -> str:
    """An expression of dimensions. optional: it may be about such ones as not every model has."""
    text = str(at.value) if isinstance(at.value, int) and not isinstance(at.value, bool) else at.value
    if not isinstance(text, str) or not _EXPRESSION.fullmatch(text):
        raise at.wrong(f"{shown(at.value)} stands here, a sum of products such as 2 * heads * head_dim + rope_dim is expected")
    for word in re.findall(r"[a-z_][a-z0-9_]*", text):
        if word not in dimensions:
            raise at.wrong(f"no dimension is called {word!r}", why=what, do=f"Declared are {', '.join(dimensions) or 'none'}")
        if dimensions[word].optional and not optional:
            raise at.wrong(f"the dimension {word} is optional", why="Without it this would have no value", do="Say it by other dimensions")
    return text
