"""What tensors have in common that are alike but for the numbers in their names: one name for all, and how they are cut.

Checks look at each cut once, and tables show alike tensors as one row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.index.index import Tensor

_NUMBER = re.compile(r"\d+")


def name_pattern(name: str) -> str:
    """A name with its numbers replaced."""
    return _NUMBER.sub("#", name)


def cut_of(tensor: Tensor) -> tuple[object, ...]:
    """The shape of a tensor and its boxes, in a form that is equal for tensors that are cut in the same way."""
    shards = tensor.shards
    primary = shards.primary
    return tensor.shape, shards.offsets.tobytes(), shards.sizes.tobytes(), None if primary is None else primary.tobytes()


def folded_name(names: Sequence[str]) -> str:
    """One name for several: a number that varies becomes {first..last}, or {a,b} if its values are not consecutive."""
    rows = [_NUMBER.findall(name) for name in names]
    words = _NUMBER.split(names[0])
    text = words[0]
    for column, word in zip(zip(*rows, strict=True), words[1:], strict=True):
        text += _range_text(sorted({int(number) for number in column})) + word
    return text


def _range_text(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers[:6])) + (",..." if len(numbers) > 6 else "") + "}"
