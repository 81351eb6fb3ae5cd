"""What a live server holds, compared with a checkpoint: as lines, and as a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural

from .invocation import current
from .tables import show

if TYPE_CHECKING:
    from reshard.verbs.server_comparison import ServerComparison

# Names of one kind that are printed; --json prints all.
_MOST = 8

allow_not_comparable = click.option(
    "--allow-not-comparable",
    is_flag=True,
    help="Exit with 0 if nothing is different and at least one parameter is equal, though others cannot be compared.",
)


def server_document(result: ServerComparison) -> dict[str, Any]:
    """The comparison with stable keys."""
    return {
        "equal": result.equal,
        "parameters": result.parameters,
        "matching": result.matching,
        "renamed": result.renamed,
        "different": result.keys("values"),
        "missing": result.keys("missing"),
        "not_comparable": result.not_comparable,
        "unknown": result.unknown,
        "bytes": result.total_nbytes,
        "compared_bytes": result.nbytes,
        "version": result.version,
        "fingerprint": result.fingerprint,
        "same_version": result.same_version,
    }


def exit_code(result: Any, *, allowed: bool) -> int:
    """0 if a Comparison found no difference; also if it cannot be told whether a server has one, where that is allowed."""
    return 0 if result.equal or (allowed and result.equal is None and result.found) else 1


def show_server(result: ServerComparison, server: str = "the server") -> None:
    """Print the verdict and the names."""
    show(result.verdict(server))
    if current().log.quiet:
        return
    for title, keys in (
        ("different", result.keys("values")),
        ("missing", result.keys("missing")),
        ("not comparable", result.not_comparable),
        ("unknown", result.unknown),
        ("version", [each.detail for each in result.differences if each.kind == "version"]),
    ):
        for key in keys[:_MOST]:
            show(f"  {title:<14}  {key}")
        if len(keys) > _MOST:
            show(f"  {title:<14}  and {len(keys) - _MOST:,} more")
    if result.renamed:
        show(f"  note            {plural(len(result.renamed), 'parameter')} under another name of the same parameter")
    for note in result.notes:
        show(f"  note            {note}")
