"""Draw the tables of docs/benchmarks.md as bars: docs/pictures/*.svg.

    python benchmarks/pictures.py

Under a table, a line such as `![seconds: reshard, cp + sync](pictures/copy.svg)` asks for a picture of these columns. So the page has each
figure once, and tests/docs/test_pictures.py sees whether the pictures are those of its tables. The colours follow the reader's light or
dark mode.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .dim { fill: #666 }
.c0 { fill: #2f6fb2 } .c1 { fill: #b9b9b9 } .c2 { fill: #d98e32 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .dim { fill: #999 } .c1 { fill: #777 } }
""".strip()
LETTER, LABEL, BARS, NUMBER = 6.9, 20, 440, 90
"""Pixels: the width of a letter, the height of a line, the longest bar, and the space of the number behind it."""


class Picture(NamedTuple):
    path: Path
    unit: str
    columns: tuple[str, ...]
    rows: list[tuple[str, tuple[str | None, ...]]]
    """The label of each row, and its number in each column as the table writes it."""


def pictures(page: Path) -> Iterator[Picture]:
    """The pictures that a page asks for. Raises ValueError if one names a column that the table above it lacks."""
    table: list[list[str]] = []
    ended = False
    for line in page.read_text().split("\n"):
        asked = re.fullmatch(r"!\[([\w ]+): (.+)\]\((pictures/[\w-]+\.svg)\)", line)
        if line.startswith("|"):
            if ended:
                table, ended = [], False
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif asked:
            unit, columns, path = asked[1], tuple(asked[2].split(", ")), page.parent / asked[3]
            places = [table[0].index(column) for column in columns]
            rows = [(_plain(row[0]), tuple(_number(row[place]) for place in places)) for row in table[2:]]
            yield Picture(path, unit, columns, [row for row in rows if any(value is not None for value in row[1])])
        ended = True if table and not line.startswith("|") else ended


def _plain(text: str) -> str:
    return re.sub(r"[`*]|\]\([^)]*\)|\[", "", text)


def _number(cell: str) -> str | None:
    """The first number of a cell; in "1 164 MB" it is 1164."""
    found = re.match(r"\W*(\d+(?: \d{3})*(?:\.\d+)?)", cell)
    return found[1].replace(" ", "") if found else None


def drawn(picture: Picture) -> str:
    """The picture as SVG: for each row one bar of each column, under the row's label."""
    values = [float(value) for _, row in picture.rows for value in row if value is not None]
    most, width = max(values), max(BARS + NUMBER, int(LETTER * max(len(label) for label, _ in picture.rows)) + 10)
    parts, x, y = [], 0.0, 14
    for i, column in enumerate(picture.columns):
        parts.append(f'<rect class="c{i}" x="{x:g}" y="{y - 10}" width="10" height="10"/>')
        parts.append(f'<text x="{x + 15:g}" y="{y}">{html.escape(column)}</text>')
        x += 15 + LETTER * len(column) + 24
    parts.append(f'<text class="dim" x="{x:g}" y="{y}">{html.escape(picture.unit)}</text>')
    for label, row in picture.rows:
        y += LABEL + 4
        parts.append(f'<text x="0" y="{y}">{html.escape(label)}</text>')
        for i, value in enumerate(row):
            if value is None:
                continue
            length = max(round(BARS * float(value) / most, 1), 1)
            parts.append(f'<rect class="c{i}" x="0" y="{y + 5}" width="{length:g}" height="12"/>')
            parts.append(f'<text class="dim" x="{length + 6:g}" y="{y + 15}">{value}</text>')
            y += 15
    title = html.escape(f"{picture.unit}: {', '.join(picture.columns)}")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 10}" width="{width}" role="img" aria-label="{title}">'
    return "\n".join((opening, f"<style>{STYLE}</style>", f"<title>{title}</title>", *parts, "</svg>\n"))


if __name__ == "__main__":
    for picture in pictures(DOCS / "benchmarks.md"):
        picture.path.parent.mkdir(exist_ok=True)
        picture.path.write_text(drawn(picture))
        print(picture.path.relative_to(DOCS))
