"""reshard doctor: is a checkpoint healthy?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document, to_json
from reshard.geometry.quantities import plural

from ... import options
from ...invocation import current
from ...json_output import show_json
from ...progress import working
from ...tables import nbytes_text, show, show_table

if TYPE_CHECKING:
    from reshard.health.findings import Finding, Report

# Findings of one id that are printed; --json prints all.
_MOST = 8


@options.command("doctor", "reshard doctor step-1000", "reshard doctor step-1000 --deep --since step-900", "reshard doctor --list")
@options.checkpoint("checkpoint", required=False)
@click.option("--deep", is_flag=True, help="Also read all tensors once, and the checksums of zip files.")
@click.option("--since", metavar="CKPT", help="An earlier save of the same run: find what never moved. Reads the weights of both.")
@click.option("--fail-on", metavar="ID,...", default="", help="Exit with 1 for these findings, too: ids, or `warning` or `info`.")
@click.option("--list", "list_kinds", is_flag=True, help="List all findings with their meaning, and stop.")
@options.format_name
@options.model
@options.effort
@options.page
@options.as_json
def command(checkpoint: str | None, fail_on: str, list_kinds: bool, as_json: bool, **given: Any) -> None:
    """Check that CHECKPOINT is complete, consistent and plausible.

    Without --deep no weight is read, and the check costs about what `inspect` costs. The exit code is 1 if there is an error, or a finding
    that --fail-on names.
    """
    import reshard
    from reshard.health.findings import SEVERITIES, check_fail_on

    page = options.page_of(given)
    if list_kinds:
        _show_kinds(as_json)
        return
    if checkpoint is None:
        raise click.UsageError("Missing argument 'CHECKPOINT'.", click.get_current_context())
    metrics = current().metrics
    metrics.label(target=checkpoint)
    words = tuple(word.strip() for word in fail_on.split(",") if word.strip())
    check_fail_on(words)
    with working("doctor", _bytes_to_read(checkpoint, given), given) as effort:
        report = reshard.doctor(checkpoint, **given, **effort)
    metrics.label(format=report.format)
    metrics.record(bytes_read=report.nbytes, tensors=report.tensors)
    for severity in SEVERITIES:
        metrics.record(severity, findings=report.count(severity))
    page.write(lambda pages: pages.report_page(report))
    if as_json:
        show_json(document(report))
    else:
        show_report(report)
    click.get_current_context().exit(1 if report.fails(words) else 0)


def _bytes_to_read(checkpoint: str, given: dict[str, Any]) -> int:
    """About the bytes that are read, for the progress bar: the size of the files."""
    from pathlib import Path

    root = Path(checkpoint)
    if not (given["deep"] or given["since"]) or not root.is_dir():
        return 0
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def show_report(report: Report) -> None:
    read = f", {nbytes_text(report.nbytes)} read" if report.nbytes else ""
    show(f"{report.path}: {report.counts_text()}; {plural(report.tensors, 'tensor')}, {plural(report.files, 'file')}{read}")
    if current().log.quiet:
        return
    by_id: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_id.setdefault(finding.id, []).append(finding)
    for id, findings in by_id.items():
        show()
        show(f"{findings[0].severity}  {id}")
        for finding in findings[:_MOST]:
            show(f"  {_place(finding)}{finding.detail}")
        if len(findings) > _MOST:
            show(f"  and {len(findings) - _MOST:,} more; --json lists all")
        if advice := dict.fromkeys(finding.do for finding in findings if finding.do):
            show(f"  {'. '.join(text.rstrip('.') for text in list(advice)[:2])}.")


def _place(finding: Finding) -> str:
    """The tensor, the file and the rank of a finding, as a prefix of its sentence."""
    places = [finding.tensor, f"in {finding.file}" if finding.tensor and finding.file else finding.file]
    rank = f" (rank {finding.rank})" if finding.rank is not None else ""
    text = " ".join(place for place in places if place)
    return f"{text}{rank}: " if text else ""


def _show_kinds(as_json: bool) -> None:
    from reshard.health.findings import KINDS

    if as_json:
        show_json({"findings": to_json(KINDS.values())})
    else:
        show_table([(kind.id, kind.severity, kind.text.replace("`", "")) for kind in KINDS.values()], ("id", "severity", "meaning"))
