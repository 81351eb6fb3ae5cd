"""Checkpoints on disk for the engine's tests: a tensor's boxes in files of any layout, made and read back by plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Shards

GAP = b"\xee" * 5  # between pieces: nothing is aligned, and what is read too far shows


def array(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Random bits, as the words that the engine moves them as."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return data.view(dtype.word).reshape(shape)


def store(
    root: Path, name: str, values: np.ndarray, dtype: DType, boxes: Sequence[Box], *, files: int = 2, transposed: bool = False
) -> Tensor:
    """The boxes of `values` in a few files below `root`, each box row-major, or with its axes reversed; by numpy alone."""
    root.mkdir(parents=True, exist_ok=True)
    pieces = []
    contents = [bytearray() for _ in range(files)]
    for i, box in enumerate(boxes):
        content = contents[i % files]
        content += GAP
        part = values[box.index]
        order = tuple(reversed(range(part.ndim))) if transposed else tuple(range(part.ndim))
        stored = part.transpose(order)
        strides = tuple(np.array(row_major(stored.shape))[np.argsort(order)].tolist()) if part.ndim else ()
        pieces.append(Piece(box, Extent(f"{name}-{i % files}.bin", len(content), strides, dtype)))
        content += np.ascontiguousarray(stored).tobytes()
    for i, content in enumerate(contents):
        (root / f"{name}-{i}.bin").write_bytes(bytes(content) + GAP)
    return Tensor(name, dtype, values.shape, "weight", Shards.of(pieces))


def index(root: Path, tensors: Sequence[Tensor]) -> Index:
    files = tuple(StoredFile(path.name, path.stat().st_size) for path in sorted(root.iterdir()))
    return Index("made", tuple(tensors), files, RunFacts())


def read_piece(root: Path, piece: Piece) -> np.ndarray:
    """A piece's elements, straight from the file by numpy's own strides."""
    data = (root / piece.extent.path).read_bytes()
    itemsize = piece.extent.dtype.itemsize
    in_bytes = tuple(stride * itemsize for stride in piece.extent.strides)
    return np.ndarray(piece.box.sizes, piece.extent.dtype.word, data, piece.extent.byte_offset, in_bytes).copy()


def assembled(root: Path, tensor: Tensor) -> np.ndarray:
    """The whole tensor from its pieces, by numpy alone."""
    values = np.zeros(tensor.shape, tensor.dtype.word)
    for piece in tensor.pieces():
        values[piece.box.index] = read_piece(root, piece)
    return values
