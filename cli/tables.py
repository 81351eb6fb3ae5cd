"""Plain text: columns, byte counts, lists."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from reshard.errors import printable
from reshard.geometry.quantities import nbytes_text as nbytes_text
from reshard.storage.system_calls import system_refusal

from .spelling import with_flags


def duration_text(seconds: float) -> str:
    """3 days, 5 h, 12 min, 40 s: whole units."""
    for size, unit in ((86400, "day"), (3600, "h"), (60, "min")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'s' if unit == 'day' and number > 1 else ''}"
    return f"{int(seconds)} s"


def count_text(count: int) -> str:
    """8.03 B, 74,016: exact below a million."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def table(rows: Sequence[Sequence[object]], headings: Sequence[str], *, indent: str = "  ") -> list[str]:
    """The lines of aligned columns under headings; numbers to the right."""
    texts = [[with_flags(_text(cell)) for cell in row] for row in rows]
    widths = [max([len(heading), *(len(row[i]) for row in texts)]) for i, heading in enumerate(headings)]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in zip(cells, widths, right, strict=True))
        return (indent + "  ".join(padded)).rstrip()

    return [line(list(headings)), *(line(row) for row in texts)]


def shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def show_table(rows: Sequence[Sequence[object]], headings: Sequence[str], *, optional: Sequence[int] = (), on_stderr: bool = False) -> None:
    """Print aligned columns, with bold headings on a terminal.

    optional: the columns to leave out, one after the other, until the lines are as short as the terminal, or as COLUMNS says.
    """
    kept, width = list(range(len(headings))), _width()
    lines = table(rows, headings)
    for column in optional:
        if width is None or max(map(len, lines)) <= width:
            break
        kept.remove(column)
        lines = table([[row[i] for i in kept] for row in rows], [headings[i] for i in kept])
    first, *others = lines
    with standard_output():
        click.echo(click.style(printable(first), bold=True) if _has_colour() else printable(first), err=on_stderr)
    if others:
        show(*others, on_stderr=on_stderr)


def _width() -> int | None:
    """The characters of a line; None if nothing limits them, as in a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        import shutil

        return shutil.get_terminal_size().columns
    return None


def _has_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def bar_text(share: float, width: int = 12) -> str:
    """A bar for a share of 0 to 1, in eighths of a character; a share above 0 is never drawn as nothing."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def strip_text(start: int, stop: int, size: int, *, replica: bool = False, width: int = 24) -> str:
    """The part start..stop of an axis as a strip of characters; a part that is not empty fills one at least."""
    first = min(start * width // max(size, 1), width - 1)
    last = max(-(-stop * width // max(size, 1)), first + 1) if stop > start else first
    return "·" * first + ("▒" if replica else "█") * (last - first) + "·" * (width - last)


def sparkline(counts: Sequence[int]) -> str:
    """A histogram as one line; a bin that is not empty is never drawn as empty."""
    highest = max(counts, default=0)
    return "".join(" " if not count else "▁▂▃▄▅▆▇█"[min(7, count * 8 // highest)] for count in counts)


def show(*lines: str, on_stderr: bool = False) -> None:
    """Print lines, or an empty one. What comes from a file can neither act on the terminal nor begin a line of its own."""
    with standard_output():
        click.echo(with_flags("\n".join(map(printable, lines))), err=on_stderr)


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
