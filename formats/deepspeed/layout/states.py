"""What the pickles of a tag hold, as plain values: the model states and the optimizer states of one rank.

Unknown keys of a model file are client states: DeepSpeed merges what a trainer adds into the same dict. Every key except `module` may be
missing, since older versions lack many. Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.state_dicts import flat, plain_tensors
from reshard.canonical.optimizer_state import is_plain, plain_settings
from reshard.containers.inert_pickle import DTypeName, Inert, shown
from reshard.containers.recognised_files import Move
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError
from reshard.geometry.value import value
from reshard.index.index import RunFacts

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
    optimizer: Any
    """The optimizer's state dict of a run without ZeRO."""
    groups: tuple[Parameters, ...] | None
    """The trained parameters of each optimizer group (ZeRO-1, 2) or sub-group (ZeRO-3), in the order of the flat buffers."""
    frozen_shapes: Parameters
    """The frozen parameters with their whole shapes."""
    frozen_fragments: Mapping[str, AnyTensor]
    """This rank's part of each frozen parameter, one row of elements (ZeRO-3)."""
    facts: RunFacts
    """The version, the step, the names of buffers, tied parameters (which only global rank 0 writes); and counters, schedule and config as
    plain values, by DeepSpeed's keys."""
    sizes: Mapping[str, int]
    """The run's parallel sizes: "dp", "pp", "tp", and "mp", which is pp * tp."""
    config: Mapping[str, Any]
    """DeepSpeed's config."""
    universal_info: Mapping[str, Any]
    """universal_checkpoint_info: how tensor-parallel ranks split the parameters, by patterns over names."""
    autoep_layers: tuple[Mapping[str, Any], ...]
    """The layers whose experts AutoEP fused."""
    client_keys: tuple[str, ...]
    """Keys that the trainer added."""

    @property
    def tensors(self) -> dict[str, AnyTensor]:
        """The module's tensors by name."""
        return {name: value for name, value in (self.module or {}).items() if is_plain_tensor(value)}

    @property
    def trained_names(self) -> set[str]:
        """The names of the trained parameters; empty if the file does not list them."""
        return {name for group in self.groups or () for name, _ in group}

    def without_module(self) -> ModelStates:
        """The states without what is equal on all data-parallel ranks, such as the module, which is kept for the first rank only."""
        return replace(self, module=None, optimizer=None, universal_info={}, client_keys=())

    def moved(self, path: str, move: Move) -> ModelStates | None:
        """The states of another file with an equal pickle; None with an optimizer, an object of any form. move: where its tensors are."""
        if self.optimizer is not None:
            return None
        fragments = {name: move(part) for name, part in self.frozen_fragments.items()}
        return replace(self, path=path, module=_moved(self.module, move), frozen_fragments=fragments)

    def __repr__(self) -> str:
        return f"<model states of step {self.facts.step} in {self.path}>"


def model_states(root: Any, path: str) -> ModelStates:
    """The model states of a file, from the root object of its pickle.

    Raises: CheckpointError if the root is something else.
    """
    if not isinstance(root, Mapping) or "module" not in root:
        raise CheckpointError(f"it holds {shown(root)}, not the states of a model", where=path, do="Copy the file again")
    module, groups, fragments = root["module"], root.get("param_shapes"), _mapping(root.get("frozen_param_fragments"))
    autoep_layers = _listed(root.get("ds_autoep_layers") or root.get("autoep_layers"))
    if not isinstance(module, Mapping | None):
        raise CheckpointError(f"its `module` is {shown(module)}, not a dict", where=path)
    return ModelStates(
        path,
        module=None if module is None else dict(flat(module)),
        optimizer=root.get("optimizer"),
        groups=tuple(_parameters(group, path) for group in groups) if isinstance(groups, list | tuple) else None,
        frozen_shapes=_parameters(root.get("frozen_param_shapes"), path),
        frozen_fragments=plain_tensors(fragments, path),
        facts=_facts(root),
        sizes=_sizes(root),
        config=_mapping(root.get("ds_config")),
        universal_info=_mapping(root.get("universal_checkpoint_info")),
        autoep_layers=tuple(layer for layer in autoep_layers if isinstance(layer, Mapping)),
        client_keys=tuple(str(key) for key, value in root.items() if key not in _KNOWN and value is not None),
    )


