"""What the pickles of a tag say, as plain values: the model's states and the optimizer's, of one rank each.

Keys that are not known are client states: DeepSpeed merges what a trainer adds into the same dict. Every key but `module` may be missing
(older versions lack many). Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.adapter.state_dicts import flat
from reshard.canonical.optimizer_state import is_plain, plain_settings
from reshard.containers import torch_zip
from reshard.containers.inert_pickle import DTypeName, Inert, shown
from reshard.containers.torch_zip import AnyTensor, StoredTensor, is_stored
from reshard.errors import CheckpointError
from reshard.storage.files import Files

Shape = tuple[int, ...]
Parameters = tuple[tuple[str, Shape], ...]

# What a run goes on from, beside weights and optimizer.
_PROGRESS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_config", "universal_checkpoint_info")
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
    "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", *_PROGRESS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One file of model states.

    groups: the trained parameters of each optimizer group (ZeRO-1, 2) or sub-group (ZeRO-3), in the order of the flat buffers; None
    where the file does not tell. module: None with a PipelineModule. aliases: tied name -> the name that is stored.
    """

    path: str
    module: Mapping[str, Any] | None
    buffers: frozenset[str] | None
    groups: tuple[Parameters, ...] | None
    frozen_shapes: Parameters
    frozen_fragments: Mapping[str, AnyTensor]
    aliases: Mapping[str, str]
    optimizer: Any
    step: int | None
    dp: int | None
    mp: int | None
    pp_and_tp: tuple[int, int] | None
    version: str | None
    config: Mapping[str, Any]
    universal: Mapping[str, Any]
    autoep: tuple[Mapping[str, Any], ...]
    progress: Mapping[str, Any]
    client: tuple[str, ...]

    def without_module(self) -> ModelStates:
        """What is needed of the ranks after the first, where all modules are the same."""
        return replace(self, module=None, optimizer=None, universal={}, client=())


def read_model(files: Files, path: str) -> ModelStates:
    """The model's states in a file. Raises CheckpointError if they are none."""
    root = torch_zip.read(files, path, locate=False)
    if not isinstance(root, Mapping) or "module" not in root:
        raise CheckpointError(f"it holds {shown(root)}, not the states of a model", where=path, do="Copy the file again")
    module, shapes, shared = root["module"], root.get("param_shapes"), root.get("shared_params")
    if not isinstance(module, Mapping | None):
        raise CheckpointError(f"its `module` is {shown(module)}", where=path)
    degrees, buffers = root.get("checkpoint_parallel_dimensions"), root.get("buffer_names")
    fragments = _mapping(root.get("frozen_param_fragments"))
    autoep = root.get("ds_autoep_layers") or root.get("autoep_layers")
    return ModelStates(
        path,
        None if module is None else dict(flat(module)),
        frozenset(map(str, buffers)) if isinstance(buffers, list | tuple) else None,
        tuple(_shapes(group, path) for group in shapes) if isinstance(shapes, list | tuple) else None,
        _shapes(root.get("frozen_param_shapes"), path),
        {str(name): value for name, value in fragments.items() if is_stored(value)},
        {str(alias): str(name) for alias, name in _mapping(shared).items()},
        root.get("optimizer"),
        _count(root.get("global_steps")),
        _count(root.get("dp_world_size")),
        _count(root.get("mp_world_size")),
        _degrees(degrees),
        _text(root.get("ds_version")),
        _mapping(root.get("ds_config")),
        _mapping(root.get("universal_checkpoint_info")),
        tuple(each for each in _listed(autoep) if isinstance(each, Mapping)),
        {key: root[key] for key in _PROGRESS if root.get(key) is not None and is_plain(root[key])},
        tuple(str(key) for key, value in root.items() if key not in _KNOWN and value is not None),
    )


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """One file of a ZeRO optimizer's states. The lists have an entry per group (ZeRO-1, 2) or sub-group (ZeRO-3).

    stage: 3, or 2 for both of the others, which lie alike. ranks: how many data-parallel ranks share a group. masters: this rank's part of
    each flat group. states: what the base optimizer keeps of it, by kind. paddings: elements at its end that belong to no parameter, where
    they are told and not in `masters`. alignments: elements of padding after each parameter. slices: the parameters of which
    this rank holds a part, and how many elements of each. settings: the param groups, with the numbers of their groups under "params".
    """

    path: str
    stage: int
    ranks: tuple[int, ...]
    masters: tuple[AnyTensor, ...]
    states: tuple[Mapping[str, Any], ...]
    paddings: tuple[int, ...]
    alignments: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[tuple[str, int], ...], ...]
    settings: tuple[Mapping[str, Any], ...]
    expert_partitions: tuple[Mapping[str, Any], ...]
    scaler: Mapping[str, Any]
    version: str | None


