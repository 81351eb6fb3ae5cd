"""Page: one self-contained HTML file. It needs no network and, unless asked to be interactive, holds no script: its Content-Security-Policy
forbids both. Names in checkpoints are hostile text and are escaped here, in one place. Equal content gives equal bytes."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import field

from reshard.errors import printable
from reshard.geometry.value import mutable

_LONGEST = 200
"""Characters of a name that are shown."""
_QUANTITY = re.compile(r"-|[-+]?[\d.,]+(e[-+]?\d+)?( ?%| [kMGTP]?i?B)?")
"""A number, or bytes, or a share."""


class Html(str):
    """Text that is HTML already. Any other text is escaped before it is put on a page."""

    __slots__ = ()


def escaped(text: object) -> Html:
    """A text as HTML; HTML as it is. Control characters are made visible, and a long text is cut."""
    if isinstance(text, Html):
        return text
    shown = printable(f"{text:,}" if isinstance(text, int) and not isinstance(text, bool) else str(text))
    return Html(html.escape(shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"))


def sentence(text: str) -> Html:
    """A text of reshard as HTML, whatever its length: it may hold names, which are made visible and escaped."""
    return Html(html.escape(printable(text)))


def said(text: str) -> Html:
    """The sentence above a picture; nothing for an empty one."""
    return element("p", sentence(text), class_="says") if text else Html("")


def joined(parts: Iterable[object]) -> Html:
    """Texts and HTML, one after the other."""
    return Html("".join(map(escaped, parts)))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` is the attribute class; an attribute that is None is left out."""
    words = (f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items() if value is not None)
    return Html(f"<{tag}{''.join(words)}>{joined(children)}</{tag}>")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str | None = None) -> Html:
    """A table. A column of numbers and quantities stands to the right, with its heading; other text wraps."""
    cells = [tuple(row) for row in rows]
    right = [bool(cells) and all(_is_quantity(row[i]) for row in cells) for i in range(len(headings))]
    kinds = ["n" if is_right else None for is_right in right]
    head = element("tr", *(element("th", heading, scope="col", class_=kind) for heading, kind in zip(headings, kinds, strict=True)))
    body = (element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in cells)
    parts = [element("caption", caption)] if caption else []
    return element("div", element("table", *parts, element("thead", head), element("tbody", *body)), class_="wide", tabindex="0")


def _is_quantity(cell: object) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and not isinstance(cell, Html) and _QUANTITY.fullmatch(cell) is not None)


def folded(summary: object, *children: object, is_open: bool = False, **attributes: object) -> Html:
    """A part that can be unfolded, by keyboard too, without a script. attributes: those of its summary."""
    return Html(f"<details{' open' if is_open else ''}>{element('summary', summary, **attributes)}{joined(children)}</details>")


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """A list of names and values."""
    return element("dl", *(part for name, shown in rows for part in (element("dt", name), element("dd", _whole(shown)))))


def _whole(shown: object) -> object:
    return sentence(shown) if isinstance(shown, str) and not isinstance(shown, Html) else shown


def legend(*keys: tuple[str, str]) -> Html:
    """What colours mean. keys: (class of the colour, meaning)."""
    shown = (element("span", element("span", class_="key", style=f"background:var(--{colour})"), meaning) for colour, meaning in keys)
    return element("p", *shown, class_="legend")


def meter(share: float) -> Html:
    """A bar for a share of 0 to 1."""
    width = f"{100 * min(max(share, 0.0), 1.0):.4g}"
    return Html(f'<span class="bar" role="img" aria-label="{width} %"><span style="width:{width}%"></span></span>')


