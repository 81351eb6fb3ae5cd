"""The layout of FSDP2 files as verl names them: every rank's rows of every tensor, as a DTensor on a mesh of all ranks."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import parameter_and_kind
from reshard.containers import torch_frame, torch_pickle
from reshard.containers.alike_files import numbered_bytes
from reshard.errors import RequestError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import chunk
from reshard.geometry.stored import StoredTensor, part, step_count
from reshard.index.index import ParamGroup, Tensor
from reshard.plans.alike_files import AlikeTensors, FileForm, LazyFraming
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.placed import PlacedTensor
from reshard.plans.target import Target

# verl's name for the only dimension of its mesh.
_DIMENSION = "fsdp"
# torch's name for the default process group. The tensors of a mesh of all ranks communicate in it.
_GROUP = "0"


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of --dp ranks, the model's files in huggingface/, and fsdp_config.json.

    Raises: RequestError if the optimizer is wanted and the source has no param groups, or a parameter is in none.
    """
    target.parallel.allow("dp", what="FSDP files, where the data-parallel ranks share every tensor (--dp)")
    groups = _param_groups(content)
    dtypes = {key: target.dtype_of(tensor) for key, tensor in content.tensors.items()}
    ranks = target.parallel.dp
    of_kinds = [list(_rank_files(content, dtypes, groups, ranks, kind)) for kind in (("model", "optim") if groups else ("model",))]
    files = tuple(file for of_rank in zip(*of_kinds, strict=True) for file in of_rank)
    config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=2).encode() + b"\n"
    model_files = (Sidecar(f"huggingface/{sidecar.path}", sidecar.content) for sidecar in companions.sidecars(dtypes.values()))
    return Layout("fsdp", files, (*model_files, Sidecar("fsdp_config.json", config)), target.parallel)


def _param_groups(content: Content) -> tuple[ParamGroup, ...]:
    """The source's param groups if optimizer state is written, else none."""
    if not content.states:
        return ()
    groups = content.param_groups()
    if not groups or not all(group.settings for group in groups):
        raise RequestError(
            "--optimizer: the source has no param groups (learning rate, weight decay, ...)",
            why="torch's optimizers do not load state without them",
            do="Leave out --optimizer, or write --to dcp",
        )
    return groups


def _rank_files(
    content: Content, dtypes: Mapping[str, DType], groups: tuple[ParamGroup, ...], ranks: int, kind: str
) -> Iterator[TargetFile]:
    """The files of one kind, "model" or "optim", of all ranks. Ranks whose files are alike are laid out once."""

    def described(rank: int) -> tuple[Mapping[str, Any], _RankTensors]:
        tensors = _RankTensors(ranks, rank)
        if kind == "model":
            return _model_state_dict(content, dtypes, tensors), tensors
        return _optimizer_state_dict(content, dtypes, groups, tensors), tensors

    tensors_of_kind = content.weights if kind == "model" else content.states
    lengths = sorted({tensor.shape[0] for tensor in tensors_of_kind.values() if tensor.shape})

    def form(rank: int) -> tuple[object, ...]:
        # Ranks that hold as many rows of every tensor, and whose number takes as many bytes in a pickle.
        return rank > 255, *(chunk(length, ranks, rank)[1] for length in lengths)

    for _, alike in groupby(range(ranks), key=form):
        yield from _files_of_alike_ranks(f"{kind}_world_size_{ranks}_rank_", list(alike), described)


def _files_of_alike_ranks(
    stem: str, alike: list[int], described: Callable[[int], tuple[Mapping[str, Any], _RankTensors]]
) -> Iterator[TargetFile]:
    """The files of consecutive ranks whose pickles differ in their number only. stem: what precedes the rank in the names of the files."""
    first = alike[0]
    state_dict, tensors = described(first)
    pickle, storages = torch_pickle.state_dict_pickle(state_dict)
    # The pickles of two more ranks tell where the number stands.
    others = {
        rank: torch_pickle.state_dict_pickle(described(rank)[0])[0] for rank in dict.fromkeys(alike[1:2] + alike[-1:]) if rank != first
    }
    pickles = numbered_bytes(pickle, first, others)
    if pickles is None:  # torch pickles something else that differs from rank to rank
        for rank in alike:
            yield from _files_of_alike_ranks(stem, [rank], described)
        return
    # The places in the file depend on the length of its name.
    for _, of_length in groupby(alike, key=lambda rank: len(str(rank))):
        named = list(of_length)
        frame = torch_frame.frame(f"{stem}{named[0]}", pickles(named[0]), storages)
        held = [(storage, at) for at, storage in zip(frame.storages, storages, strict=True) if isinstance(storage, torch_pickle.Plain)]
        placed = tuple(PlacedTensor(tensors.stored[storage], at) for storage, at in held)
        steps = tuple(tensors.steps[storage] for storage, _ in held)
        form = FileForm(placed, steps, tuple((offset, len(data)) for offset, data in frame.literals))
        for rank in named:
            framing = LazyFraming(form.framing, partial(_framing, f"{stem}{rank}", pickles, rank, storages))
            yield TargetFile(f"{stem}{rank}.pt", frame.nbytes, framing, AlikeTensors(form, rank - first), {"dp": rank})