def read_optimizer(files: Files, path: str, swapped: str | None = None) -> OptimizerStates:
    """The ZeRO optimizer's states in a file; swapped: the folder of what the rank had swapped to NVMe, if there is one.

    Raises: CheckpointError if they are none, or contradict themselves.
    """
    attributes: dict[str, Any] = {}
    root = torch_zip.read(files, path, locate=False, attributes=attributes)
    states = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(states, Mapping):
        raise CheckpointError("it holds no optimizer_state_dict", where=path, do="Copy the file again")
    if "fp32_flat_groups" in states:
        found = _stage_3(states, _text(root.get("ds_version")), path)
        return found if swapped is None else _swapped_back(files, found, attributes, swapped)
    if "single_partition_of_fp32_groups" in states:
        return _stage_2(states, path)
    raise CheckpointError(
        f"its optimizer state has no full-precision groups, but {', '.join(list(map(str, states))[:6])}",
        where=path,
        why="Only what ZeRO writes is laid out in a known way",
        do="Name the optimizer that wrote it in an issue",
    )


def _stage_2(states: Mapping[str, Any], path: str) -> OptimizerStates:
    masters = _flats(states["single_partition_of_fp32_groups"], "single_partition_of_fp32_groups", path)
    count, base = len(masters), states.get("base_optimizer_state")
    elastic = isinstance(base, list | tuple)
    kept = dict(enumerate(base)) if elastic else _mapping(_mapping(base).get("state"))  # type: ignore[arg-type]
    step = states.get("base_optimizer_state_step")
    if elastic and is_stored(step):
        kept = {i: {"step": step, **state} for i, state in kept.items() if isinstance(state, Mapping)}
    ranks = states.get("partition_count")
    is_zero = "zero_stage" in states
    paddings = _counts(states.get("group_paddings"), count)
    # BF16_Optimizer writes masters with their padding, and no stage (deepspeed/runtime/bf16_optimizer.py).
    return OptimizerStates(
        path,
        2,
        _counts(ranks if isinstance(ranks, list | tuple) else [ranks] * count, count),
        masters,
        tuple(_mapping(kept.get(i)) for i in range(count)),
        paddings if is_zero else (0,) * count,
        tuple(tuple(_count(each) or 0 for each in _listed(group)) for group in _listed(states.get("param_alignment_paddings"))),
        tuple(tuple(_slices(group)) for group in _listed(states.get("param_slice_mappings"))),
        tuple(_settings(_mapping(base).get("param_groups"))),
        (),
        _scaler(states),
        _text(states.get("ds_version")),
    )


def _stage_3(states: Mapping[str, Any], version: str | None, path: str) -> OptimizerStates:
    masters = _flats(states["fp32_flat_groups"], "fp32_flat_groups", path)
    base, ranks = _mapping(states.get("optimizer_state_dict")), states.get("partition_count")
    kept = _mapping(base.get("state"))
    count = len(masters)
    return OptimizerStates(
        path,
        3,
        _counts(ranks if isinstance(ranks, list | tuple) else [ranks] * count, count),
        masters,
        tuple(_mapping(kept.get(i)) for i in range(count)),
        (0,) * count,
        (),
        (),
        tuple(_settings(base.get("param_groups"))),
        tuple(each for each in _listed(states.get("ds_zero_partition_groups")) if isinstance(each, Mapping)),
        _scaler(states),
        version,
    )


