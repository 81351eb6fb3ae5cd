"""Legacy checkpoints, written: a torch.save file of every model-parallel rank, with the state of the plain or the distributed optimizer.

Weights alone are a "release", which Megatron loads as a model to begin with; with an optimizer it is the save of an iteration.
Source: megatron/training/checkpointing.py (get_checkpoint_name, generate_state_dict) of core_r0.16, optimizer/optimizer.py and
distrib_optimizer.py of 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.containers.pickle_writer import Name
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.stored import Section, StoredTensor
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.target import Target

from ..layout.chunks import Chunk, Entry, RankPlace
from ..layout.flat_buckets import KINDS, Held, starts
from ..layout.save_folders import TRACKER
from ..layout.tensors import is_decayed
from .save import F32, Writing, begin_writing

_FILE, _DISTRIBUTED = "model_optim_rng.pt", "distrib_optim.pt"
_VERSION = 3.0


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every rank, and the tracker that names their folder."""
    writing = begin_writing(content, target, "a Megatron checkpoint")
    save = f"iter_{writing.step:07d}" if writing.has_optimizer else "release"
    copies = dict(writing.copies)
    files: list[TargetFile] = []
    for stage in range(writing.sizes.pp):
        for place in writing.sizes.ranks():
            files.extend(_Rank(writing, stage, place, copies).files(save))
    dtypes = {writing.dtype}
    tracker = Sidecar(TRACKER, (str(writing.step) if writing.has_optimizer else "release").encode())
    parallel = target.parallel
    return Layout("megatron", tuple(files), (*companions.sidecars(dtypes), tracker), parallel, writing.notes(), copies, writing.told)


@dataclass(frozen=True, slots=True, eq=False)
class _Parameter:
    """An entry that the optimizer knows: of which chunk, with which element type."""

    entry: Entry
    array: Mosaic
    chunk: int
    dtype: DType

    @property
    def is_decayed(self) -> bool:
        return is_decayed(self.entry.name, self.array.shape)


