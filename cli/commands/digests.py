"""reshard digests: what a serving engine's ranks should hold, as digests; and whether a live server holds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural

from .. import options
from ..json_output import show_json
from ..progress import bar
from ..tables import show

if TYPE_CHECKING:
    from reshard.verbs.digests import ServerComparison

# Names of one kind that are printed; --json prints all.
_MOST = 8


@click.command(
    "digests",
    cls=options.Command,
    examples=[
        "reshard digests step-1000 --to vllm --tp 8 --json > baseline.json",
        "reshard digests step-1000 --to vllm --tp 8 --compare server.json",
    ],
)
@click.argument("source")
@click.option("--compare", "server", metavar="FILE", help="Compare with the answer of a server's weight checker.")
@options.target()
@options.selection("Hash")
@options.format_name
@options.model
@options.as_json
def command(source: str, to: str, server: str | None, as_json: bool, **given: Any) -> None:
    """Print the SHA-256 of every parameter of every rank, as the serving engine holds it after loading SOURCE.

    With --compare, tell whether a live server holds these weights. FILE is what the server answers to
    `curl -X POST http://HOST:8000/weight_checker -H 'Content-Type: application/json' -d '{"action": "checksum"}'`; vLLM answers if it was
    started with VLLM_SERVER_DEV_MODE=1. The exit code is 1 if a parameter differs or is missing.
    """
    import reshard
    from reshard.verbs.digests import compare_with_server
    from reshard.verbs.request import OpenOptions

    held = _answer(server) if server else None
    opened = reshard.open(source, **options.take(given, OpenOptions))
    total = sum(tensor.nbytes for tensor in opened.index.tensors if tensor.kind == "weight")
    with bar(total, "digests", None) as advance:
        expected = reshard.digests(opened, to=to, progress=advance, **given)
    result = compare_with_server(expected, held) if held is not None else None
    if as_json:
        show_json({"action": "compare", "baseline": expected, "comparison": None if result is None else document(result)})
    elif result is None:
        for key, digest in expected.items():
            show(f"{digest}  {key}")
    else:
        _show(result)
    click.get_current_context().exit(0 if result is None or result.is_equal else 1)


def _answer(path: str) -> dict[str, str]:
    """The digests in a server's answer. Raises CheckpointError if the file holds something else."""
    import json

    from reshard.errors import CheckpointError
    from reshard.storage.system_calls import system_errors

    with system_errors("read", path):
        content = Path(path).read_bytes()
    try:
        document = json.loads(content)
        checksums = document.get("checksums", document.get("baseline"))
        return {str(key): str(digest) for key, digest in checksums.items()}
    except (ValueError, AttributeError):
        raise CheckpointError(
            "this is not the answer of a weight checker",
            where=path,
            why='It should be {"checksums": {name: digest}}',
            do="If the server answered 404, start it with VLLM_SERVER_DEV_MODE=1 in its environment, and ask again",
        ) from None


def document(result: ServerComparison) -> dict[str, Any]:
    """The comparison with stable keys."""
    return {
        "equal": result.is_equal,
        "matching": result.equal,
        "renamed": result.renamed,
        "different": result.different,
        "missing": result.missing,
        "not_comparable": result.not_comparable,
    }


def _show(result: ServerComparison) -> None:
    found = result.equal + len(result.renamed)
    verdict = "the server holds these weights" if result.is_equal else "the server holds other weights"
    show(f"{verdict}: {plural(found, 'parameter')} equal, {len(result.different):,} different, {len(result.missing):,} missing")
    for title, keys in (("different", result.different), ("missing", result.missing), ("not comparable", result.not_comparable)):
        for key in keys[:_MOST]:
            show(f"  {title:<14}  {key}")
        if len(keys) > _MOST:
            show(f"  {title:<14}  and {len(keys) - _MOST:,} more")
    if result.renamed:
        show(f"  note            {plural(len(result.renamed), 'parameter')} under another name of the same parameter")