def _scaler(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """The loss scaler as plain values: its class, and its attributes; those of a type that is none of ours are left out."""
    scaler = states.get("loss_scaler")
    if not isinstance(scaler, Inert) or not isinstance(scaler.state, Mapping):
        return {}
    attributes = {str(key): str(value) if isinstance(value, DTypeName) else value for key, value in scaler.state.items()}
    kept = {key: value for key, value in attributes.items() if is_plain(value)}
    return {"class": scaler.class_name.rpartition(".")[2], "dynamic": states.get("dynamic_loss_scale") is True, "attributes": kept}


def _swapped_back(files: Files, found: OptimizerStates, attributes: Mapping[str, Any], folder: str) -> OptimizerStates:
    """The states with the groups that are empty in the file, as they were swapped out, taken from their swap files.

    A master carries the name of its file, ds_id, as an attribute; what the optimizer keeps of it is in <kind>-<ds_id>. A file is the raw
    elements, and what fills it up to a multiple of 1 KiB. Source: deepspeed/runtime/swap_tensor/optimizer_utils.py; measured on 0.19.8.
    """

    def swapped(tensor: AnyTensor, name: str) -> AnyTensor:
        path = f"{folder}{name}.tensor.swp"
        size = files.size(path)
        if 0 not in tensor.shape or size is None:
            return tensor
        return StoredTensor(path, 0, tensor.dtype, (size // tensor.dtype.itemsize,), (1,), name)

    masters, states = list(found.masters), [dict(state) for state in found.states]
    for i, master in enumerate(masters):
        told = attributes.get(master.storage)
        name = told.get("ds_id") if isinstance(told, Mapping) else None
        if isinstance(name, str) and re.fullmatch(r"[\w-]{1,100}", name):
            masters[i] = swapped(master, name)
            states[i] = {
                kind: swapped(value, f"{kind}-{name}") if is_stored(value) and len(value.shape) == 1 else value
                for kind, value in states[i].items()
            }
    return replace(found, masters=tuple(masters), states=tuple(states))


def _flats(value: Any, what: str, path: str) -> tuple[AnyTensor, ...]:
    """One row of elements per group."""
    found = tuple(value) if isinstance(value, list | tuple) else ()
    for i, row in enumerate(found):
        if not is_stored(row) or len(row.shape) != 1 or (row.shape[0] > 1 and row.strides != (1,)):
            raise CheckpointError(f"{what}[{i}] should be one row of elements, it is {shown(row)}", where=path, do="Copy the file again")
    return found


def _slices(group: Any) -> Iterator[tuple[str, int]]:
    """The parameters of one param_slice_mapping. Where they start is not read: it is wrong with round_robin_gradients."""
    for name, address in _mapping(group).items():
        yield str(name), _count(address.get("numel")) or 0 if isinstance(address, Inert) else 0


def _settings(groups: Any) -> Iterator[Mapping[str, Any]]:
    for group in _listed(groups):
        yield plain_settings(_mapping(group))


def _shapes(value: Any, path: str) -> Parameters:
    found = []
    for name, shape in _mapping(value).items():
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CheckpointError(f"its shape is {shown(shape)}", where=f"{name} in {path}")
        found.append((str(name), tuple(shape)))
    return tuple(found)


def _degrees(value: Any) -> tuple[int, int] | None:
    found = _mapping(value)
    pp, tp = _count(found.get("pp_degree")), _count(found.get("tp_degree"))
    return (pp, tp) if pp and tp else None


def _mapping(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return value.mapping if isinstance(value, Inert) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _counts(value: Any, count: int) -> tuple[int, ...]:
    found = tuple(_count(each) or 0 for each in _listed(value))
    return found if len(found) == count else (0,) * count


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
