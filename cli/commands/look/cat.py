"""reshard cat: the values of one tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from reshard.pages.sections import Section, Verbatim
from reshard.pages.texts import shape_text

from ... import options
from ...console import width_of
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.engine.views import LazyTensor
    from reshard.opening.checkpoint import Checkpoint

# Without --slice, a larger tensor is shown as the first rows and columns.
_MOST_ELEMENTS, _CORNER = 1000, 8


@options.command("cat", "reshard cat step-1000 model.norm.weight", "reshard cat step-1000 model.embed_tokens.weight --slice 0:4,:8")
@options.checkpoint("checkpoint")
@click.argument("name")
@click.option("--slice", "index", metavar="A:B,C:D", help="Only these indices of each axis, as in Python: 0:4,:8 or 3,-8:")
@options.format_name
@options.model
def command(checkpoint: str, name: str, index: str | None, **given: Any) -> Reply:
    """Print the values of the tensor NAME of CHECKPOINT. Only the bytes of the slice are read.

    Without --slice, the first 8 indices of each axis of a large tensor are shown. Values of 16 and 8 bits are printed exactly.
    """
    import reshard

    opened = reshard.open(checkpoint, **given)
    base, bracket, part_of = name.removesuffix("]").partition("[")
    if index is None and bracket and name not in opened:  # name[0:2], as in Python
        name, index = base, part_of
    tensor = named(opened, name)
    chosen = index if index is not None else ",".join([f":{_CORNER}"] * len(tensor.shape)) if _is_large(tensor) else "..."
    part = sliced(tensor, chosen)
    values = _values(part)
    cells = {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "slice": chosen}
    shown = "" if chosen == "..." else f"[{chosen}]"
    line = f"{tensor.name}{shown}  {tensor.dtype} {shape_text(part.shape)}" + (f" of {shape_text(tensor.shape)}" if shown else "")
    return Reply(lambda: {**cells, "values": _json_values(values.tolist())}, _sections(line, values))


def _sections(line: str, values: Any) -> Iterator[Section]:
    import numpy as np

    yield line
    yield Verbatim(
        np.array2string(values, threshold=1_000_000, max_line_width=width_of(sys.stdout) or 120, precision=9, floatmode="unique")
    )


def named(opened: Checkpoint, name: str) -> LazyTensor:
    """The tensor of that name. Raises RequestError, with the nearest names, if there is none."""
    from reshard.errors import RequestError, choices

    if name not in opened:
        named_so = [known for known in opened if name in known]
        raise RequestError(f"no tensor is called {name!r}", do=choices(name, named_so or list(opened), most=3))
    return opened[name]


def sliced(tensor: LazyTensor, text: str) -> LazyTensor:
    """The slice that a text such as `0:4,:8` means. Raises RequestError for anything else."""
    from reshard.errors import RequestError

    try:
        return tensor[tuple(_index(word.strip()) for word in text.split(","))]
    except (ValueError, IndexError) as error:
        raise RequestError(
            f"--slice {text}: {error}", where=f"{tensor.name} {shape_text(tensor.shape)}", do="Use for example 0:4,:8"
        ) from None


def _index(word: str) -> Any:
    if word == "...":
        return ...
    numbers = [int(number) if number.strip() else None for number in word.split(":")]
    return slice(*numbers) if len(numbers) > 1 else numbers[0] if numbers[0] is not None else slice(None)


def _is_large(tensor: LazyTensor) -> bool:
    return math.prod(tensor.shape) > _MOST_ELEMENTS


def _values(part: LazyTensor) -> Any:
    """The values as an array that prints exactly: narrow floats as float32."""
    import numpy as np

    values = part.numpy()
    return values.astype(np.float32) if part.dtype.floating and part.dtype.itemsize < 4 else values


def _json_values(values: Any) -> Any:
    """JSON has no NaN, infinity and complex numbers: these become texts."""
    if isinstance(values, list):
        return [_json_values(value) for value in values]
    if isinstance(values, complex) or (isinstance(values, float) and not math.isfinite(values)):
        return str(values)
    return values
