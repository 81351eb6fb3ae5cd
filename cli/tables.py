"""Plain text: columns, byte counts, lists."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from reshard.errors import printable
from reshard.geometry.value import value
from reshard.storage.system_calls import system_refusal

from .console import BOLD, has_colour, painted, painted_cell, shown_on, width_of, wrapped
from .invocation import current
from .spelling import with_flags

# The digits of a fingerprint that are shown: enough to tell checkpoints apart.
_DIGITS = 12


def fingerprint_text(root: str) -> str:
    """A fingerprint in 12 digits; in full with -v, and with -q, whose line scripts read."""
    kind, colon, digits = root.rpartition(":")
    log = current().log
    return root if log.verbose or log.quiet else f"{kind}{colon}{digits[:_DIGITS]}"


def columns_of(text: str) -> int:
    """The columns that a text takes on a terminal: ideographs take two, combining marks none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(letter) else 1 + (east_asian_width(letter) in "WF") for letter in text)


def show_table(rows: Sequence[Sequence[object]], headings: Sequence[str], *, optional: Sequence[int] = (), on_stderr: bool = False) -> None:
    """Print aligned columns, with bold headings on a terminal.

    Where they are wider than the terminal, or than COLUMNS says: the columns `optional` are left out, one after the other; then the widest
    columns of text are wrapped; then each row becomes several lines, one for each column.
    """
    stream = sys.stderr if on_stderr else sys.stdout
    width = width_of(stream)
    with standard_output():
        _print("\n".join(_fitted(Columns.of(rows, headings), optional, width, in_colour=has_colour(stream))), on_stderr)


@value
class Columns:
    """The cells of a table as text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    to_the_right: tuple[bool, ...]

    @staticmethod
    def of(rows: Sequence[Sequence[object]], headings: Sequence[str]) -> Columns:
        texts = tuple(tuple(with_flags(_text(cell)) for cell in row) for row in rows)
        right = tuple(bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(headings)))
        return Columns(tuple(map(printable, headings)), texts, right)

    @property
    def widths(self) -> list[int]:
        return [max([columns_of(heading), *(columns_of(row[i]) for row in self.rows)]) for i, heading in enumerate(self.headings)]

    def without(self, column: int) -> Columns:
        def rest(cells: tuple[Any, ...]) -> tuple[Any, ...]:
            return cells[:column] + cells[column + 1 :]

        return Columns(rest(self.headings), tuple(map(rest, self.rows)), rest(self.to_the_right))

    def lines(self, widths: Sequence[int], *, in_colour: bool = False) -> list[str]:
        """The headings and the rows; a cell that is longer than its width goes on in the next line."""
        headings = list(self._row(self.headings, widths, in_colour=False)) if any(self.headings) else []
        body = [line for row in self.rows for line in self._row(row, widths, in_colour)]
        return [*(painted(line, BOLD) if in_colour else line for line in headings), *body]

    def _row(self, row: Sequence[str], widths: Sequence[int], in_colour: bool) -> Iterator[str]:
        cells = [_broken(cell, width) if columns_of(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            texts = (cell[number] if number < len(cell) else "" for cell in cells)
            padded = (
                " " * (width - columns_of(text)) + text if flush else text + " " * (width - columns_of(text))
                for text, width, flush in zip(texts, widths, self.to_the_right, strict=True)
            )
            line = ("  " + "  ".join(padded)).rstrip()
            if in_colour:
                line = re.sub(r"\S+(?: \S+)*", lambda match: painted_cell(match[0]), line)
            yield line

    def stacked(self, width: int) -> Iterator[str]:
        """Each row as lines: its first cell, and below it each other cell with its heading."""
        longest = max(map(len, self.headings[1:]), default=0)
        for row in self.rows:
            yield from wrapped(f"  {row[0]}", width)
            for heading, cell in zip(self.headings[1:], row[1:], strict=True):
                if cell:
                    yield from wrapped(f"    {(heading or '-').ljust(longest)}  {cell}", width)


# A column of text is wrapped, but not to less than this.
_NARROWEST_COLUMN = 16


def _fitted(columns: Columns, optional: Sequence[int], width: int | None, *, in_colour: bool) -> list[str]:
    """The lines of a table that fit."""
    kept = list(range(len(columns.headings)))
    for column in optional:
        if width is None or _width(columns.widths) <= width:
            break
        columns = columns.without(kept.index(column))
        kept.remove(column)
    widths = columns.widths
    while width is not None and _width(widths) > width:
        texts = [i for i, length in enumerate(widths) if not columns.to_the_right[i] and length > _NARROWEST_COLUMN]
        if not texts:
            return list(columns.stacked(width))
        widths[max(texts, key=lambda i: widths[i])] -= 1
    return columns.lines(widths, in_colour=in_colour)


def _width(widths: Sequence[int]) -> int:
    """The length of a line of columns."""
    return sum(widths) + 2 * len(widths)


def _broken(text: str, width: int) -> list[str]:
    """The pieces of a cell, each at most `width` long: it is broken after a space, or else after / or ., or else after _ or -,
    or anywhere."""
    pieces = []
    while len(text) > width:
        places = ((r" ", width + 1), (r"[/.]", width), (r"[_-]", width))
        breaks = ([match.end() for match in re.finditer(place, text[:end])] for place, end in places)
        at = next((ends[-1] for ends in breaks if ends and ends[-1] > width // 3), width)
        pieces.append(text[:at].rstrip())
        text = "  " + text[at:].lstrip() if width > 2 * _NARROWEST_COLUMN else text[at:].lstrip()
    return [*pieces, text]


def show(*lines: str, on_stderr: bool = False) -> None:
    """Print texts, or an empty line; each is wrapped at the width of the terminal. What comes from a file can neither act on the terminal
    nor begin a line of its own."""
    stream = sys.stderr if on_stderr else sys.stdout
    with standard_output():
        _print("\n".join(shown_on(stream, with_flags(printable(line))) for line in lines), on_stderr)


class Shown:
    """How many lines this process has printed on standard output."""

    lines = 0


def _print(text: str, on_stderr: bool) -> None:
    click.echo(text, err=on_stderr, color=True)
    if not on_stderr:
        Shown.lines += text.count("\n") + 1


def show_verbatim(*lines: str, shown: Callable[[str], str]) -> None:
    """Print lines that are to be copied as they are, such as a file's. shown: what a terminal may show of a line."""
    with standard_output():
        click.echo("\n".join(map(shown, lines)), color=True)


@contextmanager
def standard_output() -> Iterator[None]:
    """Inside this context, something is printed.

    When the reader of the output has gone, as with `| head`, the rest is discarded, and the command goes on to its exit code. Raises
    SystemRefusal if the output cannot be written, for example to a full disk.
    """
    try:
        yield
    except OSError as error:
        discard_output()
        if error.errno != errno.EPIPE:
            raise system_refusal(error, "written", "standard output") from error


def discard_output() -> None:
    """From now on, write what is printed nowhere. Python flushes standard output at its end, and would complain about an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else printable(str(cell))
