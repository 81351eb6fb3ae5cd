"""Drawings: SVG from plain numbers, with the colours of a page. One path per row, not one element per box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from reshard.picture.page import COLOURS, Html, element, escaped, joined, legend

Span = tuple[float, float]
"""Where something starts and ends, as shares of the width."""
_SWATCHES = 6
_LINE, _CHARACTER = 18, 7
"""Pixels: the height of a line of text, and the width of a character."""
_WIDTH, _PHONE, _WIDEST_CELL = 1000, 210, 30
"""Pixels: a picture beside its labels on a wide screen and on a phone, and the widest cell of a grid."""
Held = tuple[list[Span], list[Span]]
"""What one holder has, and what it has as a copy of what another one holds."""


def strips(rows: Mapping[str, Held], *, title: str, dividers: Iterable[float] = ()) -> Html:
    """A map: one strip for each holder, under each other. dividers: vertical lines, as shares of the width; the parts between them are
    numbered from 1."""
    height = _LINE * len(rows)
    parts = [f'<rect class="soft" x="0" y="0" width="{_WIDTH}" height="{height}"/>']
    for y, (label, held) in zip(range(0, height, _LINE), rows.items(), strict=True):
        for name, spans in zip("ba", reversed(held), strict=True):  # a replica hides no part in a lane of several holders
            if spans:
                path = "".join(_box(start * _WIDTH, y, max((stop - start) * _WIDTH, 0.6), _LINE - 2) for start, stop in spans)
                parts.append(f'<path class="{name}" d="{path}"><title>{escaped(label)}</title></path>')
    edges = [0.0, *dividers, 1.0]
    lines = "".join(f"M{_n(at * _WIDTH)} 0v{height}" for at in edges[1:-1])
    parts += [f'<path class="line" d="{lines}"/>'] if lines else []
    numbers = [((a + b) / 2, str(number)) for number, (a, b) in enumerate(pairwise(edges), 1)] if lines else []
    return _chart(list(rows), parts, (_WIDTH, height), title, numbers)


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it is long: both ends of a file's name tell it from others."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def stacked(rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str], *, title: str, limit: float | None = None) -> Html:
    """Horizontal bars of several parts. rows: label, the size of each part, and the text at the end. limit: a vertical line, such as the
    memory of a GPU."""
    most = max([sum(parts) for _, parts, _ in rows] + [limit or 0.0]) or 1.0
    cells = []
    for label, sizes, text in rows:
        drawn, x = [], 0.0
        for name, size, colour in zip(names, sizes, "abcde", strict=False):
            if size:
                drawn.append(
                    f'<path class="{colour}" d="{_box(x, 1, size / most * _WIDTH, _LINE - 2)}"><title>{escaped(name)}</title></path>'
                )
                x += size / most * _WIDTH
        drawn += [f'<path class="limit" d="M{_n(limit / most * _WIDTH)} 0v{_LINE}"/>'] if limit else []
        cells += [element("span", label), _stretched(drawn, (_WIDTH, _LINE), f"{title}: {label}"), element("span", text)]
    return joined((element("div", *cells, class_="draw bars"), legend(*zip("abcde", names, strict=False))))


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
    drawn = []
    for y, (_, values) in enumerate(rows):
        for x, value in enumerate(values):
            if value is not None:
                shade = f'class="c" opacity="{0.12 + 0.88 * value:.3g}"' if value > 0 else 'class="soft"'
                drawn.append(f'<path {shade} d="{_box(x, y * _LINE, 0.95, _LINE - 1)}"/>')
    marks = [((x + 0.5) / len(columns), column) for x, column in enumerate(columns)]
    size = (len(columns), _LINE * len(rows))
    picture = _chart([label for label, _ in rows], drawn, size, title, marks, axes, _WIDEST_CELL * len(columns))
    swatches = [i / (_SWATCHES - 1) for i in range(_SWATCHES)]
    keys = (f"background:var(--c);opacity:{0.12 + 0.88 * share:.3g}" if share else "background:var(--soft)" for share in swatches)
    shown = element("span", *(element("span", class_="key", style=style) for style in keys))
    return joined((picture, element("p", element("span", scale[0]), shown, element("span", scale[1]), class_="legend")))


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_name: str, y_name: str) -> Html:
    """Lines through points, each with its name at its end, and the axes."""
    points = [point for line in lines.values() for point in line]
    x_most, y_most = max((x for x, _ in points), default=1) or 1, max((y for _, y in points), default=1) or 1
    drawn = ['<path class="line" d="M10 20v160h320"/>']
    for name, line in lines.items():
        at = [(10 + x / x_most * 300, 180 - y / y_most * 160) for x, y in line]
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in at)
        drawn.append(f'<path class="curve" d="M{path}"/>' if line else "")
        drawn.append(f'<text x="{_n(at[-1][0] + 4)}" y="{_n(at[-1][1])}">{escaped(name)}</text>' if line else "")
    drawn += [
        f'<text x="10" y="12">{escaped(y_name)}, up to {y_most:.3g}</text>',
        f'<text x="10" y="196">{escaped(x_name)}, up to {x_most:g}</text>',
    ]
    return _svg(drawn, 'viewBox="0 0 360 200" width="480"', title)


def in_notebook(drawing: str) -> str:
    """A drawing with its colours, as a notebook shows it."""
    return f'<div class="reshard"><style>{COLOURS}</style>{drawing}</div>'


def _chart(
    labels: Sequence[str],
    parts: Iterable[str],
    size: tuple[int, int],
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    axes: tuple[str, str] | None = None,
    widest: int = _WIDTH,
) -> Html:
    """A picture as wide as there is room: labels on the left, one for each line, and marks below, of which a phone shows fewer.

    marks: (where, as a share of the width, text). axes: what stands above the labels and above the picture.
    """
    for_phones = set(_with_room(marks, min(widest, _PHONE)))
    shown = (
        element("span", text, style=f"left:{100 * at:.4g}%", class_=None if (at, text) in for_phones else "roomy")
        for at, text in _with_room(marks, widest)
    )
    head = [element("span", axis) for axis in axes or ()]
    names = (element("span", shortened(label, 40), title=label) for label in labels)
    picture = (*head[1:], _stretched(parts, size, title), element("div", *shown, class_="marks") if marks else "")
    return element(
        "div",
        element("div", *head[:1], *names, class_="labels"),
        element("div", *picture, style=f"max-width:{widest}px"),
        class_="draw",
    )


def _with_room(marks: Iterable[tuple[float, str]], width: int) -> Iterator[tuple[float, str]]:
    """The marks that a width has room for, from left to right."""
    taken = -1.0
    for at, text in marks:
        half = (_CHARACTER * len(text) + 4) / 2
        if at * width - half >= taken:
            taken = at * width + half
            yield at, text


def _stretched(parts: Iterable[str], size: tuple[int, int], title: str) -> Html:
    """A picture without text, as wide as there is room and as high as it is. size: its width in units of its own, its height in pixels."""
    return _svg(parts, f'viewBox="0 0 {size[0]} {size[1]}" preserveAspectRatio="none" style="width:100%;height:{size[1]}px"', title)


def _svg(parts: Iterable[str], size: str, title: str) -> Html:
    name = escaped(title)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">'
    return Html(f"{opening}<title>{name}</title>{''.join(parts)}</svg>")


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h-{_n(width)}z"


def _n(number: float) -> str:
    """A coordinate with few digits, so that equal pictures have equal bytes."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
