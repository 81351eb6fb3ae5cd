"""reshard digests: what a serving engine's ranks should hold, as digests; and whether a live server holds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..progress import bar, weight_bytes
from ..replies import Reply
from ..server import allow_not_comparable, server_document, server_reply

if TYPE_CHECKING:
    from reshard.adapter.serving_format.weight_checker import WeightChecker


@options.command(
    "digests",
    "reshard digests step-1000 --to vllm --tp 8 --json > baseline.json",
    "reshard digests step-1000 --to vllm --tp 8 --compare server.json",
)
@options.checkpoint("source")
@click.option("--compare", "server", metavar="FILE", help="Compare with the answer of a server's weight checker.")
@allow_not_comparable
@options.target(of_engines=True)
@options.selection("Hash")
@options.format_name
@options.model
def command(source: str, to: str, server: str | None, allow_not_comparable: bool, **given: Any) -> Reply:
    """Print the digest of every parameter of every rank, as the serving engine holds it after loading SOURCE.

    For vLLM the digest is the SHA-256, for SGLang its hash of 64 bits as on a GPU. With --json, it is printed in the engine's own form.

    With --compare, tell whether a live server holds these weights. FILE is what the server answers to
    `curl -X POST http://HOST:8000/weight_checker -H 'Content-Type: application/json' -d '{"action": "checksum"}'`; vLLM answers if it was
    started with VLLM_SERVER_DEV_MODE=1. SGLang's path is /weights_checker. The exit code is 1 if a parameter differs, is missing,
    or cannot be compared. `reshard verify SOURCE http://HOST:8000` asks the server itself.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import OpenOptions
    from reshard.verbs.digests import expected_parameters, weight_checker
    from reshard.verbs.server_comparison import compare_with_server

    if allow_not_comparable and server is None:
        raise RequestError("--allow-not-comparable is for a server", do="Give its answer with --compare FILE, or leave the option out")
    checker = weight_checker(to)
    held = _answer(server, checker) if server else None
    opened = reshard.open(source, **options.take(given, OpenOptions))
    with bar(weight_bytes(opened), "digests") as advance:
        expected = expected_parameters(reshard.plan(opened, to=to, **given), held or {}, checker, advance)
    result = compare_with_server(expected, held, checker) if held is not None else None
    made = {**checker.document(expected.digests), "comparison": None if result is None else server_document(result)}
    if result is None:
        return Reply(made, (f"{digest}  {key}" for key, digest in expected.digests.items()))
    return server_reply(result, "the server", made, allowed=allow_not_comparable)


def _answer(path: str, checker: WeightChecker) -> dict[str, str]:
    """The digests in a server's answer. Raises CheckpointError if the file holds something else."""
    from reshard.storage.json_input import parsed
    from reshard.storage.system_calls import system_errors

    with system_errors("read", path):
        content = Path(path).read_bytes()
    try:
        answer = parsed(content)
    except ValueError:
        answer = None
    return checker.digests_in(answer, where=path)
