"""What the pickles of a tag hold, as plain values: the model states and the optimizer states of one rank.

Unknown keys of a model file are client states: DeepSpeed merges what a trainer adds into the same dict. Every key except `module` may be
missing, since older versions lack many. Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.state_dicts import flat
from reshard.canonical.optimizer_state import is_plain, plain_settings
from reshard.containers.inert_pickle import DTypeName, Inert, shown
from reshard.containers.recognised_files import Move
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError
from reshard.geometry.value import value

Shape = tuple[int, ...]
# Names and shapes, in the order of a flat buffer.
Parameters = tuple[tuple[str, Shape], ...]

# PipelineModule calls the parameters that several layers share tied_modules.<key>.<name>.
TIED_PREFIX = "tied_modules."

# Keys that a run needs in order to resume, besides weights and optimizer states.
_PROGRESS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_config", "universal_checkpoint_info")
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
    "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", *_PROGRESS,
}  # fmt: skip


@value(repr=False)
class ModelStates:
    """One file of model states. A field is empty or None if the file lacks its key."""

    path: str
    """The file."""
    module: Mapping[str, Any] | None
    """The module's state dict by full names; None with a PipelineModule, whose layers are in files of their own."""
    buffers: frozenset[str] | None
    """Names of the module's buffers."""
    groups: tuple[Parameters, ...] | None
    """The trained parameters of each optimizer group (ZeRO-1, 2) or sub-group (ZeRO-3), in the order of the flat buffers."""
    frozen_shapes: Parameters
    """The frozen parameters with their whole shapes."""
    frozen_fragments: Mapping[str, AnyTensor]
    """This rank's part of each frozen parameter, one row of elements (ZeRO-3)."""
    aliases: Mapping[str, str]
    """Tied parameters: second name -> the name under which the parameter is stored. Only global rank 0 writes them."""
    optimizer: Any
    """The optimizer's state dict of a run without ZeRO."""
    step: int | None
    """The run's step."""
    dp: int | None
    """Data-parallel size."""
    mp: int | None
    """Model-parallel size: pipeline-parallel size * tensor-parallel size."""
    pp_and_tp: tuple[int, int] | None
    """Pipeline-parallel and tensor-parallel size."""
    version: str | None
    """DeepSpeed's version."""
    config: Mapping[str, Any]
    """DeepSpeed's config."""
    universal_info: Mapping[str, Any]
    """universal_checkpoint_info: how tensor-parallel ranks split the parameters, by patterns over names."""
    autoep_layers: tuple[Mapping[str, Any], ...]
    """The layers whose experts AutoEP fused."""
    progress: Mapping[str, Any]
    """Counters, schedule and config as plain values, by DeepSpeed's keys."""
    client_keys: tuple[str, ...]
    """Keys that the trainer added."""

    @property
    def trained_names(self) -> set[str]:
        """The names of the trained parameters; empty if the file does not list them."""
        return {name for group in self.groups or () for name, _ in group}

    def without_module(self) -> ModelStates:
        """The states without what is equal on all data-parallel ranks, such as the module, which is kept for the first rank only."""
        return replace(self, module=None, optimizer=None, universal_info={}, client_keys=())

    def moved(self, path: str, move: Move) -> ModelStates:
        """The states of another file with an equal pickle. move: where its tensors are."""
        return replace(
            self,
            path=path,
            module=_moved(self.module, move),
            frozen_fragments={name: move(part) for name, part in self.frozen_fragments.items()},
            optimizer=_moved(self.optimizer, move),
        )

    def __repr__(self) -> str:
        return f"<model states of step {self.step} in {self.path}>"


def model_states(root: Any, path: str) -> ModelStates:
    """The model states of a file, from the root object of its pickle.

    Raises: CheckpointError if the root is something else.
    """
    if not isinstance(root, Mapping) or "module" not in root:
        raise CheckpointError(f"it holds {shown(root)}, not the states of a model", where=path, do="Copy the file again")
    module, groups, buffers = root["module"], root.get("param_shapes"), root.get("buffer_names")
    if not isinstance(module, Mapping | None):
        raise CheckpointError(f"its `module` is {shown(module)}, not a dict", where=path)
    return ModelStates(
        path=path,
        module=None if module is None else dict(flat(module)),
        buffers=frozenset(map(str, buffers)) if isinstance(buffers, list | tuple) else None,
        groups=tuple(_parameters(group, path) for group in groups) if isinstance(groups, list | tuple) else None,
        frozen_shapes=_parameters(root.get("frozen_param_shapes"), path),
        frozen_fragments={str(name): part for name, part in _mapping(root.get("frozen_param_fragments")).items() if is_plain_tensor(part)},
        aliases={str(alias): str(name) for alias, name in _mapping(root.get("shared_params")).items()},
        optimizer=root.get("optimizer"),
        step=_count(root.get("global_steps")),
        dp=_count(root.get("dp_world_size")),
        mp=_count(root.get("mp_world_size")),
        pp_and_tp=_pp_and_tp(root.get("checkpoint_parallel_dimensions")),
        version=_text(root.get("ds_version")),
        config=_mapping(root.get("ds_config")),
        universal_info=_mapping(root.get("universal_checkpoint_info")),
        autoep_layers=tuple(_mappings(root.get("ds_autoep_layers") or root.get("autoep_layers"))),
        progress={key: root[key] for key in _PROGRESS if root.get(key) is not None and is_plain(root[key])},
        client_keys=tuple(str(key) for key, value in root.items() if key not in _KNOWN and value is not None),
    )


