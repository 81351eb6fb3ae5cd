"""The card of a conversion: a section of README.md that says what the files beside it were made from, and how to check that.

    README.md of the source, as it was carried
    <!-- reshard:card -->
    ## How these files were made
    ...
    <!-- /reshard:card -->

Only what stands between the two marks is reshard's: the next conversion replaces it, and leaves the rest as it is. Equal conversions have
equal sections: it holds no time and no path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.geometry.quantities import nbytes_text, plural
from reshard.plans.manifest import CHECKSUMS, README
from reshard.secrets import masked

if TYPE_CHECKING:
    from reshard.plans.layout import Sidecar
    from reshard.plans.plan import Plan

_BEGIN, _END = b"<!-- reshard:card -->", b"<!-- /reshard:card -->"
_LONGEST = 200


def has_card(readme: bytes) -> bool:
    """Whether a README.md has a section of reshard."""
    return _section(readme) is not None


def kept_readme(sidecars: Iterable[Sidecar], edited: bytes | None) -> bytes:
    """The README.md that a card is added to: that of the source, unless somebody has edited the one of the target around its card, or has
    written one where the source has none."""
    carried = next((sidecar.content for sidecar in sidecars if sidecar.path == README), b"")
    return edited if edited is not None and (has_card(edited) or not carried) else carried


def with_card(readme: bytes, card: str) -> bytes:
    """README.md with the card in place of its section of reshard; without one, below everything else."""
    section = _BEGIN + b"\n" + card.encode() + b"\n" + _END
    if place := _section(readme):
        start, stop = place
        return readme[:start] + section + readme[stop:]
    gap = b"" if not readme else b"\n" if readme.endswith(b"\n") else b"\n\n"
    return readme + gap + section + b"\n"


def card(plan: Plan, record: Mapping[str, Any], fingerprint: str, *, checksums: bool) -> str:
    """The section of a conversion. record: what reshard.json says. checksums: whether SHA256SUMS is written."""
    totals = plan.totals()
    written = f"{plural(totals.tensors, 'tensor')}, {nbytes_text(totals.written)} in {plural(totals.files, 'file')}"
    sizes = [f"{axis} {record[axis]}" for axis in ("tp", "pp", "ep", "dp") if (record.get(axis) or 1) > 1]
    rows = [
        *((name, _source(source)) for name, source in _sources(record)),
        ("format", ", ".join([f"`{record['format']}`", *sizes])),
        ("holds", written),
        ("fingerprint", f"`{fingerprint}`"),
        *(("left out", _left_out(drop)) for drop in record["dropped"] or ()),
        ("made by", f"reshard {record['versions']['reshard']}"),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in [("", ""), ("---", "---"), *rows])
    proof, commands = _proof(plan), _commands(plan, checksums=checksums)
    width = max(len(command) for command, _ in commands)
    listed = "\n".join(f"{command:<{width}}  # {why}" for command, why in commands)
    return f"## How these files were made\n\n{table}\n\n{proof}\n\nTo check it, in this folder:\n\n```sh\n{listed}\n```"


def _section(readme: bytes) -> tuple[int, int] | None:
    """Where the section of reshard begins and ends, its marks included; None if there is none."""
    end = readme.rfind(_END)
    start = readme.rfind(_BEGIN, 0, end) if end >= 0 else -1
    return (start, end + len(_END)) if start >= 0 else None


def _sources(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the weights come from, by the name of its row."""
    combined = record["combined"]
    yield from (("source", source) for source in (combined["sources"] if combined else [record["source"]]))
    if record["adapter"]:
        yield "adapter", record["adapter"]
    yield from (("later step", delta) for delta in record["deltas"])


def _source(source: Mapping[str, Any]) -> str:
    """A source in words: the name of its folder, and not where that lay."""
    words = [_code(masked(str(source.get("path") or "")).rstrip("/").rpartition("/")[2])]
    if source.get("format"):
        words.append(f"format `{source['format']}`")
    if source.get("step") is not None:
        words.append(f"step {source['step']}")
    if source.get("fingerprint"):
        words.append(f"fingerprint `{source['fingerprint']}`")
    return ", ".join(words)


def _left_out(drop: Mapping[str, Any]) -> str:
    return f"{drop['tensors']:,} {drop['kind']}, {nbytes_text(drop['bytes'])}: {_plain(drop['reason'])}"


def _proof(plan: Plan) -> str:
    """What was proven before a byte was written, and what was done to the values."""
    kinds = zip(_changed(plan), ("cast to another element type", "computed: decoded, encoded, merged or averaged"), strict=True)
    done = ", and ".join(f"{plural(len(routes), 'tensor')} {what}" for routes, what in kinds if routes)
    return (
        "Proven before the first byte was written: each byte of a weight here comes from one place of the source, and each weight of "
        "the source is here, or named above as left out. The values are bit by bit those of the source"
        f"{f', except {done}' if done else ''}."
    )


def _changed(plan: Plan) -> tuple[Sequence[object], Sequence[object]]:
    """The tensors that are cast alone, and those that are computed."""
    computed = [route for route in plan.routes if route.source.is_computed]
    return [route for route in plan.routes if route.is_cast and not route.source.is_computed], computed


def _commands(plan: Plan, *, checksums: bool) -> list[tuple[str, str]]:
    """The commands that check the folder, and what each tells."""
    cast, computed = _changed(plan)
    commands = [("reshard verify .", "each byte is as it was written, no file is missing")]
    if not plan.content.selection.optimizer:
        commands.append(("reshard fingerprint .", "the fingerprint above: whose weights these are"))
    if not computed:
        commands.append((f"reshard verify SOURCE .{' --cast' if cast else ''}", "the weights are those of SOURCE, a copy of the source"))
    if checksums:
        commands.append((f"sha256sum -c {CHECKSUMS}", "without reshard"))
    return commands


def _plain(text: str) -> str:
    """A text for a cell of a table: what Markdown or HTML would read as its own is escaped."""
    shown = " ".join(masked(text).split())[:_LONGEST]
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", shown)


def _code(text: str) -> str:
    """A name in a cell of a table, as code."""
    return "`" + re.sub(r"[`|\\\s]|[^\x20-\x7e\xa0-\uffff]", "_", text)[:_LONGEST] + "`"
