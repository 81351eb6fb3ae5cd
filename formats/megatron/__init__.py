"""Megatron-LM and Megatron-Core: legacy checkpoints of model-parallel ranks, and distributed ones.

layout/   what a checkpoint looks like
read/     from files to an Index
write/    from a model to files

Measured on megatron-core 0.16.1 and 0.12.3 (fixtures/megatron, megatron_dist, megatron_versions).
"""

from __future__ import annotations

from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.errors import CheckpointError
from reshard.index.index import Index
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files

from .layout.save_folders import METADATA, WEIGHTS, is_rank_folder, save_folder
from .options import OPTIONS
from .read import legacy
from .read.check_masters import check_masters
from .write import legacy as writing_legacy


class Megatron(Format):
    name = "megatron"
    summary = "Megatron-LM legacy: mp_rank_*/model_optim_rng.pt of tensor-, pipeline- and expert-parallel ranks"
    owns = ("model_optim_rng.pt", "distrib_optim.pt", "latest_checkpointed_iteration.txt")
    refines = ("pt",)
    options = OPTIONS
    keeps_masters = True

    def detect(self, files: Files) -> str | None:
        folder = save_folder(files)
        if folder is None or folder + METADATA in files.list(folder):
            return None
        if (alone := folder + WEIGHTS[-1]) in files.list(folder):
            return alone
        ranks = (path for path in files.list(folder) if is_rank_folder(path))
        return next((path + name for path in ranks for name in WEIGHTS if path + name in files.list(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        folder = save_folder(files)
        if folder is None:
            raise CheckpointError("there is no folder of a rank here, such as mp_rank_00, and no iter_0000001", where=files.root)
        return legacy.read(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        return writing_legacy.lay_out(content, target, companions)


FORMAT = Megatron()
