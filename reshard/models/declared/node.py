"""Node: a value of a declaration with its place in the file, so that every error names the line and the keys that lead to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.value import value
from reshard.models.architecture import Dimension
from reshard.models.declared.yaml_data import Document, Path

CONFIG_KEY = r"[\w.-]+"
# A key of a dimension, which may name the entry of each layer: num_heads.{layer}.
KEY_OF_LAYER = r"[\w-]+(\.([\w-]+|\{layer\}))*"
_TERM = r"(?:[a-z_][a-z0-9_]*|[1-9][0-9]{0,9})"
_EXPRESSION = re.compile(rf"\s*{_TERM}(?:\s*[*/+-]\s*{_TERM})*\s*")


@value
class Node:
    """A value of a declaration, and its place. The methods that read the value raise RequestError if it is not what they expect."""

    value: Any
    """Plain data, as in `Document`."""
    path: Path
    """The keys that lead to it."""
    file: str
    """The file, as error messages name it."""
    lines: Mapping[Path, int]
    """The lines of all values of the file."""

    @classmethod
    def of(cls, document: Document, file: str) -> Node:
        """The root of a document."""
        return cls(document.value, (), file, document.lines)

    def error(self, what: str, *, why: str | None = None, do: str | None = None) -> RequestError:
        """An error about this value, with its line."""
        line = next((self.lines[self.path[:n]] for n in range(len(self.path), 0, -1) if self.path[:n] in self.lines), None)
        place = f"{self.file}, line {line}" if line else self.file
        return RequestError(what, where=": ".join([place, *([" > ".join(self.path)] if self.path else [])]), why=why, do=do)

    def unexpected(self, expected: str, *, do: str | None = None) -> RequestError:
        """An error that says what was expected in place of this value."""
        quotes = "; put it into quotes if it is meant as a word" if isinstance(self.value, bool) else ""
        return self.error(f"expected {expected}, found {shown(self.value)}{quotes}", do=do)

    def inner(self, key: str, value: Any) -> Node:
        """A value inside this one."""
        return Node(value, (*self.path, key), self.file, self.lines)

    def mapping(self, allowed: Sequence[str] = ()) -> dict[str, Node]:
        """The values of a mapping by key. allowed: the keys that it may have; empty: any."""
        if not isinstance(self.value, dict):
            raise self.unexpected("a mapping of keys to values", do=_list_of_keys(allowed))
        nodes = {key: self.inner(key, value) for key, value in self.value.items()}
        for key, node in nodes.items():
            if allowed and key not in allowed:
                raise node.error(f"there is no key {key!r} here", do=_list_of_keys(allowed))
        return nodes

    def items(self) -> list[Node]:
        """The items of a list. A single value is a list of one item."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [self.inner(str(i), value) if isinstance(self.value, list) else self for i, value in enumerate(values)]

    def word(self, pattern: str = r"\S+", expected: str = "a word") -> str:
        """The value, a word that matches a pattern."""
        if not isinstance(self.value, str) or not re.fullmatch(pattern, self.value):
            raise self.unexpected(expected)
        return self.value

    def config_key(self) -> str:
        """The value, a key of the config."""
        return self.word(CONFIG_KEY, "a key of the config")

    def condition(self) -> str:
        """The value, a condition on the config, as Model.holds takes it."""
        return self.word(rf"(not )?{CONFIG_KEY}( is [\w.-]+)?", "a key of the config, KEY is VALUE, or `not` and one of these")

    def one_of(self, words: Sequence[str]) -> str:
        """The value, one of some words."""
        if self.value not in words or not isinstance(self.value, str):
            raise self.unexpected(f"one of {', '.join(words)}")
        return self.value

    def flag(self) -> bool:
        """The value, true or false."""
        if not isinstance(self.value, bool):
            raise self.unexpected("true or false")
        return self.value

    def setting(self) -> bool | int | str:
        """The value, a setting of a config."""
        if not isinstance(self.value, bool | int | str):
            raise self.unexpected("true, false, a whole number or a word")
        return self.value

    def settings(self) -> Any:
        """The value, a setting of a config or a list or mapping of settings."""
        if isinstance(self.value, dict):
            return {key: node.settings() for key, node in self.mapping().items()}
        return [item.settings() for item in self.items()] if isinstance(self.value, list) else self.setting()

    def number(self, least: int) -> int:
        """The value, a whole number of at least `least`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value < 1 << 31:
            raise self.unexpected(f"a whole number from {least} on")
        return self.value


def shown(value: Any) -> str:
    """A value as an error message names it."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else repr(value)[:80]


def _list_of_keys(keys: Sequence[str]) -> str | None:
    return f"The keys are {', '.join(keys)}" if keys else None


def expression(node: Node, dimensions: Mapping[str, Dimension], *, why: str | None = None, optional: bool = False) -> str:
    """The text of an expression of dimensions. optional: whether it may use dimensions that not every model has.

    Raises: RequestError, with `why`, if it uses a dimension that is not declared.
    """
    text = str(node.value) if isinstance(node.value, int) and not isinstance(node.value, bool) else node.value
    if not isinstance(text, str) or not _EXPRESSION.fullmatch(text):
        raise node.unexpected("a sum of products of dimensions and numbers, such as 2 * heads * head_dim + rope_dim")
    for word in re.findall(r"[a-z_][a-z0-9_]*", text):
        if word not in dimensions:
            raise node.error(f"no dimension is called {word!r}", why=why, do=f"Declared are {', '.join(dimensions) or 'none'}")
        if dimensions[word].optional and not optional:
            raise node.error(
                f"the dimension {word} is optional", why="A model without it would have no value here", do="Use other dimensions"
            )
    return text
