"""reshard export: single tensors as a file that other programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Facts
from reshard.pages.texts import shape_text

from ... import options
from ...progress import bar
from ...replies import Reply
from .cat import named, sliced

if TYPE_CHECKING:
    from reshard.engine.views import LazyTensor
    from reshard.storage.output_file import OutputFile


@options.command(
    "export",
    "reshard export step-1000 '*.norm.weight' -o norms.safetensors",
    "reshard export step-1000 model.embed_tokens.weight --slice :1000 -o rows.npy",
)
@options.checkpoint("checkpoint")
@click.argument("names", nargs=-1, required=True, metavar="NAME|GLOB...")
@options.output_file("--output -o", "The file to write: .safetensors, or .npy for one tensor.", required=True)
@click.option("--slice", "index", metavar="A:B,C:D", help="Only these indices of each axis, as in Python: 0:4,:8")
@click.option("--overwrite", is_flag=True, help="Overwrite an existing file.")
@options.format_name
@options.model
def command(checkpoint: str, names: tuple[str, ...], output: OutputFile, index: str | None, overwrite: bool, **given: Any) -> Reply:
    """Write tensors of CHECKPOINT, joined from all ranks, to one file, in blocks.

    In a .npy file bfloat16 and 8-bit floats stand as raw words, because numpy has no such types; the result says how to view them.
    """
    import reshard
    from reshard.verbs.look.export import export

    opened = reshard.open(checkpoint, **given)
    tensors: dict[str, LazyTensor] = {}
    for name in names:
        if any(sign in name for sign in "*?["):
            tensors.update(opened.tensors(name))
        else:
            tensors[name] = named(opened, name)
    chosen = [tensor if index is None else sliced(tensor, index) for tensor in tensors.values()]
    with bar(sum(tensor.nbytes for tensor in chosen), "export") as advance:
        nbytes = export(chosen, output, overwrite=overwrite, progress=advance)
    hint = _hint(str(output), chosen[0].dtype) if chosen else None
    rows = [{"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes} for tensor in chosen]
    made = {"path": str(output), "bytes": nbytes, "tensors": rows, "note": hint}
    what = f"{chosen[0].name} {chosen[0].dtype} {shape_text(chosen[0].shape)}" if len(chosen) == 1 else plural(len(chosen), "tensor")
    return Reply(made, [f"{output}: {what}, {nbytes_text(nbytes)}", Facts([("note", hint)])])


def _hint(output: str, dtype: Any) -> str | None:
    """How to read a type that numpy lacks."""
    from reshard.engine.casts import numpy_type

    if not output.endswith(".npy") or numpy_type(dtype).kind != "V":
        return None
    return f"numpy has no {dtype}: read it with np.load({output!r}).view(ml_dtypes.{dtype.torch})"
