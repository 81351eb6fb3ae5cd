"""Reply: what a command found. The command returns it; here it is shown: as lines, as a JSON document, and as a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.errors import printable, visible
from reshard.geometry.quantities import nbytes_text
from reshard.geometry.value import value
from reshard.pages.sections import Facts, Note, Rows, Section, Share, Tree, Verbatim
from reshard.pages.texts import bar_text
from reshard.secrets import masked

from .console import height
from .invocation import current
from .spelling import with_flags
from .tables import Shown, show, show_table, show_verbatim, standard_output

if TYPE_CHECKING:
    from reshard.storage.output_file import OutputFile

SCHEMA_VERSION = 1
"""Grows when a key goes away or changes its meaning. docs/reference/schemas has a schema for each command."""
# Rows on a terminal without --limit: at most so many; at least so many, on a low terminal; and the lines that their headings, the last line
# and the prompt need.
_MOST_ROWS, _FEWEST_ROWS, _LINES_AROUND = 50, 3, 3


@value(eq=False)
class Reply:
    """What a command found."""

    document: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    """The document of --json, or what makes it."""
    sections: Iterable[Section]
    """What it found, described once."""
    code: int = 0
    """The exit code."""
    brief: bool = False
    """Whether --quiet leaves only the lines that stand alone."""

    def as_document(self) -> Mapping[str, Any]:
        """The document of --json."""
        return self.document() if callable(self.document) else self.document


@value
class Output:
    """How a reply is shown."""

    as_json: bool
    """Whether it is one JSON document."""
    page: OutputFile | None
    """Where its page is written; None: nowhere."""
    interactive: bool
    """Whether the page has a script."""

    @staticmethod
    def current() -> Output:
        """That of the command that runs."""
        output = click.get_current_context().meta["reshard.output"]
        assert isinstance(output, Output)
        return output

    def show(self, reply: Reply) -> None:
        """Show a reply, and write its page."""
        sections, written = [*reply.sections] if self.page is not None or not self.as_json else [], ""
        if self.page is not None:
            from reshard.engine.events import event
            from reshard.pages.pages import page_of, write_page

            command = shlex.join(("reshard", *_without_page(current().arguments)))
            nbytes = write_page(page_of(sections), self.page, interactive=self.interactive, spelled=with_flags, command=command)
            written = f"  page      {self.page}, {nbytes_text(nbytes)}"
            event("page", f"wrote {self.page}, {nbytes:,} bytes", path=str(self.page), bytes=nbytes)
        if self.as_json:
            show_json(reply.as_document())
        else:
            show_sections(sections, brief=reply.brief and current().log.quiet)
            if written and not current().log.quiet:
                show(written)


def _without_page(arguments: Sequence[str]) -> list[str]:
    """A command line without --html and its file: the same page has the same content wherever it is written."""
    at = next((i for i, word in enumerate(arguments) if word == "--html"), None)
    left = [*arguments] if at is None else [*arguments[:at], *arguments[at + 2 :]]
    return [word for word in left if not word.startswith("--html=")]


def show_sections(sections: Iterable[Section], *, brief: bool = False, on_stderr: bool = False) -> None:
    """Print sections. brief: only the lines that stand alone."""
    sections = [*sections]
    for number, section in enumerate(sections):
        if isinstance(section, str):
            if section or not brief:
                show(section, on_stderr=on_stderr)
        elif brief:
            continue
        elif isinstance(section, Verbatim):
            show_verbatim(*section.text.split("\n"), shown=visible if section.ours else printable)
        elif isinstance(section, Facts):
            for name, shown in section.lines(section.limit):
                show(f"  {name.ljust(section.width + 1)} {shown}", on_stderr=on_stderr)
        elif isinstance(section, Note):
            more = [f"and {section.more:,} more{section.hint}"] if section.more else []
            advice = [section.advice] if section.advice else []
            indent = " " * (len(section.head) - len(section.head.lstrip()) + 2)
            show(section.head, *(indent + line for line in (*section.lines[: section.limit], *more, *advice)))
        elif isinstance(section, Tree):
            _show_rows(section.table(_room(section.view.limit, sum(map(_height, sections[number + 1 :])))), on_stderr)
        elif isinstance(section, Rows):
            _show_rows(section, on_stderr)


def _show_rows(table: Rows, on_stderr: bool) -> None:
    shown = table.rows[: _room(table.limit) if table.fits else table.limit or None]
    cells = [[bar_text(cell) if isinstance(cell, Share) else cell for cell in row] for row in shown]
    show_table(cells, table.headings, optional=table.optional, on_stderr=on_stderr)
    hidden = table.hidden + len(table.rows) - len(shown)
    more = [f"and {hidden:,} more{table.hint}"] if hidden else []
    for line in (*more, *table.notes):
        show(f"  {line}", on_stderr=on_stderr)


def _height(section: Section) -> int:
    """The lines that a section needs on a terminal at least."""
    if isinstance(section, Tree):
        return _FEWEST_ROWS + 1
    return 1 + len(section.rows) if isinstance(section, Rows) else int(isinstance(section, str))


def _room(limit: int | None, below: int = 0) -> int | None:
    """The most rows; None for all. Without a limit, the lines above them stay visible on a terminal.

    below: the lines that come after these rows.
    """
    lines = height()
    if limit is not None or lines is None:
        return limit or None
    return max(min(lines - Shown.lines - _LINES_AROUND - below, _MOST_ROWS), _FEWEST_ROWS)


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
