"""Words for shell completion: the names of formats and architectures."""

from __future__ import annotations

import click


def format_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Formats whose names begin so; for --to only those that can be written."""
    from reshard.adapter import registry

    return [name for name, found in registry.formats().items() if name.startswith(incomplete) and (found.can_write or param.name != "to")]


def architecture_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Declared model types whose names begin so."""
    from reshard.models.lookup import known_model_types

    return [name for name in known_model_types() if name.startswith(incomplete)]
