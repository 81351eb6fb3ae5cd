"""reshard delta: write what changed between two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..json_output import show_json
from ..progress import weight_bytes, working
from ..tables import nbytes_text, show

if TYPE_CHECKING:
    from reshard.verbs.delta import DeltaResult


@options.command(
    "delta",
    "reshard delta step-1000 step-1100 delta-1100",
    "reshard delta step-1000+delta-1100 step-1200 delta-1200",
    "reshard delta hf-model trainer/global_step_100 delta --encoding overwrite --cast",
)
@click.argument("base")
@click.argument("new")
@click.argument("target")
@click.option(
    "--encoding",
    type=click.Choice(["xor", "overwrite"]),
    default="xor",
    show_default=True,
    help="Differences of all bytes, or positions and new bytes, which may be applied twice.",
)
@click.option("--cast", is_flag=True, help="Where element types differ, cast NEW's values to BASE's.")
@options.model
@options.effort
@options.as_json
def command(base: str, new: str, target: str, encoding: Any, cast: bool, as_json: bool, **given: Any) -> None:
    """Write what changed from the checkpoint BASE to NEW into the directory TARGET. They may have any formats and parallel sizes.

    The weights are compared under their canonical names. TARGET has the form that slime, miles and ModelExpress read: one zstd frame of
    each changed tensor in safetensors files, with an index. The index holds the fingerprints of both checkpoints, so that `reshard apply`
    refuses another base.
    """
    import reshard
    from reshard.requests.keywords import ModelOptions
    from reshard.requests.opening import open_both

    about_model = options.take(given, ModelOptions)
    a, b = open_both(base, new, **about_model)
    with working("delta", weight_bytes(b), given) as effort:
        found = reshard.delta(a, b, target, encoding=encoding, cast=cast, **effort)
    if as_json:
        show_json(found.to_json())
    else:
        _show(found)


def _show(found: DeltaResult) -> None:
    """How much changed, and how much smaller the delta is."""
    share = found.changed_elements / max(1, found.elements)
    smaller = f", {found.checkpoint_bytes / found.nbytes:,.0f} times smaller" if 2 * found.nbytes < found.checkpoint_bytes else ""
    show(f"{found.path}: version {found.version} of {found.base_version}, {found.encoding}")
    show(f"  changed   {found.changed_tensors:,} of {found.tensors:,} tensors, {found.changed_elements:,} elements ({share:.2%})")
    show(f"  size      {nbytes_text(found.nbytes)} for {nbytes_text(found.checkpoint_bytes)}{smaller}, in {found.seconds:.1f} s")
    show(f"  base      {found.base.root}")
    show(f"  result    {found.result.root}")
