"""Where a save lies, of which kind it is, and which rank a legacy folder is of.

    latest_checkpointed_iteration.txt             "10" or "release"; written last
    iter_0000010/ or release/                     one save, which may also be given itself
        mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt legacy; PPP only with several stages, EEE only with several expert-parallel ranks
        metadata.json, .metadata, *.distcp        distributed (torch_dist); zarr has a folder per tensor instead
    weights/, context/                            NeMo 2: a distributed save, and settings
    tp_rank_TT_pp_rank_PPP/model_weights.ckpt, model_config.yaml, also in a tar called *.nemo: NeMo 1; mp_rank_TT/ with one stage

Source: megatron/training/checkpointing.py, get_checkpoint_name and _get_checkpoint_format; NeMo 1's names from its
utils/app_state and connectors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import CheckpointError, RequestError
from reshard.storage.files import Files, inside, read_whole

TRACKER, METADATA = "latest_checkpointed_iteration.txt", "metadata.json"
_FOLDER = re.compile(r"iter_\d{7,}/|release/")
_RANK = re.compile(
    r"(?:.*/)?(?:mp_rank_(?P<tp>\d{2,})(?:_(?P<a>\d{3,}))?(?:_(?P<b>\d{3,}))?|tp_rank_(?P<tp2>\d{2,})_pp_rank_(?P<pp2>\d{3,}))/"
)
_UNREAD = re.compile(r"optim\.pt|layer_wise_optimizer_\d+\.pt")
PLAIN, COMMON, NEMO_CONFIG = ".metadata", "common.pt", "model_config.yaml"
# Where NeMo has the weights beside other things: NeMo 2, and NeMo 1 inside a .nemo.
_INNER = ("weights/", "model_weights/")
WEIGHTS = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")


def is_rank_folder(path: str) -> bool:
    return _RANK.fullmatch(path) is not None


def save_folder(files: Files) -> str | None:
    """The folder of the one save that is meant, as a prefix of its paths; None if nothing here looks like Megatron's.

    Raises: CheckpointError if the tracker names a save that is not there; RequestError for several saves without a tracker.
    """
    listing = files.list()
    if METADATA in listing or any(map(is_rank_folder, listing)) or {WEIGHTS[-1], NEMO_CONFIG} <= set(listing):
        return ""
    if PLAIN in listing and (COMMON in listing or _FOLDER.fullmatch(files.root.rstrip("/").rpartition("/")[2] + "/")):
        return ""
    for folder in _INNER:
        if folder in listing and METADATA in (path.removeprefix(folder) for path in files.list(folder)):
            return folder
    inner = [path for path in listing if _FOLDER.fullmatch(path)]
    if TRACKER in listing:
        return _named_by_tracker(files, inner)
    if len(inner) > 1:
        raise RequestError(
            f"{len(inner)} saves lie here, {', '.join(path.rstrip('/') for path in inner[:4])}, and no {TRACKER} says which is meant",
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{inner[-1].rstrip('/')}",
        )
    return inner[0] if inner else None


def _named_by_tracker(files: Files, inner: list[str]) -> str:
    text = read_whole(files, TRACKER, limit=4096).decode("utf-8", "replace").strip()
    folder = f"iter_{int(text):07d}/" if re.fullmatch(r"\d{1,12}", text) else inside(text or ".", where=TRACKER).rstrip("/") + "/"
    if folder not in inner:
        raise CheckpointError(
            f"it names the save {text!r}, and {folder.rstrip('/')} is not there",
            where=TRACKER,
            why=f"Saves that lie here: {', '.join(path.rstrip('/') for path in inner[:4]) or 'none'}",
            do="Copy that save from where it was written, or give the folder of another one",
        )
    return folder


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of a rank: its tensor-parallel rank, and the other numbers of its name, which are a stage, an expert-parallel rank or
    both."""

    folder: str
    tp: int
    numbers: tuple[int, ...]
    weights: str


def unread_optimizers(files: Files, folder: str) -> list[str]:
    """Optimizers' files that are not read: those of data-parallel ranks before 2023, and those of layer-wise optimizers."""
    ranks = [path for path in files.list(folder) if is_rank_folder(path)]
    return [path for rank in ranks for path in files.list(rank) if _UNREAD.fullmatch(path.removeprefix(rank))]


def rank_folders(files: Files, folder: str) -> list[RankFolder]:
    """The folders of ranks that hold weights. Raises CheckpointError if one holds none."""
    found = []
    if folder + WEIGHTS[-1] in files.list(folder):  # NeMo with one rank
        found.append(RankFolder(folder, 0, (), folder + WEIGHTS[-1]))
    for path in files.list(folder):
        if match := _RANK.fullmatch(path):
            listing = files.list(path)
            weights = next((path + name for name in WEIGHTS if path + name in listing), None)
            if match["tp2"]:
                numbers: tuple[int, ...] = (int(match["pp2"]),)
            else:
                numbers = tuple(int(number) for number in (match["a"], match["b"]) if number)
            if weights:
                found.append(RankFolder(path, int(match["tp"] or match["tp2"]), numbers, weights))
            elif not any(each.endswith("optim.pt") for each in listing):
                raise CheckpointError(
                    f"there is none of {', '.join(WEIGHTS)} in it",
                    where=path,
                    why="Each rank's folder holds its part of the model",
                    do="Copy the rank's folder again from where the checkpoint was written",
                )
    return found
