"""Whole tensors in torch.save files: a model's state dict, alone or in what a trainer saved around it; an optimizer's beside it.

    pytorch_model_fsdp.bin, optimizer.bin   FSDP FULL_STATE_DICT, by accelerate
    model.pt, checkpoint.pth, ...           {"model": state dict, "optimizer": ..., "epoch": ...}, or the state dict itself

One file, or the only such file of a folder beside those that say "optim" in their names. What a Hugging Face model's folder holds
(pytorch_model.bin and its shards) is that format's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.adapter.format import Format, Hints
from reshard.adapter.index_builder import Collector
from reshard.adapter.rank_files import find, step_of
from reshard.adapter.state_dicts import group_numbers, holds_parts, holds_tensors, model_part, optimizer_part, states
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder
from reshard.errors import CheckpointError, RequestError
from reshard.index.index import Index, ParamGroup, RunFacts, StoredFile
from reshard.storage.files import Files

_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# Where one of these lies, it holds the weights, and a torch.save file beside it something else.
_OTHERS = (".safetensors", ".distcp", ".metadata", ".index.json")
_HUGGING_FACE = re.compile(r"(pytorch_model|adapter_model|model)(-\d{5}-of-\d{5}|\.\w+)?\.bin")
# One rank's part in formats that are not this one (DeepSpeed, Megatron): never a whole model.
_PARTS = re.compile(r".*(mp_rank_\d|_states\.pt$|model_optim_rng|zero_pp_rank).*")
# What trainers save beside weights.
_BESIDE = re.compile(r".*(training_args|rng_state|random_states|scheduler|scaler|extra_state|tokenizer).*")


class TorchSave(Format):
    name = "pt"
    summary = "whole tensors in torch.save files (.pt, .pth, .bin, .ckpt): FULL_STATE_DICT, trainers' own"
    # Not *.pt: --overwrite removes what formats own, and anything may be called so.
    owns = ("pytorch_model_fsdp*.bin",)

    def detect(self, files: Files) -> str | None:
        models, optimizers = _candidates(files)
        return next(iter((*models, *optimizers)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        models, optimizers = _candidates(files)
        if len(models) > 1 or (not models and len(optimizers) > 1):
            raise RequestError(
                f"{len(models or optimizers)} files could hold the model: {', '.join((models or optimizers)[:4])}",
                where=files.root,
                do="Give one of them instead of the folder",
            )
        if not models and not optimizers:
            raise CheckpointError("no file here is torch.save's", where=files.root, do="Give the file itself")
        reading = _Reading(files)
        for path in (*models, *optimizers):
            reading.read(path)
        tensors = tuple(reading.collector.tensors(files))
        if not tensors:
            raise CheckpointError(
                "it holds no dict of tensors", where=(*models, *optimizers)[0], do="Give the file that holds the model's state dict"
            )
        facts = RunFacts("torch.save", step=step_of(files.root), config=hints.config, notes=tuple(reading.notes))
        stored = tuple(StoredFile(path, files.size(path) or 0) for path in (*models, *optimizers))
        return Index(self.name, tensors, stored, facts, objects=tuple(reading.objects), param_groups=lambda: reading.groups)


def _candidates(files: Files) -> tuple[list[str], list[str]]:
    """The files that may hold a model, and those that by their names hold an optimizer."""
    listing = files.list()
    if len(listing) > 1 and (first := next((path for path in listing if path.endswith("_0.pt")), None)) and holds_parts(files, first):
        return [], []  # a file per rank
    if find(listing) or any(path.endswith(_OTHERS) or _HUGGING_FACE.fullmatch(path) for path in listing):
        return [], []
    fitting = [path for path in listing if path.endswith(_ENDINGS) and not _PARTS.fullmatch(path)]
    fitting = [path for path in fitting if len(listing) == 1 or not _BESIDE.fullmatch(path)]
    models = [path for path in fitting if "optim" not in path]
    if len(models) > 1:  # what else lies there is told by its content: samplers, states of the loop
        models = [path for path in models if holds_tensors(files, path)] or models
    if not models and len(listing) > 1:
        return [], []
    return models, [path for path in fitting if path not in models]


class _Reading:
    def __init__(self, files: Files) -> None:
        self._files = files
        self.collector = Collector()
        self.objects: list[str] = []
        self.notes: list[str] = []
        self.groups: tuple[ParamGroup, ...] = ()
        self._parameters: dict[str, tuple[int, ...]] = {}

    def read(self, path: str) -> None:
        root = torch_zip.read(self._files, path, locate=False)
        optimizer = optimizer_part(root)
        content, beside = model_part(root) if root is not optimizer else (None, [])
        self.objects.extend(beside)
        if content is not None:
            self._read_model(content, path)
        if optimizer is not None:
            self._read_optimizer(optimizer, path)

    def _read_model(self, content: Mapping[Any, Any], path: str) -> None:
        decoder, seen = Decoder(path), set[object]()
        for name, value in content.items():
            local = decoder.decode(str(name), value)
            if local is None:
                self.objects.append(str(name))
                continue
            if any(box.sizes != local.shape for box, _ in local.shards) or not local.shards:
                raise CheckpointError(
                    f"the file holds a part of it only: {local.shards[0][0] if local.shards else 'nothing'} of {list(local.shape)}",
                    where=f"{name} in {path}",
                    why="It is one rank's file, and the names do not tell of which rank",
                    do="Give the directory with all ranks' files, named ..rank<r>.pt",
                )
            self.collector.add("weight", str(name), local, path, local.rank or 0)
            if local.dtype.floating and local.memory not in seen:
                self._parameters[str(name)] = local.shape
                seen.add(local.memory)

    def _read_optimizer(self, optimizer: Mapping[str, Any], path: str) -> None:
        decoder = Decoder(path)
        kept = [
            (parameter, kind, local)
            for parameter, kind, value in states(optimizer)
            if (local := decoder.decode(f"{parameter}.{kind}", value))
        ]
        shapes = {parameter: local.shape for parameter, kind, local in kept if kind != "step"}
        names, notes = names_for(optimizer, group_numbers(optimizer), shapes, list(self._parameters.items()))
        self.notes.extend(notes)
        self.groups = plain_groups(optimizer["param_groups"], names)
        for parameter, kind, local in kept:
            self.collector.add(*state_kind(names.get(parameter), parameter, kind), local, path, local.rank or 0)


FORMAT = TorchSave()
