"""What the optimizer keeps of every parameter, and how it is known which parameter that is: nothing is stored under a name.

The order is that of the model's parameters, which is the order of its tensors in the file, buffers aside. The plain optimizer numbers them
through its param groups; the distributed one puts them into flat buffers (buckets.py). Optimizers of dense weights and of experts are
chained: then there is a list of two. Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.adapter.state_dicts import is_tensor
from reshard.canonical.optimizer_state import is_plain, state_kind
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import ParamGroup

from ..layout.flat_buckets import KINDS, Held, starts
from ..layout.tensors import is_decayed
from .run_model import Building
from .tensor_boxes import view

_MASTERS = "fp32_from_fp16_params"


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter of one rank's chunk: its name there, the array that it is, and its element type and shape in the model.

    shared: other stages have it, too.
    """

    name: str
    chunk: int
    array: Mosaic
    stored: AnyTensor
    is_expert: bool
    is_end: bool
    shared: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_decayed(self) -> bool:
        return is_decayed(self.name, self.shape)


@dataclass(slots=True)
class Optimizers:
    """The optimizers' part of an index, as far as ranks have been read."""

    building: Building
    notes: dict[str, None] = field(default_factory=dict)
    groups: dict[tuple[int, int], tuple[dict[str, None], Mapping[str, Any]]] = field(default_factory=dict)

    def param_groups(self) -> tuple[ParamGroup, ...]:
        return tuple(ParamGroup(tuple(names), settings) for names, settings in self.groups.values())

    def read_plain(self, optimizer: Any, parameters: Sequence[Parameter], path: str, rank: int) -> None:
        """The optimizer of a rank's file: state by number, masters group by group. Says so in a note if the numbers stay unknown."""
        for link, states in enumerate(_chain(optimizer)):
            inner, groups = _inner(states)
            own = _of_link(parameters, groups, is_chain=isinstance(optimizer, list), link=link)
            numbers = [list(group["params"]) for group in groups if isinstance(group.get("params"), list)]
            state = inner.get("state")
            if not isinstance(state, Mapping) or len(numbers) != len(groups):
                continue
            masters = states.get(_MASTERS)
            assigned = _by_group(own, groups, [len(each) for each in numbers])
            if isinstance(assigned, str):
                self.notes[f"the optimizer's state is left out: {assigned} ({path})"] = None
                continue
            for position, (group, members) in enumerate(zip(groups, assigned, strict=True)):
                self._list(link, position, group, members)
                held = masters[position] if isinstance(masters, list) and position < len(masters) else []
                fitting = [member for member in members if member.stored.dtype.itemsize < 4] if held else []
                self._add_all([(m, {"master_param": t}) for m, t in zip(fitting, held, strict=len(held) == len(fitting))], path, rank)
                kept = [(m, state[n]) for m, n in zip(members, numbers[position], strict=True) if isinstance(state.get(n), Mapping)]
                self._add_all(kept, path, rank)

    def read_distributed(self, optimizer: Any, buffers: Any, parameters: Sequence[Parameter], sizes: Any, path: str, rank: int) -> None:
        """The flat buffers beside a rank's file. sizes: the bucket sizes that the run may have had.

        Raises: CheckpointError if a buffer is of another length than its parameters come to.
        """
        settings = list(_chain(optimizer))
        chain = buffers if isinstance(buffers, list) else [buffers]
        for link, held in enumerate(chain):
            if not isinstance(held, Mapping):
                continue  # of another rank's file
            _, groups = _inner(settings[link]) if link < len(settings) else ({}, [])
            own = _of_link(parameters, groups, is_chain=isinstance(buffers, list), link=link)
            for position, group in enumerate(groups):
                self._list(link, position, group, [p for p in own if _key(p, groups) == _group_key(group)])
            for part, arrays in _matched(held, own, path):
                self._add_flat(part, arrays, sizes, path, rank)

    def _add_flat(self, own: Sequence[Parameter], arrays: Mapping[str, Any], sizes: Sequence[int | None], path: str, rank: int) -> None:
        places = [Held(parameter.elements, parameter.shared) for parameter in own]
        fitting = {starts(places, size)[0] for size in sizes if starts(places, size)[1] == arrays.get("numel_unpadded")}
        if not fitting:
            raise CheckpointError(
                f"a buffer of the distributed optimizer has {arrays.get('numel_unpadded')} elements, "
                f"its {len(own)} parameters come to {starts(places, None)[1]}",
                where=path,
                why="Where its buckets end depends on settings that the file does not tell, and without them parameters cannot be found",
                do="Save with --ckpt-format torch_dist, or take the weights alone: move distrib_optim.pt away",
            )
        if len(fitting) > 1:
            self.notes[f"the distributed optimizer's state is left out: its buckets could end in {len(fitting)} ways ({path})"] = None
            return
        for parameter, start in zip(own, next(iter(fitting)), strict=True):
            kept = {}
            for key, kind in KINDS.items():
                if is_tensor(arrays.get(key)):
                    kept[kind] = view(arrays[key], start, parameter.shape, row_major(parameter.shape))
            self._add(parameter, kept, path, rank)

    def _list(self, link: int, position: int, group: Mapping[str, Any], members: Sequence[Parameter]) -> None:
        plain = {str(key): value for key, value in group.items() if key != "params" and is_plain(value)}
        names, _ = self.groups.setdefault((link, position), ({}, plain))
        for member in members:
            names.update(dict.fromkeys(member.array.names))

    def _add_all(self, found: Sequence[tuple[Parameter, Mapping[str, Any]]], path: str, rank: int) -> None:
        for parameter, kept in found:
            self._add(parameter, kept, path, rank)

    def _add(self, parameter: Parameter, kept: Mapping[str, Any], path: str, rank: int) -> None:
        """What is kept of a parameter; what has its shape lies as it does, the rest is the same for all that is fused in it."""
        for kind, stored in kept.items():
            if not is_tensor(stored):
                continue
            if stored.shape == parameter.shape:
                self._add_array(parameter.array, kind, stored, path, rank)
                continue
            for name in parameter.array.names:
                role, known = state_kind(name, name, kind)
                local = LocalTensor(stored.dtype, stored.shape, ((Box.whole(stored.shape), stored),))
                self.building.collector.add(role, known, local, path, rank)

    def _add_array(self, array: Mosaic, kind: str, stored: AnyTensor, path: str, rank: int) -> None:
        for name, local in self.building.locals_of(array, stored):
            role, known = state_kind(name, name, kind)
            self.building.collector.add(role, known, local, path, rank)


