"""The folders and files of a Megatron save: where it lies, which of the two formats it has, and which rank wrote which folder.

    latest_checkpointed_iteration.txt             the tracker: "10" or "release"; written last
    iter_0000010/ or release/                     one save; a user may also give this folder itself
        mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt legacy; PPP only with several stages, EEE only with several expert-parallel ranks
        metadata.json, .metadata, *.distcp        distributed (torch_dist); zarr has a folder per tensor instead
    weights/, context/                            NeMo 2: a distributed save and its settings
    dist_ckpt/, huggingface/                      verl: a distributed save and the model's config; its tracker names global_step_10
    tp_rank_TT_pp_rank_PPP/model_weights.ckpt, model_config.yaml
                                                  NeMo 1, also inside a tar called *.nemo; mp_rank_TT/ if there is one stage

This module is loaded to detect a format, so it imports nothing heavy.

Source: megatron/training/checkpointing.py of core_r0.16 (get_checkpoint_name, _get_checkpoint_format); for NeMo 1 its utils/app_state and
connectors.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from reshard.adapter.save_folders import step_of, the_one_save
from reshard.errors import CheckpointError, IncompleteError
from reshard.geometry.value import value
from reshard.storage.files import Files, read_whole

TRACKER = "latest_checkpointed_iteration.txt"
METADATA_JSON, DCP_METADATA, COMMON = "metadata.json", ".metadata", "common.pt"
LEGACY_WEIGHTS, DISTRIBUTED_OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
NEMO_CONFIG, _NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
_RANK_WEIGHTS = (LEGACY_WEIGHTS, "model_rng.pt", _NEMO_WEIGHTS)
_SAVE = re.compile(r"iter_\d{7,}/|release/")
_RANK = re.compile(
    r"(?:.*/)?(?:mp_rank_(?P<tp>\d{2,})(?:_(?P<a>\d{3,}))?(?:_(?P<b>\d{3,}))?|tp_rank_(?P<tp2>\d{2,})_pp_rank_(?P<pp2>\d{3,}))/"
)
LAYER_WISE = re.compile(r"layer_wise_optimizer_(\d+)\.pt")
"""Optimizer state of a data-parallel rank, with whole parameters."""
# Optimizer state of data-parallel ranks before 2023.
_UNREAD_OPTIMIZER = re.compile(r"optim\.pt")
# Folders of others that hold a distributed save: of NeMo 2, of NeMo 1 inside a .nemo file, of verl.
_FOLDERS_OF_OTHERS = ("weights/", "model_weights/", "dist_ckpt/")
# A word in the .metadata of every Megatron save, and in no other .metadata of torch.distributed.checkpoint.
_MEGATRON_WORD, _LARGEST_METADATA = b"checkpoint_version", 1 << 30
# Words in that of Megatron-FSDP's saves alone: the optimizer's settings, and the wrapper of the model.
_FSDP_WORDS = frozenset((b"param_to_group_meta", b"model.module."))
# The last .metadata that was read of each tree, and its words.
_READ: WeakKeyDictionary[Files, tuple[str, frozenset[bytes]]] = WeakKeyDictionary()


@value
class MegatronRankFolder:
    """The folder of one rank of a legacy save."""

    path: str
    """The folder, as a prefix of its paths."""
    tp_rank: int
    """Tensor-parallel rank."""
    numbers: tuple[int, ...]
    """The other numbers in the folder's name: a stage, an expert-parallel rank, or both."""
    weights: str
    """The file with the rank's part of the model."""


def find_save(files: Files) -> str | None:
    """The folder of the save to read, as a prefix of its paths; None if nothing here looks like Megatron.

    Raises: CheckpointError if the tracker names a missing save; RequestError for several saves without a tracker.
    """
    listing = files.list()
    if METADATA_JSON in listing or any(map(_RANK.fullmatch, listing)) or {_NEMO_WEIGHTS, NEMO_CONFIG} <= set(listing):
        return ""
    root = files.root.rstrip("/").rpartition("/")[2] + "/"
    if DCP_METADATA in listing and (COMMON in listing or _SAVE.fullmatch(root)):
        return ""
    for folder in _FOLDERS_OF_OTHERS:
        if folder in listing and folder + METADATA_JSON in files.list(folder):
            return folder
    saves = [path for path in listing if _SAVE.fullmatch(path)]
    if not saves and any(path.endswith("/") and step_of(path.rstrip("/")) is not None for path in listing):
        return None  # the steps are named as verl does, whose tracker has the same name
    return the_one_save(files, saves, tracker=TRACKER, folder_name=_save_name)


