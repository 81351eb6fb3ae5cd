"""reshard verify: do two checkpoints hold the same weights?"""

from __future__ import annotations

from typing import Any

import click

from . import options
from .progress import bar
from .tables import nbytes_text, show, show_json, table


@click.command("verify")
@click.argument("left")
@click.argument("right")
@click.option("--cast", is_flag=True, help="Where element types differ, cast LEFT's values to RIGHT's before comparing.")
@options.selection
@options.model
@options.effort
@options.as_json
def command(
    left: str,
    right: str,
    cast: bool,
    model: str | None,
    vocab_size: int | None,
    architecture: str | None,
    workers: int | None,
    memory: int | None,
    shown: bool | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Check that LEFT and RIGHT hold the same weights, bit by bit, whatever their layouts.

    Names, shapes, element types and values, copies on several ranks and padding included. Exit code 1 if they differ. Where only one of
    them has a config.json, it speaks for both; --model gives one for those that have none.
    """
    import reshard
    from reshard.verbs.checkpoint import open_both

    a, b = open_both(left, right, model=model, vocab_size=vocab_size, architecture=architecture)
    total = sum(tensor.nbytes for tensor in b.index.tensors if tensor.kind == "weight")
    with bar(total, "verify", shown) as advance:
        result = reshard.verify(a, b, cast=cast, selection=options.selection_of(**asked), workers=workers, memory=memory, progress=advance)
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
        show(f"equal: {result.tensors} tensors, {nbytes_text(result.nbytes)}, every bit")
    else:
        show(f"different: {len(result.differences)} findings in {result.tensors} common tensors")
        show(table([(d.name, d.kind, d.detail) for d in result.differences], ("tensor", "what", "how")))
    click.get_current_context().exit(0 if result.equal else 1)
