"""The metadata of a part: which of its slices are which slices of the whole weight.

    local_global_slices_pairs   0,8,None|None,None,None#8,16,None|None,None,None;...
                                pairs with ; between them, # between the part's slices and the whole's, | between axes
    unsharded_shape             (32, 16)

Source: nanotron 0.4, parallel/parameters.py (SlicesPair) and serialize/metadata.py (TensorMetadata).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box

_SHAPE = re.compile(r"\((\d{1,15}(?:, \d{1,15})*),?\)")
_SLICE = re.compile(r"(?:(\d{1,15}),(\d{1,15})|None,None),(?:None|1)")


def placed(metadata: Mapping[str, str], shape: tuple[int, ...], path: str) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
    """The shape of the whole weight, and pairs of equal boxes: in the part, of shape `shape`, and in the whole.

    A file without metadata holds all of its weight.

    Raises: CheckpointError if the metadata cannot be read or do not fit the part.
    """
    if not metadata:
        return shape, [(Box.whole(shape), Box.whole(shape))]
    match = _SHAPE.fullmatch(metadata.get("unsharded_shape", ""))
    whole = tuple(map(int, match[1].split(", "))) if match else ()
    boxes = []
    for pair in metadata.get("local_global_slices_pairs", "").split(";"):
        local, _, of_whole = pair.partition("#")
        inside, outside = _box(local, shape), _box(of_whole, whole)
        if len(whole) != len(shape) or inside is None or outside is None or inside.sizes != outside.sizes:
            raise CheckpointError(
                f"its metadata {dict(metadata)!r:.200} do not say where its part of shape {list(shape)} belongs",
                where=path,
                do="Copy the file again",
            )
        boxes.append((inside, outside))
    return whole, boxes


def metadata_of(pairs: Iterable[tuple[Box, Box]], shape: tuple[int, ...], whole: tuple[int, ...], version: str) -> dict[str, str]:
    """The metadata of a part of shape `shape`. pairs: equal boxes, in the part and in the whole, of shape `whole`."""
    text = ";".join(f"{_slices(inside, shape)}#{_slices(outside, whole)}" for inside, outside in pairs)
    return {"version": version, "local_global_slices_pairs": text, "unsharded_shape": f"({', '.join(map(str, whole))})"}


def _slices(box: Box, shape: tuple[int, ...]) -> str:
    """The slices of an array of a shape that a box stands for."""
    axes = zip(box.offsets, box.stops, shape, strict=True)
    return "|".join("None,None,None" if (start, stop) == (0, size) else f"{start},{stop},None" for start, stop, size in axes)


def _box(text: str, shape: tuple[int, ...]) -> Box | None:
    """The box that slices of an array of a shape stand for; None if they cannot be read, or it is not inside."""
    matches = [_SLICE.fullmatch(axis) for axis in text.split("|")]
    if len(matches) != len(shape):
        return None
    offsets, sizes = [], []
    for match, length in zip(matches, shape, strict=True):
        start, stop = (0, length) if match is None or match[1] is None else (int(match[1]), int(match[2]))
        if match is None or not 0 <= start < stop <= length:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))
