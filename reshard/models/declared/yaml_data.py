"""YAML as data only: mappings with words as keys, lists, words, numbers, true, false and null, with the line of each value.

JSON is YAML, too. The document is built from the parser's events, without recursion. Everything in YAML that is more than data is refused:
anchors, aliases, tags, several documents. A key that occurs twice is refused, too: YAML would use the last one without a message.

The parser is libyaml, which PyYAML's wheels contain, or else PyYAML's own, which is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError
from reshard.geometry.value import mutable, value

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
