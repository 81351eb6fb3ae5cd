"""The optimizer in a save: which state belongs to which parameter, and the param groups. In three forms:

    a rank's file (legacy)     torch's state dict, which numbers the parameters; or a second file with flat buffers (flat_buffers.py)
    a folder in torch_dcp      the same state dict, one entry per tensor and object:
                                   optimizer.state.<number>.<kind>              state of the parameter with this number
                                   optimizer.fp32_from_fp16_params.<group>.<i>  the master of parameter i of a param group
                                   optimizer.param_groups.<group>.<setting>     "params" lists the numbers of the group's parameters
    other distributed saves    state under the names of the weights (keyed_tensors.py) or in flat buffers; the settings and the step count
                               are shared by all ranks, and the groups do not list their parameters

The numbers follow the order of the parameters in the model, which is the order of a chunk's tensors without buffers. Optimizers of dense
weights and of experts are chained: then there is a list of two. With Muon (0.19) the chain has an optimizer for the matrices, and one for
embedding, head and vectors, whose groups name it: {"optimizer": "adam"}.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of 0.16.1, megatron/training/checkpointing.py of core_r0.16; for
Muon optimizer/{__init__,emerging_optimizers}.py of 0.19.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from reshard.adapter.state_dicts import flat
from reshard.canonical.optimizer_state import plain_settings
from reshard.containers.dcp_metadata import TensorItem
from reshard.containers.torch_zip import LocatedTensor, class_of_array, is_plain_tensor
from reshard.geometry.boxes import Box
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor
from reshard.index.shards import Shards
from reshard.models.model import Model
from reshard.models.parts import Part

from ..layout.chunks import ChunkTensor
from ..layout.names import parse_name
from ..layout.tensors import BUFFER_ROLES, EMBEDDING, HEAD, is_decayed
from .zarr import StoredFolder

OF_ADAPTER = "the optimizer's state is left out: of a run that trains a LoRA adapter, reshard does not read it"
"""A note on a checkpoint."""
_MASTERS = "fp32_from_fp16_params"
# Settings of param groups that tell which parameters are theirs, and which.
OF_EXPERTS, _OF_TABLES, _OF_ALL_BUT_MATRICES = "is_expert_parallel", "is_decoupled_lr", "optimizer"


@value(eq=False, repr=False)
class OptimizerState:
    """What the optimizer of one rank keeps, or that of a whole run."""

    path: str
    """The file that holds it."""
    states: tuple[tuple[ChunkTensor, str, Any], ...] = ()
    """(parameter, torch's name of the kind of state such as "exp_avg", where it is stored) of each tensor."""
    groups: Mapping[tuple[int, int], ParamGroup] = field(default_factory=dict)
    """(the optimizer in the chain, the group's number in it) -> the group, with the canonical names of the parameters here."""
    notes: tuple[str, ...] = ()
    """Why state is left out, if some is."""

    def __repr__(self) -> str:
        return f"<{self.path}: {len(self.states)} optimizer tensors in {len(self.groups)} param groups>"


@value
class ChainLink:
    """One of the chained optimizers, as stored."""

    number: int
    """Its number in the chain."""
    is_alone: bool
    """Whether it is the only one."""
    state: Any
    """State by number of the parameter."""
    groups: list[Mapping[str, Any]]
    """The param groups."""
    masters: Any
    """The masters, group by group."""
    told_by: frozenset[str]
    """The settings by which the chain's groups tell their parameters apart."""

    def parameters(self, parameters: Sequence[ChunkTensor]) -> list[ChunkTensor]:
        """Those of the parameters that it updates: experts have an optimizer to themselves."""
        flags = {bool(group.get(OF_EXPERTS)) for group in self.groups}
        if self.is_alone or len(flags) > 1 or OF_EXPERTS not in self.told_by:
            return list(parameters)
        is_expert = flags.pop() if flags else self.number > 0
        return [parameter for parameter in parameters if parameter.is_expert is is_expert]

    def members(self, parameters: Sequence[ChunkTensor]) -> list[list[ChunkTensor]]:
        """The parameters of each param group, by the groups' settings.

        Experts, parameters without weight decay and those with a learning rate or an optimizer of their own have groups to themselves.
        """

        def belongs(parameter: ChunkTensor, group: Mapping[str, Any]) -> bool:
            is_table = parse_name(parameter.name).name in (EMBEDDING, HEAD)
            return self.owns(parameter.is_expert, is_table, parameter.array.shape, group) and parameter.is_decayed is _has_decay(group)

        own = self.parameters(parameters)
        return [[parameter for parameter in own if belongs(parameter, group)] for group in self.groups]

    def owns(self, is_expert: bool, is_table: bool, shape: Sequence[int], group: Mapping[str, Any]) -> bool:
        """Whether a parameter of this kind is one of a group's, by the settings except weight decay.

        is_table: it is the word embedding or the head.
        """
        facts = {OF_EXPERTS: is_expert, _OF_TABLES: is_table, _OF_ALL_BUT_MATRICES: is_table or len(shape) != 2}
        return all(facts[setting] is bool(group.get(setting)) for setting in self.told_by)

    def param_groups(self, members: Sequence[Sequence[ChunkTensor]]) -> dict[tuple[int, int], ParamGroup]:
        """Its param groups by its number and theirs. members: the result of `members`."""
        groups = {}
        for number, (group, parameters) in enumerate(zip(self.groups, members, strict=True)):
            names = dict.fromkeys(name for parameter in parameters for name in parameter.array.names)
            groups[self.number, number] = ParamGroup(tuple(names), plain_settings(group, without=("params",)))
        return groups


def chain_links(optimizer: Any, at_least: int = 1) -> list[ChainLink]:
    """The chained optimizers of a list, or of a dict by number; one if they are not chained. Megatron wraps torch's state dict, or stores
    it alone. at_least: the number of links, of which the last ones may be empty."""
    if isinstance(optimizer, Mapping) and 0 in optimizer:
        optimizer = [link for _, link in sorted(optimizer.items(), key=lambda item: str(item[0]))]
    chain = list(optimizer) if isinstance(optimizer, list) else [optimizer]
    chain += [None] * (at_least - len(chain))
    links: list[ChainLink] = []
    for number, stored in enumerate(chain):
        outer = stored if isinstance(stored, Mapping) else {}
        inner = outer.get("optimizer", outer)
        inner = inner if isinstance(inner, Mapping) else {}
        groups = inner.get("param_groups")
        listed = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list | tuple) else []
        links.append(ChainLink(number, len(chain) == 1, inner.get("state"), listed, outer.get(_MASTERS), frozenset()))
    settings = (OF_EXPERTS, _OF_TABLES, _OF_ALL_BUT_MATRICES)
    told_by = {setting for setting in settings if any(group.get(setting) for link in links for group in link.groups)}
    if not all(link.groups for link in links):
        told_by.add(OF_EXPERTS)  # the links without groups are those of experts
    return [replace(link, told_by=frozenset(told_by)) for link in links]


