"""YAML as data only: mappings with words as keys, lists, words, numbers, true, false and null; and on which line each stands.

JSON is YAML, too. Built from the parser's events, without recursion. What YAML can do beyond data (anchors and aliases, tags, several
documents) is refused, and so is a key that stands twice, of which YAML would silently keep the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError

if TYPE_CHECKING:
    import yaml

_MOST_BYTES, _MOST_DEPTH = 1 << 18, 8
_MEND = "Mend that line; a name that starts with *, { or [, and a lone ?, go into quotes"
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says: plain values, and the line of each by the keys that lead to it; list items count from 0."""

    value: Any
    lines: Mapping[Path, int]


@dataclass(slots=True)
class _Open:
    """A mapping or list that has begun; `key` is the one that waits for its value."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = field(default=None)

    def next_path(self) -> Path:
        return (*self.path, str(len(self.value)) if isinstance(self.value, list) else str(self.key))


def parse(content: bytes, where: str) -> Document:
    """The document in a file's content. Raises RequestError, naming the line, if it is not one of plain data."""
    import yaml

    if len(content) > _MOST_BYTES:
        raise RequestError(f"the file has {len(content):,} bytes, at most {_MOST_BYTES:,} make sense", where=where)
    try:
        return _Building(where).document(yaml.SafeLoader(content.decode()))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RequestError(f"it is not valid YAML: {error.problem}", where=where + line, do=_MEND) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"it is not valid YAML: {error}", where=where, do="A text file in UTF-8 is expected") from None


class _Building:
    def __init__(self, where: str) -> None:
        self._where = where
        self._open: list[_Open] = []
        self._lines: dict[Path, int] = {}
        self._roots: list[Any] = []

    def document(self, loader: yaml.SafeLoader) -> Document:
        import yaml

        for event in _events(loader):
            line = _line(event)
            self._refuse_tricks(event, line)
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                if len(self._open) == _MOST_DEPTH:
                    raise self._wrong(f"more than {_MOST_DEPTH} levels inside each other", line)
                path = self._open[-1].next_path() if self._open else ()
                self._open.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], path))
                self._refuse_as_key(line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._put(self._open.pop().value, line)
            elif isinstance(event, yaml.ScalarEvent):
                self._put(self._scalar(loader, event, line), line)
        if len(self._roots) != 1:
            raise RequestError(f"it holds {len(self._roots) or 'no'} documents, one is expected", where=self._where)
        return Document(self._roots[0], self._lines)

    def _put(self, value: Any, line: int) -> None:
        if not self._open:
            self._roots.append(value)
            return
        top = self._open[-1]
        if isinstance(top.value, list):
            self._lines[top.next_path()] = line
            top.value.append(value)
        elif top.key is None:
            if not isinstance(value, str):
                raise self._wrong(f"the key {value!r} is no word", line, "Put it into quotes if it is meant as one")
            if value in top.value:
                raise self._wrong(f"the key {value!r} stands here a second time", line, "Leave one of the two")
            top.key = value
            self._lines[top.next_path()] = line
        else:
            top.value[top.key], top.key = value, None

    def _scalar(self, loader: yaml.SafeLoader, event: yaml.ScalarEvent, line: int) -> Any:
        import yaml

        tag: str = loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
        kind = tag.removeprefix("tag:yaml.org,2002:")
        if kind == "str":
            return event.value
        try:
            if kind in ("int", "float", "bool", "null"):
                return loader.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, OverflowError) as error:
            raise self._wrong(f"{event.value[:40]!r} is no number: {error}", line) from None
        raise self._wrong(f"{event.value[:40]!r} is taken for a {kind} by YAML", line, "Put it into quotes if it is meant as a word")

    def _refuse_as_key(self, line: int) -> None:
        outer = self._open[-2] if len(self._open) > 1 else None
        if outer and isinstance(outer.value, dict) and outer.key is None:
            raise self._wrong("a key is itself a list or mapping", line, "Put a name that starts with { or [ into quotes")

    def _refuse_tricks(self, event: yaml.Event, line: int) -> None:
        import yaml

        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            raise self._wrong(f"*{anchor} refers to another place", line, "Write the value; a name that starts with * goes into quotes")
        if anchor:
            raise self._wrong(f"&{anchor} marks a place to refer to", line, "Leave it out, or put it into quotes")
        if tag:
            raise self._wrong(f"{tag} is a tag", line, "Leave it out, or put it into quotes: only plain data are read")

    def _wrong(self, what: str, line: int, do: str | None = None) -> RequestError:
        return RequestError(what, where=f"{self._where}, line {line}", do=do)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def _events(loader: yaml.SafeLoader) -> Iterator[yaml.Event]:
    try:
        while loader.check_event():
            yield loader.get_event()  # type: ignore[no-untyped-call]
    finally:
        loader.dispose()
