"""DeepSpeed's universal checkpoints: each parameter whole, in a folder of its own, loaded at any world size.

    latest_universal                                     the tag's name
    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...      {"param": tensor, "cat_dim": 0, ...}; from ZeRO-3 a tensor of one axis
    <tag>/zero/<parameter>/step.pt                       from ZeRO-1 and 2 only
    <tag>/zero/optimizer_state.pt                        param groups; from ZeRO-3 also state/<flat group>/step, and the rows of rank 0,
                                                         which are not read
    <tag>/mp_rank_MM_model_states.pt, or zero_pp_rank_D_mp_rank_MM_model_states.pt
                                                         copies of the training run's model states

reading.py   from the files to an index
writing.py   the files that ZeRO-1, 2 and 3 load

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py; measured on 0.19.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.errors import IncompleteError

from .folder import ZERO, find_universal_folder, other_tag_is_latest

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


class Universal(Format):
    """A universal checkpoint of DeepSpeed."""

    name = "universal"
    summary = "DeepSpeed universal checkpoints: every parameter whole, loaded at any world size"
    owns = ("*/zero/*.pt", "zero/*.pt", "latest_universal")
    keeps_names = True
    keeps_optimizer = True

    def detect(self, files: Files) -> str | None:
        folder = find_universal_folder(files)
        return None if folder is None or other_tag_is_latest(files, folder) else f"{folder}{ZERO}"

    def read(self, files: Files, hints: Hints) -> Index:
        from .reading import read_universal

        folder = find_universal_folder(files)
        if folder is None:
            raise IncompleteError("there is no folder zero/ with the states of parameters", where=files.root)
        return read_universal(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from ..read.checks import check_masters
        from .reading import check_shapes_of_states

        check_shapes_of_states(index)
        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .writing import universal_layout

        return universal_layout(content, target, companions)


FORMAT = Universal()
