"""The index of an adapter: its files are read as those of a Hugging Face folder, and its tensors belong to an adapter."""

from __future__ import annotations

from dataclasses import replace

from reshard.adapter.format import Hints
from reshard.index.index import Index
from reshard.storage.files import Files

from .. import read as hf


def read(files: Files, hints: Hints) -> Index:
    """The index. Raises CheckpointError if a file is missing, or the files contradict each other."""
    index = hf.read_folder(files, hints)
    tensors = tuple(replace(tensor, kind="adapter") for tensor in index.tensors)
    return replace(index, format="peft", facts=replace(index.facts, producer="peft"), tensors=tensors)
