"""The pages of `--html`: sections as one self-contained file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from reshard import __version__
from reshard.geometry.quantities import plural
from reshard.index.balance import shares
from reshard.index.index import Index
from reshard.opening.keywords import PathLike
from reshard.pages.checkpoints import share_rows
from reshard.pages.pictures import bubble_curves, memory_bars, picture_of, transfers
from reshard.pages.readings import share_reading
from reshard.pages.sections import Drawing, Facts, Head, Note, OnPage, Rows, Section, Share, Tree
from reshard.pages.shard_maps import layer_map, tensor_map, tree_list
from reshard.picture.page import Html, Page, element, facts, folded, joined, meter, said, sentence, table
from reshard.storage.output_file import OutputFile

# Rows and findings that a page shows, the rest is counted; and rows that are shown unfolded.
_MOST_ROWS, _MOST_UNFOLDED = 1000, 20
_BAD = frozenset({"partial", "missing", "not finite"})
"""The names of facts that are errors."""
DRAWINGS: dict[str, Callable[..., Html]] = {
    "bubbles": bubble_curves,
    "layers": layer_map,
    "memory": memory_bars,
    "shares": lambda *of: _shares(*of),
    "tensor": tensor_map,
    "transfers": transfers,
    "value": picture_of,
}
"""How the values of a Drawing are drawn, by its kind."""


def write_page(page: Page, path: PathLike, *, interactive: bool = False, spelled: Callable[[str], str] = str, command: str = "") -> int:
    """Write a page to an output file (storage/output_file.py), and return its length in bytes.

    spelled: how texts name keywords. command: what made the page. The date is today's, or that of SOURCE_DATE_EPOCH, so that equal content
    gives equal bytes.
    """
    file = OutputFile.at(path)
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    day = datetime.fromtimestamp(int(seconds), UTC) if seconds.isdecimal() else datetime.now(UTC)
    page.origin = f"Made by reshard {__version__} on {day:%Y-%m-%d}" + (f" with: {command}" if command else "")
    return file.write(spelled(page.render(interactive=interactive)).encode("utf-8", "replace"))


def page_of(sections: Sequence[Section]) -> Page:
    """The page of a result. Its first section with a head says how it begins; findings stand together in one section."""
    sections = [section.section if isinstance(section, OnPage) else section for section in sections]
    head = next(section for section in sections if isinstance(section, Head))
    page = Page(head.title, _head(head))
    for section in sections:
        if isinstance(section, Facts) and section.title:
            shown = [(name, _fact(name, value)) for name, value in section.lines()]
            page.add(section.title, facts(shown) if shown else "")
        elif isinstance(section, Rows) and section.title:
            page.add(section.title, _table(section))
        elif isinstance(section, Tree):
            page.add(section.title, tree_list(section.tree))
        elif isinstance(section, Drawing):
            page.add(section.title, DRAWINGS[section.kind](*section.of))
    entries = [section for section in sections if isinstance(section, Note)]
    page.add("Findings", *map(_finding, entries))
    return page


def _head(head: Head) -> Html:
    verdict = element("span", head.verdict, class_=f"verdict {head.tone}") if head.verdict else ""
    parts = [element("p", element("span", head.what, class_="what"), verdict, class_="kicker"), element("h1", head.title)]
    tiles = [element("div", element("dt", name), element("dd", shown)) for name, shown in head.facts if shown is not None]
    if tiles:
        parts.append(element("dl", *tiles, class_="tiles"))
    if head.command:
        parts.append(element("p", element("span", "next", class_="dim"), element("code", sentence(head.command)), class_="next"))
    return element("header", *parts)


def _fact(name: str, shown: object) -> object:
    return element("span", sentence(str(shown)), class_="error") if name in _BAD else shown


def _table(section: Rows) -> Html:
    if not section.rows:
        return Html("")
    shown = section.rows[:_MOST_ROWS]
    content = table(section.headings, [[meter(cell) if isinstance(cell, Share) else cell for cell in row] for row in shown])
    number = section.hidden + len(section.rows)
    content = joined((content, _not_shown(number - len(shown)), *(element("p", note, class_="dim") for note in section.notes)))
    return content if number <= _MOST_UNFOLDED else folded(plural(number, "row"), content)


def _shares(index: Index, by: str) -> Html:
    divided = shares(index, by)
    return joined((said(share_reading(index, by, divided)), _table(share_rows(divided, by))))


def _finding(entry: Note) -> Html:
    title = element("span", entry.head, class_="error" if entry.tone == "error" else None)
    texts = [element("p", sentence(line)) for line in entry.lines[:_MOST_ROWS]]
    advice = element("p", sentence(entry.advice), class_="dim") if entry.advice else ""
    return element("div", element("p", title), *texts, _not_shown(len(entry.lines) - len(texts)), advice, class_=f"finding is-{entry.tone}")


def _not_shown(number: int) -> Html:
    return element("p", f"{number:,} more are not shown.", class_="dim") if number > 0 else Html("")
