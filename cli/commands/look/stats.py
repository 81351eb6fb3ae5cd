"""reshard stats: how are the values of each tensor distributed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import to_json
from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Facts, Rows
from reshard.pages.texts import sparkline

from ... import options
from ...progress import working
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.verbs.look.stats import TensorStatistics

# By which --sort puts a tensor first.
_ORDERS = {
    "name": lambda row: row.name,
    "nan": lambda row: -(row.nan + row.inf),
    "zeros": lambda row: -row.zeros / max(row.elements, 1),
    "largest": lambda row: -max(abs(row.smallest or 0), abs(row.largest or 0)),
    "std": lambda row: -(row.deviation or 0),
}


@options.command("stats", "reshard stats step-1000", "reshard stats step-1000 '*q_proj*' --sort std", "reshard stats step-1000 --json")
@options.checkpoint("checkpoint")
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@click.option("--optimizer", is_flag=True, help="Also the optimizer state.")
@click.option("--sort", type=click.Choice(["model", *_ORDERS]), default="model", show_default=True, help="The order of the rows.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(0), metavar="N", help="Show N tensors; 0 for all.")
@options.format_name
@options.model
@options.effort
def command(checkpoint: str, globs: tuple[str, ...], optimizer: bool, sort: str, limit: int, **given: Any) -> Reply:
    """Show how the values of CHECKPOINT's tensors are distributed.

    For every tensor, or those whose names match a GLOB: the smallest and the largest value, mean, standard deviation, zeros, NaN, infinite
    values, rows of one value, and a histogram. Every tensor is read once, in blocks. Quantized tensors are measured as stored, without
    their scales.
    """
    import reshard
    from reshard.opening.keywords import OpenOptions
    from reshard.verbs.look.stats import wanted

    opened = reshard.open(checkpoint, **options.take(given, OpenOptions))
    total = sum(tensor.nbytes for tensor in wanted(opened, globs, optimizer=optimizer))
    with working("stats", total, given) as effort:
        report = reshard.stats(opened, globs, optimizer=optimizer, **effort)
    rows = [*report]
    if sort in _ORDERS:
        rows.sort(key=_ORDERS[sort])
    checks = report.source_checks
    made = {"path": checkpoint, "bytes": total, "tensors": to_json(rows), "source_checks": to_json(checks)}
    strange = sum(1 for row in rows if row.nan or row.inf)
    line = f"{plural(len(rows), 'tensor')}, {nbytes_text(total)}: {strange or 'none'} with NaN or infinite values"
    return Reply(made, [line, "", _table(rows, limit), Facts([("note", checks.notes())])])


def _table(rows: list[TensorStatistics], limit: int) -> Rows:
    shown = rows[: limit or None]
    cells = [
        (
            row.name if row.kind in ("weight", "buffer", "adapter", "other") else f"{row.name} ({row.kind})",
            row.dtype,
            *(_number(value) for value in (row.smallest, row.largest, row.mean, row.deviation)),
            f"{100 * row.zeros / row.elements:.3g} %" if row.elements else "-",
            row.nan,
            row.inf,
            row.constant_rows,
            sparkline(row.histogram),
        )
        for row in shown
    ]
    headings = ("tensor", "dtype", "min", "max", "mean", "std", "zeros", "NaN", "inf", "constant rows", "histogram")
    return Rows(headings, cells, optional=(9, 6, 10, 1), hidden=len(rows) - len(shown), hint="; --limit 0 shows all")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
