"""The optimizer's param groups and step count in a distributed save, which all ranks share.

The param groups do not list their parameters: which parameters belong to a group follows from its settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from reshard.canonical.optimizer_state import plain_settings
from reshard.containers.torch_zip import LocatedTensor
from reshard.geometry.boxes import Box
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor
from reshard.index.shards import Shards
from reshard.models.model import Model, Part

from ..layout.tensors import BUFFER_ROLES, is_decayed
from .zarr import StoredFolder

# The entries in which each rank saves the settings of its optimizer. The settings of all ranks are equal.
_RANK_SETTINGS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_0_1")


@value(eq=False, repr=False)
class CommonOptimizer:
    """The param groups and step counts that all ranks share."""

    param_groups: tuple[ParamGroup, ...] = ()
    """The param groups, with canonical names."""
    steps: tuple[Tensor, ...] = ()
    """One step count per parameter. All parameters of an optimizer share its one stored step count."""

    def __repr__(self) -> str:
        return f"<optimizer with {len(self.param_groups)} param groups, {len(self.steps)} step counts>"


def read_common_optimizer(
    stored: StoredFolder, common: Mapping[str, Any], model: Model, stored_weights: Collection[str]
) -> CommonOptimizer:
    """The param groups and step counts, from `common` or, if it has none, from the entries of the ranks."""
    links = _chain_links(common.get("optimizer"))
    if not any(link.get("param_groups") for link in links):
        links = _chain_links(_settings_of_ranks(stored))
    groups: list[ParamGroup] = []
    steps: list[Tensor] = []
    for number, link in enumerate(links):
        if not link.get("param_groups") and not link.get("state"):
            continue
        # Experts have an optimizer to themselves, the second one of the chain.
        parts = [part for part in model.parts() if len(links) == 1 or (part.expert is not None) is bool(number)]
        groups.extend(_param_groups(link, parts))
        trained = [part.tensor for part in parts if part.role not in BUFFER_ROLES and part.tensor in stored_weights]
        steps.extend(_steps(link, trained))
    return CommonOptimizer(tuple(groups), tuple(steps))


def _settings_of_ranks(stored: StoredFolder) -> dict[int, Any]:
    """The settings of each optimizer of the chain, from the entries of the ranks."""
    settings: dict[int, Any] = {}
    for key, item in stored.metadata.objects.items():
        if (match := _RANK_SETTINGS.fullmatch(key)) and (link := int(match[1] or 0)) not in settings:
            value = stored.value(item)
            settings[link] = value[0] if isinstance(value, list) and value else value
    return settings


def _chain_links(optimizer: Any) -> list[Mapping[str, Any]]:
    """torch's state dict of each optimizer in the chain: a list, a dict by number, or a single one."""
    by_number = dict(enumerate(optimizer)) if isinstance(optimizer, list) else optimizer
    by_number = by_number if isinstance(by_number, Mapping) and 0 in by_number else {0: by_number}
    stored = [value for _, value in sorted(by_number.items(), key=lambda item: str(item[0])) if isinstance(value, Mapping)]
    inner = [value.get("optimizer", value) for value in stored]
    return [link if isinstance(link, Mapping) else {} for link in inner]


def _param_groups(link: Mapping[str, Any], parts: Sequence[Part]) -> Iterator[ParamGroup]:
    groups = link.get("param_groups", ())
    for group in groups if isinstance(groups, list | tuple) else ():
        if isinstance(group, Mapping):
            has_decay = group.get("wd_mult", 1.0) != 0
            names = dict.fromkeys(part.tensor for part in parts if is_decayed(part.parameter, part.array.shape) is has_decay)
            yield ParamGroup(tuple(names), plain_settings(group, without=("params",)))


def _steps(link: Mapping[str, Any], names: Sequence[str]) -> Iterator[Tensor]:
    state = link.get("state")
    step = state.get("common_step") if isinstance(state, Mapping) else None
    if isinstance(step, LocatedTensor):
        shards = Shards.of([Piece(Box.whole(step.shape), Extent(step.path, step.byte_offset, step.strides, step.dtype))])
        yield from (Tensor(name, step.dtype, step.shape, "step", shards) for name in dict.fromkeys(names))