def merged_param_groups(states: Iterable[OptimizerState], order: Iterable[str]) -> tuple[ParamGroup, ...]:
    """The param groups of a run, from the parts of all ranks. The settings are those of the first rank.

    order: the model's weights in its order, which each group follows: ZeRO-3 and torch's optimizers load state by position in the group.
    """
    names: dict[tuple[int, int], dict[str, None]] = {}
    settings: dict[tuple[int, int], Mapping[str, Any]] = {}
    for key, group in ((key, group) for state in states for key, group in state.groups.items()):
        names.setdefault(key, {}).update(dict.fromkeys(group.names))
        settings.setdefault(key, group.settings)
    position = {name: i for i, name in enumerate(order)}
    return tuple(ParamGroup(tuple(sorted(names[key], key=lambda name: position[name])), settings[key]) for key in names)


# ---- torch's state dict, whose numbers follow the order of the parameters ----


Members = list[list[ChunkTensor]]
"""The parameters of each param group of an optimizer."""


def numbered_optimizer(
    optimizer: Any,
    parameters: Sequence[ChunkTensor],
    path: str,
    share: Callable[[list[ChainLink], list[Members]], list[Members]] | None = None,
) -> OptimizerState:
    """The optimizer in the file at `path`, from its state dict.

    share: finds what a rank has of the parameters of each optimizer in the chain; None: it has all of them.
    """
    states: list[tuple[ChunkTensor, str, Any]] = []
    groups: dict[tuple[int, int], ParamGroup] = {}
    notes: list[str] = []
    links = chain_links(optimizer)
    of_links = [link.members(parameters) for link in links]
    for link, members in zip(links, share(links, of_links) if share else of_links, strict=True):
        numbers = [list(group["params"]) for group in link.groups if isinstance(group.get("params"), list)]
        if not isinstance(link.state, Mapping) or len(numbers) != len(link.groups):
            continue
        if list(map(len, members)) != list(map(len, numbers)):
            notes.append(
                f"the optimizer's state is left out: it has groups of {_lengths(numbers)} parameters, "
                f"and by their settings they would be {_lengths(members)} ({path})"
            )
            continue
        groups |= link.param_groups(members)
        for position, group_members in enumerate(members):
            masters = link.masters[position] if isinstance(link.masters, list) and position < len(link.masters) else None
            narrow = (member for member in group_members if not member.is_own_master)  # others have no master
            states.extend((member, "master_param", master) for member, master in zip(narrow, masters or (), strict=False))
            for member, parameter_number in zip(group_members, numbers[position], strict=True):
                kept = link.state.get(parameter_number)
                states.extend((member, kind, stored) for kind, stored in (flat(kept) if isinstance(kept, Mapping) else ()))
    tensors = (state for state in states if is_plain_tensor(state[2]) or isinstance(state[2], TensorItem) or class_of_array(state[2]))
    return OptimizerState(path, tuple(tensors), groups, tuple(notes))


