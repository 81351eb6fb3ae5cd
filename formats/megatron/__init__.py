"""Megatron-LM and Megatron-Core: legacy checkpoints of model-parallel ranks, and distributed ones.

tensors.py            Megatron's names, fusions and cuts of every architecture
names.py              what a stored tensor's name says
arguments.py          the run's settings, and the Hugging Face config that says the same
places.py, ranks.py   which folders and files there are, and what they say
stages.py             which layers a pipeline's chunks hold
placing.py            from a stored tensor to boxes of canonical ones
building.py           what both kinds of checkpoint share on the way to an index
nemo.py               NeMo's settings, as args would say them
legacy.py             --ckpt-format torch, read
optimizer.py          which state is of which parameter of a legacy checkpoint
buckets.py            where parameters lie in the distributed optimizer's buffers
megatron_dist.py      --ckpt-format torch_dist, read; with zarr.py, plain_dcp.py (torch_dcp) and bucket_space.py (dp_reshardable)
checks.py             whether masters are those of their weights
chunks.py             what a rank's chunk of the model holds, in order
settings.py           from a Hugging Face config to the run's settings
writing.py            what is written of a model, whatever the kind; with writing_legacy.py and writing_dist.py

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

from . import legacy, writing_legacy
from .checks import check_masters
from .options import OPTIONS
from .places import METADATA, WEIGHTS, is_rank_folder, save_folder


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
