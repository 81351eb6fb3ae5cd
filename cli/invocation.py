"""One run of the command line: what commands know about it besides their own options."""

from __future__ import annotations

import click

from reshard.geometry.value import value

from .logs import LogOptions
from .metrics import Metrics


@value
class Invocation:
    """One run of the command line."""

    arguments: list[str]
    """The command line with masked credentials, which `convert` records."""
    log: LogOptions
    """What it says about the log."""
    metrics: Metrics
    """What becomes known about the run."""


def current() -> Invocation:
    """The run to which the command belongs."""
    invocation = click.get_current_context().find_root().obj
    assert isinstance(invocation, Invocation)
    return invocation
