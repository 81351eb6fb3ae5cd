"""The layout of FSDP2 files as verl names them: every rank's rows of every tensor, as a DTensor on a mesh of all ranks."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import groupby
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import kind_path, parameter_and_kind
from reshard.containers import pickle_writer, torch_frame
from reshard.containers.dtensor_writer import RowShards
from reshard.containers.pickle_writer import Call
from reshard.containers.recognised_files import numbered_bytes
from reshard.containers.torch_frame import Plain, Tensors
from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import chunk
from reshard.geometry.sections import StoredTensor, part, step_count
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor
from reshard.plans.layout import AlikeTensors, FileForm, Layout, LazyFraming, PlacedTensor, Sidecar, Target, TargetFile

from . import TORCH_VERSION

# verl's name for the only dimension of its mesh.
_DIMENSION = "fsdp"


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of --dp ranks, the model's files in huggingface/, and fsdp_config.json.

    Raises: RequestError if the optimizer is wanted and the source has no param groups, or a parameter is in none.
    """
    target.parallel.allow("dp", what="FSDP files, where the data-parallel ranks share every tensor (`dp=`)")
    groups = _param_groups(content)
    dtypes = {key: target.dtype_of(tensor) for key, tensor in content.tensors.items()}
    ranks, torch_version = target.parallel.dp, target.options.get("torch_version") or _installed_torch() or TORCH_VERSION.choices[-1]
    wanted = _Wanted(content, dtypes, groups, ranks, torch_version)
    of_kinds = [list(_rank_files(wanted, kind)) for kind in (("model", "optim") if groups else ("model",))]
    files = tuple(file for of_rank in zip(*of_kinds, strict=True) for file in of_rank)
    config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=2).encode() + b"\n"
    model_files = (Sidecar(f"huggingface/{sidecar.path}", sidecar.content) for sidecar in companions.sidecars(dtypes.values()))
    notes = (f"the files are those of torch {torch_version}; `torch_version=` writes those of another version",)
    return Layout("fsdp", files, (*model_files, Sidecar("fsdp_config.json", config)), target.parallel, notes)