def _facts(root: Mapping[Any, Any]) -> RunFacts:
    buffers = root.get("buffer_names")
    return RunFacts(
        version=_text(root.get("ds_version")),
        step=_count(root.get("global_steps")),
        state={key: root[key] for key in _PROGRESS if root.get(key) is not None and is_plain(root[key])},
        tied={str(alias): str(name) for alias, name in _mapping(root.get("shared_params")).items()},
        buffers=tuple(sorted(set(map(str, buffers)))) if isinstance(buffers, list | tuple) else None,
    )


def _sizes(root: Mapping[Any, Any]) -> dict[str, int]:
    dimensions = _mapping(root.get("checkpoint_parallel_dimensions"))
    sizes = {
        "dp": root.get("dp_world_size"),
        "mp": root.get("mp_world_size"),
        "pp": dimensions.get("pp_degree"),
        "tp": dimensions.get("tp_degree"),
    }
    return {name: count for name, size in sizes.items() if (count := _count(size))}


@value(eq=False, repr=False)
class FlatGroup:
    """One rank's partition of a flat group (ZeRO-1, 2) or sub-group (ZeRO-3). What the file lacks is empty, or 0."""

    master: AnyTensor
    """The full-precision copy, one row of elements."""
    states: Mapping[str, Any]
    """The base optimizer's state of the partition, by kind: {"exp_avg": row, "step": count, ...}."""
    sharing: int
    """How many data-parallel ranks share the group."""
    padding: int = 0
    """Elements of padding at the partition's end that are not stored in `master`."""
    alignments: tuple[int, ...] = ()
    """Elements of padding after each parameter."""
    local_elements: tuple[tuple[str, int], ...] = ()
    """(name, elements in this partition) of the group's parameters."""
    ranks: tuple[int, ...] = ()
    """The ranks that share the group, as AutoEP records them."""
    swap_name: str | None = None
    """What the names of its swap files end with, if it was swapped to NVMe."""

    def __repr__(self) -> str:
        return f"<partition of {self.master.shape[0]} elements with {', '.join(self.states)}>"


@value(repr=False)
class OptimizerStates:
    """One file of a ZeRO optimizer's states."""

    path: str
    """The file."""
    zero_stage: int
    """3; or 2 for ZeRO-1 and ZeRO-2, which share one layout."""
    groups: tuple[FlatGroup, ...]
    """This rank's partitions of the flat groups."""
    group_settings: tuple[Mapping[str, Any], ...]
    """One entry per param group: its settings, with the numbers of its groups under "params"."""
    loss_scaler: Mapping[str, Any]
    """The loss scaler's class and attributes as plain values."""
    version: str | None
    """DeepSpeed's version."""

    @property
    def shared_by(self) -> tuple[int, ...]:
        """How many data-parallel ranks share each group; 0 where the file lacks it."""
        return tuple(group.sharing for group in self.groups)

    @property
    def described_groups(self) -> str:
        """The number of groups, and how many ranks share them."""
        return f"{len(self.groups)} groups shared by {', '.join(map(str, dict.fromkeys(self.shared_by))) or 'no'} ranks"

    def moved(self, path: str, move: Move) -> OptimizerStates:
        """The states of another file with an equal pickle. move: where its tensors are."""
        groups = tuple(replace(group, master=move(group.master), states=_moved(group.states, move)) for group in self.groups)
        return replace(self, path=path, groups=groups)

    def __repr__(self) -> str:
        return f"<ZeRO-{'3' if self.zero_stage == 3 else '1/2'} optimizer states of {len(self.groups)} groups in {self.path}>"


