"""FSDP files of one rank each: torch.save of state dicts whose tensors are DTensors or ShardedTensors.

    model_world_size_{N}_rank_{r}.pt     verl (FSDP2: DTensors), with optim_world_size_..., extra_state_world_size_...
    pytorch_model_fsdp_{i}_rank{r}.bin   accelerate without DCP; FSDP1: ShardedTensors, or DTensors if it was given a device mesh
    optimizer_{i}_rank{r}.bin, ...       the optimizer's state dict; parameters are names, or numbers in their recorded order

DTensors say where they belong by mesh, placements and coordinates, ShardedTensors list their boxes
(containers/distributed_tensors.py); plain tensors are whole on every rank. Any other file called ..rank<r>.pt is read alike.
Measured on torch 2.13 (fixtures/fsdp) and on files of older versions (fixtures/torch_versions).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.adapter.format import Format, Hints
from reshard.adapter.index_builder import Collector
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.processes import in_processes
from reshard.adapter.rank_files import RankFiles, check_progress, example, missing_ranks, open_folder, step_of
from reshard.adapter.state_dicts import group_numbers, has_flat_parameters, model_part, optimizer_part, states
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import names_for, parameter_and_kind, plain_groups, state_kind
from reshard.containers import torch_frame, torch_pickle, torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Mesh, chunk
from reshard.geometry.stored import StoredTensor, count, part
from reshard.index.index import Index, ParamGroup, RunFacts, StoredFile, Tensor
from reshard.plans.layout import Layout, Placed, Sidecar, TargetFile
from reshard.plans.target import Target
from reshard.storage.files import Files


class Fsdp(Format):
    name = "fsdp"
    summary = "FSDP files of one rank each (verl, accelerate): DTensor, ShardedTensor"
    owns = ("*_rank_*.pt", "*_rank[0-9]*.bin", "fsdp_config.json")
    keeps_names = True

    def detect(self, files: Files) -> str | None:
        found = example(files)
        return found if found and not has_flat_parameters(files, found) else None

    def read(self, files: Files, hints: Hints) -> Index:
        folder = open_folder(files)
        check_progress(files, folder.others)
        run = _Run(files)
        if folder.model:
            run.read_model(folder.model)
        if folder.optimizer:
            run.read_optimizer(folder.optimizer)
        elif folder.model and optimizer_part(torch_zip.read(files, folder.model.first, locate=False)):
            run.read_optimizer(folder.model)  # both in one file: {"model": ..., "optimizer": ...}
        tensors = tuple(run.collector.tensors(files))
        ranks = folder.ranks(run.mesh.ranks if run.mesh else 1)
        notes = [*run.notes, *missing_ranks(folder, ranks, tensors)]
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

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        target.parallel.allow("dp", what="FSDP files, where the data-parallel ranks share every tensor (--dp)")
        groups = content.param_groups() if content.states else ()
        if content.states and not all(group.settings for group in groups or [ParamGroup((), {})]):
            raise RequestError(
                "--optimizer: the source has no param groups (learning rate, weight decay, ...)",
                why="torch's optimizers do not load state without them",
                do="Leave out --optimizer, or write --to dcp",
            )
        dtypes = {key: target.dtype_of(tensor) for key, tensor in content.tensors.items()}
        ranks, files = target.parallel.dp, list[TargetFile]()
        for rank in range(ranks):
            specs = _Specs(ranks, rank)
            files.append(_framed(f"model_world_size_{ranks}_rank_{rank}.pt", _model_dict(content, dtypes, specs), specs))
            if groups:
                files.append(_framed(f"optim_world_size_{ranks}_rank_{rank}.pt", _optimizer_dict(content, dtypes, groups, specs), specs))
        config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=2).encode() + b"\n"
        beside = (Sidecar(f"huggingface/{each.path}", each.content) for each in companions.sidecars(dtypes.values()))
        return Layout(self.name, tuple(files), (*beside, Sidecar("fsdp_config.json", config)), target.parallel)


# ---- writing ----


class _Specs:
    """torch's own descriptions of one rank's part of tensors that are cut into rows; and what fills each (`parts`)."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._mesh = _mesh_of(ranks, rank)
        self.parts: dict[torch_pickle.Plain, StoredTensor] = {}

    def distributed(self, key: str, name: str, tensor: Tensor, dtype: DType) -> torch_pickle.Distributed | torch_pickle.Plain:
        """The rank's rows of a tensor; its part is noted. Scalars are whole on every rank."""
        import torch
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        if not tensor.shape:
            return self._noted(part(name, key, dtype, (), Box((), ())))
        start, size = chunk(tensor.shape[0], self.ranks, self.rank)
        box = Box.whole(tensor.shape).narrow(0, start, start + size)
        meta = TensorMeta(torch.Size(tensor.shape), row_major(tensor.shape), getattr(torch, dtype.torch))
        local = self._noted(part(name, key, dtype, tensor.shape, box))
        return torch_pickle.Distributed(local, tensor.shape, DTensorSpec(self._mesh, (Shard(0),), tensor_meta=meta))

    def count(self, name: str, number: int) -> torch_pickle.Plain:
        """A count of steps, which every rank has."""
        return self._noted(count(name, number))

    def _noted(self, stored: StoredTensor) -> torch_pickle.Plain:
        described = torch_pickle.Plain(stored.dtype, stored.shape)
        self.parts[described] = stored
        return described


