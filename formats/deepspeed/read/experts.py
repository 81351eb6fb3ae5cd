"""Experts: DeepSpeed-MoE keeps every expert's weights in a file of its own, under its global number, and its optimizer state in groups
that only the ranks with the same experts share, under its local number on them.

    global number = expert-parallel rank * experts per rank + local number

AutoEP (0.19) fuses the experts of a layer: its optimizer has one tensor of a rank's experts, its files (ZeRO-1, 2) one slice each.

Expert-parallel rank of a data-parallel rank: d % ep, as expert parallelism lies inside data parallelism; d // (dp / ep) with
use_data_before_expert_parallelism. Source: deepspeed/utils/groups.py, deepspeed/moe/; measured on 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.containers import torch_zip
from reshard.containers.torch_zip import AnyTensor, is_stored
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.index.shards import Shards, concatenated

from ..layout.partitions import as_it_is
from ..layout.states import ModelStates, OptimizerStates, Parameters, Shape
from .join import Part, Reading, Topology

_LOCAL = re.compile(r"(?P<module>.*\bdeepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a rank's experts lie in the fused tensor of all: the whole shape, and the global number of each of its own."""

    shape: Shape
    numbers: tuple[int, ...]

    def apply(self, shards: Shards, local: Shape) -> tuple[Shape, Shards]:
        """The whole shape, and the rank's pieces in its coordinates."""
        rest = (0,) * (len(local) - 1)
        return self.shape, concatenated(
            [shards.moved(Box.whole(local).narrow(0, i, i + 1), (e, *rest)) for i, e in enumerate(self.numbers)]
        )


@dataclass(frozen=True, slots=True)
class Family:
    """The data-parallel ranks that share a group, and what its parameters are there in the whole model."""

    members: Sequence[int]
    parameters: Parameters
    placed: Mapping[str, Placed]


def families(
    models: Mapping[int, ModelStates], own: Mapping[int, OptimizerStates], g: int, parameters: Parameters, topology: Topology
) -> Iterator[Family]:
    """The families of group g. models, own: what the data-parallel ranks' files say; of the models' perhaps the first one's only."""
    everyone, first = sorted(own), models[min(models)]
    sets = list(_members(first, own, g))
    topology.ep = max(topology.ep, len(sets))
    for ep_rank, members in enumerate(sets):
        if len(sets) == 1:
            yield Family(everyone, parameters, dict(_placed(first, parameters, 0)))
        else:
            told = models.get(members[0], first).autoep
            number = told[0].get("ep_rank", ep_rank) if told and members[0] in models else ep_rank
            yield Family(members, tuple(_globally(parameters, ep_rank)), dict(_placed(first, parameters, number)))


