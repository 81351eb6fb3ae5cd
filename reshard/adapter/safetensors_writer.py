"""A safetensors file that is to be written: its header, and where each tensor lies behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.containers import safetensors
from reshard.geometry.stored import StoredTensor
from reshard.plans.layout import PlacedTensor, TargetFile

# transformers and the engines look for it: whose tensors these are.
_METADATA = {"format": "pt"}


def framed(path: str, stored: Iterable[StoredTensor], ranks: Mapping[str, int] | None = None) -> TargetFile:
    """A file that holds those tensors. ranks: for whom it is, if for somebody in particular."""
    # Wide elements first keeps every tensor aligned to its element size (what the safetensors library does as well).
    ordered = sorted(stored, key=lambda each: -each.dtype.itemsize)
    frame = safetensors.frame(((each.name, each.dtype, each.shape) for each in ordered), _METADATA)
    placed = tuple(PlacedTensor(each, entry.byte_offset) for each, entry in zip(ordered, frame.entries, strict=True))
    return TargetFile(path, frame.nbytes, ((0, frame.header),), placed, ranks or {})