class _Rank:
    """What one rank of one stage writes. copies: filled with the step counts for which another one stands."""

    def __init__(self, writing: Writing, stage: int, place: RankPlace, copies: dict[str, str]) -> None:
        self._writing, self._stage, self._place, self._copies = writing, stage, place, copies
        self._chunks = [chunk for chunk in writing.chunks if chunk.stage == stage]
        self._parameters: list[_Parameter] = []

    def files(self, save: str) -> Iterator[TargetFile]:
        sizes = self._writing.sizes
        tp_rank, ep_rank = self._place.tp, self._place.ep
        suffix = (f"_{self._stage:03d}" if sizes.pp > 1 else "") + (f"_{ep_rank:03d}" if sizes.ep > 1 else "")
        folder = f"{save}/mp_rank_{tp_rank:02d}{suffix}/"
        ranks = {"tp": tp_rank, "pp": self._stage, "ep": ep_rank}
        file = TorchFile(folder + _FILE, ranks)
        keys = ["model"] if sizes.vp == 1 else [f"model{number}" for number in range(sizes.vp)]
        root: dict[str, Any] = {
            "args": self._writing.args(rank=self._stage * sizes.per_stage + self._place.number),
            "checkpoint_version": _VERSION,
            "iteration": self._writing.step,
            "num_floating_point_operations_so_far": 0,
        }
        for key, chunk in zip(keys, self._chunks, strict=True):
            root[key] = self._chunk(file, chunk)
        if self._writing.has_optimizer:
            root["optimizer"] = self._optimizer(file)
            root["opt_param_scheduler"] = self._writing.scheduler()
        yield file.close(root)
        if self._writing.has_optimizer and self._writing.is_distributed:
            yield self._flat_file(folder, ranks)

    def _chunk(self, file: TorchFile, chunk: Chunk) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry in self._writing.entries(chunk, self._place):
            if entry.array is None:
                found[entry.name] = None
                continue
            dtype = self._writing.dtype_of(entry.array) if entry.is_parameter else F32
            found[entry.name] = file.tensor(entry.array.stored(entry.name, dtype, entry.shape))
            if entry.is_parameter:
                self._parameters.append(_Parameter(entry, entry.array, chunk.number, dtype))
        return found

    def _links(self) -> list[list[_Parameter]]:
        """The parameters of each of the chained optimizers: experts have one of their own if they are shared out."""
        if self._writing.sizes.ep == 1:
            return [self._parameters]
        return [[p for p in self._parameters if p.entry.is_expert is expert] for expert in (False, True)]

    def _optimizer(self, file: TorchFile) -> Any:
        make = self._settings_alone if self._writing.is_distributed else self._plain
        found = [make(file, members, is_expert=bool(link)) for link, members in enumerate(self._links())]
        return found if len(found) > 1 else found[0]

    def _groups(self, members: Sequence[_Parameter], *, is_expert: bool) -> list[tuple[dict[str, Any], list[_Parameter]]]:
        """The param groups: what is decayed, and what is not. Every rank has both, even if one is empty."""
        found = []
        for decayed in (True, False):
            own = [member for member in members if member.is_decayed is decayed]
            if not own and (is_expert and not decayed):
                continue
            names = [name for member in own for name in member.array.names]
            found.append((self._writing.group_settings(names, is_decayed=decayed, is_expert=is_expert), own))
        return found

    def _settings_alone(self, file: TorchFile, members: Sequence[_Parameter], *, is_expert: bool) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [settings for settings, _ in self._groups(members, is_expert=is_expert)]}}

    def _plain(self, file: TorchFile, members: Sequence[_Parameter], *, is_expert: bool) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        groups, masters = [], []
        for settings, own in self._groups(members, is_expert=is_expert):
            numbers = list(range(len(state), len(state) + len(own)))
            for number, member in zip(numbers, own, strict=True):
                state[number] = self._state(file, member)
            groups.append({**settings, "params": numbers})
            narrow = [member for member in own if member.dtype.itemsize < 4]
            masters.append([file.tensor(self._kept(member, "master_param")) for member in narrow] if self._writing.has_masters else [])
        inner = {"state": state, "param_groups": groups}
        return {"optimizer": inner, "fp32_from_fp16_params": masters} if self._writing.has_masters else inner

    def _state(self, file: TorchFile, member: _Parameter) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if member.dtype.itemsize >= 4:
            # It is its own full-precision copy.
            self._copies.update(
                {self._writing.states[name]["master_param"]: name for name in member.array.names if name in self._writing.states}
            )
        if self._writing.has_steps:
            found["step"] = self._writing.step_tensor(file, member.array.names, self._copies)
        for kind in self._writing.kinds(member.array):
            found[kind] = file.tensor(self._kept(member, kind))
        return found

    def _kept(self, member: _Parameter, kind: str) -> StoredTensor:
        return self._writing.state_array(member.array, kind).stored(f"{kind}.{member.entry.name}", F32, member.entry.shape)

    def _flat_file(self, folder: str, ranks: Mapping[str, int]) -> TargetFile:
        """The buffers of the distributed optimizer; of what several ranks have alike they are in the first one's file."""
        file = TorchFile(folder + _DISTRIBUTED, ranks)
        links = self._links()
        is_first = (self._place.has_dense, self._place.has_experts) if len(links) > 1 else (True,)
        found = [self._buffers(file, members) if first else None for first, members in zip(is_first, links, strict=True)]
        return file.close(found if len(found) > 1 else found[0])

    def _buffers(self, file: TorchFile, members: Sequence[_Parameter]) -> dict[Any, Any]:
        found: dict[Any, Any] = {"buckets_coalesced": True}
        for chunk in dict.fromkeys(member.chunk for member in members):
            inside = [member for member in members if member.chunk == chunk]
            for dtype in dict.fromkeys(member.dtype for member in inside):
                own = [member for member in inside if member.dtype == dtype]
                places, end = starts([Held(math.prod(m.array.shape), m.entry.is_shared) for m in own], self._bucket_size())
                arrays = {key: file.tensor(self._flat(f"{key}.{len(found)}", kind, own, places, end)) for key, kind in KINDS.items()}
                found[len(found) - 1] = {(Name("torch", dtype.torch), Name("torch", "float32")): {**arrays, "numel_unpadded": end}}
        return found

    def _flat(self, name: str, kind: str, own: Sequence[_Parameter], places: Sequence[int], end: int) -> StoredTensor:
        sections: list[Section] = []
        for member, start in zip(own, places, strict=True):
            array = self._writing.state_array(member.array, kind)
            for section in array.sections(row_major(array.shape)):
                sections.append(Section(section.name, section.box, start + section.start, section.strides))
        return StoredTensor(name, F32, (end,), tuple(sections))

    def _bucket_size(self) -> int | None:
        """Where the run closes buckets: it does not, unless it overlaps the reduction of gradients (distributed_data_parallel.py)."""
        args = self._writing.source_args
        if not args.get("overlap_grad_reduce") or self._stage > 0:
            return None
        said, ranks = args.get("ddp_bucket_size"), args.get("data_parallel_size")
        return said if isinstance(said, int) else max(40_000_000, 1_000_000 * (ranks if isinstance(ranks, int) else 1))