# What verl calls the only dimension of its mesh.
_DIMENSION = "fsdp"
# The name that torch gives the default process group, which a mesh of all ranks uses: there the file's tensors communicate.
_GROUP = "0"


def _mesh_of(ranks: int, rank: int) -> Any:
    """torch's DeviceMesh of all ranks as one of them has it, without a process group to ask for the rank."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.arange(ranks, dtype=torch.int32)
    try:
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=(_DIMENSION,), _init_backend=False, _rank=rank)
    except TypeError:  # torch until 2.9; the attributes that its own have (fixtures/torch_versions)
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh.__dict__.update(device_type="cpu", mesh=grid, mesh_dim_names=(_DIMENSION,), _flatten_mesh_list=tuple(range(ranks)))
        mesh.__dict__.update(_thread_id=None, _coordinate_on_dim=[rank], _hash=None, _dim_group_infos=[("", list(range(ranks)), _GROUP)])
    mesh.__dict__["_dim_group_names"] = [_GROUP]
    return mesh


def _model_dict(content: Content, dtypes: Mapping[str, DType], specs: _Specs) -> OrderedDict[str, Any]:
    return OrderedDict((name, specs.distributed(name, name, tensor, dtypes[name])) for name, tensor in content.weights.items())


def _optimizer_dict(content: Content, dtypes: Mapping[str, DType], groups: tuple[ParamGroup, ...], specs: _Specs) -> dict[str, Any]:
    """Optimizer.state_dict(): parameters numbered through the groups, with their names beside, as torch >= 2.6 keeps them."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group.names)}
    state: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
    for key, tensor in content.states.items():
        parameter, kind = parameter_and_kind(key)
        if parameter in numbers:
            state[numbers[parameter]][kind] = specs.distributed(key, f"state.{numbers[parameter]}.{kind}", tensor, dtypes[key])
        else:
            raise RequestError("--optimizer: it is in no param group", where=parameter, do="Leave out --optimizer")
    for parameter, number in content.step_counts.items():
        state[numbers[parameter]]["step"] = specs.count(f"state.{numbers[parameter]}.step", number)
    listed = [{**group.settings, "params": [numbers[name] for name in group.names], "param_names": list(group.names)} for group in groups]
    return {"state": state, "param_groups": listed}


def _framed(path: str, root: Mapping[str, Any], specs: _Specs) -> TargetFile:
    """The file around the parts that `root` describes."""
    pickle, storages = torch_pickle.dumps(root)
    frame = torch_frame.frame(path.removesuffix(".pt"), pickle, storages)
    placed = tuple(
        Placed(specs.parts[content], place)
        for place, content in zip(frame.storages, storages, strict=True)
        if isinstance(content, torch_pickle.Plain)
    )
    return TargetFile(path, frame.nbytes, frame.literals, placed, {"dp": specs.rank})


# ---- reading ----


_FLAT_STATE = "optim.state."


