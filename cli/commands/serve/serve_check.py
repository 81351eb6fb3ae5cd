"""reshard serve-check: will an engine take this folder?"""

from __future__ import annotations

from typing import Any

import click

from ... import options
from ...replies import Reply
from ..look.doctor import fail_on_option, named_findings, report_reply


@options.command(
    "serve-check", "reshard serve-check out", "reshard serve-check out --tp 8 --engine-version 0.32.0", "reshard serve-check hf --tp 16"
)
@options.checkpoint("checkpoint")
@click.option("--engine", metavar="FORMAT", help="The engine's format (default: that of CHECKPOINT; vllm for a Hugging Face folder).")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="The tensor-parallel size at which it will be served.")
@click.option("--pp", type=click.IntRange(1), metavar="N", help="The pipeline-parallel size at which it will be served.")
@click.option("--ep", type=click.IntRange(1), metavar="N", help="The expert-parallel size at which it will be served.")
@click.option("--engine-version", metavar="V", help="The engine's version (default: the newest that is known).")
@fail_on_option
@options.format_name
@options.model
@options.page
def command(checkpoint: str, fail_on: str, **given: Any) -> Reply:
    """Check that an engine will take CHECKPOINT: files, config, tokenizer, and the names, shapes and sizes that the engine asks for.

    No weight is read, and neither the engine nor a GPU is needed. The exit code is 1 if there is an error, or a finding
    that --fail-on names.
    """
    import reshard
    from reshard.engine.events import event

    words = named_findings(fail_on)
    report = reshard.serve_check(checkpoint, **given)
    if report.fails(("warning",)) and not report.fails(words):
        event("old-exit", "a warning alone no longer ends with exit code 1, as before 0.3: --fail-on warning asks for that", level=30)
    return report_reply(report, words)