def _framing(
    root: str, pickles: Callable[[int], bytes], rank: int, storages: Sequence[torch_pickle.Plain | bytes]
) -> Sequence[tuple[int, bytes]]:
    """The bytes around the tensors of a rank's file."""
    return torch_frame.frame(root, pickles(rank), storages).literals


class _RankTensors:
    """Describes one rank's tensors to the pickler, and remembers what fills each."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.stored: dict[torch_pickle.Plain, StoredTensor] = {}
        """What fills each local tensor."""
        self.steps: dict[torch_pickle.Plain, int] = {}
        """How many rows of its canonical tensor the next rank's part lies further."""
        self._mesh = _device_mesh(ranks, rank)

    def distributed(self, key: str, name: str, tensor: Tensor, dtype: DType) -> torch_pickle.Distributed | torch_pickle.Plain:
        """The rank's rows of the canonical tensor `key` as a DTensor. A scalar is a plain tensor, whole on every rank."""
        import torch
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        if not tensor.shape:
            return self._plain(part(name, key, dtype, (), Box((), ())))
        start, size = chunk(tensor.shape[0], self.ranks, self.rank)
        box = Box.whole(tensor.shape).narrow(0, start, start + size)
        meta = TensorMeta(torch.Size(tensor.shape), row_major(tensor.shape), getattr(torch, dtype.torch))
        local = self._plain(part(name, key, dtype, tensor.shape, box), step=chunk(tensor.shape[0], self.ranks, 0)[1])
        return torch_pickle.Distributed(local, tensor.shape, DTensorSpec(self._mesh, (Shard(0),), tensor_meta=meta))

    def count(self, name: str, steps: int) -> torch_pickle.Plain:
        """A count of steps, which every rank holds."""
        return self._plain(step_count(name, steps))

    def _plain(self, stored: StoredTensor, step: int = 0) -> torch_pickle.Plain:
        plain = torch_pickle.Plain(stored.dtype, stored.shape)
        self.stored[plain], self.steps[plain] = stored, step
        return plain


def _device_mesh(ranks: int, rank: int) -> Any:
    """torch's DeviceMesh of all ranks, as rank `rank` has it. It is made without a process group."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.arange(ranks, dtype=torch.int32)
    try:
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=(_DIMENSION,), _init_backend=False, _rank=rank)
    except TypeError:  # torch up to 2.9; the attributes are those of its own meshes (fixtures/torch_versions)
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh.__dict__.update(device_type="cpu", mesh=grid, mesh_dim_names=(_DIMENSION,), _flatten_mesh_list=tuple(range(ranks)))
        mesh.__dict__.update(_thread_id=None, _coordinate_on_dim=[rank], _hash=None, _dim_group_infos=[("", list(range(ranks)), _GROUP)])
    mesh.__dict__["_dim_group_names"] = [_GROUP]
    return mesh


def _model_state_dict(content: Content, dtypes: Mapping[str, DType], tensors: _RankTensors) -> OrderedDict[str, Any]:
    return OrderedDict((name, tensors.distributed(name, name, tensor, dtypes[name])) for name, tensor in content.weights.items())


def _optimizer_state_dict(
    content: Content, dtypes: Mapping[str, DType], groups: tuple[ParamGroup, ...], tensors: _RankTensors
) -> dict[str, Any]:
    """Optimizer.state_dict(): parameters are numbered through the groups, with their names beside the numbers (torch 2.6 and later)."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group.names)}
    state: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
    for key, tensor in content.states.items():
        parameter, kind = parameter_and_kind(key)
        if parameter not in numbers:
            raise RequestError("--optimizer: it is in no param group", where=parameter, do="Leave out --optimizer")
        number = numbers[parameter]
        state[number][kind] = tensors.distributed(key, f"state.{number}.{kind}", tensor, dtypes[key])
    for parameter, steps in content.step_counts.items():
        number = numbers[parameter]
        state[number]["step"] = tensors.count(f"state.{number}.step", steps)
    param_groups = [
        {**group.settings, "params": [numbers[name] for name in group.names], "param_names": list(group.names)} for group in groups
    ]
    return {"state": state, "param_groups": param_groups}
