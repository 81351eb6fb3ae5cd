"""Which files of a folder may hold the model and its optimizer. Names decide; files are opened only where several names fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.adapter.rank_files import rank_file_sets
from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.storage.files import Files

_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# Files of other formats. Where one lies, it holds the weights, and torch.save files beside it hold something else.
_OTHER_FORMATS = (".safetensors", ".distcp", ".metadata", ".index.json")
_HUGGING_FACE = re.compile(r"(pytorch_model|adapter_model|model)(-\d{5}-of-\d{5}|\.\w+)?\.bin")
# One rank's part of a DeepSpeed or Megatron checkpoint: never a whole model.
_PARTS = re.compile(r".*(mp_rank_\d|_states\.pt$|model_optim_rng|zero_pp_rank).*")
# What trainers save beside weights.
_NO_WEIGHTS = re.compile(r".*(training_args|rng_state|random_states|scheduler|scaler|extra_state|tokenizer).*")


@value
class Candidates:
    """The files that may belong to a checkpoint."""

    models: tuple[str, ...] = ()
    """Files that may hold a model."""
    optimizers: tuple[str, ...] = ()
    """Files that hold an optimizer, according to their names, or that hold no tensors of a model."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them, the models first."""
        return (*self.models, *self.optimizers)


def candidates(files: Files) -> Candidates:
    """The candidates of a folder; none if its files belong to another format."""
    listing = files.list()
    if len(listing) > 1 and _has_a_file_per_rank(files, listing):
        return Candidates()
    if rank_file_sets(listing) or any(path.endswith(_OTHER_FORMATS) or _HUGGING_FACE.fullmatch(path) for path in listing):
        return Candidates()
    fitting = [path for path in listing if path.endswith(_ENDINGS) and not _PARTS.fullmatch(path)]
    if len(listing) > 1:
        fitting = [path for path in fitting if not _NO_WEIGHTS.fullmatch(path)]
    models = [path for path in fitting if "optim" not in path]
    if len(models) > 1:
        models = _with_tensors(files, models) or models
    if not models and len(listing) > 1:
        return Candidates()
    return Candidates(tuple(models), tuple(path for path in fitting if path not in models))


def _has_a_file_per_rank(files: Files, listing: tuple[str, ...]) -> bool:
    """Whether torch_checkpointing's file of rank 0 lies here. It holds a part of each tensor."""
    first = next((path for path in listing if path.endswith("_0.pt")), None)
    if first is None:
        return False
    from reshard.adapter.state_dicts import holds_sharded_tensors

    return holds_sharded_tensors(files, first)


def _with_tensors(files: Files, paths: list[str]) -> list[str]:
    """The files that hold a dict of tensors. Trainers put samplers and loop states beside them, under any name."""
    from reshard.adapter.state_dicts import holds_tensors

    return [path for path in paths if holds_tensors(files, path)]