class _Run:
    """What has been read of a run."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.collector = Collector()
        self.objects: list[str] = []
        self.notes: list[str] = []
        self.groups: tuple[ParamGroup, ...] = ()
        self.mesh: Mesh | None = None
        self.producer = "torch.save"
        # The model's parameters in its own order; tied ones once.
        self._parameters: dict[str, tuple[int, ...]] = {}
        self._plain: set[str] = set()

    def read_model(self, found: RankFiles) -> None:
        for read in in_processes(list(found.paths.items()), lambda ranks: _Part(self._files).read_model(ranks)):
            self._join(read)
            self._parameters, self._plain = (self._parameters, self._plain) if self._parameters else (read.parameters, read.plain)

    def read_optimizer(self, found: RankFiles) -> None:
        optimizer = _optimizer_of(self._files, found.first)
        numbers, decoder = group_numbers(optimizer), Decoder(found.first)
        shapes = {
            parameter: local.shape
            for parameter, kind, value in states(optimizer)
            if kind != "step" and (local := decoder.decode(f"{parameter}.{kind}", value))
        }
        names, notes = names_for(optimizer, numbers, shapes, list(self._parameters.items()))
        if not names and self._plain:
            sharded = [(name, shape) for name, shape in self._parameters.items() if name not in self._plain]
            again = names_for(optimizer, numbers, shapes, sharded)
            names, notes = again if again[0] else (names, notes)
        self.notes.extend(notes)
        self.groups = plain_groups(optimizer["param_groups"], names)
        objects = len(self.objects)
        for read in in_processes(
            list(found.paths.items()), lambda ranks: _Part(self._files).read_optimizer(ranks, names, numbers, found.first)
        ):
            self._join(read)
        if any(name.startswith(_FLAT_STATE) for name in self.objects[objects:]):
            self.notes.append(
                "the optimizer's state is each rank's own run of flat parameters, whose units are not in the files; it is left out"
            )

    def _join(self, read: _Part) -> None:
        self.collector.join(read.collector)
        self.objects.extend(read.objects)
        if read.mesh and (self.mesh is None or len(read.mesh.sizes) > len(self.mesh.sizes)):
            self.mesh = read.mesh
        self.producer = read.producer if self.producer == "torch.save" else self.producer


def _optimizer_of(files: Files, path: str) -> Mapping[str, Any]:
    optimizer = optimizer_part(torch_zip.read(files, path, locate=False))
    if optimizer is None:
        raise CheckpointError("it holds no optimizer state (state and param_groups)", where=path)
    return optimizer


class _Part:
    """What has been read of some ranks, maybe in a process of its own; it is pickled to come back."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.collector = Collector()
        self.objects: list[str] = []
        self.mesh: Mesh | None = None
        self.producer = "torch.save"
        self.parameters: dict[str, tuple[int, ...]] = {}
        # Those of them that are whole on every rank: buffers, as a rule, or parameters that FSDP was told to ignore.
        self.plain: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}

    def read_model(self, ranks: Sequence[tuple[int, str]]) -> _Part:
        for rank, path in ranks:
            content, beside = model_part(torch_zip.read(self._files, path, locate=False))
            if content is None:
                raise CheckpointError("it holds no dict of tensors", where=path, do="Give the files that hold the model's state dict")
            self.objects.extend(name for name in beside if name not in OPTIMIZER_ROOTS)
            decoder, seen, is_first = Decoder(path), set[object](), not self.parameters
            for name, value in content.items():
                local = self._local(decoder, str(name), value, rank, path)
                if local is None:
                    self.objects.append(str(name))
                    continue
                self.collector.add("weight", str(name), local, path, rank)
                if is_first and local.dtype.floating and local.memory not in seen:
                    self.parameters[str(name)] = local.shape
                    seen |= {local.memory} - {None}
                    if local.distribution is None and local.rank is None:
                        self.plain.add(str(name))
        return self

    def read_optimizer(
        self, ranks: Sequence[tuple[int, str]], names: Mapping[Any, str], numbers: tuple[tuple[Any, ...], ...], first: str
    ) -> _Part:
        for rank, path in ranks:
            optimizer, decoder = _optimizer_of(self._files, path), Decoder(path)
            if group_numbers(optimizer) != numbers:
                raise CheckpointError(
                    f"its param groups are others than those of {first}",
                    where=path,
                    why="The files are from different runs",
                    do="Keep the files of one save only",
                )
            for parameter, kind, value in states(optimizer):
                local = self._local(decoder, f"{parameter}.{kind}", value, rank, path)
                if local and parameter not in names and local.shape and local.distribution is None and local.rank is None:
                    self.objects.append(f"{_FLAT_STATE}{parameter}.{kind}")  # FSDP1's raw state: a run of elements, not a tensor
                elif local:
                    self.collector.add(*state_kind(names.get(parameter), parameter, kind), local, path, rank)
        return self

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
