"""FSDP files of one rank each: torch.save of state dicts whose tensors are DTensors or ShardedTensors.

    model_world_size_{N}_rank_{r}.pt     verl (FSDP2: DTensors), with optim_world_size_..., extra_state_world_size_...
    pytorch_model_fsdp_{i}_rank{r}.bin   accelerate without DCP; FSDP1: ShardedTensors, or DTensors if it was given a device mesh
    optimizer_{i}_rank{r}.bin, ...       the optimizer's state dict; parameters are names, or numbers in their recorded order

DTensors say where they belong by mesh, placements and coordinates, ShardedTensors list their boxes
(containers/distributed_tensors.py); plain tensors are whole on every rank. Any other file called ..rank<r>.pt is read alike.
Measured on torch 2.13 (fixtures/fsdp) and on files of older versions (fixtures/torch_versions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter import Hints
from reshard.collect import Collector
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.errors import CheckpointError
from reshard.files import Files
from reshard.index import Index, ParamGroup, RunFacts, StoredFile
from reshard.meshes import Mesh
from reshard.optimizers import names_for, plain_groups, state_role
from reshard.rank_files import RankFiles, check_steps, example, missing_ranks, open_folder, step_of
from reshard.state_dicts import group_numbers, has_flat_parameters, model_part, optimizer_part, states


class Fsdp:
    name = "fsdp"
    summary = "FSDP files of one rank each (verl, accelerate): DTensor, ShardedTensor"
    owns = ("*_rank_*.pt", "*_rank[0-9]*.bin", "fsdp_config.json")

    def detect(self, files: Files) -> str | None:
        found = example(files)
        return found if found and not has_flat_parameters(files, found) else None

    def read(self, files: Files, hints: Hints) -> Index:
        folder = open_folder(files)
        run = _Run(files)
        if folder.model:
            run.read_model(folder.model)
        if folder.optimizer:
            run.read_optimizer(folder.optimizer)
        tensors = tuple(run.collector.tensors())
        ranks = folder.ranks(run.mesh.ranks if run.mesh else 1)
        notes = [*run.notes, *missing_ranks(folder, ranks, tensors)]
        check_steps(files, tensors)
        facts = RunFacts(
            producer=run.producer,
            step=step_of(files.root),
            parallel=dict(zip(run.mesh.names, run.mesh.sizes, strict=True)) if run.mesh else {"ranks": ranks},
            config=hints.config,
            notes=tuple(notes),
            mesh=run.mesh,
        )
        stored = tuple(StoredFile(path, files.size(path) or 0) for path in folder.paths())
        others = [path for found in folder.others for path in found.paths.values()]
        return Index(self.name, tensors, stored, facts, objects=(*dict.fromkeys(run.objects), *others), param_groups=lambda: run.groups)


class _Run:
    """What has been read of a run so far."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.collector = Collector(files)
        self.objects: list[str] = []
        self.notes: list[str] = []
        self.groups: tuple[ParamGroup, ...] = ()
        self.mesh: Mesh | None = None
        self.producer = "torch.save"
        # The model's parameters in its own order; tied ones once.
        self._parameters: dict[str, tuple[int, ...]] = {}

    def read_model(self, found: RankFiles) -> None:
        for rank, path in found.paths.items():
            content, beside = model_part(torch_zip.read(self._files, path, locate=False))
            if content is None:
                raise CheckpointError("it holds no dict of tensors", where=path, do="Give the files that hold the model's state dict")
            self.objects.extend(beside)
            decoder, seen = Decoder(path), set[object]()
            for name, value in content.items():
                local = self._local(decoder, str(name), value, rank, path)
                if local is None:
                    self.objects.append(str(name))
                    continue
                self.collector.add("weight", str(name), local, path, rank)
                if rank == min(found.paths) and local.dtype.floating and local.memory not in seen:
                    self._parameters[str(name)] = local.shape
                    seen |= {local.memory} - {None}

    def read_optimizer(self, found: RankFiles) -> None:
        names: Mapping[Any, str] = {}
        numbers: tuple[tuple[Any, ...], ...] | None = None
        for rank, path in found.paths.items():
            optimizer = optimizer_part(torch_zip.read(self._files, path, locate=False))
            if optimizer is None:
                raise CheckpointError("it holds no optimizer state (state and param_groups)", where=path)
            decoder = Decoder(path)
            kept = [
                (parameter, kind, local)
                for parameter, kind, value in states(optimizer)
                if (local := self._local(decoder, f"{parameter}.{kind}", value, rank, path))
            ]
            if numbers is None:
                numbers = group_numbers(optimizer)
                shapes = {parameter: local.shape for parameter, kind, local in kept if kind != "step"}
                names, notes = names_for(optimizer, numbers, shapes, list(self._parameters.items()))
                self.notes.extend(notes)
                self.groups = plain_groups(optimizer["param_groups"], names)
            elif group_numbers(optimizer) != numbers:
                raise CheckpointError(
                    f"its param groups are others than those of {found.first}",
                    where=path,
                    why="The files are from different runs",
                    do="Keep the files of one save only",
                )
            for parameter, kind, local in kept:
                self.collector.add(*state_role(names.get(parameter), parameter, kind), local, path, rank)

    def _local(self, decoder: Decoder, name: str, value: Any, rank: int, path: str) -> LocalTensor | None:
        local = decoder.decode(name, value)
        if local is None:
            return None
        if local.rank is not None and local.rank != rank:
            raise CheckpointError(
                f"the file says it is rank {local.rank}'s, its name says rank {rank}",
                where=path,
                why="A file was renamed, or copied over another: one part would be there twice, another not at all",
                do="Give every file the name of its own rank",
            )
        if local.distribution is None:
            self.producer = "FSDP1 (ShardedTensor)" if local.rank is not None else self.producer
        elif self.mesh is None or len(local.distribution.mesh.sizes) > len(self.mesh.sizes):
            self.mesh, self.producer = local.distribution.mesh, "FSDP (DTensor)"
        return local


FORMAT = Fsdp()
