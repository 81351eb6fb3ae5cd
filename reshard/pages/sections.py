"""Sections: a result described once, as plain values. cli/replies.py shows them as lines, pages.py as a page.

    Head      how a page begins; lines leave it out
    str       a line of its own, "" for an empty one; a page leaves it out
    Facts     names and values
    Rows      a table
    Note     a line, and the lines below it that explain it
    Tree      the folded tensors
    Verbatim  text to be copied as it is; a page leaves it out
    Drawing   a picture; lines leave it out
    OnPage    another section that lines leave out

A table or facts without a title are left out of a page. The functions of this room that end in `_sections` describe one result each. They
load nothing that draws: the terminal needs them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.geometry.value import value
from reshard.pages.texts import nbytes_text, shape_text

if TYPE_CHECKING:
    from reshard.index.fold import Fold


class Share(float):
    """A cell of a table: a share of 0 to 1, shown as a bar."""


@value
class Head:
    """How a page begins."""

    title: str
    """The title, in the window and above the content."""
    what: str = ""
    """What the page is about, in a word or two, such as "checkpoint"."""
    verdict: str = ""
    """The finding in a word or two, such as "complete"."""
    tone: str = "good"
    """Whether the verdict is "good", "bad", or "open"."""
    facts: Sequence[tuple[str, object]] = ()
    """(name, value): the few values that matter most. Values that are None are left out."""
    command: str | None = None
    """The command that goes on from here."""


@value
class Facts:
    """Names and values, one line for each value."""

    rows: Sequence[tuple[str, object]]
    """(name, value). A value that is a sequence is one line for each of its entries; None and empty texts are left out."""
    title: str = "Summary"
    """The title on a page."""
    width: int = 8
    """The characters of the names on a terminal."""
    limit: int | None = None
    """The most values of one name on a terminal; None for all."""

    def lines(self, limit: int | None = None) -> Iterator[tuple[str, object]]:
        """The names and values that are shown. limit: the most values of one name; the others are counted."""
        for name, shown in self.rows:
            given = shown if isinstance(shown, tuple | list) else (shown,)
            values = [stated for stated in given if stated is not None and stated != ""]
            yield from ((name, stated) for stated in values[:limit])
            if limit is not None and len(values) > limit:
                yield name, f"and {len(values) - limit:,} more"


@value
class Rows:
    """A table."""

    headings: Sequence[str]
    """The headings of the columns."""
    rows: Sequence[Sequence[object]]
    """The cells."""
    title: str = ""
    """The title on a page."""
    optional: Sequence[int] = ()
    """The columns that a narrow terminal leaves out, one after the other."""
    limit: int | None = None
    """The most rows on a terminal; 0 or None for all."""
    fits: bool = False
    """Without a limit, as many rows are shown as the terminal has room for."""
    hidden: int = 0
    """How many rows are not given."""
    hint: str = ""
    """What follows the number of the rows that are not shown, such as an option that shows all."""
    notes: Sequence[str] = ()
    """Lines below the table."""


@value
class Note:
    """A line, and the lines below it that explain it."""

    head: str
    """The line."""
    lines: Sequence[str]
    """The lines below it."""
    tone: str = "info"
    """The severity of a finding: "error", "warning" or "info"."""
    limit: int | None = None
    """The most lines below it on a terminal; None for all."""
    hint: str = ""
    """What follows the number of the lines that are not shown."""
    advice: str = ""
    """The last line, such as what to do."""

    @property
    def more(self) -> int:
        """How many lines a terminal does not show."""
        return 0 if self.limit is None else max(0, len(self.lines) - self.limit)


@value
class TreeView:
    """How much of a checkpoint is shown, and in which order."""

    by: str | None = None
    depth: int | None = None
    sort: str = "model"
    limit: int | None = None

    def rows(self, tree: Fold, most: int | None) -> tuple[list[tuple[int, Fold]], int]:
        """The rows of a tree that are shown, and how many are not. Without a depth, as many levels as fit."""
        tree = tree.sorted_by_bytes() if self.sort == "bytes" else tree
        every = list(tree.walk(self.depth))
        if most is None or len(every) <= most:
            return every, 0
        if self.depth is None:
            for depth in range(max(level for level, _ in every), 0, -1):
                rows = [(level, branch) for level, branch in every if level < depth]
                if len(rows) <= most:
                    return rows, len(every) - len(rows)
        return every[:most], len(every) - most


@value
class Tree:
    """The folded tensors: a table on a terminal, branches that unfold on a page."""

    tree: Fold
    view: TreeView
    title: str = "Tensors"

    def table(self, most: int | None) -> Rows:
        """At most so many rows of the tree."""
        from reshard.index.coverage import sharding_text

        rows, hidden = self.view.rows(self.tree, most)
        cells = []
        for level, branch in rows:
            first = branch.stored[0] if branch.stored else None
            kind = f" ({first.kind})" if first and first.kind != "weight" else ""
            about = (first.dtype.name, shape_text(first.shape), sharding_text(first)) if first else ("", "", "")
            share = Share(branch.nbytes / self.tree.nbytes if self.tree.nbytes else 0)
            cells.append(("  " * level + branch.name + kind, branch.count, *about, branch.state, nbytes_text(branch.nbytes), share))
        state = "with" if any(branch.state for _, branch in rows) else ""
        headings = ("tensor", "count", "dtype", "shape", "sharding", state, "bytes", "")
        hint = "; `limit=0` shows all, `depth=N` fewer levels"
        return Rows(headings, cells, optional=(5, 7, 4), hidden=hidden, hint=hint)


@value
class Verbatim:
    """Text that is to be copied as it is, such as a file's."""

    text: str
    ours: bool = False
    """Whether it holds no secret, though variables in it have the names of credentials."""


@value
class Drawing:
    """A picture of values."""

    title: str
    """The title on a page."""
    kind: str
    """How they are drawn: one of DRAWINGS (pages.py)."""
    of: tuple[Any, ...]
    """The values."""


@value
class OnPage:
    """A section that lines leave out."""

    section: Section


Section: TypeAlias = Head | str | Facts | Rows | Note | Tree | Verbatim | Drawing | OnPage
