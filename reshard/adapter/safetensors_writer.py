"""A safetensors file, laid out: its header, and where each tensor lies after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.containers import safetensors
from reshard.geometry.stored import StoredTensor
from reshard.plans.layout import TargetFile
from reshard.plans.placed import PlacedTensor

# transformers and the serving engines look for it; "pt" stands for torch.
_METADATA = {"format": "pt"}


def framed(
    path: str, stored: Iterable[StoredTensor], ranks: Mapping[str, int] | None = None, *, metadata: Mapping[str, str] = _METADATA
) -> TargetFile:
    """A file that holds these tensors. ranks: the rank that loads the file, if only one does; see TargetFile. metadata: of the header."""
    # The widest element types come first, so that every tensor is aligned to its element size. The safetensors library does the same.
    ordered = sorted(stored, key=lambda tensor: -tensor.dtype.itemsize)
    frame = safetensors.frame(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), metadata)
    placed = tuple(PlacedTensor(tensor, entry.byte_offset) for tensor, entry in zip(ordered, frame.entries, strict=True))
    return TargetFile(path, frame.nbytes, ((0, frame.header),), placed, ranks or {})
