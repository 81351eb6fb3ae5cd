"""reshard hub: any checkpoint as a Hugging Face repository, an S3 bucket and a page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from reshard.pages.sections import Verbatim

from ... import options
from ...invocation import current
from ...replies import show_sections

if TYPE_CHECKING:
    from reshard.doors.hub import Hub


@options.command(
    "hub",
    "reshard hub step-1000 --name my-org/llama-step-1000 --model llama-3-8b",
    "reshard hub step-1000 --to vllm --tp 8",
    "reshard hub runs/7 --to hf --dtype bf16",
    "reshard hub base policy --name my-org/base --name my-org/policy --port 9000",
    has_json=False,
)
@options.checkpoint("sources", nargs=-1, required=True, metavar="CKPT|RUN...")
@click.option("--name", multiple=True, metavar="ORG/NAME", help="What clients call it; once for each source (default: local/FOLDER).")
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="The port; 0 for a free one.")
@click.option(
    "--bind",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Listen there. Another address than the loopback needs a token: RESHARD_HUB_TOKEN, or one that is made and shown once.",
)
@options.target(required=False)
@options.selection("Serve")
@options.format_name
@options.model
def command(sources: tuple[str, ...], to: str | None, **given: Any) -> None:
    """Serve checkpoints in another format, without converting them: every byte is computed when a client reads it.

    The server speaks the protocol of the Hugging Face Hub (set HF_ENDPOINT), that of S3 (path style), and serves plain files and a page
    for browsers, on one port. --to takes several formats with commas between them (default: hf). The steps of RUN are revisions, and new
    ones appear when they are complete. Names that are not announced do not exist for clients.

    The bytes are those that `reshard convert` writes. If a source changes while it is served, reading it becomes an error. Ctrl-C ends
    the server.
    """
    from reshard.doors.hub import TOKEN, hub

    given = {name: value for name, value in given.items() if value is not None}
    metrics = current().metrics
    served = hub(sources, to=(to or "hf").split(","), **given)
    metrics.label(target=served.url, format=to or "hf")
    show_sections([Verbatim("\n".join(_lines(served)), ours=True)])
    if served.is_made:
        sys.stderr.write(f"The token of this server, shown once: {TOKEN}={served.access.token}\n")
    sys.stdout.flush()
    try:
        served.serve()
    finally:
        served.close()
        metrics.record(bytes_served=served.sent, requests=served.requests)


def _lines(served: Hub) -> list[str]:
    """What is served, and commands to copy. They name the variable of the token, and not the token."""
    names = ", ".join(served.catalogue.by_name)
    return [f"{served.url} serves {names}", "", *(f"  {program:12}  {line}" for program, line in served.lines())]
