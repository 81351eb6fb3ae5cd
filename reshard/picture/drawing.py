"""Drawings: SVG from plain numbers, with the colours of a page. One path per row, not one element per box."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from reshard.picture.page import COLOURS, Html, element, escaped, legend

Span = tuple[float, float]
"""Where something starts and ends, as shares of the width."""
_SWATCHES = 6
Held = tuple[list[Span], list[Span]]
"""What one holder has, and what it has as a copy of what another one holds."""


def strips(rows: Mapping[str, Held], *, title: str, dividers: Iterable[float] = (), width: int = 1180) -> Html:
    """A map: one strip for each holder, under each other. dividers: vertical lines, as shares of the width; the parts between them are
    numbered from 1."""
    height = 18 if len(rows) <= 32 else 7 if len(rows) <= 128 else 3
    labels = len(rows) <= 32
    left = min(7 * max(map(len, rows), default=0) + 14, 300) if labels else 0
    inner, total = width - left, len(rows) * height
    parts = [f'<rect class="soft" x="{left}" y="0" width="{inner}" height="{total}"/>']
    for number, (label, held) in enumerate(rows.items()):
        y, thick = number * height, max(height - 2, 1) if height > 3 else height
        if labels:
            parts.append(f'<text x="0" y="{y + height - 6}">{escaped(shortened(label, 40))}</text>')
        for name, spans in zip("ab", held, strict=True):
            if spans:
                path = "".join(_box(left + start * inner, y, max((stop - start) * inner, 0.6), thick) for start, stop in spans)
                parts.append(f'<path class="{name}" d="{path}"><title>{escaped(label)}</title></path>')
    edges = [0.0, *dividers, 1.0]
    lines = "".join(f"M{_n(left + at * inner)} 0v{total}" for at in edges[1:-1])
    if lines:
        parts.append(f'<path class="line" d="{lines}"/>')
        centres = enumerate(pairwise(edges), 1)
        parts += [
            f'<text x="{_n(left + (a + b) / 2 * inner)}" y="{total + 14}" text-anchor="middle">{number}</text>'
            for number, (a, b) in centres
            if (b - a) * inner > 16
        ]
    return _svg(parts, width, max(total, 1) + (18 if lines else 0), title)


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it is long: both ends of a file's name tell it from others."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def stacked(rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str], *, title: str, limit: float | None = None) -> Html:
    """Horizontal bars of several parts. rows: label, the size of each part, and the text at the end. limit: a vertical line, such as the
    memory of a GPU."""
    most = max([sum(parts) for _, parts, _ in rows] + [limit or 0.0]) or 1.0
    left, inner, height = 7 * max((len(label) for label, _, _ in rows), default=0) + 14, 620, 24
    drawn = []
    for number, (label, sizes, text) in enumerate(rows):
        y, x = number * height, float(left)
        drawn.append(f'<text x="0" y="{y + 15}">{escaped(label)}</text>')
        for name, size, colour in zip(names, sizes, "abcde", strict=False):
            if size:
                length = size / most * inner
                drawn.append(f'<path class="{colour}" d="{_box(x, y + 3, length, height - 6)}"><title>{escaped(name)}</title></path>')
                x += length
        drawn.append(f'<text x="{_n(x + 6)}" y="{y + 15}">{escaped(text)}</text>')
    if limit:
        drawn.append(f'<path class="limit" d="M{_n(left + limit / most * inner)} 0v{len(rows) * height}"/>')
    texts = max((len(text) for _, _, text in rows), default=0)
    picture = _svg(drawn, left + inner + 7 * texts + 12, max(len(rows) * height, 1), title)
    return Html(picture + legend(*zip("abcde", names, strict=False)))


def heat_map(
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    title: str,
    axes: tuple[str, str],
    scale: tuple[str, str],
) -> Html:
    """A grid of cells, the stronger the larger; values are 0 to 1, None for a cell that does not exist.

    axes: what the rows and the columns are. scale: what the weakest and the strongest colour mean.
    """
    left, top, height = 7 * max([len(axes[0]), *(len(label) for label, _ in rows)]) + 14, 18, 18
    size = max(6, min(30, 1040 // max(len(columns), 1)))
    bottom = top + len(rows) * height
    drawn = [f'<text x="0" y="12">{escaped(axes[0])}</text><text x="{left}" y="12">{escaped(axes[1])}</text>']
    for y, (label, values) in enumerate(rows):
        drawn.append(f'<text x="0" y="{top + y * height + 13}">{escaped(label)}</text>')
        for x, value in enumerate(values):
            if value is not None:
                box = _box(left + x * size, top + y * height, size - 1, height - 1)
                drawn.append(
                    f'<path class="soft" d="{box}"/>' if value <= 0 else f'<path class="c" opacity="{0.12 + 0.88 * value:.3g}" d="{box}"/>'
                )
    step = max(1, -(-7 * max(map(len, columns), default=1) // size))
    drawn += [f'<text x="{left + x * size}" y="{bottom + 13}">{escaped(columns[x])}</text>' for x in range(0, len(columns), step)]
    drawn.append(f'<text x="{left}" y="{bottom + 36}" text-anchor="end">{escaped(scale[0])}  </text>')
    for i in range(_SWATCHES):
        shade = f'class="c" opacity="{0.12 + 0.88 * i / (_SWATCHES - 1):.3g}"' if i else 'class="soft"'
        drawn.append(f'<path {shade} d="{_box(left + 4 + i * 22, bottom + 26, 21, 12)}"/>')
    drawn.append(f'<text x="{left + _SWATCHES * 22 + 10}" y="{bottom + 36}">{escaped(scale[1])}</text>')
    width = left + max(len(columns) * size + 30, _SWATCHES * 22 + 7 * len(scale[1]) + 20)
    return _svg(drawn, width, bottom + 42, title)


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_name: str, y_name: str) -> Html:
    """Lines through points, each with its name at its end, and the axes."""
    points = [point for line in lines.values() for point in line]
    x_most, y_most = max((x for x, _ in points), default=1) or 1, max((y for _, y in points), default=1) or 1
    drawn = ['<path class="line" d="M50 20v160h520"/>']
    for name, line in lines.items():
        at = [(50 + x / x_most * 480, 180 - y / y_most * 160) for x, y in line]
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in at)
        drawn.append(f'<path class="curve" d="M{path}"/>' if line else "")
        drawn.append(f'<text x="{_n(at[-1][0] + 4)}" y="{_n(at[-1][1])}">{escaped(name)}</text>' if line else "")
    drawn += [
        f'<text x="50" y="12">{escaped(y_name)}, up to {y_most:.3g}</text>',
        f'<text x="50" y="196">{escaped(x_name)}, up to {x_most:g}</text>',
    ]
    return _svg(drawn, 600, 200, title)


def in_notebook(drawing: str) -> str:
    """A drawing with its colours, as a notebook shows it."""
    return f'<div class="reshard"><style>{COLOURS}</style>{drawing}</div>'


def _svg(parts: Iterable[str], width: int, height: int, title: str) -> Html:
    name = escaped(title)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{name}">'
    return element("div", Html(f"{opening}<title>{name}</title>{''.join(parts)}</svg>"), class_="draw")


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h-{_n(width)}z"


def _n(number: float) -> str:
    """A coordinate with few digits, so that equal pictures have equal bytes."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
