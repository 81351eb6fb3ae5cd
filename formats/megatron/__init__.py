"""Megatron-LM's legacy checkpoints (--ckpt-format torch): one torch.save file per model-parallel rank.

    layout/            names, fusions and splits of Megatron's tensors, its settings, its folders
    read/              from the files of both Megatron formats to an Index
    write/             from a model and parallel sizes to the files of both formats
    options.py         the options of both
    megatron_dist.py   the other format: distributed checkpoints

Measured on megatron-core 0.16.1 and 0.12.3 (fixtures/megatron, megatron_dist, megatron_versions).
"""

from __future__ import annotations

from typing import ClassVar

from reshard.adapter.format import Format, Option
from reshard.storage.files import Files

from .layout.save_folders import DISTRIBUTED_OPTIMIZER, LEGACY_WEIGHTS, TRACKER, find_legacy
from .options import OPTIONS


class Megatron(Format):
    name = "megatron"
    other_names: ClassVar[tuple[str, ...]] = ("megatron-lm",)
    summary = "Megatron-LM legacy: mp_rank_*/model_optim_rng.pt of tensor-, pipeline- and expert-parallel ranks"
    owns: ClassVar[tuple[str, ...]] = (LEGACY_WEIGHTS, DISTRIBUTED_OPTIMIZER, TRACKER)
    refines: ClassVar[tuple[str, ...]] = ("pt",)
    needs_vocabulary = True
    keeps_masters = True
    options: ClassVar[tuple[Option, ...]] = OPTIONS
    reader, writer = "read.legacy", "write.legacy"

    def detect(self, files: Files) -> str | None:
        return find_legacy(files)


FORMAT = Megatron()
