"""Plain folders of torch.distributed.checkpoint (--ckpt-format torch_dcp): the legacy state dict, each of its tensors and objects an entry.
What the optimizer keeps is numbered, as there.

Source: megatron/training/checkpointing.py of core_r0.16; fsdp_dtensor lies alike, with gates apart from their other halves (`_w`, `_v`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.canonical.optimizer_state import is_plain, state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import ParamGroup, Tensor
from reshard.storage.files import Files, read_whole

from ..layout.arguments import Args
from ..layout.chunks import Entry, LayerSpec, RankPlace, Sizes, chunks_of, entries
from ..layout.names import without_wrappers
from ..layout.tensors import MegatronModel, is_decayed
from .zarr import Stored

_STATE = re.compile(r"optimizer\.(?:optimizer\.)?state\.(\d+)\.([a-z0-9_]+)")
_MASTER = re.compile(r"optimizer\.fp32_from_fp16_params\.(\d+)\.(\d+)")
_GROUP = re.compile(r"optimizer\.(?:optimizer\.)?param_groups\.(\d+)\.(\w+)")
# A word that Megatron's entries have, and nobody else's.
_SIGN, _LIMIT = b"checkpoint_version", 1 << 30
_COMMON = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")


def is_megatrons(files: Files, path: str) -> bool:
    """Whether a .metadata is of such a checkpoint, and not of any other."""
    return (files.size(path) or 0) <= _LIMIT and _SIGN in read_whole(files, path, limit=_LIMIT)


def common(stored: Stored) -> dict[str, Any]:
    """What all ranks agree on: entries of the root, and the schedule's."""
    objects = stored.metadata.objects
    found = {key: stored.value(objects[key]) for key in _COMMON if key in objects}
    schedule = {key.partition(".")[2]: item for key, item in objects.items() if key.startswith("opt_param_scheduler.")}
    if schedule:
        found["opt_param_scheduler"] = {key: stored.value(item) for key, item in schedule.items()}
    return found


class Numbered:
    """The numbered optimizer of such a folder. notes: why its state is left out, if it is."""

    def __init__(self, stored: Stored, model: MegatronModel, args: Args) -> None:
        self._stored, self._tensors = stored, stored.metadata.tensors
        self.notes: list[str] = []
        self._groups = self._param_groups()
        impl = str(args.get("transformer_impl", "local"))
        spelling = LayerSpec.of(args, impl)
        (chunk,) = chunks_of((model.layers,), 1)
        own = {without_wrappers(key) for key in self._tensors}
        found = [
            entry for entry in entries(model, chunk, Sizes(), RankPlace(0, 0, 0), spelling) if entry.is_parameter and entry.name in own
        ]
        self._members: list[list[Entry]] = []
        if self._groups:
            members = [[e for e in found if _is_decayed(e) is (group.get("wd_mult", 1.0) != 0)] for group in self._groups]
            counts = [len(group.get("params", ())) for group in self._groups]
            if [len(each) for each in members] == counts:
                self._members = members
            else:
                self.notes.append(f"the optimizer's state is left out: its groups list {counts} parameters, not those that the model has")

    def param_groups(self) -> tuple[ParamGroup, ...]:
        found = []
        for group, members in zip(self._groups, self._members, strict=False):
            names = dict.fromkeys(name for entry in members if entry.array for name in entry.array.names)
            found.append(ParamGroup(tuple(names), {key: value for key, value in group.items() if key != "params" and is_plain(value)}))
        return tuple(found)

    def arrays(self) -> Iterator[tuple[str, Mosaic, TensorItem]]:
        """(kind, array, where it is stored) of everything that is kept of a parameter."""
        by_number = {n: e for g, m in zip(self._groups, self._members, strict=False) for n, e in zip(g["params"], m, strict=True)}
        for key, item in self._tensors.items():
            entry, kind = None, ""
            if match := _STATE.fullmatch(key):
                entry, kind = by_number.get(int(match[1])), match[2]
            elif match := _MASTER.fullmatch(key):
                group, position = int(match[1]), int(match[2])
                narrow = self._members[group] if group < len(self._members) else []
                entry, kind = narrow[position] if position < len(narrow) else None, "master_param"
            if entry is not None and entry.array is not None:
                yield kind, entry.array, item

    def steps(self) -> Iterator[Tensor]:
        """The counts of steps, one for all that is fused in a parameter."""
        for kind, array, item in self.arrays():
            if item.shape != array.shape:
                for name in array.names:
                    role, known = state_kind(name, name, kind)
                    yield Tensor(known, item.dtype, item.shape, role, self._stored.shards(item))

    def _param_groups(self) -> list[Mapping[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for key, item in self._stored.metadata.objects.items():
            if match := _GROUP.fullmatch(key):
                found.setdefault(int(match[1]), {})[match[2]] = self._stored.value(item)
        return [group for _, group in sorted(found.items()) if isinstance(group.get("params"), list)]


def _is_decayed(entry: Entry) -> bool:
    return entry.array is not None and is_decayed(entry.name, entry.array.shape)
