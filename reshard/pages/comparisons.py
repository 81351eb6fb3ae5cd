"""Comparisons, described once: what `verify` found, and what `diff` measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.geometry.quantities import plural
from reshard.pages.sections import Drawing, Facts, Head, OnPage, Rows, Section
from reshard.pages.texts import nbytes_text

if TYPE_CHECKING:
    from reshard.engine.compare import Comparison, Difference
    from reshard.measures.changes import Change
    from reshard.signing.check import SignedComparison
    from reshard.verbs.look.diff import Diff
    from reshard.verbs.server_comparison import ServerComparison

# Names of one kind that a terminal shows of a server; --json prints all.
_MOST = 8


def comparison_sections(result: Comparison, title: str, record: str) -> Iterator[Section]:
    """The result, the differences, and what was not compared. record: what one checkpoint was compared with; empty for two."""
    yield _head(result, title)
    compared = f"{plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)}, every bit"
    if result.equal:
        others = ", and the other files" if record == "reshard.json" else ""
        yield f"as written: {compared}{others}" if record else f"equal: {compared}"
    else:
        of_what = f"from {record}" if record else f"in {plural(result.tensors, 'common tensor')}"
        yield f"different: {plural(len(result.differences), 'difference')} {of_what}"
        yield _differences(result.differences, "tensor or file" if record else "tensor")
    yield from _summary(result)


def signed_sections(result: SignedComparison, title: str) -> Iterator[Section]:
    """What was compared with a signature, the differences, and what was signed."""
    signed = result.statement
    verdict = "as signed" if result.equal else f"not as signed: {plural(len(result.differences), 'difference')}"
    yield Head(title, "signature", verdict, "good" if result.equal else "bad", [("files", len(signed.files) if signed else 0)])
    if result.equal:
        yield f"{verdict}: {result.compared}"
    else:
        yield from (verdict, _differences(result.differences, "file"))
    about = [("signed", str(signed)), ("fingerprint", signed.fingerprint)] if signed else []
    yield Facts([*about, ("key", result.key), ("note", result.notes)])


def diff_sections(result: Diff, title: str, beyond: Sequence[Change] | None, limit: int) -> Iterator[Section]:
    """What changed, by layer, role and tensor, and what cannot be compared. beyond: changes beyond the thresholds, if there are any."""
    changed, not_finite = result.largest(), [str(kind) for kind in result.not_finite()]
    total = result.total()
    measured = [
        ("tensors changed", len(changed)),
        ("elements changed", f"{100 * total.share:.3g} %"),
        ("relative L2", f"{total.relative:.3g}"),
        ("largest", f"{total.largest:.3g}"),
    ]
    yield _head(result, title, measured if result.changes else [], not_finite)
    yield from not_finite
    others = [difference for difference in result.differences if difference.kind != "values"]
    compared = f"{plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)} compared" if result.changes else "headers"
    outcome = f"{len(changed):,} of {plural(len(result.changes), 'tensor')} changed" if result.changes else "no weight was read"
    more = f"; {plural(len(others), 'difference')} in names, shapes or element types" if others else ""
    yield f"{'equal' if result.equal else 'different'}: {compared}; {outcome}{more}"
    if beyond is not None:
        yield f"beyond the threshold: {plural(len(beyond), 'tensor')}" + (f", such as {beyond[0].name}" if beyond else "")
    if result.changes:
        yield Drawing("Change by layer and role", "value", (result,))
    if changed:
        for name, rows in (("layer", result.by_layer()), ("role", result.by_role())):
            yield from _changes(name, [row for row in rows if row.changed], len(rows), limit)
        yield from _changes("tensor", changed, len(result.changes), limit)
        yield from _ulps(result.changes)
    if others:
        yield from ("", _differences(others, "tensor"))
    yield from _summary(result, not_finite)


def server_sections(result: ServerComparison, server: str = "the server") -> Iterator[Section]:
    """What a live server holds, compared with a checkpoint: the verdict and the names."""
    yield _head(result, server)
    yield result.verdict(server)
    named = [
        ("different", result.keys("values")),
        ("missing", result.keys("missing")),
        ("not comparable", result.not_comparable),
        ("unknown", result.unknown),
        ("version", [difference.detail for difference in result.differences if difference.kind == "version"]),
    ]
    renamed = f"{plural(len(result.renamed), 'parameter')} under another name of the same parameter" if result.renamed else None
    yield from (Facts(named, width=14, limit=_MOST), Facts([("note", renamed), ("note", result.notes)], width=14))
    yield OnPage(_differences(result.differences, "tensor"))


def _head(result: Comparison, title: str, measured: Sequence[tuple[str, object]] = (), not_finite: Sequence[str] = ()) -> Head:
    verdict = not_finite[0] if not_finite else _result(result)
    tiles = [("compared", plural(result.tensors, "tensor")), ("bytes", nbytes_text(result.nbytes)), *measured]
    return Head(title, "comparison", verdict, "good" if result.equal and not not_finite else "bad", tiles)


def _result(result: Comparison) -> str:
    return "equal" if result.equal else plural(len(result.differences), "difference")


def _summary(result: Comparison, not_finite: Sequence[str] = ()) -> Iterator[Section]:
    """The notes; on a page below the result."""
    notes = ("note", result.notes)
    yield from (Facts([notes], title=""), OnPage(Facts([("not finite", not_finite), ("result", _result(result)), notes])))


def _differences(differences: Sequence[Difference], first: str) -> Rows:
    return Rows((first, "what", "how"), [(row.name, row.kind, row.detail) for row in differences], "Differences")


def _changes(name: str, changes: Sequence[Change], number: int, limit: int) -> Iterator[Section]:
    """A table of changes. number: how many entries were compared."""
    from reshard.measures.changes import columns_of

    headings, rows = columns_of(name, changes)
    notes = [f"and {number - len(changes):,} without a change"] if number > len(changes) else []
    yield from ("", Rows(headings, rows, f"Change by {name}", (5, 4, 1), limit, hint="; `limit=0` shows all", notes=notes))


def _ulps(changes: Sequence[Change]) -> Iterator[Section]:
    """The histogram of ULPs of all tensors together."""
    from reshard.measures.changes import sum_of, ulp_range

    counts, rows = sum_of("", changes).ulps, []
    for number, count in enumerate(counts):
        first, last = ulp_range(number)
        if count:
            rows.append((str(first) if first == last else f"{first:,} to {last:,}", count, f"{100 * count / sum(counts):.3g} %"))
    yield from ("", Rows(("ULPs", "elements", "share"), rows, "ULPs")) if rows else ()
