"""Experts: DeepSpeed-MoE keeps every expert's weights in a file of its own, under its global number, and its optimizer state in groups
that only the ranks with the same experts share, under its local number on them.

    global number = expert-parallel rank * experts per rank + local number

Expert-parallel rank of a data-parallel rank: d % ep, as expert parallelism lies inside data parallelism; d // (dp / ep) with
use_data_before_expert_parallelism. Source: deepspeed/utils/groups.py, deepspeed/moe/; measured on 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.boxes import Box
from reshard.containers import torch_zip
from reshard.errors import CheckpointError
from reshard.shards import Shards

from .assembly import Reading, Topology
from .states import ModelStates, OptimizerStates, Parameters, Shape, is_stored

_LOCAL = re.compile(r"(?P<module>.*\bdeepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a rank's experts lie among all of them: a fused tensor's first axis."""

    shape: Shape
    start: int

    def apply(self, shards: Shards, local: Shape) -> tuple[Shape, Shards]:
        return self.shape, shards.moved(Box.whole(local), (self.start, *(0,) * (len(local) - 1)))


def families(
    reading: Reading, model: ModelStates, own: Mapping[int, OptimizerStates], g: int, parameters: Parameters, topology: Topology
) -> Iterator[tuple[Sequence[int], Parameters, Mapping[str, Placed]]]:
    """The sets of data-parallel ranks that share group g, each with the names that its parameters have there in the whole model."""
    everyone = sorted(own)
    sharing = own[0].ranks[g] or len(everyone)
    if sharing == len(everyone) or own[0].stage == 3:
        yield everyone, parameters, {}
        return
    ep, rest = divmod(len(everyone), sharing)
    if rest:
        raise CheckpointError(
            f"group {g} is shared by {sharing} ranks, of {len(everyone)} in all", where=own[0].path, do="Keep the files of one save only"
        )
    topology.ep = max(topology.ep, ep)
    data_first = bool(model.config.get("use_data_before_expert_parallel_") or model.config.get("use_data_before_expert_parallelism"))
    for ep_rank in range(ep):
        members = [dp for dp in everyone if (dp // sharing if data_first else dp % ep) == ep_rank]
        yield members, tuple(_globally(parameters, ep_rank)), {}


def _globally(parameters: Parameters, ep_rank: int) -> Iterator[tuple[str, Shape]]:
    """The parameters under their experts' global numbers."""
    local: dict[str, int] = {}
    for name, _ in parameters:
        if match := _LOCAL.fullmatch(name):
            local[match["module"]] = max(local.get(match["module"], 0), 1 + int(match["number"]))
    for name, shape in parameters:
        match = _LOCAL.fullmatch(name)
        yield (f"{match['module']}.{ep_rank * local[match['module']] + int(match['number'])}.{match['rest']}" if match else name), shape


def read(reading: Reading, models: Mapping[tuple[int, int], ModelStates], topology: Topology) -> None:
    """The experts' own files: weights under global numbers."""
    for (_, _, mp_rank), path in reading.tag.experts.items():
        content = torch_zip.read(reading.files, path, locate=False)
        for name, value in content.items() if isinstance(content, Mapping) else ():
            if is_stored(value):
                reading.add_whole("weight", str(name), value, topology.place(mp_rank))


def parameters_of(reading: Reading, ep_rank: int, ep: int) -> Parameters:
    """The parameters of the experts that one of `ep` expert-parallel ranks holds, from the experts' files, in the model's order."""
    known = [each for path in reading.tag.experts.values() for each in _shapes(reading, path).items()]
    count: dict[str, int] = {}
    for name, _ in known:
        if match := _LOCAL.fullmatch(name):
            count[match["module"]] = max(count.get(match["module"], 0), 1 + int(match["number"]))
    found = ((match, name, shape) for name, shape in known if (match := _LOCAL.fullmatch(name)))
    return tuple((name, shape) for match, name, shape in found if int(match["number"]) // max(1, count[match["module"]] // ep) == ep_rank)


def _shapes(reading: Reading, path: str) -> dict[str, Shape]:
    content: Any = torch_zip.read(reading.files, path, locate=False)
    return {str(name): value.shape for name, value in content.items() if is_stored(value)} if isinstance(content, Mapping) else {}


def groups_without_shapes(reading: Reading, model: ModelStates, own: Mapping[int, OptimizerStates]) -> tuple[Parameters, ...]:
    """The groups of a file without param_shapes, as DeepSpeed before 0.19 writes it beside experts: names in the order of the ranks'
    param_slice_mappings, shapes from the module and the experts' files.

    Raises: CheckpointError if they do not tell either.
    """
    shapes: dict[str, Shape] = {str(name): value.shape for name, value in (model.module or {}).items() if is_stored(value)}
    for path in reading.tag.experts.values():
        shapes.update(_shapes(reading, path))
    found = []
    for g in range(len(own[0].masters)):
        names = dict.fromkeys(name for states in own.values() if g < len(states.names) for name in states.names[g])
        if not names or any(name not in shapes for name in names):
            raise CheckpointError(
                "it holds no param_shapes, and the optimizer's files do not tell the names and shapes of their flat groups either",
                where=model.path,
                why="Without them nobody can know which elements belong to which parameter",
                do="Save the checkpoint with the model's states",
            )
        found.append(tuple((name, shapes[name]) for name in names))
    return tuple(found)
