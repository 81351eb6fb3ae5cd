"""Table: rows with named columns, which sort, print, and become a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import RequestError, choices
from reshard.geometry.packages import package
from reshard.geometry.quantities import plural
from reshard.geometry.value import Drawn, value

_ROWS = 20
"""Rows of a printed table."""
_WIDEST = 48
"""Characters of a cell of a printed table."""


@value
class Table(Drawn):
    """Rows with named columns."""

    columns: tuple[str, ...]
    """The names of the columns."""
    rows: tuple[tuple[object, ...], ...]
    """The rows; None stands for what is not known or does not apply."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def column(self, name: str) -> list[Any]:
        """The cells of a column. Raises RequestError, with the nearest name, if there is none of that name."""
        at = self._place(name)
        return [row[at] for row in self.rows]

    def sorted_by(self, column: str, *, reverse: bool = False) -> Table:
        """The rows in the order of a column. Rows without a value come last. Raises RequestError if there is no such column."""
        at = self._place(column)
        known = sorted((row for row in self.rows if row[at] is not None), key=lambda row: row[at], reverse=reverse)  # type: ignore[arg-type,return-value]
        return Table(self.columns, (*known, *(row for row in self.rows if row[at] is None)))

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Raises RequestError if pandas is not installed."""
        return package("pandas", "to_pandas()", "Install it with pip").DataFrame(list(self.rows), columns=list(self.columns))

    def _place(self, name: str) -> int:
        if name not in self.columns:
            raise RequestError(f"there is no column {name!r}", do=choices(name, self.columns))
        return self.columns.index(name)

    def __repr__(self) -> str:
        return f"Table({plural(len(self), 'row')}: {', '.join(self.columns)})"[:200]

    def __str__(self) -> str:
        """The first rows as aligned text."""
        lines = [self.columns, *(tuple(map(cell_text, row)) for row in self.rows[:_ROWS])]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*text, *([f"and {plural(len(self) - _ROWS, 'more row')}"] if len(self) > _ROWS else [])])


def cell_text(cell: object) -> str:
    """A cell in a few characters."""
    if cell is None:
        return "-"
    text = f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if type(cell) is int else str(cell)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
