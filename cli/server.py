"""What a live server holds, compared with a checkpoint: as lines, and as a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.geometry.quantities import plural

from .tables import show

if TYPE_CHECKING:
    from reshard.verbs.digests import ServerComparison

# Names of one kind that are printed; --json prints all.
_MOST = 8


def server_document(result: ServerComparison) -> dict[str, Any]:
    """The comparison with stable keys."""
    return {
        "equal": result.equal,
        "matching": result.matching,
        "renamed": result.renamed,
        "different": result.keys("values"),
        "missing": result.keys("missing"),
        "not_comparable": result.not_comparable,
    }


def show_server(result: ServerComparison, server: str = "the server") -> None:
    """Print the verdict and the names."""
    different, missing = result.keys("values"), result.keys("missing")
    found = result.matching + len(result.renamed)
    counts = f"{plural(found, 'parameter')} equal, {len(different):,} different, {len(missing):,} missing"
    other = f", {len(result.not_comparable):,} not comparable" if result.not_comparable else ""
    show(f"{server} holds {'these' if result.equal else 'other'} weights: {counts}{other}")
    for title, keys in (("different", different), ("missing", missing), ("not comparable", result.not_comparable)):
        for key in keys[:_MOST]:
            show(f"  {title:<14}  {key}")
        if len(keys) > _MOST:
            show(f"  {title:<14}  and {len(keys) - _MOST:,} more")
    if result.renamed:
        show(f"  note            {plural(len(result.renamed), 'parameter')} under another name of the same parameter")
    for note in result.notes:
        show(f"  note            {note}")