def folder_of_save(files: Files, expected: str) -> str:
    """The folder of the save to read. expected: what it would hold. Raises what `find_save` raises; IncompleteError if it finds none."""
    folder = find_save(files)
    if folder is None:
        raise IncompleteError(f"there is no {expected} here, and no save, such as iter_0000001", where=files.root)
    return folder


def _save_name(text: str) -> str:
    """The folder that the text of the tracker means: a number, or "release"."""
    return f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,12}", text) else text


def find_legacy(files: Files) -> str | None:
    """The first file of a legacy save that holds weights; None if this is not a legacy save. Raises what `find_save` raises."""
    folder = find_save(files)
    if folder is None or folder + METADATA_JSON in files.list(folder):
        return None
    if folder + _NEMO_WEIGHTS in files.list(folder):
        return folder + _NEMO_WEIGHTS
    ranks = (path for path in files.list(folder) if _RANK.fullmatch(path))
    return next((path + name for path in ranks for name in _RANK_WEIGHTS if path + name in files.list(path)), None)


def find_distributed(files: Files) -> str | None:
    """The file that shows that this is a distributed save; None if it is not one. Raises what `find_save` raises."""
    folder = find_save(files)
    if folder is None:
        return None
    listing, metadata = files.list(folder), folder + DCP_METADATA
    if folder + METADATA_JSON in listing:
        return folder + METADATA_JSON
    if metadata not in listing or folder + COMMON in listing:
        return metadata if metadata in listing else None
    # Of a folder without a common.pt, .metadata tells whether it is a Megatron save (--ckpt-format torch_dcp).
    return metadata if _MEGATRON_WORD in _words_in(files, metadata) else None


def find_fsdp(files: Files) -> str | None:
    """The .metadata of a save by Megatron-FSDP; None if this is not one. Raises what `find_save` raises."""
    path = find_distributed(files)
    if path is None or not path.endswith(DCP_METADATA):
        return None
    folder = path.removesuffix(DCP_METADATA)
    return path if folder + COMMON not in files.list(folder) and _words_in(files, path) & _FSDP_WORDS else None


def _words_in(files: Files, metadata: str) -> frozenset[bytes]:
    """Which of the words that tell Megatron's saves apart are in a .metadata. It is read once for all formats that ask."""
    if _READ.get(files, ("",))[0] != metadata:
        is_small = (files.size(metadata) or 0) <= _LARGEST_METADATA
        content = read_whole(files, metadata, limit=_LARGEST_METADATA) if is_small else b""
        _READ[files] = metadata, frozenset(word for word in (_MEGATRON_WORD, *_FSDP_WORDS) if word in content)
    return _READ[files][1]


def rank_folders(files: Files, folder: str) -> list[MegatronRankFolder]:
    """The rank folders of a legacy save that hold weights. Raises CheckpointError if a rank folder holds neither weights nor optimizer."""
    ranks = []
    if folder + _NEMO_WEIGHTS in files.list(folder):  # NeMo with one rank
        ranks.append(MegatronRankFolder(folder, 0, (), folder + _NEMO_WEIGHTS))
    for path in files.list(folder):
        match = _RANK.fullmatch(path)
        if match is None:
            continue
        listing = files.list(path)
        weights = next((path + name for name in _RANK_WEIGHTS if path + name in listing), None)
        numbers = (match["pp2"],) if match["tp2"] else (match["a"], match["b"])
        if weights:
            tp_rank = int(match["tp"] or match["tp2"])
            ranks.append(MegatronRankFolder(path, tp_rank, tuple(int(number) for number in numbers if number), weights))
        elif not any(name.endswith("optim.pt") for name in listing):
            raise CheckpointError(
                f"it holds none of {', '.join(_RANK_WEIGHTS)}",
                where=path,
                why="Each rank's folder holds its part of the model",
                do="Copy the rank's folder again from where the checkpoint was written",
            )
    return ranks


def unread_optimizers(files: Files, folder: str) -> list[str]:
    """The optimizer files of a legacy save that reshard does not read."""
    # Megatron Bridge saves layer-wise optimizers into the root, where ranks and saves replace each other's files: they may be of another
    # step, and are of one tensor-parallel rank.
    in_root = [path for path in files.list("") if LAYER_WISE.fullmatch(path)]
    ranks = (path for path in files.list(folder) if _RANK.fullmatch(path))
    return in_root + [path for rank in ranks for path in files.list(rank) if _UNREAD_OPTIMIZER.fullmatch(path.removeprefix(rank))]
