"""Mistakes: what was done to a tensor so that it has these elements instead of the right ones.

Each finder gets the wrong elements and the right ones and returns a sentence about a mistake that explains every bit, or None. A tensor is
a table of rows (its first axis), and of columns (its second). Wrong rows are looked up among the right rows of all tensors of the same
layer: whatever was permuted, interleaved, exchanged or copied, the answer is where each row came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Block
from reshard.geometry.dtypes import F32, DType, from_torch

_NARROWER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def value_mistakes(wrong: Block, right: Block, dtype: DType) -> list[str]:
    """The mistakes in single values that explain a part of a tensor: a cast too many, or a one added or subtracted. A mistake explains the
    tensor if it explains every part."""
    if not dtype.floating:
        return []
    texts = []
    for name in _NARROWER:
        narrow = from_torch(name, where="mistake")
        if narrow.name != dtype.name and np.array_equal(cast(cast(right, dtype, narrow), narrow, dtype), wrong):
            texts.append(f"equal after a cast to {name} and back: one cast too many")
    values, exact = _numbers(wrong, dtype), _numbers(right, dtype)
    for step, text in ((1.0, "has one added"), (-1.0, "has one subtracted")):
        if np.array_equal(cast((exact + np.float32(step)).view(F32.word), F32, dtype), wrong) or np.array_equal(
            cast((values - np.float32(step)).view(F32.word), F32, dtype), right
        ):
            texts.append(f"{text}: a norm that one side stores minus one")
    return texts


def _numbers(words: Block, dtype: DType) -> npt.NDArray[np.float32]:
    numbers: npt.NDArray[np.float32] = cast(words, dtype, F32).view(np.float32)
    return numbers


def shape_mistake(wrong: Block, right: Block) -> str | None:
    """A mistake that may change the shape: a transposed matrix, rows of padding too many or too few."""
    if wrong.ndim == 2 and wrong.shape == right.shape[::-1] and np.array_equal(wrong, right.T):
        return "transposed"
    if wrong.ndim and wrong.shape[1:] == right.shape[1:] and wrong.shape[0] != right.shape[0]:
        rows = min(len(wrong), len(right))
        more = wrong if len(wrong) > len(right) else right
        if np.array_equal(wrong[:rows], right[:rows]) and not more[rows:].any():
            padding = f"{abs(len(wrong) - len(right)):,} rows of zeros too {'many' if more is wrong else 'few'}"
            return f"{padding} at the end: padded to {len(wrong):,} rows instead of {len(right):,}"
    return None


def row_mistake(name: str, wrong: Block, right: Mapping[str, Callable[[], Block]]) -> str | None:
    """Where the rows of a tensor came from, if each is a row of one of the right tensors.

    right: by name, what reads the tensors of the same layer whose rows are as long, this one included. One of them is in memory at a time.
    """
    names = list(right)
    places = _looked_up(wrong, list(right.values()), preferred=names.index(name))
    if places is None:
        return None
    owners, rows, counts = places
    if (owners == names.index(name)).all():
        return _moved(rows, counts[names.index(name)])
    return _mixed([names[i] for i in owners], rows)


def column_mistake(wrong: Block, right: Block) -> str | None:
    """As `row_mistake`, for the columns of a matrix."""
    if wrong.ndim != 2 or wrong.shape != right.shape:
        return None
    columns = _looked_up(np.ascontiguousarray(wrong.T), [lambda: np.ascontiguousarray(right.T)], preferred=0)
    text = None if columns is None else _moved(columns[1], right.shape[1])
    return text and text.replace("row", "column")


def stale_part(wrong: Block, right: Block) -> tuple[int, int, int] | None:
    """(axis, part, parts) if the tensors differ in one part of an axis alone, such as that of one rank; None if they do not."""
    for axis in range(min(wrong.ndim, 2)):
        different = (wrong != right).any(axis=tuple(i for i in range(wrong.ndim) if i != axis))
        at = np.flatnonzero(different)
        for parts in (2, 4, 8, 16, 32, 64):
            size = wrong.shape[axis] // parts
            if not len(at) or size < 1 or wrong.shape[axis] % parts or at[0] // size != at[-1] // size:
                break
            part = int(at[0]) // size
            # The smallest part that holds all differences is that of the rank, if most of it differs.
            if 2 * len(at) > size:
                return axis, part, parts
    return None


def _looked_up(
    wrong: Block, right: Sequence[Callable[[], Block]], *, preferred: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]] | None:
    """For each row of `wrong`, an equal row of the right tensors: the tensor's number, the row in it, and how many rows each tensor has.
    None if some row has no equal. right: what reads the tensors; one is in memory at a time."""
    if wrong.ndim < 2 or not wrong.size:
        return None
    digests = [_row_digests(read()) for read in right]
    places: dict[bytes, tuple[int, int]] = {}
    for number in sorted(range(len(right)), key=lambda candidate: candidate != preferred):
        for row, digest in enumerate(digests[number]):
            places.setdefault(digest, (number, row))
    # A row that stayed where it was is not moved, even if another row is equal to it.
    own = dict(enumerate(digests[preferred]))
    rows_of_right = [(preferred, row) if own.get(row) == digest else places.get(digest) for row, digest in enumerate(_row_digests(wrong))]
    if None in rows_of_right:
        return None
    owners, rows = np.array(rows_of_right, np.int64).T
    return owners, rows, list(map(len, digests))


def _row_digests(block: Block) -> list[bytes]:
    """A digest of each row."""
    rows = np.ascontiguousarray(block).reshape(len(block), -1).view(np.uint8)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def _moved(order: npt.NDArray[np.int64], count: int) -> str | None:
    """What happened to the rows of one tensor. order: for each row, the right row that stands there."""
    identity = np.arange(len(order))
    if len(order) == count and np.array_equal(order, identity):
        return None
    for text, expected in _known_orders(len(order)):
        if np.array_equal(order, expected):
            return text
    size = _block_size(order)
    blocks = (order[::size] // size).tolist()
    listed = ", ".join(map(str, blocks[:16])) + (", ..." if len(blocks) > 16 else "")
    if len(set(blocks)) < len(blocks):
        return f"its {len(blocks)} blocks of {size} rows are copies of the right blocks {listed}: heads are copied to the wrong places"
    return f"its {len(blocks)} blocks of {size} rows are permuted: {listed}" if size > 1 else "its rows are permuted"


def _known_orders(count: int) -> Iterator[tuple[str, Any]]:
    """Orders of rows that have a name."""
    rows = np.arange(count)
    yield "its rows are reversed", rows[::-1]
    for parts in (count_of_parts for count_of_parts in range(2, min(count, 1025)) if count % count_of_parts == 0):
        if 2 * parts <= count:
            yield f"its {parts} parts are interleaved row by row", rows.reshape(parts, -1).T.reshape(-1)
        if count // parts % 2 == 0 and count // parts > 2:
            heads = rows.reshape(parts, 2, -1)
            yield (
                f"the halves of each of {parts} heads are interleaved: the rotary order of another library",
                heads.swapaxes(1, 2).reshape(-1),
            )
            pairs = rows.reshape(parts, -1, 2)
            yield (
                f"the pairs of each of {parts} heads are laid out as halves: the rotary order of another library",
                pairs.swapaxes(1, 2).reshape(-1),
            )


def _block_size(order: npt.NDArray[np.int64]) -> int:
    """The largest size of blocks that stay together."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    size = len(order)
    for number in (*breaks.tolist(), *order[np.append(0, breaks)].tolist()):
        size = math.gcd(size, number)
    return max(size, 1)


def _mixed(owners: Sequence[str], rows: npt.NDArray[np.int64]) -> str:
    """Rows that come from several tensors: which, and how."""
    names = list(dict.fromkeys(owners))
    if len(names) == 1:
        same = np.array_equal(rows, np.arange(len(rows)))
        return f"holds {names[0]}" if same else f"holds rows of {names[0]}"
    changes = sum(a != b for a, b in pairwise(owners))
    how = "interleaved row by row" if changes == len(owners) - 1 else f"in {changes + 1} runs"
    return f"holds rows of {' and '.join(names)}, {how}"