def _lengths(groups: Iterable[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups)


_ENTRY = re.compile(rf"optimizer\.(?:optimizer\.)?(state|param_groups|{_MASTERS})\.(\d+)\.(\w+)")


def folder_optimizer(stored: StoredFolder, parameters: Callable[[], Sequence[ChunkTensor]]) -> OptimizerState:
    """The optimizer in a folder that has one entry per tensor and object of a legacy state dict; empty if it has no param groups.

    parameters: finds the parameters of the run.
    """
    metadata = stored.metadata
    entries: dict[str, dict[int, dict[str, Any]]] = {"state": {}, "param_groups": {}, _MASTERS: {}}
    for key in (*metadata.tensors, *(key for key in metadata.objects if ".param_groups." in key)):
        if match := _ENTRY.fullmatch(key):
            entry = metadata.tensors[key] if key in metadata.tensors else stored.value(metadata.objects[key])
            entries[match[1]].setdefault(int(match[2]), {})[match[3]] = entry
    path = f"{stored.prefix}.metadata"
    groups = {number: group for number, group in sorted(entries["param_groups"].items()) if isinstance(group.get("params"), list)}
    if not groups:
        return OptimizerState(path)
    of_groups = [entries[_MASTERS].get(number, {}) for number in groups]
    masters = [[by_position[position] for position in sorted(by_position, key=int)] for by_position in of_groups]
    inner = {"state": entries["state"], "param_groups": list(groups.values())}
    return numbered_optimizer({"optimizer": inner, _MASTERS: masters}, parameters(), path)


def _has_decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", 1.0) != 0)


# ---- the settings that all ranks of a distributed save share ----

# The entries in which each rank saves the settings of its optimizer. The settings of all ranks are equal.
_RANK_SETTINGS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_0_1")


def common_optimizer(
    stored: StoredFolder, common: Mapping[str, Any], model: Model, stored_weights: Collection[str]
) -> tuple[tuple[ParamGroup, ...], list[Tensor]]:
    """The param groups and the step counts, from `common` or, if it has none, from the entries of the ranks.

    The parameters of a group follow from its settings. All parameters of an optimizer share its one stored step count.
    """
    links = chain_links(common.get("optimizer"))
    if not all(link.groups for link in links) and (of_ranks := _settings_of_ranks(stored)):
        chain = {link.number: {"optimizer": {"state": link.state, "param_groups": link.groups}} for link in links}
        links = chain_links({0: None} | chain | of_ranks)
    groups: list[ParamGroup] = []
    steps: list[Tensor] = []
    for link in links:
        # Megatron stores no copies of the tables in layers for multi-token prediction.
        parts = [part for part in model.parts() if part.tensor in stored_weights]
        members = [dict.fromkeys(part.tensor for part in parts if _is_member(part, link, group)) for group in link.groups]
        groups.extend(
            ParamGroup(tuple(names), plain_settings(group, without=("params",))) for names, group in zip(members, link.groups, strict=True)
        )
        step = link.state.get("common_step") if isinstance(link.state, Mapping) else None
        if isinstance(step, LocatedTensor):
            shards = Shards.of([Piece(Box.whole(step.shape), Extent(step.path, step.byte_offset, step.strides, step.dtype))])
            trained = dict.fromkeys(name for names in members for name in names)
            steps.extend(Tensor(name, step.dtype, step.shape, "step", shards) for name in trained)
    return tuple(groups), steps


def _is_member(part: Part, link: ChainLink, group: Mapping[str, Any]) -> bool:
    """Whether a part of the model is one of a group's parameters, by the group's settings."""
    is_own = link.owns(part.expert is not None, part.role in ("embedding", "head"), part.array.shape, group)
    return is_own and part.role not in BUFFER_ROLES and is_decayed(part.parameter, part.array.shape) is _has_decay(group)


def _settings_of_ranks(stored: StoredFolder) -> dict[int, Any]:
    """The settings of each optimizer of the chain, from the entries of the ranks."""
    settings: dict[int, Any] = {}
    for key, item in stored.metadata.objects.items():
        if (match := _RANK_SETTINGS.fullmatch(key)) and (link := int(match[1] or 0)) not in settings:
            settings[link] = as_one(stored.value(item))
    return settings


def as_one(value: Any) -> Any:
    """The first of the values that ranks have in common, of which some versions store a list."""
    return value[0] if isinstance(value, list) and value else value