@mutable
class Page:
    """A page that is put together section by section."""

    title: str
    """The title of the window."""
    head: Html = Html("")
    """What stands above all sections."""
    sections: list[tuple[str, str, Html]] = field(default_factory=list)
    """(anchor, title, content) of the sections so far."""
    origin: str = ""
    """What made the page, and when."""

    def add(self, title: str, *content: object) -> None:
        """Add a section, if it has any content."""
        if any(content):
            anchor = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in title.lower())
            self.sections.append((anchor, title, element("section", element("h2", title), *content, id=anchor)))

    def render(self, *, interactive: bool = False) -> str:
        """The file. interactive: with a field that filters rows, and columns that sort on a click."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        script = ""
        if interactive:
            digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
            policy += f"; script-src 'sha256-{digest}'"
            script = f"<script>{_SCRIPT}</script>"
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escaped(self.title)}</title>'
            f"<style>{_STYLE}</style></head>\n<body><main>{self.head}{self._navigation(interactive)}\n"
            + "\n".join(content for _, _, content in self.sections)
            + f"\n</main>{element('footer', self.origin) if self.origin else ''}{script}</body></html>\n"
        )

    def _navigation(self, interactive: bool) -> Html:
        search = Html('<input id="filter" type="search" placeholder="Filter names" aria-label="Filter names">') if interactive else ""
        links = [element("a", title, href=f"#{anchor}") for anchor, title, _ in self.sections] if len(self.sections) > 2 else []
        return element("nav", search, *links, aria_label="Sections") if links or search else Html("")


# A drawing in a notebook has the same colours.
COLOURS = """
:root,.reshard{--bg:#fff;--fg:#16202b;--dim:#5b6875;--line:#dde3ea;--soft:#f2f5f9;--a:#2466b0;--b:#a3c6ec;--c:#c2571a;--d:#2f855a;--e:#8a4f9e;
--bad:#b42318;--good:#1f7a4d;--open:#9a6700}
@media(prefers-color-scheme:dark){:root,.reshard{--bg:#11161c;--fg:#e3e9ef;--dim:#97a3b0;--line:#2b343e;--soft:#1a212a;--a:#69a7ec;--b:#2f527c;
--c:#e58f58;--d:#63c08d;--e:#c595d8;--bad:#ff8a7a;--good:#6fd09c;--open:#e0b252}}
.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}.d{fill:var(--d)}.e{fill:var(--e)}.bad{fill:var(--bad)}.soft{fill:var(--soft)}
.line{stroke:var(--line);fill:none}.limit{stroke:var(--bad);fill:none;stroke-dasharray:4 3}.curve{stroke:var(--a);fill:none;stroke-width:2}
svg text{fill:var(--dim);font:11px ui-monospace,monospace}svg{max-width:100%;height:auto;display:block}
svg path{vector-effect:non-scaling-stroke}
.draw{display:grid;grid-template-columns:fit-content(40%) minmax(0,1fr);gap:0 .7rem}
.draw span{display:block;font:11px/18px ui-monospace,monospace;color:var(--dim)}
.labels{min-width:0}.labels span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.marks{position:relative;height:18px}.marks span{position:absolute;transform:translateX(-50%)}
.bars{grid-template-columns:max-content minmax(4rem,44rem) 1fr;row-gap:.35rem}
@media(max-width:640px){.marks .roomy{display:none}
.bars{grid-template-columns:max-content minmax(0,1fr)}.bars svg+span{grid-column:1/3;margin-bottom:.4rem}}
"""

_STYLE = (
    COLOURS
    + """
*{box-sizing:border-box}html{scroll-padding-top:3.2rem}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.55 system-ui,sans-serif}
main,footer{max-width:1280px;margin:0 auto;padding:0 2rem}
header{padding:2.2rem 0 1.2rem}
.kicker{display:flex;gap:.7rem;align-items:center;margin:0 0 .3rem;color:var(--dim);font-size:.8rem;letter-spacing:.06em;
text-transform:uppercase}
.verdict{padding:.1rem .6rem;border-radius:1rem;font-weight:600;letter-spacing:0;text-transform:none;border:1px solid currentColor}
.good{color:var(--good)}.verdict.bad,.error{color:var(--bad)}.open{color:var(--open)}.error{font-weight:600}
h1{font-size:1.7rem;line-height:1.25;margin:0;overflow-wrap:anywhere;font-weight:650;letter-spacing:-.01em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1px;margin:1.3rem 0 0;
border:1px solid var(--line);border-radius:10px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--line);padding:.7rem .9rem}.tiles dt{font-size:.78rem}
.tiles dd{font-size:1.12rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.next{display:flex;gap:.8rem;align-items:baseline;margin:1rem 0 0;max-width:none}.next .dim{flex:none}
.next code{background:var(--soft);border-radius:6px;padding:.35rem .7rem;overflow-wrap:anywhere;user-select:all}
nav{position:sticky;top:0;z-index:1;display:flex;gap:1.1rem;align-items:center;padding:.55rem 0;margin:.4rem 0 0;background:var(--bg);
border-bottom:1px solid var(--line);overflow-x:auto;white-space:nowrap;font-size:.87rem}
nav a{color:var(--dim);text-decoration:none}nav a:hover{color:var(--a)}
section{padding:1.6rem 0 .4rem}h2,h3,dt{overflow-wrap:anywhere}h2{font-size:1.12rem;margin:0 0 .8rem;font-weight:650}
h3{font-size:.95rem;margin:1.2rem 0 .5rem;font-weight:600}
p{margin:.5rem 0;overflow-wrap:anywhere;max-width:60rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1.4rem;margin:0}dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
code,td,.row,summary{font-family:ui-monospace,monospace;font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;min-width:min(100%,34rem)}caption{text-align:left;color:var(--dim);padding:.3rem 0}
th,td{text-align:left;padding:.32rem 1.4rem .32rem 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere;
min-width:3rem}
th{font-weight:600;font-size:12.5px;color:var(--dim);white-space:nowrap}td:last-child,th:last-child{padding-right:0}
tbody tr:hover td{background:var(--soft)}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
summary{cursor:pointer;list-style:none}summary::-webkit-details-marker{display:none}
summary::before{content:"▸";display:inline-block;width:1rem;color:var(--dim)}details[open]>summary::before{content:"▾"}
.row{display:grid;grid-template-columns:minmax(0,26rem) 7rem minmax(0,1fr);gap:0 1rem;align-items:center;padding:.14rem 0}
.row:hover{background:var(--soft)}
summary.row::before{display:none}.row .name{overflow-wrap:anywhere;padding-left:calc(var(--l,0)*1.1rem + 1rem);text-indent:-1rem}
summary.row .name::before{content:"▸";display:inline-block;width:1rem;text-indent:0;color:var(--dim)}
details[open]>summary.row .name::before{content:"▾"}div.row .name::before{content:"";display:inline-block;width:1rem}
.more{color:var(--dim)}
.finding{border:1px solid var(--line);border-left:4px solid var(--open);border-radius:8px;padding:.7rem 1rem;margin:.7rem 0}
.finding.is-error{border-left-color:var(--bad)}.finding.is-info{border-left-color:var(--a)}
.finding p{margin:.25rem 0}.finding .at{font:13px ui-monospace,monospace;color:var(--dim)}
.bar{display:inline-block;width:100%;min-width:4rem;max-width:9rem;height:.6rem;background:var(--soft);border-radius:3px;overflow:hidden;
vertical-align:middle}
.bar span{display:block;height:100%;background:var(--a)}
.dim{color:var(--dim)}
.says{font-size:1.02rem;margin:0 0 1rem}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .35rem 0 0;vertical-align:-.08rem;border-radius:2px}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.3rem;color:var(--dim);font-size:.87rem;margin:.6rem 0}
input{font:inherit;padding:.25rem .6rem;width:15rem;min-width:9rem;background:var(--bg);color:var(--fg);border:1px solid var(--line);
border-radius:6px}
footer{color:var(--dim);font-size:.82rem;padding-top:2.5rem;padding-bottom:2.5rem;overflow-wrap:anywhere}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}[hidden]{display:none!important}
@media(max-width:640px){
main,footer{padding-left:1rem;padding-right:1rem}header{padding-top:1.3rem}h1{font-size:1.3rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.45rem}.tiles dd{margin:0}
.row{grid-template-columns:minmax(0,1fr) 4rem;padding:.3rem 0}.row .more{grid-column:1/3;padding-left:calc(var(--l,0)*1.1rem + 1rem)}
.next{display:block}.next code{display:block;margin-top:.3rem}
th,td{padding-right:.9rem}td:not(.n){min-width:6.5rem}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444}nav{display:none}main{max-width:none}}
"""
)

_SCRIPT = """
const box=document.getElementById('filter');
box.addEventListener('input',()=>{const word=box.value.toLowerCase();
for(const row of document.querySelectorAll('tbody tr,div.row,.finding'))row.hidden=!!word&&!row.textContent.toLowerCase().includes(word);
for(const part of document.querySelectorAll('details'))if(word)part.open=true});
for(const head of document.querySelectorAll('th'))head.addEventListener('click',()=>{
const body=head.closest('table').tBodies[0],at=head.cellIndex,up=head.dataset.up!=='1';head.dataset.up=up?'1':'0';
const value=row=>{const text=row.cells[at].textContent.replaceAll(',',''),n=parseFloat(text);return isNaN(n)?text:n};
[...body.rows].sort((x,y)=>{const a=value(x),b=value(y);return(a<b?-1:a>b?1:0)*(up?1:-1)}).forEach(row=>body.append(row))});
"""
