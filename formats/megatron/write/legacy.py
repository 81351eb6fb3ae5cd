"""Legacy checkpoints, written: one torch.save file per model-parallel rank, with the state of the plain or the distributed optimizer.

    iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    settings, chunks of the model, optimizer
                                        distrib_optim.pt      the flat buffers of the distributed optimizer
    latest_checkpointed_iteration.txt

Source: megatron/training/checkpointing.py (get_checkpoint_name, generate_state_dict) of core_r0.16, optimizer/optimizer.py and
distrib_optimizer.py of 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.containers.pickle_writer import Name
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.geometry.value import value
from reshard.plans.layout import Layout, Target, TargetFile

from ..layout.chunks import Chunk, ChunkEntry
from ..layout.flat_buckets import BUFFER_KINDS, BufferedParameter, BufferLayout, lay_out_buffer
from ..layout.parallel_sizes import StageRank
from ..layout.save_folders import DISTRIBUTED_OPTIMIZER, LEGACY_WEIGHTS
from ..layout.tensors import is_decayed
from .save import F32, MegatronSave, begin_save

_VERSION = 3.0


@value(eq=False)
class _Parameter:
    """A parameter of a rank."""

    entry: ChunkEntry
    array: Mosaic
    chunk: int
    """The number of its chunk in the stage."""
    dtype: DType

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies to it."""
        return is_decayed(self.entry.name, self.array.shape)

    @property
    def is_own_master(self) -> bool:
        """Whether it is its own full-precision copy."""
        return self.dtype.itemsize >= 4


@value(eq=False)
class _SavedRank:
    """What one rank of a stage saves."""

    save: MegatronSave
    """The save that it is a part of."""
    stage: int
    """Its stage."""
    stage_rank: StageRank
    """Its tensor-parallel and expert-parallel rank in the stage."""
    chunks: tuple[tuple[Chunk, list[ChunkEntry]], ...]
    """The chunks of the stage with the rank's entries."""
    parameters: tuple[_Parameter, ...]
    """The parameters of all chunks, in order."""

    @property
    def folder(self) -> str:
        sizes = self.save.sizes
        stage = f"_{self.stage:03d}" if sizes.pp > 1 else ""
        ep_rank = f"_{self.stage_rank.ep_rank:03d}" if sizes.ep > 1 else ""
        return f"{self.save.name}/mp_rank_{self.stage_rank.tp_rank:02d}{stage}{ep_rank}/"

    @property
    def target_ranks(self) -> dict[str, int]:
        return {"tp": self.stage_rank.tp_rank, "pp": self.stage, "ep": self.stage_rank.ep_rank}

    @property
    def parameters_by_optimizer(self) -> list[list[_Parameter]]:
        """The parameters of each of the chained optimizers: with expert parallelism, experts have an optimizer of their own."""
        if self.save.sizes.ep == 1:
            return [list(self.parameters)]
        return [[parameter for parameter in self.parameters if parameter.entry.is_expert is is_expert] for is_expert in (False, True)]


