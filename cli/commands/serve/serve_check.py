"""reshard serve-check: will an engine take this folder?"""

from __future__ import annotations

from typing import Any

import click

from ... import options
from ...replies import Reply
from ..look.doctor import report_reply


@options.command(
    "serve-check", "reshard serve-check out", "reshard serve-check out --tp 8 --engine-version 0.32.0", "reshard serve-check hf --tp 16"
)
@options.checkpoint("checkpoint")
@click.option("--engine", metavar="FORMAT", help="The engine's format (default: that of CHECKPOINT; vllm for a Hugging Face folder).")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="The tensor-parallel size at which it will be served.")
@click.option("--pp", type=click.IntRange(1), metavar="N", help="The pipeline-parallel size at which it will be served.")
@click.option("--ep", type=click.IntRange(1), metavar="N", help="The expert-parallel size at which it will be served.")
@click.option("--engine-version", metavar="V", help="The engine's version (default: the newest that is known).")
@options.format_name
@options.model
@options.page
def command(checkpoint: str, **given: Any) -> Reply:
    """Check that an engine will take CHECKPOINT: files, config, tokenizer, and the names, shapes and sizes that the engine asks for.

    No weight is read, and neither the engine nor a GPU is needed. The exit code is 1 if there is an error or a warning.
    """
    import reshard

    return report_reply(reshard.serve_check(checkpoint, **given), ("warning",))