def _installed_torch() -> str | None:
    """The version of the torch that is installed beside reshard, if its files are known."""
    try:
        version = ".".join(metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return None
    return version if version in TORCH_VERSION.choices else None


def _param_groups(content: Content) -> tuple[ParamGroup, ...]:
    """The source's param groups if optimizer state is written, else none."""
    if not content.states:
        return ()
    groups = content.param_groups()
    if not groups or not all(group.settings for group in groups):
        raise RequestError(
            "`optimizer=True`: the source has no param groups (learning rate, weight decay, ...)",
            why="torch's optimizers do not load state without them",
            do="Leave out `optimizer=True`, or write `to=dcp`",
        )
    return groups


@value(slots=False)
class _Wanted:
    """What all ranks' files hold together."""

    content: Content
    """The tensors."""
    dtypes: Mapping[str, DType]
    """The element type in which each is stored."""
    groups: tuple[ParamGroup, ...]
    """The param groups; empty if no optimizer state is written."""
    ranks: int
    """The number of ranks."""
    torch_version: str
    """The version of torch that reads the files, such as "2.13"."""


def _rank_files(wanted: _Wanted, kind: str) -> Iterator[TargetFile]:
    """The files of one kind, "model" or "optim", of all ranks. Ranks whose files are alike are laid out once."""

    def described(rank: int) -> tuple[_RankTensors, bytes]:
        tensors = _RankTensors(wanted, rank)
        if kind == "optim":
            return tensors, pickle_writer.dumps(_optimizer_state_dict(tensors))
        weights = OrderedDict((name, tensors.rows(name, name, tensor)) for name, tensor in wanted.content.weights.items())
        return tensors, pickle_writer.dumps(weights)

    content, ranks = wanted.content, wanted.ranks
    tensors_of_kind = content.weights if kind == "model" else content.states
    lengths = sorted({tensor.shape[0] for tensor in tensors_of_kind.values() if tensor.shape})

    def form(rank: int) -> tuple[object, ...]:
        # Ranks that hold as many rows of every tensor, and whose number takes as many bytes in a pickle.
        return rank > 255, *(chunk(length, ranks, rank)[1] for length in lengths)

    for _, alike in groupby(range(ranks), key=form):
        yield from _files_of_alike_ranks(f"{kind}_world_size_{ranks}_rank_", list(alike), described)


def _files_of_alike_ranks(stem: str, alike: list[int], described: Callable[[int], tuple[_RankTensors, bytes]]) -> Iterator[TargetFile]:
    """The files of consecutive ranks whose pickles differ in their number only.

    stem: what precedes the rank in the names of the files. described: rank -> its tensors and its pickle.
    """
    first = alike[0]
    tensors, pickle = described(first)
    storages = tensors.storages
    # The pickles of two more ranks tell where the number stands.
    others = {rank: described(rank)[1] for rank in dict.fromkeys(alike[1:2] + alike[-1:]) if rank != first}
    pickles = numbered_bytes(pickle, first, others)
    if pickles is None:  # something else differs from rank to rank
        for rank in alike:
            yield from _files_of_alike_ranks(stem, [rank], described)
        return
    # The places in the file depend on the length of its name.
    for _, of_length in groupby(alike, key=lambda rank: len(str(rank))):
        named = list(of_length)
        frame = torch_frame.frame(f"{stem}{named[0]}", pickles(named[0]), storages)
        held = [(storage, at) for at, storage in zip(frame.storages, storages, strict=True) if isinstance(storage, Plain)]
        placed = tuple(PlacedTensor(tensors.stored[storage], at) for storage, at in held)
        steps = tuple(tensors.steps[storage] for storage, _ in held)
        form = FileForm(placed, steps, tuple((offset, len(data)) for offset, data in frame.literals))
        for rank in named:
            framing = LazyFraming(form.framing, partial(_framing, f"{stem}{rank}", pickles, rank, storages))
            alike_tensors = AlikeTensors(form, rank - first)
            yield TargetFile(f"{stem}{rank}.pt", frame.nbytes, framing, alike_tensors, {"dp": rank}, frame.checksums)


def _framing(root: str, pickles: Callable[[int], bytes], rank: int, storages: Sequence[Plain | bytes]) -> Sequence[tuple[int, bytes]]:
    """The bytes around the tensors of a rank's file."""
    return torch_frame.frame(root, pickles(rank), storages).literals


class _RankTensors:
    """Describes one rank's tensors in a pickle, and remembers what fills each."""

    def __init__(self, wanted: _Wanted, rank: int) -> None:
        self.wanted = wanted
        self.rank = rank
        self.stored: dict[Plain, StoredTensor] = {}
        """What fills each local tensor."""
        self.steps: dict[Plain, int] = {}
        """How many rows of its canonical tensor the next rank's part lies further."""
        self._tensors = Tensors()
        major, minor = wanted.torch_version.split(".")
        self._row_shards = RowShards(self._tensors, wanted.ranks, rank, _DIMENSION, (int(major), int(minor)))

    @property
    def storages(self) -> list[Plain | bytes]:
        """Element i is the content of the storage with the key i."""
        return self._tensors.storages

    def rows(self, key: str, name: str, tensor: Tensor) -> Call:
        """The rank's rows of the canonical tensor `key` as a DTensor. A scalar is a plain tensor, whole on every rank."""
        dtype, ranks = self.wanted.dtypes[key], self.wanted.ranks
        if not tensor.shape:
            return self._tensors.add(self._plain(part(name, key, dtype, (), Box((), ()))))
        start, size = chunk(tensor.shape[0], ranks, self.rank)
        box = Box.whole(tensor.shape).narrow(0, start, start + size)
        local = self._plain(part(name, key, dtype, tensor.shape, box), step=chunk(tensor.shape[0], ranks, 0)[1])
        return self._row_shards.add(local, tensor.shape)

    def count(self, name: str, steps: int) -> Call:
        """A count of steps, which every rank holds."""
        return self._tensors.add(self._plain(step_count(name, steps)))

    def _plain(self, stored: StoredTensor, step: int = 0) -> Plain:
        plain = Plain(stored.dtype, stored.shape)
        self.stored[plain], self.steps[plain] = stored, step
        return plain


def _optimizer_state_dict(tensors: _RankTensors) -> dict[str, Any]:
    """Optimizer.state_dict(): parameters are numbered through the groups, with their names beside the numbers (torch 2.6 and later)."""
    content, groups = tensors.wanted.content, tensors.wanted.groups
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group.names)}
    state: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
    for key, tensor in content.states.items():
        parameter, kind = parameter_and_kind(key)
        if parameter not in numbers:
            raise RequestError("`optimizer=True`: it is in no param group", where=parameter, do="Leave out `optimizer=True`")
        number = numbers[parameter]
        *outer, last = kind_path(kind)
        place: dict[Any, Any] = state[number]
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensors.rows(key, f"state.{number}.{kind}", tensor)
    for parameter, steps in content.step_counts.items():
        number = numbers[parameter]
        state[number]["step"] = tensors.count(f"state.{number}.step", steps)
    param_groups = [
        {**group.settings, "params": [numbers[name] for name in group.names], "param_names": list(group.names)} for group in groups
    ]
    return {"state": {number: _with_lists(kinds) for number, kinds in state.items()}, "param_groups": param_groups}


def _with_lists(value: Any) -> Any:
    """The value with lists in place of dicts by number."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    return [parts[key] for key in sorted(parts)] if parts and all(type(key) is int for key in parts) else parts
