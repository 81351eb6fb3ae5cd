"""DeepSpeed's universal checkpoints: each parameter whole, in a folder of its own, loaded at any world size.

    latest_universal                                     the tag's name
    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...      {"param": tensor, "cat_dim": 0, ...}; from ZeRO-3 a tensor of one axis
    <tag>/zero/<parameter>/step.pt                       from ZeRO-1 and 2 only
    <tag>/zero/optimizer_state.pt                        param groups; from ZeRO-3 also state/<flat group>/step, and the rows of rank 0,
                                                         which are not read
    <tag>/mp_rank_MM_model_states.pt, or zero_pp_rank_D_mp_rank_MM_model_states.pt
                                                         copies of the training run's model states

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py; measured on 0.19.8.
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.adapter.save_folders import tracked_name
from reshard.storage.files import Files

from .layout.tag import LATEST, ZERO, find_universal_folder


class Universal(Format):
    """A universal checkpoint of DeepSpeed."""

    name = "universal"
    summary = "DeepSpeed universal checkpoints: every parameter whole, loaded at any world size"
    owns = ("*/zero/*.pt", "zero/*.pt", "latest_universal")
    keeps_names = True
    keeps_optimizer = True
    reader, writer = "read.universal", "write.universal"

    def detect(self, files: Files) -> str | None:
        folder = find_universal_folder(files)
        if folder is None:
            return None
        # `latest` names a tag beside this folder: the one that the run saved, and from which the universal checkpoint was made.
        latest = f"{tracked_name(files, LATEST)}/" if files.size(LATEST) is not None else folder
        return f"{folder}{ZERO}" if latest == folder or latest not in files.list() else None


FORMAT = Universal()
