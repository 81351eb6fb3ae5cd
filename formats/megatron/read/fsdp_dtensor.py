"""Checkpoints of Megatron-FSDP, read: the distributed save without metadata.json, as keyed_tensors.py and named_groups.py read it."""

from __future__ import annotations

from dataclasses import replace

from reshard.adapter.format import Hints
from reshard.index.index import Index
from reshard.storage.files import Files

from . import distributed

check_values = distributed.check_values


def read(files: Files, hints: Hints) -> Index:
    """The index of the save. Raises what the reader of distributed saves raises."""
    return replace(distributed.read(files, hints), format="fsdp-dtensor")
