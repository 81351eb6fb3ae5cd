"""reshard verify: do two checkpoints hold the same weights?"""

from __future__ import annotations

from typing import Any

import click

from reshard.geometry.quantities import plural

from .. import options
from ..json_output import show_json
from ..progress import bar
from ..tables import nbytes_text, show, table


@click.command("verify", cls=options.Command, examples=["reshard verify step-1000 out", "reshard verify step-1000 out --cast"])
@click.argument("left")
@click.argument("right")
@click.option("--cast", is_flag=True, help="Where element types differ, cast LEFT's values to RIGHT's before comparing.")
@options.selection
@options.model
@options.effort
@options.as_json
def command(left: str, right: str, cast: bool, as_json: bool, show_progress: bool | None, **given: Any) -> None:
    """Check that LEFT and RIGHT hold the same weights, bit by bit, whatever their layouts.

    Names, shapes, element types and values are compared, including replicas and padding. The exit code is 1 if they differ. If only one
    of them has a config.json, it applies to both.
    """
    import reshard
    from reshard.verbs.checkpoint import open_both
    from reshard.verbs.request import EffortOptions, ModelOptions, selection_of

    a, b = open_both(left, right, **options.take(given, ModelOptions))
    effort = options.take(given, EffortOptions)
    total = sum(tensor.nbytes for tensor in b.index.tensors if tensor.kind == "weight")
    with bar(total, "verify", show_progress) as advance:
        result = reshard.verify(a, b, cast=cast, selection=selection_of(given), **{**effort, "progress": advance})
    if as_json:
        show_json(
            {
                "equal": result.equal,
                "tensors": result.tensors,
                "bytes": result.nbytes,
                "differences": [{"name": d.name, "kind": d.kind, "detail": d.detail} for d in result.differences],
            }
        )
    elif result.equal:
        show(f"equal: {plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)}, every bit")
    else:
        show(f"different: {plural(len(result.differences), 'difference')} in {plural(result.tensors, 'common tensor')}")
        show(table([(d.name, d.kind, d.detail) for d in result.differences], ("tensor", "what", "how")))
    click.get_current_context().exit(0 if result.equal else 1)
