"""reshard architectures: the models whose split over ranks is declared."""

from __future__ import annotations

import click

from . import options
from .tables import show, show_json


@click.command("architectures")
@options.as_json
def command(as_json: bool) -> None:
    """List the models whose split over ranks is declared, by the model_type of their configs."""
    from reshard.architecture import known_model_types

    found = known_model_types()
    show_json(list(found)) if as_json else show("\n".join(found))
