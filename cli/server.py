"""What a live server holds, compared with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from .replies import Reply

if TYPE_CHECKING:
    from reshard.verbs.server_comparison import ServerComparison

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


def server_reply(result: ServerComparison, server: str, made: Mapping[str, Any], *, allowed: bool) -> Reply:
    """The comparison. made: its document. allowed: whether it may be unknown if there is a difference, where nothing is different."""
    from reshard.pages.comparisons import server_sections

    is_right = result.equal or (allowed and result.equal is None and result.found)
    return Reply(made, server_sections(result, server), 0 if is_right else 1, brief=True)