@value(repr=False)
class OptimizerStates:
    """One file of a ZeRO optimizer's states. The tuples have one entry per group (ZeRO-1, 2) or sub-group (ZeRO-3), unless noted."""

    path: str
    """The file."""
    zero_stage: int
    """3; or 2 for ZeRO-1 and ZeRO-2, which share one layout."""
    partition_counts: tuple[int, ...]
    """How many data-parallel ranks share the group; 0 if the file lacks it."""
    masters: tuple[AnyTensor, ...]
    """This rank's partition of the flat full-precision group, one row of elements."""
    states: tuple[Mapping[str, Any], ...]
    """The base optimizer's state of the partition, by kind: {"exp_avg": row, "step": count, ...}."""
    paddings: tuple[int, ...]
    """Elements of padding at the partition's end that are not stored in `masters`."""
    alignments: tuple[tuple[int, ...], ...]
    """Elements of padding after each parameter; empty if the file lacks them."""
    local_elements: tuple[tuple[tuple[str, int], ...], ...]
    """(name, elements in this partition) of the group's parameters; empty if the file lacks them."""
    group_settings: tuple[Mapping[str, Any], ...]
    """One entry per param group: its settings, with the numbers of its groups under "params"."""
    expert_partitions: tuple[Mapping[str, Any], ...]
    """Which ranks share the group, as AutoEP records it; empty without AutoEP."""
    loss_scaler: Mapping[str, Any]
    """The loss scaler's class and attributes as plain values; not per group."""
    version: str | None
    """DeepSpeed's version."""

    def moved(self, path: str, move: Move) -> OptimizerStates:
        """The states of another file with an equal pickle. move: where its tensors are."""
        return replace(self, path=path, masters=tuple(map(move, self.masters)), states=tuple(_moved(state, move) for state in self.states))

    def __repr__(self) -> str:
        return f"<ZeRO-{'3' if self.zero_stage == 3 else '1/2'} optimizer states of {len(self.masters)} groups in {self.path}>"


def optimizer_states(root: Any, path: str) -> OptimizerStates:
    """The ZeRO optimizer's states of a file, from the root object of its pickle.

    Raises: CheckpointError if the root is something else, or the groups are not rows of elements.
    """
    states = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(states, Mapping):
        raise CheckpointError("it holds no optimizer_state_dict", where=path, do="Copy the file again")
    if "fp32_flat_groups" in states:
        return _zero3_states(states, _text(root.get("ds_version")), path)
    if "single_partition_of_fp32_groups" in states:
        return _zero2_states(states, path)
    raise CheckpointError(
        f"its optimizer state has no full-precision groups, only {', '.join(list(map(str, states))[:6])}",
        where=path,
        why="reshard knows the layout of ZeRO's optimizer states only",
        do="Open an issue that names the optimizer",
    )


def _zero2_states(states: Mapping[str, Any], path: str) -> OptimizerStates:
    masters = _rows(states["single_partition_of_fp32_groups"], "single_partition_of_fp32_groups", path)
    base, alignments = states.get("base_optimizer_state"), _listed(states.get("param_alignment_paddings"))
    # BF16_Optimizer writes masters with their padding, and no stage (deepspeed/runtime/bf16_optimizer.py).
    masters_are_padded = "zero_stage" not in states
    return OptimizerStates(
        path=path,
        zero_stage=2,
        partition_counts=_per_group(states.get("partition_count"), len(masters)),
        masters=masters,
        states=tuple(map(_mapping, _base_states(states, len(masters)))),
        paddings=(0,) * len(masters) if masters_are_padded else _counts(states.get("group_paddings"), len(masters)),
        alignments=tuple(tuple(_count(padding) or 0 for padding in _listed(group)) for group in alignments),
        local_elements=tuple(tuple(_local_elements(group)) for group in _listed(states.get("param_slice_mappings"))),
        group_settings=tuple(plain_settings(_mapping(group)) for group in _listed(_mapping(base).get("param_groups"))),
        expert_partitions=(),
        loss_scaler=_loss_scaler(states),
        version=_text(states.get("ds_version")),
    )


