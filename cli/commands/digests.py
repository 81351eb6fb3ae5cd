"""reshard digests: what a serving engine's ranks should hold, as digests; and whether a live server holds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..json_output import show_json
from ..progress import bar
from ..server import server_document, show_server
from ..tables import show

if TYPE_CHECKING:
    from reshard.adapter.serving_format.weight_checker import WeightChecker


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
    """Print the digest of every parameter of every rank, as the serving engine holds it after loading SOURCE.

    For vLLM the digest is the SHA-256, for SGLang its hash of 64 bits as on a GPU. With --json, it is printed in the engine's own form.

    With --compare, tell whether a live server holds these weights. FILE is what the server answers to
    `curl -X POST http://HOST:8000/weight_checker -H 'Content-Type: application/json' -d '{"action": "checksum"}'`; vLLM answers if it was
    started with VLLM_SERVER_DEV_MODE=1. SGLang's path is /weights_checker. The exit code is 1 if a parameter differs or is missing.
    `reshard verify SOURCE http://HOST:8000` asks the server itself.
    """
    import reshard
    from reshard.verbs.digests import compare_with_server, digests_of, likely_hash, parameters, weight_checker
    from reshard.verbs.request import OpenOptions

    checker = weight_checker(to)
    held = _answer(server, checker) if server else None
    opened = reshard.open(source, **options.take(given, OpenOptions))
    total = sum(tensor.nbytes for tensor in opened.index.tensors if tensor.kind == "weight")
    with bar(total, "digests", None) as advance:
        expected_parameters = parameters(reshard.plan(opened, to=to, **given))
        new_hash = likely_hash(expected_parameters, held or {}, checker)
        expected = digests_of(expected_parameters, new_hash, advance)
    result = compare_with_server(expected, held, checker) if held is not None else None
    if as_json:
        show_json({**checker.document(expected), "comparison": None if result is None else server_document(result)})
    elif result is None:
        for key, digest in expected.items():
            show(f"{digest}  {key}")
    else:
        show_server(result)
    click.get_current_context().exit(0 if result is None or result.equal else 1)


def _answer(path: str, checker: WeightChecker) -> dict[str, str]:
    """The digests in a server's answer. Raises CheckpointError if the file holds something else."""
    from reshard.adapter.serving_format.weight_checker import digests_in
    from reshard.storage.json_input import parsed
    from reshard.storage.system_calls import system_errors

    with system_errors("read", path):
        content = Path(path).read_bytes()
    try:
        answer = parsed(content)
    except ValueError:
        answer = None
    return digests_in(answer, [checker], where=path)
