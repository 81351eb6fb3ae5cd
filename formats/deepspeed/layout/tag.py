"""The files of a tag: which folder it is, and what the name of each file says; model-parallel ranks.

    latest                                                       the tag's name
    <tag>/mp_rank_MM_model_states.pt                             model states of a model-parallel rank; ZeRO-0, 1, 2
    <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt              model states of a data-parallel rank; ZeRO-3
    <tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt       optimizer states of a data-parallel rank
    <tag>/layer_LL[-model_TT]-model_states.pt                    a layer of a PipelineModule
    <tag>/[layer_L_]expert_E_mp_rank_MM_model_states.pt          an expert of a MoE layer
    <tag>/expp_rank_E_mp_rank_MM_optim_states.pt                 optimizer states of an expert-parallel rank, without ZeRO
    <tag>/offloaded_tensors/rankRR/[<kind>-]<ds_id>.tensor.swp   a row that was swapped to NVMe, of a master or a state

MM = pipeline stage * tensor-parallel size + tensor-parallel rank; D is the data-parallel rank, TT the tensor-parallel rank.

Source: deepspeed/runtime/engine.py, _get_ckpt_name and _get_zero_ckpt_name; measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

from reshard.adapter.save_folders import the_one_save, tracked_name
from reshard.errors import CheckpointError, IncompleteError, MixedSaves
from reshard.geometry.value import value
from reshard.storage.files import Files, inside

if TYPE_CHECKING:
    from reshard.geometry.meshes import Parallel

# The files in which DeepSpeed names the newest tag, and the newest universal checkpoint.
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
# A universal checkpoint's folder of parameters, and the state that is a parameter's full-precision copy.
ZERO, FP32 = "zero/", "fp32"
_SCRIPT, _SWAP_FOLDER = "zero_to_fp32.py", "offloaded_tensors/"

# Field of Tag -> the names of its files. The groups of a pattern are the numbers that the field is keyed by.
_PATTERNS = {
    "models": re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "zero3_models": re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optimizers": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    "layers": re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt"),
    "experts": re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "expert_optimizers": re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}
Paths = Mapping[tuple[int, ...], str]
T = TypeVar("T")


@value(repr=False)
class Tag:
    """The paths of a tag's files, keyed by the numbers in their names. A number that a name leaves out counts as 0."""

    folder: str
    """The tag's folder as a prefix of its paths, such as "global_step2/"; "" if the checkpoint is the tag itself."""
    models: Paths = field(default_factory=dict)
    """Model states of ZeRO-0, 1 and 2, by (model-parallel rank,)."""
    zero3_models: Paths = field(default_factory=dict)
    """Model states of ZeRO-3, by (data-parallel rank, model-parallel rank)."""
    optimizers: Paths = field(default_factory=dict)
    """Optimizer states of ZeRO, by (data-parallel rank, model-parallel rank)."""
    layers: Paths = field(default_factory=dict)
    """Layers of a PipelineModule, by (layer, tensor-parallel rank)."""
    experts: Paths = field(default_factory=dict)
    """Experts of MoE layers, by (layer, expert, model-parallel rank)."""
    expert_optimizers: Paths = field(default_factory=dict)
    """Optimizer states without ZeRO, by (expert-parallel rank, model-parallel rank)."""
    has_swap_files: bool = False
    """Whether the tag has a folder offloaded_tensors/."""

    def swap_folder(self, dp_rank: int) -> str:
        """The folder with the swap files of a data-parallel rank. Its name has the global rank."""
        return f"{self.folder}{_SWAP_FOLDER}rank{dp_rank:02d}/"

    def paths(self) -> Iterator[str]:
        """The paths of all files except swap files."""
        for paths in (self.models, self.zero3_models, self.optimizers, self.layers, self.experts, self.expert_optimizers):
            yield from paths.values()

    def __repr__(self) -> str:
        return f"<tag {self.folder or '.'} with {len(list(self.paths()))} files>"


@value
class ModelRank:
    """One model-parallel rank: the files of one pipeline stage and one tensor-parallel rank."""

    number: int
    """The MM of mp_rank_MM: stage * tp + tp_rank."""
    stage: int
    """The pipeline stage."""
    tp_rank: int
    """The tensor-parallel rank."""


def model_rank(number: int, tp: int) -> ModelRank:
    """The model-parallel rank of that number."""
    return ModelRank(number, *divmod(number, tp))


def of_model_rank(files: Mapping[tuple[int, ...], T], number: int) -> dict[int, T]:
    """What the files of one model-parallel rank hold, by data-parallel or expert-parallel rank."""
    return {rank: path for (rank, mp), path in files.items() if mp == number}


def model_ranks(parallel: Parallel) -> Iterator[ModelRank]:
    """All model-parallel ranks of a run, in order."""
    return (model_rank(number, parallel.tp) for number in range(parallel.pp * parallel.tp))


def mixed_saves(what: str, where: str, why: str = "The files are from different saves") -> MixedSaves:
    """The error for files that are not of one save."""
    return MixedSaves(what, where=where, why=why, do="Keep the files of one save only")


def is_file_of_a_tag(path: str) -> bool:
    """Whether a path is named like a file with model states or optimizer states."""
    name = path.rpartition("/")[2]
    return any(pattern.fullmatch(name) for pattern in _PATTERNS.values())


def find_tag_folder(files: Files) -> str | None:
    """The folder of the tag, as a prefix of its paths; None if there is no tag.

    Raises: CheckpointError if `latest` names a tag that is not there; RequestError for several tags without `latest`.
    """
    listing = files.list()
    if any(is_file_of_a_tag(path) for path in listing):
        return ""
    folders = [folder for folder in listing if folder.endswith("/") and any(map(is_file_of_a_tag, files.list(folder)))]
    # Other programs also write a file `latest`. DeepSpeed writes its script beside it; if the tag was removed, only `latest` is left.
    if LATEST in listing and (folders or _SCRIPT in listing or len(listing) == 1):
        return the_one_save(files, folders, tracker=LATEST)
    return the_one_save(files, folders)


def find_universal_folder(files: Files) -> str | None:
    """The folder that holds zero/, as a prefix of its paths; None if there is none.

    Raises: CheckpointError if `latest_universal` names a tag that is not there.
    """
    listing = files.list()
    if _holds_parameters(files, ""):
        return ""
    if LATEST_UNIVERSAL in listing:
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


def open_tag(files: Files, folder: str) -> Tag:
    """The tag in a folder, from the names of its files.

    Raises: CheckpointError for two files of the same rank.
    """
    listing = files.list(folder)
    fields: dict[str, dict[tuple[int, ...], str]] = {name: {} for name in _PATTERNS}
    for path in listing:
        for name, pattern in _PATTERNS.items():
            if match := pattern.fullmatch(path.removeprefix(folder)):
                numbers = tuple(int(number or 0) for number in match.groups())
                if other := fields[name].get(numbers):
                    raise CheckpointError(
                        f"{other} holds the states of the same rank",
                        where=path,
                        why="The two are from saves with different precision; nothing tells which of them fits the other files",
                        do="Move the file of the older save away",
                    )
                fields[name][numbers] = path
    return Tag(
        folder, **{name: dict(sorted(paths.items())) for name, paths in fields.items()}, has_swap_files=folder + _SWAP_FOLDER in listing
    )
