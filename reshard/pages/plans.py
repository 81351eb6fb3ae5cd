"""Plans, described once: what would be written, for whom, and what is cast, filled or dropped on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.geometry.quantities import plural
from reshard.health.model_files import missing_in_target
from reshard.pages.checkpoints import Fact, dropped_facts
from reshard.pages.sections import Drawing, Facts, Head, Rows, Section
from reshard.pages.texts import count_text, nbytes_text
from reshard.plans import summary
from reshard.plans.layout import LeftFile, left_by_kind

if TYPE_CHECKING:
    from reshard.engine.destinations.forecast import StoreForecast
    from reshard.health.findings import Finding
    from reshard.plans.plan import Plan

# Copied files that a terminal shows.
_MOST_COPIES = 20
CHECKED = "has exactly one source; every source tensor is used or listed as skipped"


def plan_sections(plan: Plan, stores: Sequence[StoreForecast] = ()) -> Iterator[Section]:
    """A plan. stores: what a conversion will ask of stores."""
    totals, ranks, layout = plan.totals(), summary.ranks(plan), plan.layout
    title = f"{plan.source.format} -> {layout.format} for {layout.parallel}"
    read, written = nbytes_text(totals.read), nbytes_text(totals.written)
    model, elements = plan.content.model, sum(route.target.elements for route in plan.routes if route.target.kind == "weight")
    named = f"{model.architecture.model_type}, {count_text(elements)} parameters: " if model else ""
    tiles = [
        ("source", plan.source_files.root),
        ("tensors", totals.tensors),
        ("files", totals.files),
        ("read", read),
        ("written", written),
        ("ranks", len(ranks)),
    ]
    yield Head(named + title, "plan", "proven", facts=tiles)
    yield from (f"{title}: {plural(totals.tensors, 'tensor')} into {plural(totals.files, 'file')}", "")
    rows = [
        (
            " ".join(f"{name} {number}" for name, number in rank.ranks.items()) or "-",
            rank.files[0] + (f" (+{len(rank.files) - 1})" if len(rank.files) > 1 else ""),
            nbytes_text(rank.nbytes),
            rank.tensors,
            *map(_range, (rank.layers, rank.query_heads, rank.kv_heads, rank.vocabulary)),
            rank.padding_rows,
        )
        for rank in ranks
    ]
    headings = ("rank", "file", "bytes", "tensors", "layers", "query heads", "KV heads", "vocabulary", "padding rows")
    yield from (Rows(headings, rows, "Ranks", optional=(8, 3, 7, 4)), "")
    parts = f"{nbytes_text(totals.copied)} copied, {nbytes_text(totals.filled)} filled, {nbytes_text(totals.framing)} of framing"
    copied = ", ".join(sidecar.path for sidecar in layout.sidecars)
    yield Facts(
        [
            ("read", read + (f", and {nbytes_text(totals.compared)} of replicas to compare" if totals.compared else "")),
            ("write", f"{written}: {parts}"),
            *(("store", _requests(store)) for store in stores),
            *cast_facts(plan),
            *dropped_facts(plan.drops),
            *left_facts(layout.left),
            *missing_facts(missing_in_target(plan)),
            ("copy", copied and f"unchanged: {copied}"),
            ("note", layout.notes),
            ("checked", f"every output byte {CHECKED}"),
        ]
    )
    yield Drawing("Who holds what", "value", (plan,))
    yield Drawing("Who reads from whom", "transfers", (plan,))


def copies_section(copies: Mapping[str, int]) -> Section:
    """The files of a pipeline that would be copied beside its new component."""
    rows = [(path, nbytes_text(nbytes)) for path, nbytes in copies.items()]
    total = f"copied byte for byte: {plural(len(rows), 'file')}, {nbytes_text(sum(copies.values()))}"
    return Rows(("copied file", "bytes"), rows, "Copied files", limit=_MOST_COPIES, hint="; --json lists all", notes=[total])


def _requests(store: StoreForecast) -> list[str]:
    done = [(store.reads, "read", store.read), (store.writes, "write", store.written)]
    return [f"{store.url}: about {plural(count, 'request')} to {verb} {nbytes_text(nbytes)}" for count, verb, nbytes in done if nbytes]


def cast_facts(plan: Plan) -> list[Fact]:
    """One fact for each pair of element types."""
    return [("cast", f"{plural(number, 'tensor')} from {before} to {after}") for before, after, number in summary.casts(plan)]


def missing_facts(findings: Iterable[Finding]) -> list[Fact]:
    """One fact for each thing that the target's engines will miss."""
    return [("missing", f"{finding.detail}; {finding.do[0].lower()}{finding.do[1:]}") for finding in findings]


def left_facts(files: Collection[LeftFile]) -> list[Fact]:
    """One fact that counts what lies beside the source's weights and is not carried."""
    by_kind = left_by_kind(files)
    entries = by_kind.pop("header-entry", 0)
    counts = ", ".join(plural(number, kind.replace("-", " ")) for kind, number in by_kind.items())
    of_headers = [plural(entries, "header entry", "header entries")] if entries else []
    left = [*([f"{plural(len(files) - entries, 'file')}: {counts}"] if by_kind else []), *of_headers]
    return [("left", f"{'; '.join(left)}; --json --full names each")] if left else []


def _range(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "-"
    return str(pair[0]) if pair[1] - pair[0] == 1 else f"{pair[0]}..{pair[1] - 1}"
