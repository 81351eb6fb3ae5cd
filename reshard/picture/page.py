"""Page: one self-contained HTML file. It needs no network and, unless asked to be interactive, holds no script: its Content-Security-Policy
forbids both. Names in checkpoints are hostile text and are escaped here, in one place. Equal content gives equal bytes."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import field

from reshard.errors import printable
from reshard.geometry.value import mutable

_LONGEST = 200
"""Characters of a name that are shown."""


class Html(str):
    """Text that is HTML already. Any other text is escaped before it is put on a page."""

    __slots__ = ()


def escaped(text: object) -> Html:
    """A text as HTML; HTML as it is. Control characters are made visible, and a long text is cut."""
    if isinstance(text, Html):
        return text
    shown = printable(f"{text:,}" if isinstance(text, int) and not isinstance(text, bool) else str(text))
    return Html(html.escape(shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"))


def joined(parts: Iterable[object]) -> Html:
    """Texts and HTML, one after the other."""
    return Html("".join(map(escaped, parts)))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` is the attribute class; an attribute that is None is left out."""
    words = (f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items() if value is not None)
    return Html(f"<{tag}{''.join(words)}>{joined(children)}</{tag}>")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str | None = None) -> Html:
    """A table. Numbers stand to the right."""
    head = element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
    body = (element("tr", *(element("td", cell, class_="n" if isinstance(cell, int | float) else None) for cell in row)) for row in rows)
    parts = [element("caption", caption)] if caption else []
    return element("div", element("table", *parts, head, element("tbody", *body)), class_="wide", tabindex="0")


def folded(summary: object, *children: object, is_open: bool = False) -> Html:
    """A part that can be unfolded, by keyboard too, without a script."""
    return Html(f"<details{' open' if is_open else ''}>{element('summary', summary)}{joined(children)}</details>")


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """A list of names and values."""
    return element("dl", *(part for name, value in rows for part in (element("dt", name), element("dd", value))))


def meter(share: float) -> Html:
    """A bar for a share of 0 to 1."""
    width = f"{100 * min(max(share, 0.0), 1.0):.4g}"
    return Html(f'<span class="bar" role="img" aria-label="{width} %"><span style="width:{width}%"></span></span>')


@mutable
class Page:
    """A page that is put together section by section."""

    title: str
    """The title, in the window and above the content."""
    sections: list[Html] = field(default_factory=list)
    """The sections so far."""

    def add(self, title: str, *content: object) -> None:
        """Add a section, if it has any content."""
        if any(content):
            anchor = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
            self.sections.append(element("section", element("h2", title), *content, id=anchor))

    def render(self, *, interactive: bool = False) -> str:
        """The file. interactive: with a field that filters rows, and columns that sort on a click."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        script = ""
        if interactive:
            digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
            policy += f"; script-src 'sha256-{digest}'"
            script = f"<script>{_SCRIPT}</script>"
        search = '<input id="filter" type="search" placeholder="Filter names" aria-label="Filter names">' if interactive else ""
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escaped(self.title)}</title>'
            f"<style>{_STYLE}</style></head>\n<body><main><h1>{escaped(self.title)}</h1>{search}\n"
            + "\n".join(self.sections)
            + f"\n</main>{script}</body></html>\n"
        )


# A drawing in a notebook has the same colours.
COLOURS = """
:root,.reshard{--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d1d9e0;--soft:#f3f5f8;--a:#2563ab;--b:#93bce8;--c:#b3541e;--d:#3d7d52;--e:#8a4f9e;
--bad:#b42318}
@media(prefers-color-scheme:dark){:root,.reshard{--bg:#14181d;--fg:#e4e8ec;--dim:#98a2ad;--line:#333b45;--soft:#1d232a;--a:#6aa5e6;--b:#2f5480;
--c:#e0905c;--d:#6fbf8a;--e:#c08fd4;--bad:#ff8a7a}}
.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}.d{fill:var(--d)}.e{fill:var(--e)}.bad{fill:var(--bad)}.soft{fill:var(--soft)}
.line{stroke:var(--line);fill:none}.curve{stroke:var(--a);fill:none;stroke-width:2}
svg text{fill:var(--dim);font:11px ui-monospace,monospace}svg{max-width:100%;height:auto;display:block}
"""

_STYLE = (
    COLOURS
    + """
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.35rem;margin:0 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--line);padding-bottom:.3rem}
p{margin:.5rem 0;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
code,td,summary{font-family:ui-monospace,monospace;font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;min-width:40%}caption{text-align:left;color:var(--dim);padding:.3rem 0}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
th{font-weight:600;font-size:13px}.n{text-align:right;font-variant-numeric:tabular-nums}
details{margin-left:1rem}section>details{margin-left:0}summary{cursor:pointer;padding:.12rem 0}
.name{display:inline-block;min-width:20rem}.leaf{margin-left:2.1rem;padding:.12rem 0;font:13px ui-monospace,monospace}
summary .more,.leaf .more{color:var(--dim)}
.bar{display:inline-block;width:7rem;height:.65rem;background:var(--soft);vertical-align:middle}
.bar span{display:block;height:100%;background:var(--a)}
.dim{color:var(--dim)}.error{color:var(--bad);font-weight:600}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-.1rem}
input{font:inherit;padding:.3rem .6rem;width:100%;max-width:24rem;background:var(--bg);color:var(--fg);border:1px solid var(--line)}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}[hidden]{display:none!important}
@media(max-width:560px){
.name{min-width:0!important}dl{grid-template-columns:1fr}dt{margin-top:.4rem}.bar{width:4rem}main{padding:1rem .7rem}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444}details>*{display:block}main{max-width:none}}
"""
)

_SCRIPT = """
const box=document.getElementById('filter');
box.addEventListener('input',()=>{const word=box.value.toLowerCase();
for(const row of document.querySelectorAll('tbody tr,.leaf'))row.hidden=!!word&&!row.textContent.toLowerCase().includes(word);
for(const part of document.querySelectorAll('details'))if(word)part.open=true});
for(const head of document.querySelectorAll('th'))head.addEventListener('click',()=>{
const body=head.closest('table').tBodies[0],at=head.cellIndex,up=head.dataset.up!=='1';head.dataset.up=up?'1':'0';
const value=row=>{const text=row.cells[at].textContent.replaceAll(',',''),n=parseFloat(text);return isNaN(n)?text:n};
[...body.rows].sort((x,y)=>{const a=value(x),b=value(y);return(a<b?-1:a>b?1:0)*(up?1:-1)}).forEach(row=>body.append(row))});
"""
