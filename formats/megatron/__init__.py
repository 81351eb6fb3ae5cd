"""Megatron-LM's legacy checkpoints (--ckpt-format torch): one torch.save file per model-parallel rank.

    layout/            names, fusions and splits of Megatron's tensors, its settings, its folders
    read/              from the files of both Megatron formats to an Index
    write/             from a model and parallel sizes to the files of both formats
    megatron_dist.py   the other format: distributed checkpoints

This module is loaded for every checkpoint, to detect the format. So it imports its reader and its writer when they are needed.

Measured on megatron-core 0.16.1 and 0.12.3 (fixtures/megatron, megatron_dist, megatron_versions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.errors import IncompleteError
from reshard.storage.files import Files

from .layout.save_folders import DISTRIBUTED_OPTIMIZER, LEGACY_WEIGHTS, TRACKER, find_legacy, find_save
from .options import OPTIONS

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target


class Megatron(Format):
    name = "megatron"
    summary = "Megatron-LM legacy: mp_rank_*/model_optim_rng.pt of tensor-, pipeline- and expert-parallel ranks"
    owns = (LEGACY_WEIGHTS, DISTRIBUTED_OPTIMIZER, TRACKER)
    refines = ("pt",)
    needs_vocabulary = True
    options = OPTIONS
    keeps_masters = True

    def detect(self, files: Files) -> str | None:
        return find_legacy(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.legacy import read_legacy

        folder = find_save(files)
        if folder is None:
            raise IncompleteError("there is no rank folder here, such as mp_rank_00, and no save, such as iter_0000001", where=files.root)
        return read_legacy(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.masters import check_masters

        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.legacy import lay_out_legacy

        return lay_out_legacy(content, target, companions)


FORMAT = Megatron()
