"""The findings of `doctor` and `serve-check`, described once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard.geometry.quantities import grouped, plural
from reshard.pages.sections import Head, Note, Section
from reshard.pages.texts import nbytes_text

if TYPE_CHECKING:
    from reshard.health.findings import Finding, Report

# Findings of one kind that a terminal shows; --json lists all.
_MOST = 8


def report_sections(report: Report) -> Iterator[Section]:
    """The findings, the worst first, those of one kind together."""
    read = nbytes_text(report.nbytes) if report.nbytes else None
    tone = "bad" if report.fails() else "open" if report.findings else "good"
    tiles = [("format", report.format or "not known"), ("tensors", report.tensors), ("files", report.files), ("weights read", read)]
    yield Head(report.path, "health", report.counts_text(), tone, tiles)
    sizes = f"{plural(report.tensors, 'tensor')}, {plural(report.files, 'file')}{f', {read} read' if read else ''}"
    yield f"{report.path}: {report.counts_text()}; {sizes}"
    for id, findings in grouped(report.findings, lambda finding: finding.id).items():
        do = [*dict.fromkeys(finding.do for finding in findings if finding.do)][:2]
        advice = f"{'. '.join(text.rstrip('.') for text in do)}." if do else ""
        severity = findings[0].severity
        yield from ("", Note(f"{severity}  {id}", [*map(_text, findings)], severity, _MOST, "; --json lists all", advice))


def _text(finding: Finding) -> str:
    """The tensor, the file and the rank of a finding, and its sentence."""
    places = [finding.tensor, f"in {finding.file}" if finding.tensor and finding.file else finding.file]
    rank = f" (rank {finding.rank})" if finding.rank is not None else ""
    place = " ".join(place for place in places if place) + rank
    return f"{place}: {finding.detail}" if place else finding.detail
