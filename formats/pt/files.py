"""Which files hold the model, and which its optimizer."""

from __future__ import annotations

import re

from reshard.adapter.rank_files import rank_file_sets
from reshard.storage.files import Files

_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# Files of other formats. Where one lies, it holds the weights, and torch.save files beside it hold something else.
_OTHER_FORMATS = (".safetensors", ".distcp", ".metadata", ".index.json")
_HUGGING_FACE = re.compile(r"(pytorch_model|adapter_model|model)(-\d{5}-of-\d{5}|\.\w+)?\.bin")
# One rank's part of a DeepSpeed or Megatron checkpoint: never a whole model.
_PARTS = re.compile(r".*(mp_rank_\d|_states\.pt$|model_optim_rng|zero_pp_rank).*")
# What trainers save beside weights.
_NO_WEIGHTS = re.compile(r".*(training_args|rng_state|random_states|scheduler|scaler|extra_state|tokenizer).*")
# The state of verl's data loader lies in a step's folder, beside the folders of the models.
_DATA_LOADER, _MODELS_OF_VERL = "data.pt", {"actor/", "critic/"}


def candidates(files: Files) -> tuple[list[str], list[str]]:
    """The files that may hold a model, and those that hold an optimizer, by their names, or no tensors of a model.

    Both are empty if the files belong to another format. Names decide; files are opened only where several names fit.
    """
    listing = files.list()
    if len(listing) > 1 and _has_a_file_per_rank(files, listing):
        return [], []
    if (rank_file_sets(listing) and not _is_whole_model(files, listing)) or any(
        path.endswith(_OTHER_FORMATS) or _HUGGING_FACE.fullmatch(path) for path in listing
    ):
        return [], []
    fitting = [path for path in listing if path.endswith(_ENDINGS) and not _PARTS.fullmatch(path)]
    if _MODELS_OF_VERL & set(listing):
        fitting = [path for path in fitting if path != _DATA_LOADER]
    if len(listing) > 1:
        fitting = [path for path in fitting if not _NO_WEIGHTS.fullmatch(path)]
    models = [path for path in fitting if "optim" not in path]
    is_alone = not any(path.endswith("/") for path in listing)
    if len(models) > 1 or not is_alone:
        from reshard.adapter.state_dicts import holds_tensors

        # Trainers put samplers and loop states beside the weights, under any name.
        models = [path for path in models if holds_tensors(files, path)] or (models if is_alone and len(models) > 1 else [])
    if not models and len(listing) > 1:
        return [], []
    return models, [path for path in fitting if path not in models]


def _is_whole_model(files: Files, listing: tuple[str, ...]) -> bool:
    """Whether the file of rank 0, given by itself, holds whole tensors: Composer's of a run that saved from one rank."""
    sets = rank_file_sets(listing)
    if not files.is_file or any(rank_files.world not in (None, 1) or rank_files.first_item[0] for rank_files in sets):
        return False
    from reshard.adapter.state_dicts import holds_flat_parameters, holds_sharded_tensors, holds_tensors

    path = listing[0]
    return holds_tensors(files, path) and not holds_sharded_tensors(files, path) and not holds_flat_parameters(files, path)


def _has_a_file_per_rank(files: Files, listing: tuple[str, ...]) -> bool:
    """Whether torch_checkpointing's file of a rank lies here. It holds a part of each tensor. Without the file of rank 0, its metadata
    tells."""
    numbered = (path for path in listing if path.endswith("_0.pt") or ("metadata.pkl" in listing and re.search(r"_\d+\.pt$", path)))
    first = next(numbered, None)
    if first is None:
        return False
    from reshard.adapter.state_dicts import holds_sharded_tensors

    return holds_sharded_tensors(files, first)
