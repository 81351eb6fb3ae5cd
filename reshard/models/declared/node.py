"""A declaration as plain data, and Node: a value of it with its place, so that every error names the line and the keys that lead to it.

A declaration is YAML as data only: mappings with words as keys, lists, words, numbers, true, false and null, with the line of each value.
JSON is YAML, too. The document is built from the parser's events, without recursion. Everything in YAML that is more than data is refused:
anchors, aliases, tags, several documents. A key that occurs twice is refused, too: YAML would use the last one without a message.

The parser is libyaml, which PyYAML's wheels contain, or else PyYAML's own, which is slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError
from reshard.geometry.value import mutable, value
from reshard.models.architecture import Dimension

if TYPE_CHECKING:
    import yaml

_MOST_BYTES, _MOST_DEPTH = 1 << 18, 8
_QUOTES = "Correct that line. A name that starts with *, { or [, and a ? alone, need quotes"
Path = tuple[str, ...]


@value
class Document:
    """The content of a file."""

    value: Any
    """Plain values: dict, list, str, int, float, bool, None."""
    lines: Mapping[Path, int]
    """The line of each value by the keys that lead to it. Items of a list are counted from 0."""


def parse(content: bytes, where: str) -> Document:
    """The document in a file's content. Raises RequestError, naming the line, if the content is not one document of plain data."""
    import yaml

    if len(content) > _MOST_BYTES:
        raise RequestError(f"the file has {len(content):,} bytes; a declaration has at most {_MOST_BYTES:,}", where=where)
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return _Builder(where).document(loader(content.decode()))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RequestError(f"this is not valid YAML: {error.problem}", where=where + line, do=_QUOTES) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"this is not valid YAML: {error}", where=where, do="A text file in UTF-8 is expected") from None


