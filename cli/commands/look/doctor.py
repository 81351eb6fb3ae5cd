"""reshard doctor: is a checkpoint healthy?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document, to_json
from reshard.pages.sections import Rows

from ... import options
from ...invocation import current
from ...progress import working
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.health.findings import Report


fail_on_option = click.option(
    "--fail-on", metavar="ID,...", default="", help="Exit with 1 for these findings, too: ids, or `warning` or `info`."
)
"""Of every command that reports findings: the exit code is 1 if one is an error, and this option names more."""


@options.command("doctor", "reshard doctor step-1000", "reshard doctor step-1000 --deep --since step-900", "reshard doctor --list")
@options.checkpoint("checkpoint", required=False)
@click.option("--deep", is_flag=True, help="Also read all tensors once, and the checksums of zip files.")
@click.option("--since", metavar="CKPT", help="An earlier save of the same run: find what never moved. Reads the weights of both.")
@fail_on_option
@click.option("--list", "list_kinds", is_flag=True, help="List all findings with their meaning, and stop.")
@options.format_name
@options.model
@options.effort
@options.page
def command(checkpoint: str | None, fail_on: str, list_kinds: bool, **given: Any) -> Reply:
    """Check that CHECKPOINT is complete, consistent and plausible.

    Without --deep no weight is read, and the check costs about what `inspect` costs. The exit code is 1 if there is an error, or a finding
    that --fail-on names.
    """
    import reshard
    from reshard.health.findings import SEVERITIES

    if list_kinds:
        return _kinds()
    if checkpoint is None:
        raise click.UsageError("Missing argument 'CHECKPOINT'.", click.get_current_context())
    metrics = current().metrics
    metrics.label(target=checkpoint)
    words = named_findings(fail_on)
    with working("doctor", _bytes_to_read(checkpoint, given), given) as effort:
        report = reshard.doctor(checkpoint, **given, **effort)
    metrics.label(format=report.format)
    metrics.record(bytes_read=report.nbytes, tensors=report.tensors)
    for severity in SEVERITIES:
        metrics.record(severity, findings=report.count(severity))
    return report_reply(report, words)


def named_findings(text: str) -> tuple[str, ...]:
    """The words of --fail-on. Raises RequestError for one that is neither an id nor a severity."""
    from reshard.health.findings import check_fail_on

    words = tuple(word.strip() for word in text.split(",") if word.strip())
    check_fail_on(words)
    return words


def report_reply(report: Report, fail_on: Iterable[str]) -> Reply:
    """The findings. fail_on: those that end with the exit code 1 besides errors."""
    from reshard.pages.reports import report_sections

    return Reply(document(report), report_sections(report), 1 if report.fails(fail_on) else 0, brief=True)


def _bytes_to_read(checkpoint: str, given: dict[str, Any]) -> int:
    """About the bytes that are read, for the progress bar: the size of the files."""
    from pathlib import Path

    root = Path(checkpoint)
    if not (given["deep"] or given["since"]) or not root.is_dir():
        return 0
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def _kinds() -> Reply:
    """All kinds of findings."""
    from reshard.health.findings import KINDS

    rows = [(kind.id, kind.severity, kind.text.replace("`", "")) for kind in KINDS.values()]
    return Reply({"findings": to_json(KINDS.values())}, [Rows(("id", "severity", "meaning"), rows)])
