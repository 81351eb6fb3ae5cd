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

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.adapter.save_folders import tracked_name
from reshard.errors import IncompleteError

from .layout.tag import FP32, LATEST, LATEST_UNIVERSAL, ZERO

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
        if folder is None:
            return None
        # `latest` names a tag beside this folder: the one that the run saved, and from which the universal checkpoint was made.
        latest = f"{tracked_name(files, LATEST)}/" if files.size(LATEST) is not None else folder
        return f"{folder}{ZERO}" if latest == folder or latest not in files.list() else None

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.universal import read_universal

        folder = find_universal_folder(files)
        if folder is None:
            raise IncompleteError("there is no folder zero/ with the states of parameters", where=files.root)
        return read_universal(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.one_save import check_masters
        from .read.universal import check_shapes_of_states

        check_shapes_of_states(index)
        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.universal import universal_layout

        return universal_layout(content, target, companions)


def find_universal_folder(files: Files) -> str | None:
    """The folder that holds zero/, as a prefix of its paths; None if there is none.

    Raises: CheckpointError if `latest_universal` names a tag that is not there.
    """
    listing = files.list()
    if _holds_parameters(files, ""):
        return ""
    if LATEST_UNIVERSAL in listing:
        from reshard.storage.files import inside

        text = tracked_name(files, LATEST_UNIVERSAL)
        folder = inside(text, where=LATEST_UNIVERSAL).rstrip("/") + "/" if text else "/"
        if _holds_parameters(files, folder):
            return folder
        raise IncompleteError(
            f"it names the tag {text!r}, which is not there, or holds no {ZERO}",
            where=LATEST_UNIVERSAL,
            why="The conversion that wrote it was not finished, or its result was removed",
            do="Give the folder that holds zero/, or convert again",
        )
    folders = [path for path in listing if path.endswith("/") and _holds_parameters(files, path)]
    return folders[0] if len(folders) == 1 else None


def _holds_parameters(files: Files, folder: str) -> bool:
    """Whether a folder holds zero/ with files, or with folders of parameters."""
    if folder + ZERO not in files.list(folder):
        return False
    return any(files.size(path) is not None or files.size(f"{path}{FP32}.pt") is not None for path in files.list(folder + ZERO))


FORMAT = Universal()
