"""Plain folders of torch.distributed.checkpoint (--ckpt-format torch_dcp): the legacy state dict, one entry per tensor and object.

    args, iteration, checkpoint_version, ...          plain values of the run
    model.<name>                                      weights; see keyed_tensors.py
    optimizer.state.<number>.<kind>                   optimizer state of the parameter with this number
    optimizer.fp32_from_fp16_params.<group>.<i>       the master of parameter i of a param group
    optimizer.param_groups.<group>.<setting>          "params" lists the numbers of the group's parameters

The numbers follow the order of the parameters in the model. fsdp_dtensor has the same form, with gate and up apart (`_w`, `_v`).

Source: megatron/training/checkpointing.py of core_r0.16.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from reshard.canonical.optimizer_state import plain_settings, state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor

from ..layout.arguments import Args
from ..layout.chunks import ChunkEntry, chunk_entries, split_into_chunks
from ..layout.layer_spec import LayerSpec
from ..layout.names import strip_wrappers
from ..layout.parallel_sizes import ParallelSizes, StageRank
from ..layout.tensors import MegatronModel, is_decayed
from .keyed_tensors import array_subviews, canonical_tensors
from .run_model import RunModel
from .zarr import StoredFolder

_STATE = re.compile(r"optimizer\.(?:optimizer\.)?state\.(\d+)\.([a-z0-9_]+)")
_MASTER = re.compile(r"optimizer\.fp32_from_fp16_params\.(\d+)\.(\d+)")
_GROUP = re.compile(r"optimizer\.(?:optimizer\.)?param_groups\.(\d+)\.(\w+)")
_RUN_STATE = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")


@value(eq=False, repr=False)
class NumberedOptimizer:
    """The optimizer of a plain folder. It identifies its parameters by number."""

    groups: tuple[Mapping[str, Any], ...] = ()
    """The param groups, as stored."""
    members: tuple[Sequence[ChunkEntry], ...] = ()
    """The parameters of each group; empty if they are not known for certain."""
    notes: tuple[str, ...] = ()
    """Why the optimizer state is left out, if it is."""

    def param_groups(self) -> tuple[ParamGroup, ...]:
        """The param groups with canonical names, if the parameters are known."""
        return tuple(
            ParamGroup(
                tuple(dict.fromkeys(name for entry in entries if entry.array for name in entry.array.names)),
                plain_settings(group, without=("params",)),
            )
            for group, entries in zip(self.groups, self.members, strict=False)
        )

    def __repr__(self) -> str:
        return f"<optimizer of {sum(map(len, self.members))} numbered parameters in {len(self.groups)} param groups>"


def read_run_state(stored: StoredFolder) -> dict[str, Any]:
    """The plain values of the run: those at the root, and the state of the schedule."""
    objects = stored.metadata.objects
    state = {key: stored.value(objects[key]) for key in _RUN_STATE if key in objects}
    schedule = {key.partition(".")[2]: item for key, item in objects.items() if key.startswith("opt_param_scheduler.")}
    if schedule:
        state["opt_param_scheduler"] = {key: stored.value(item) for key, item in schedule.items()}
    return state


def read_numbered_optimizer(stored: StoredFolder, model: MegatronModel, args: Args) -> NumberedOptimizer:
    """The optimizer of a plain folder; without param groups if the folder has none."""
    groups = _read_groups(stored)
    if not groups:
        return NumberedOptimizer()
    parameters = _parameters(model, args, {strip_wrappers(key) for key in stored.metadata.tensors})
    members = tuple([entry for entry in parameters if _is_decayed(entry) is (group.get("wd_mult", 1.0) != 0)] for group in groups)
    counts = [len(group.get("params", ())) for group in groups]
    if list(map(len, members)) != counts:
        note = f"the optimizer's state is left out: its groups list {counts} parameters, which are not the parameters of the model"
        return NumberedOptimizer(tuple(groups), notes=(note,))
    return NumberedOptimizer(tuple(groups), members)


def numbered_tensors(stored: StoredFolder, optimizer: NumberedOptimizer, model: RunModel) -> Iterator[Tensor]:
    """The canonical tensors of the optimizer state.

    A state of another shape than its parameter, such as a step count, belongs to each canonical tensor that is fused in the parameter.
    """
    for kind, entry, item in _states(stored, optimizer):
        if entry.array is None:
            continue
        if item.shape == entry.array.shape:
            yield from canonical_tensors(stored, item, array_subviews(entry.array, item), model, kind)
        else:
            for name in entry.array.names:
                tensor_kind, known_as = state_kind(name, name, kind)
                yield Tensor(known_as, item.dtype, item.shape, tensor_kind, stored.shards(item))


def _read_groups(stored: StoredFolder) -> list[Mapping[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for key, item in stored.metadata.objects.items():
        if match := _GROUP.fullmatch(key):
            groups.setdefault(int(match[1]), {})[match[2]] = stored.value(item)
    return [group for _, group in sorted(groups.items()) if isinstance(group.get("params"), list)]


def _parameters(model: MegatronModel, args: Args, stored_names: Collection[str]) -> list[ChunkEntry]:
    """The stored parameters in the order of the model. The whole model is one chunk, as tensors are stored whole."""
    (chunk,) = split_into_chunks((model.layers,), 1)
    spec = LayerSpec.from_args(args, str(args.get("transformer_impl", "local")))
    entries = chunk_entries(model, chunk, ParallelSizes(), StageRank(0, 0, 0), spec)
    return [entry for entry in entries if entry.is_parameter and entry.name in stored_names]


def _is_decayed(entry: ChunkEntry) -> bool:
    return entry.array is not None and is_decayed(entry.name, entry.array.shape)


def _states(stored: StoredFolder, optimizer: NumberedOptimizer) -> Iterator[tuple[str, ChunkEntry, TensorItem]]:
    """(kind, parameter, stored tensor) of everything that the optimizer keeps of a known parameter."""
    members = optimizer.members
    by_number = {
        number: entry
        for group, entries in zip(optimizer.groups, members, strict=False)
        for number, entry in zip(group["params"], entries, strict=True)
    }
    for key, item in stored.metadata.tensors.items():
        if (match := _STATE.fullmatch(key)) and int(match[1]) in by_number:
            yield match[2], by_number[int(match[1])], item
        elif match := _MASTER.fullmatch(key):
            group, position = int(match[1]), int(match[2])
            if group < len(members) and position < len(members[group]):
                yield "master_param", members[group][position], item