def _base_states(states: Mapping[str, Any], groups: int) -> Iterator[Any]:
    """The base optimizer's state of each group. An elastic checkpoint has a list of states, and one step for all."""
    base, step = states.get("base_optimizer_state"), states.get("base_optimizer_state_step")
    if not isinstance(base, list | tuple):
        by_group = _mapping(_mapping(base).get("state"))
        yield from (by_group.get(group) for group in range(groups))
        return
    for group in range(groups):
        state = base[group] if group < len(base) else None
        yield {"step": step, **state} if is_plain_tensor(step) and isinstance(state, Mapping) else state


def _zero3_states(states: Mapping[str, Any], version: str | None, path: str) -> OptimizerStates:
    masters = _rows(states["fp32_flat_groups"], "fp32_flat_groups", path)
    base = _mapping(states.get("optimizer_state_dict"))
    by_group = _mapping(base.get("state"))
    return OptimizerStates(
        path=path,
        zero_stage=3,
        partition_counts=_per_group(states.get("partition_count"), len(masters)),
        masters=masters,
        states=tuple(_mapping(by_group.get(group)) for group in range(len(masters))),
        paddings=(0,) * len(masters),
        alignments=(),
        local_elements=(),
        group_settings=tuple(plain_settings(_mapping(group)) for group in _listed(base.get("param_groups"))),
        expert_partitions=tuple(_mappings(states.get("ds_zero_partition_groups"))),
        loss_scaler=_loss_scaler(states),
        version=version,
    )


def _loss_scaler(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """The loss scaler's class and its plain attributes; {} if there is none."""
    scaler = states.get("loss_scaler")
    if not isinstance(scaler, Inert) or not isinstance(scaler.state, Mapping):
        return {}
    attributes = {str(key): str(value) if isinstance(value, DTypeName) else value for key, value in scaler.state.items()}
    return {
        "class": scaler.class_name.rpartition(".")[2],
        "dynamic": states.get("dynamic_loss_scale") is True,
        "attributes": {key: value for key, value in attributes.items() if is_plain(value)},
    }


def _rows(value: Any, key: str, path: str) -> tuple[AnyTensor, ...]:
    """The flat groups of a rank: one row of elements each."""
    rows = tuple(_listed(value))
    for i, row in enumerate(rows):
        if not is_plain_tensor(row) or len(row.shape) != 1 or (row.shape[0] > 1 and row.strides != (1,)):
            raise CheckpointError(f"{key}[{i}] should be one row of elements, it is {shown(row)}", where=path, do="Copy the file again")
    return rows


def _local_elements(mapping: Any) -> Iterator[tuple[str, int]]:
    """(name, elements) from one param_slice_mapping. Its start offsets are not read: they are wrong with round_robin_gradients."""
    for name, address in _mapping(mapping).items():
        yield str(name), _count(address.get("numel")) or 0 if isinstance(address, Inert) else 0


def _parameters(shapes: Any, path: str) -> Parameters:
    for name, shape in _mapping(shapes).items():
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CheckpointError(f"its shape is {shown(shape)}", where=f"{name} in {path}")
    return tuple((str(name), tuple(shape)) for name, shape in _mapping(shapes).items())


def _pp_and_tp(dimensions: Any) -> tuple[int, int] | None:
    pp, tp = _count(_mapping(dimensions).get("pp_degree")), _count(_mapping(dimensions).get("tp_degree"))
    return (pp, tp) if pp and tp else None


def _moved(value: Any, move: Move) -> Any:
    """A value with all tensors in it moved."""
    if is_plain_tensor(value):
        return move(value)
    if isinstance(value, Mapping):
        return {key: _moved(item, move) for key, item in value.items()}
    return type(value)(_moved(item, move) for item in value) if type(value) in (list, tuple) else value


# A pickle may hold anything under a key. These give the value of the expected type, or an empty one.


def _mapping(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return value.mapping if isinstance(value, Inert) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in _listed(value) if isinstance(item, Mapping))


def _per_group(value: Any, groups: int) -> tuple[int, ...]:
    """One count per group, from a list or from one number for all."""
    return _counts(value if isinstance(value, list | tuple) else [value] * groups, groups)


def _counts(value: Any, length: int) -> tuple[int, ...]:
    counts = tuple(_count(item) or 0 for item in _listed(value))
    return counts if len(counts) == length else (0,) * length


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