def _chain(optimizer: Any) -> Iterator[Mapping[str, Any]]:
    found = optimizer if isinstance(optimizer, list) else [optimizer]
    yield from (each if isinstance(each, Mapping) else {} for each in found)


def _inner(states: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """torch's state dict inside of Megatron's, or the one that is there alone; and its param groups."""
    inner = states.get("optimizer", states)
    inner = inner if isinstance(inner, Mapping) else {}
    listed = inner.get("param_groups")
    return inner, [group for group in listed if isinstance(group, Mapping)] if isinstance(listed, list) else []


def _of_link(parameters: Sequence[Parameter], groups: Sequence[Mapping[str, Any]], *, is_chain: bool, link: int) -> list[Parameter]:
    """The parameters of one of the chained optimizers: experts have one of their own."""
    flags = {bool(group.get("is_expert_parallel")) for group in groups}
    if not is_chain or len(flags) > 1:
        return list(parameters)
    wanted = flags.pop() if flags else link > 0
    return [parameter for parameter in parameters if parameter.is_expert is wanted]


def _group_key(group: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    return bool(group.get("is_expert_parallel")), group.get("wd_mult", 1.0) != 0, bool(group.get("is_decoupled_lr"))


def _key(parameter: Parameter, groups: Sequence[Mapping[str, Any]]) -> tuple[bool, bool, bool]:
    """The group that a parameter belongs to: experts, what is not decayed, and what has a learning rate of its own are apart."""
    has_experts = any(group.get("is_expert_parallel") for group in groups)
    has_decoupled = any(group.get("is_decoupled_lr") for group in groups)
    return parameter.is_expert and has_experts, parameter.is_decayed, parameter.is_end and has_decoupled


def _by_group(own: Sequence[Parameter], groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[list[Parameter]] | str:
    """The parameters of each param group in their order; a reason if that is not certain."""
    found = [[parameter for parameter in own if _key(parameter, groups) == _group_key(group)] for group in groups]
    if [len(each) for each in found] == list(counts):
        return found
    by_settings = ", ".join(str(len(members)) for members in found)
    return f"it has groups of {', '.join(map(str, counts))} parameters, and by their settings they would be {by_settings}"


def _matched(held: Mapping[Any, Any], own: Sequence[Parameter], path: str) -> Iterator[tuple[list[Parameter], Mapping[str, Any]]]:
    """The parameters of each buffer: there is one for every element type of every chunk.

    Raises: CheckpointError if there are more or fewer buffers than that.
    """
    expected: list[tuple[str, list[Parameter]]] = []
    for chunk in sorted({parameter.chunk for parameter in own}):
        inside = [parameter for parameter in own if parameter.chunk == chunk]
        for name in dict.fromkeys(parameter.stored.dtype.torch for parameter in inside):
            expected.append((name, [parameter for parameter in inside if parameter.stored.dtype.torch == name]))
    found = [(dtypes, arrays) for key, by_dtype in held.items() if isinstance(by_dtype, Mapping) for dtypes, arrays in by_dtype.items()]
    kinds = [str(dtypes[0]).removeprefix("torch.") if isinstance(dtypes, tuple) else "" for dtypes, _ in found]
    if kinds != [name for name, _ in expected] or not all(isinstance(arrays, Mapping) for _, arrays in found):
        raise CheckpointError(
            f"it holds buffers of {', '.join(kinds) or 'nothing'}, the model's chunks have {', '.join(name for name, _ in expected)}",
            where=path,
            why="There is one for every element type of every chunk",
            do="Copy the file again from where the checkpoint was written, or move it away to take the weights alone",
        )
    for (_, parameters), (_, arrays) in zip(expected, found, strict=True):
        yield parameters, arrays
