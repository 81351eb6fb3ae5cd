"""Models of which only a layout and digests are kept (fixtures/learned): their weights follow from the names and shapes in the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.containers import safetensors
from reshard.geometry.dtypes import DType
from reshard.serving.learned.layout import LearnedLayout


def write_weights(layout: LearnedLayout, folder: Path) -> None:
    """Write the checkpoint tensors of a layout to model.safetensors. Every element is finite, and follows from the tensor's name."""
    entries = [(name, source.dtype, source.shape) for name, source in layout.source_entries.items()]
    entries.sort(key=lambda entry: -entry[1].itemsize)
    frame = safetensors.frame(entries, {"format": "pt"})
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(frame.header + b"".join(elements(*entry) for entry in entries))


def elements(name: str, dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The bytes of a tensor: the digest of its name, without the highest bit of the exponent."""
    count = math.prod(shape)
    words = np.frombuffer(hashlib.shake_256(name.encode()).digest(count * dtype.itemsize), dtype.word)
    return (words & np.asarray(~(1 << (8 * dtype.itemsize - 2)) & ((1 << 8 * dtype.itemsize) - 1), dtype.word)).tobytes()


def digest_of_rank(state: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest for everything that a rank holds. state: name -> dtype, shape and sha256 of a tensor's bytes."""
    lines = [f"{name} {each['dtype']} {list(each['shape'])} {each['sha256']}" for name, each in sorted(state.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
