"""Whole tensors in torch.save files: a model's state dict, alone or in a trainer's dict, and its optimizer's.

    pytorch_model_fsdp.bin, optimizer.bin   FSDP FULL_STATE_DICT, by accelerate
    model.pt, checkpoint.pth, ...           {"model": state dict, "optimizer": ..., "epoch": ...}, or the state dict itself

files.py    which files hold the model, and which its optimizer
read.py     the index

A checkpoint is one file, or a folder with one file for the model and files for its optimizer, which have "optim" in their names. The
files of a Hugging Face model (pytorch_model.bin and its shards) belong to the format hf.
Measured on torch 2.13 and older files (fixtures/fsdp/full-*, fixtures/torch_versions).
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.storage.files import Files

from .files import candidates


class TorchSave(Format):
    name = "pt"
    summary = "whole tensors in torch.save files (.pt, .pth, .bin, .ckpt): FULL_STATE_DICT, trainers' own"
    # Not *.pt: --overwrite removes the files that a format owns, and any file may have such a name.
    owns = ("pytorch_model_fsdp*.bin",)
    other_names = ("pytorch",)
    one_file_suffices = True

    def detect(self, files: Files) -> str | None:
        models, optimizers = candidates(files)
        return next(iter((*models, *optimizers)), None)


FORMAT = TorchSave()