def lay_out_legacy(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every rank, and the tracker that names their folder.

    Raises: RequestError if Megatron cannot hold the model, or it does not divide by the parallel sizes.
    """
    save = begin_save(content, target)
    files: list[TargetFile] = []
    aliases = dict(save.aliases)
    for stage in range(save.sizes.pp):
        for stage_rank in save.sizes.stage_ranks():
            rank = _saved_rank(save, stage, stage_rank)
            files.append(_weights_file(rank))
            if save.has_optimizer and save.is_distributed_optimizer:
                files.append(_distributed_optimizer_file(rank))
            elif save.has_optimizer:
                aliases |= _plain_optimizer_aliases(rank)
    sidecars = (*companions.sidecars({save.dtype}), save.tracker)
    return Layout("megatron", tuple(files), sidecars, target.parallel, save.notes(), aliases, save.inlined_scalars)


def _saved_rank(save: MegatronSave, stage: int, stage_rank: StageRank) -> _SavedRank:
    chunks = tuple((chunk, save.entries(chunk, stage_rank)) for chunk in save.chunks if chunk.stage == stage)
    parameters = tuple(
        _Parameter(entry, entry.array, chunk.number, save.dtype_of(entry.array))
        for chunk, entries in chunks
        for entry in entries
        if entry.array is not None and entry.is_parameter
    )
    return _SavedRank(save, stage, stage_rank, chunks, parameters)


def _weights_file(rank: _SavedRank) -> TargetFile:
    """The file with the settings, the model's chunks and the optimizer."""
    save = rank.save
    file = TorchFile(rank.folder + LEGACY_WEIGHTS, rank.target_ranks)
    root: dict[str, Any] = {
        "args": save.args(rank=rank.stage * save.sizes.ranks_per_stage + rank.stage_rank.number),
        "checkpoint_version": _VERSION,
        "iteration": save.step,
        "num_floating_point_operations_so_far": 0,
    }
    for chunk, entries in rank.chunks:
        root["model" if save.sizes.vp == 1 else f"model{chunk.number}"] = {entry.name: _entry(save, file, entry) for entry in entries}
    if save.has_optimizer:
        root["optimizer"] = _optimizer(rank, file)
        root["opt_param_scheduler"] = save.scheduler()
    return file.close(root)


def _entry(save: MegatronSave, file: TorchFile, entry: ChunkEntry) -> Any:
    """An entry of a chunk as a tensor of the file, or None."""
    if entry.array is None:
        return None
    dtype = save.dtype_of(entry.array) if entry.is_parameter else F32
    return file.tensor(entry.array.stored(entry.name, dtype, entry.stored_shape))


def _optimizer(rank: _SavedRank, file: TorchFile) -> Any:
    """The optimizer in a rank's file; with the distributed one only its param groups."""
    chain = []
    for number, members in enumerate(rank.parameters_by_optimizer):
        groups = _param_groups(rank.save, members, is_expert=bool(number))
        if rank.save.is_distributed_optimizer:
            chain.append({"optimizer": {"param_groups": [settings for settings, _ in groups]}})
        else:
            chain.append(_plain_optimizer(rank.save, file, groups))
    return chain if len(chain) > 1 else chain[0]


_ParamGroup = tuple[dict[str, Any], list[_Parameter]]


def _param_groups(save: MegatronSave, parameters: Sequence[_Parameter], *, is_expert: bool) -> list[_ParamGroup]:
    """(settings, parameters) of the groups with and without weight decay. Dense weights have both groups, even if one is empty."""
    groups: list[_ParamGroup] = []
    for is_decayed_group in (True, False):
        members = [parameter for parameter in parameters if parameter.is_decayed is is_decayed_group]
        if members or is_decayed_group or not is_expert:
            names = [name for member in members for name in member.array.names]
            groups.append((save.optimizer.group_settings(names, is_decayed=is_decayed_group, is_expert=is_expert), members))
    return groups


def _plain_optimizer(save: MegatronSave, file: TorchFile, groups: Sequence[_ParamGroup]) -> dict[str, Any]:
    """torch's state dict, which numbers the parameters across the groups; and beside it the masters, group by group."""
    state: dict[int, dict[str, Any]] = {}
    numbered_groups: list[dict[str, Any]] = []
    masters: list[list[Any]] = []
    for settings, members in groups:
        numbers = list(range(len(state), len(state) + len(members)))
        state |= {number: _parameter_state(save, file, member) for number, member in zip(numbers, members, strict=True)}
        numbered_groups.append({**settings, "params": numbers})
        narrow = [member for member in members if not member.is_own_master] if save.has_masters else []
        masters.append([file.tensor(_state_tensor(save, member, "master_param")) for member in narrow])
    inner = {"state": state, "param_groups": numbered_groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if save.has_masters else inner


def _parameter_state(save: MegatronSave, file: TorchFile, parameter: _Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if save.has_step_tensors:
        state["step"] = save.optimizer.step_tensor(file, parameter.array.names)
    for kind in save.optimizer.kinds(parameter.array):
        state[kind] = file.tensor(_state_tensor(save, parameter, kind))
    return state


def _state_tensor(save: MegatronSave, parameter: _Parameter, kind: str) -> StoredTensor:
    array, entry = save.optimizer.state_array(parameter.array, kind), parameter.entry
    return array.stored(f"{kind}.{entry.name}", F32, entry.stored_shape)


def _plain_optimizer_aliases(rank: _SavedRank) -> dict[str, str]:
    """Masters and step counts that the plain optimizer of a rank does not store, because another stored tensor has the same values."""
    optimizer, aliases = rank.save.optimizer, dict[str, str]()
    for parameter in rank.parameters:
        if parameter.is_own_master:
            aliases |= optimizer.master_aliases(parameter.array.names)
        if rank.save.has_step_tensors:
            aliases |= optimizer.step_aliases(parameter.array.names)
    return aliases


def _distributed_optimizer_file(rank: _SavedRank) -> TargetFile:
    """The buffers of the distributed optimizer. Those that several ranks would write are in the file of the first one."""
    file = TorchFile(rank.folder + DISTRIBUTED_OPTIMIZER, rank.target_ranks)
    by_optimizer = rank.parameters_by_optimizer
    is_first = (rank.stage_rank.is_first_dense, rank.stage_rank.is_first_experts) if len(by_optimizer) > 1 else (True,)
    chain = [_buffers(rank, file, members) if is_own else None for is_own, members in zip(is_first, by_optimizer, strict=True)]
    return file.close(chain if len(chain) > 1 else chain[0])


def _buffers(rank: _SavedRank, file: TorchFile, parameters: Sequence[_Parameter]) -> dict[Any, Any]:
    """The arrays of each buffer: one buffer for each element type of each chunk."""
    buffers: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (dtype, members) in enumerate(_by_buffer(parameters)):
        layout = lay_out_buffer([BufferedParameter(math.prod(m.array.shape), m.entry.is_shared) for m in members], _bucket_size(rank))
        arrays = {
            name: file.tensor(_flat_tensor(rank.save, f"{name}.{number}", kind, members, layout)) for name, kind in BUFFER_KINDS.items()
        }
        buffers[number] = {(Name("torch", dtype.torch), Name("torch", "float32")): {**arrays, "numel_unpadded": layout.elements}}
    return buffers


def _by_buffer(parameters: Sequence[_Parameter]) -> Iterator[tuple[DType, list[_Parameter]]]:
    for chunk in dict.fromkeys(parameter.chunk for parameter in parameters):
        in_chunk = [parameter for parameter in parameters if parameter.chunk == chunk]
        for dtype in dict.fromkeys(parameter.dtype for parameter in in_chunk):
            yield dtype, [parameter for parameter in in_chunk if parameter.dtype == dtype]


def _flat_tensor(save: MegatronSave, name: str, kind: str, parameters: Sequence[_Parameter], layout: BufferLayout) -> StoredTensor:
    """An array of a buffer: the state of that kind of all its parameters."""
    sections: list[Section] = []
    for parameter, offset in zip(parameters, layout.offsets, strict=True):
        array = save.optimizer.state_array(parameter.array, kind)
        sections.extend(array.sections(row_major(array.shape)).moved(offset))
    return StoredTensor(name, F32, (layout.elements,), Sections.of(sections))


def _bucket_size(rank: _SavedRank) -> int | None:
    """The bucket size of the run that will load the save; None without overlapping gradient reduction (distributed_data_parallel.py)."""
    args = rank.save.source_args
    if not args.get("overlap_grad_reduce") or rank.stage > 0:
        return None
    size, data_parallel = args.get("ddp_bucket_size"), args.get("data_parallel_size")
    return size if isinstance(size, int) else max(40_000_000, 1_000_000 * (data_parallel if isinstance(data_parallel, int) else 1))