@mutable
class _Collection:
    """A mapping or list whose end has not been read."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = None
    """Of a mapping: the key whose value comes next; None if a key comes next."""

    def next_path(self) -> Path:
        return (*self.path, str(len(self.value)) if isinstance(self.value, list) else str(self.key))


class _Builder:
    """Builds a document from events."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[_Collection] = []
        self._lines: dict[Path, int] = {}
        self._roots: list[Any] = []

    def document(self, loader: yaml.SafeLoader | yaml.CSafeLoader) -> Document:
        import yaml

        for event in _events(loader):
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, yaml.ScalarEvent):
                self._refuse_references(event, line)
                self._put(self._scalar(loader, event, line), line)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._refuse_references(event, line)
                self._open({} if isinstance(event, yaml.MappingStartEvent) else [], line)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self._put(self._stack.pop().value, line)
            elif isinstance(event, yaml.AliasEvent):
                raise self._error(
                    f"*{event.anchor} refers to another place", line, "Write the value. A name that starts with * needs quotes"
                )
        if len(self._roots) != 1:
            raise RequestError(f"the file contains {len(self._roots) or 'no'} documents; one is expected", where=self._where)
        return Document(self._roots[0], self._lines)

    def _open(self, value: dict[str, Any] | list[Any], line: int) -> None:
        if len(self._stack) == _MOST_DEPTH:
            raise self._error(f"mappings and lists are nested in more than {_MOST_DEPTH} levels", line)
        outer = self._stack[-1] if self._stack else None
        if outer and isinstance(outer.value, dict) and outer.key is None:
            raise self._error("this key is a list or a mapping", line, "Put a name that starts with { or [ into quotes")
        self._stack.append(_Collection(value, outer.next_path() if outer else ()))

    def _put(self, value: Any, line: int) -> None:
        if not self._stack:
            self._roots.append(value)
            return
        top = self._stack[-1]
        if isinstance(top.value, list):
            self._lines[top.next_path()] = line
            top.value.append(value)
        elif top.key is None:
            if not isinstance(value, str):
                raise self._error(f"the key {value!r} is not a word", line, "Put it into quotes if it is meant as one")
            if value in top.value:
                raise self._error(f"the key {value!r} occurs twice", line, "Leave one of the two")
            top.key = value
            self._lines[top.next_path()] = line
        else:
            top.value[top.key], top.key = value, None

    def _scalar(self, loader: yaml.SafeLoader | yaml.CSafeLoader, event: yaml.ScalarEvent, line: int) -> Any:
        import yaml

        tag: str = loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
        kind = tag.removeprefix("tag:yaml.org,2002:")
        if kind == "str":
            return event.value
        try:
            if kind in ("int", "float", "bool", "null"):
                return loader.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, OverflowError) as error:
            raise self._error(f"{event.value[:40]!r} is not a number: {error}", line) from None
        raise self._error(f"YAML takes {event.value[:40]!r} for a {kind}", line, "Put it into quotes if it is meant as a word")

    def _refuse_references(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.anchor:
            raise self._error(f"&{event.anchor} is an anchor", line, "Leave it out, or put it into quotes: only plain data is read")
        if event.tag:
            raise self._error(f"{event.tag} is a tag", line, "Leave it out, or put it into quotes: only plain data is read")

    def _error(self, what: str, line: int, do: str | None = None) -> RequestError:
        return RequestError(what, where=f"{self._where}, line {line}", do=do)


def _events(loader: yaml.SafeLoader | yaml.CSafeLoader) -> Iterator[yaml.Event]:
    try:
        while loader.check_event():
            event = loader.get_event()
            if event is not None:
                yield event
    finally:
        loader.dispose()


CONFIG_KEY = r"[\w.-]+"
# A key of a dimension, which may name the entry of each layer: num_heads.{layer}.
KEY_OF_LAYER = r"\.?[\w-]+(\.([\w-]+|\{layer\}))*"
_TERM = r"(?:[a-z_][a-z0-9_]*|[1-9][0-9]{0,9})"


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

    def read(self, readers: Mapping[str, Callable[[Node], Any]]) -> dict[str, Any]:
        """The values of a mapping by key. readers: key that it may have -> the function that reads its value."""
        return {key: readers[key](inner) for key, inner in self.mapping(tuple(readers)).items()}

    def items(self) -> list[Node]:
        """The items of a list. A single value is a list of one item."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [self.inner(str(i), value) if isinstance(self.value, list) else self for i, value in enumerate(values)]

    def word(self, pattern: str = r"\S+", expected: str = "a word") -> str:
        """The value, a word that matches a pattern."""
        if not isinstance(self.value, str) or not re.fullmatch(pattern, self.value):
            raise self.unexpected(expected)
        return self.value

    def sentence(self, expected: str = "a sentence") -> str:
        """The value, a text for people."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.unexpected(expected)
        return self.value

    def config_key(self) -> str:
        """The value, a key of the config."""
        return self.word(CONFIG_KEY, "a key of the config")

    def condition(self) -> str:
        """The value, a condition on the config, as Model.holds takes it."""
        one = rf"(not )?{CONFIG_KEY}( is [\w.-]+)?"
        return self.word(
            rf"{one}(( and | or ){one})*",
            "a key of the config, KEY is VALUE, `not` and one of these, or several with `and` or `or` between them",
        )

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


def expression(
    node: Node, dimensions: Mapping[str, Dimension], *, why: str | None = None, optional: bool = False, signs: str = "*/+-"
) -> str:
    """The text of an expression of dimensions. optional: whether it may use dimensions that not every model has. signs: those that
    it may contain.

    Raises: RequestError, with `why`, if it uses a dimension that is not declared.
    """
    text = str(node.value) if isinstance(node.value, int) and not isinstance(node.value, bool) else node.value
    if not isinstance(text, str) or not re.fullmatch(rf"\s*{_TERM}(?:\s*[{signs}]\s*{_TERM})*\s*", text):
        raise node.unexpected("a sum of products of dimensions and numbers, such as 2 * heads * head_dim + rope_dim")
    for word in re.findall(r"[a-z_][a-z0-9_]*", text):
        if word not in dimensions:
            raise node.error(f"no dimension is called {word!r}", why=why, do=f"Declared are {', '.join(dimensions) or 'none'}")
        if dimensions[word].optional and not optional:
            raise node.error(
                f"the dimension {word} is optional", why="A model without it would have no value here", do="Use other dimensions"
            )
    return text