def _members(model: ModelStates, own: Mapping[int, OptimizerStates], g: int) -> Iterator[list[int]]:
    """The data-parallel ranks of each family, by expert-parallel rank."""
    everyone, first = sorted(own), own[min(own)]
    if first.expert_partitions:
        told = [own[dp].expert_partitions[g].get("partition_ranks") if g < len(own[dp].expert_partitions) else None for dp in everyone]
        sets = dict.fromkeys(tuple(each) for each in told if isinstance(each, list | tuple))
        if sorted(rank for each in sets for rank in each) != everyone:
            raise CheckpointError(f"group {g} is shared by the ranks {list(sets)}, which are not all once", where=first.path)
        yield from map(list, sets)
        return
    sharing = first.ranks[g] or len(everyone)
    ep, rest = divmod(len(everyone), sharing)
    if rest:
        raise CheckpointError(
            f"group {g} is shared by {sharing} ranks, of {len(everyone)} in all", where=first.path, do="Keep the files of one save only"
        )
    data_first = bool(model.config.get("use_data_before_expert_parallelism"))
    for ep_rank in range(ep):
        yield [dp for dp in everyone if (dp // sharing if data_first else dp % ep) == ep_rank]


def _placed(model: ModelStates, parameters: Parameters, ep_rank: int) -> Iterator[tuple[str, Placed]]:
    """Which of the parameters are AutoEP's fused experts, and whose they are on that expert-parallel rank."""
    shapes = dict(parameters)
    for layer in model.autoep:
        numbers = next((each for rank, each in _placement(layer) if rank == ep_rank), ())
        for name in (f"{layer.get('expert_key_prefix')}.{part}" for part in _FUSED):
            if (shape := shapes.get(name)) is not None:
                total = layer.get("num_experts")
                if type(total) is not int or len(numbers) != shape[0] or any(number >= total for number in numbers):
                    raise CheckpointError(
                        f"its shape is {list(shape)}, its rank's experts are {numbers} of {total}", where=f"{name} in {model.path}"
                    )
                yield name, Placed((total, *shape[1:]), numbers)


_FUSED = ("w1", "w2", "w3")


def _placement(layer: Mapping[str, Any]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(expert-parallel rank, global numbers of its experts) of an AutoEP layer; they follow each other where nothing else is said."""
    described = layer.get("expert_placement")
    ranks = described.get("ranks") if isinstance(described, Mapping) else None
    if isinstance(ranks, list | tuple):
        yield from ((each["rank"], tuple(each["experts"])) for each in ranks)
        return
    local, ep = layer.get("num_local_experts"), layer.get("ep_size")
    if type(local) is int and type(ep) is int:
        yield from ((rank, tuple(range(rank * local, (rank + 1) * local))) for rank in range(ep))


def _globally(parameters: Parameters, ep_rank: int) -> Iterator[tuple[str, Shape]]:
    """The parameters under their experts' global numbers."""
    local: dict[str, int] = {}
    for name, _ in parameters:
        if match := _LOCAL.fullmatch(name):
            local[match["module"]] = max(local.get(match["module"], 0), 1 + int(match["number"]))
    for name, shape in parameters:
        match = _LOCAL.fullmatch(name)
        yield (f"{match['module']}.{ep_rank * local[match['module']] + int(match['number'])}.{match['rest']}" if match else name), shape


def read(reading: Reading, model: ModelStates, topology: Topology) -> None:
    """The experts' own files: weights under global numbers; AutoEP's are slices of the fused tensors that its optimizer knows."""
    totals = {layer.get("expert_key_prefix"): layer.get("num_experts") for layer in model.autoep}
    for (_, _, mp_rank), path in reading.tag.experts.items():
        place = topology.place(mp_rank)
        for name, value in _tensors(reading, path).items():
            match = _SLICE.fullmatch(name)
            if match and type(total := totals.get(match["prefix"])) is int:
                one = replace(value, shape=(1, *value.shape), strides=(math.prod(value.shape), *value.strides))
                whole = Placed((total, *value.shape), (int(match["number"]),))
                shape, shards = whole.apply(as_it_is(one, 0, reading.locations), one.shape)
                reading.add("weight", f"{match['prefix']}.{match['part']}", Part(*place, value.dtype, shape, shards))
            else:
                reading.add_whole("weight", name, value, place)


_SLICE = re.compile(r"(?P<prefix>.*)\.(?P<part>w[123])\.(?P<number>\d+)")


def _tensors(reading: Reading, path: str) -> Mapping[str, AnyTensor]:
    """The tensors of an expert's file, which is read once, whoever asks first."""
    if path not in reading.experts:
        content = torch_zip.read(reading.files, path, locate=False)
        items = content.items() if isinstance(content, Mapping) else ()
        reading.experts[path] = {str(name): value for name, value in items if is_stored(value)}
    return reading.experts[path]


def parameters_of(reading: Reading, ep_rank: int, ep: int) -> Parameters:
    """The parameters of the experts that one of `ep` expert-parallel ranks holds, from the experts' files, in the model's order."""
    known = list(_shapes(reading))
    count: dict[str, int] = {}
    for name, _ in known:
        if match := _LOCAL.fullmatch(name):
            count[match["module"]] = max(count.get(match["module"], 0), 1 + int(match["number"]))
    found = ((match, name, shape) for name, shape in known if (match := _LOCAL.fullmatch(name)))
    return tuple((name, shape) for match, name, shape in found if int(match["number"]) // max(1, count[match["module"]] // ep) == ep_rank)


def _shapes(reading: Reading) -> Iterator[tuple[str, Shape]]:
    """The names and shapes in all experts' files."""
    for path in reading.tag.experts.values():
        yield from ((name, value.shape) for name, value in _tensors(reading, path).items())


def groups_without_shapes(reading: Reading, model: ModelStates, own: Mapping[int, OptimizerStates]) -> tuple[Parameters, ...]:
    """The groups of a file without param_shapes, as DeepSpeed before 0.19 writes it beside experts: names in the order of the ranks'
    param_slice_mappings, shapes from the module and the experts' files, or from the config.

    What else says "expert" in its name those versions drop from the model's file: its master is there, and read as one row of elements.
    Raises: CheckpointError if not even the names are told.
    """
    shapes: dict[str, Shape] = {str(name): value.shape for name, value in (model.module or {}).items() if is_stored(value)}
    shapes.update(_shapes(reading))
    declared = reading.hints.model
    shapes |= {name: weight.shape for name, weight in declared.weights.items() if name not in shapes} if declared else {}
    found = []
    for g in range(len(own[0].masters)):
        members = next(iter(_members(model, own, g)))
        names: dict[str, int] = {}
        for name, numel in (each for dp in members if g < len(own[dp].slices) for each in own[dp].slices[g]):
            names[name] = names.get(name, 0) + numel
        if not names:
            raise CheckpointError(
                "it holds no param_shapes, and the optimizer's files do not tell the names and shapes of their flat groups either",
                where=model.path,
                why="Without them nobody can know which elements belong to which parameter",
                do="Save the checkpoint with the model's states",
            )
        reading.shapeless.update((name, numel) for name, numel in names.items() if name not in shapes)
        found.append(tuple((name, shapes.get(name, (numel,))) for name, numel in names.items()))
    if reading.shapeless:
        some = ", ".join(list(reading.shapeless)[:3])
        reading.notes.append(
            f"{len(reading.shapeless)} parameters are in no model file, nor are their shapes; their masters are read as one row: {some}"
        )
    return tuple(found)