def optimizer_states(root: Any, path: str, attributes: Mapping[str, Any]) -> OptimizerStates:
    """The ZeRO optimizer's states of a file, from the root object of its pickle. attributes: those of its tensors, by storage.

    Raises: CheckpointError if the root is something else, or the groups are not rows of elements.
    """
    states = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(states, Mapping):
        raise CheckpointError("it holds no optimizer_state_dict", where=path, do="Copy the file again")
    if "fp32_flat_groups" in states:
        stage, base, groups = 3, _mapping(states.get("optimizer_state_dict")), _zero3_groups(states, path, attributes)
    elif "single_partition_of_fp32_groups" in states:
        stage, base, groups = 2, _mapping(states.get("base_optimizer_state")), _zero2_groups(states, path)
    else:
        raise CheckpointError(
            f"its optimizer state has no full-precision groups, only {', '.join(list(map(str, states))[:6])}",
            where=path,
            why="reshard knows the layout of ZeRO's optimizer states only",
            do="Open an issue that names the optimizer",
        )
    settings = tuple(plain_settings(_mapping(group)) for group in _listed(base.get("param_groups")))
    return OptimizerStates(
        path, stage, tuple(groups), settings, _loss_scaler(states), _text((root if stage == 3 else states).get("ds_version"))
    )


def _zero2_groups(states: Mapping[str, Any], path: str) -> Iterator[FlatGroup]:
    masters = _rows(states, "single_partition_of_fp32_groups", path)
    # BF16_Optimizer writes masters with their padding, and no stage (deepspeed/runtime/bf16_optimizer.py).
    paddings = _counts(states.get("group_paddings") if "zero_stage" in states else 0, len(masters))
    alignments, slices = _listed(states.get("param_alignment_paddings")), _listed(states.get("param_slice_mappings"))
    sharing, base = _counts(states.get("partition_count"), len(masters)), list(_base_states(states, len(masters)))
    for number, master in enumerate(masters):
        yield FlatGroup(
            master,
            _mapping(base[number]),
            sharing[number],
            paddings[number],
            tuple(_count(padding) or 0 for padding in _listed(_item(alignments, number))),
            tuple(_local_elements(_item(slices, number))),
        )


def _base_states(states: Mapping[str, Any], groups: int) -> Iterator[Any]:
    """The base optimizer's state of each group. An elastic checkpoint has a list of states, and one step for all."""
    base, step = states.get("base_optimizer_state"), states.get("base_optimizer_state_step")
    if not isinstance(base, list | tuple):
        by_group = _mapping(_mapping(base).get("state"))
        yield from (by_group.get(group) for group in range(groups))
        return
    for group in range(groups):
        state = _item(base, group)
        yield {"step": step, **state} if is_plain_tensor(step) and isinstance(state, Mapping) else state


def _zero3_groups(states: Mapping[str, Any], path: str, attributes: Mapping[str, Any]) -> Iterator[FlatGroup]:
    masters, partitions = _rows(states, "fp32_flat_groups", path), _listed(states.get("ds_zero_partition_groups"))
    by_group = _mapping(_mapping(states.get("optimizer_state_dict")).get("state"))
    sharing = _counts(states.get("partition_count"), len(masters))
    for number, master in enumerate(masters):
        ranks = _listed(_mapping(_item(partitions, number)).get("partition_ranks"))
        swap_name = _text(_mapping(attributes.get(master.storage)).get("ds_id"))
        yield FlatGroup(master, _mapping(by_group.get(number)), sharing[number], ranks=tuple(ranks), swap_name=swap_name)


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


def _rows(states: Mapping[str, Any], key: str, path: str) -> Sequence[AnyTensor]:
    """The flat groups of a rank: one row of elements each."""
    rows = _listed(states[key])
    for i, row in enumerate(rows):
        if not is_plain_tensor(row) or len(row.shape) != 1 or (row.shape[0] > 1 and row.strides != (1,)):
            plain_tensors({key: row}, path)
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


def _item(values: Any, number: int) -> Any:
    return values[number] if number < len(_listed(values)) else None


def _counts(value: Any, length: int) -> Sequence[int]:
    """One count per group, from a list or from one number for all."""
    counts = [_count(item) or 0 for item in (value if isinstance(value, list | tuple) else [value] * length)]
    return counts if len(counts) == length else [0] * length


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
