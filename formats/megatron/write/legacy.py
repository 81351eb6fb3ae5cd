"""Legacy checkpoints, written: one torch.save file per model-parallel rank, with the state of the plain or the distributed optimizer.

    iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    settings, chunks of the model, optimizer
                                        distrib_optim.pt      the flat buffers of the distributed optimizer
    latest_checkpointed_iteration.txt

Source: megatron/training/checkpointing.py (get_checkpoint_name, generate_state_dict) of core_r0.16, optimizer/optimizer.py and
distrib_optimizer.py of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import STEP
from reshard.containers.pickle_writer import Name
from reshard.geometry.boxes import row_major
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.plans.layout import Layout, Target, TargetFile

from ..layout.chunks import ChunkTensor, Entry
from ..layout.flat_buckets import BUFFER_KINDS, bucket_size, buffer_of, by_buffer
from ..layout.save_folders import DISTRIBUTED_OPTIMIZER, LEGACY_WEIGHTS
from ..layout.stages import Rank
from .memory import lay_out_memory as lay_out_memory
from .save import F32, MegatronSave, begin_save


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every rank, and the tracker that names their folder.

    Raises: RequestError if Megatron cannot hold the model, or it does not divide by the parallel sizes.
    """
    save = begin_save(content, target)
    files: list[TargetFile] = []
    aliases = dict(save.aliases)
    for rank in save.sizes.ranks():
        chunks = {chunk.number: save.entries(chunk, rank) for chunk in save.chunks_of(rank)}
        parameters = [tensor for entries in chunks.values() for _, tensor in entries if tensor and tensor.is_parameter]
        files.append(_weights_file(save, rank, chunks, parameters))
        if save.has_optimizer and save.is_distributed_optimizer:
            files.append(_distributed_optimizer_file(save, rank, parameters))
        elif save.has_optimizer:
            steps_shared_by = [parameter.array.names for parameter in parameters] if save.has_step_tensors else ()
            aliases |= save.optimizer.aliases(parameters, steps_shared_by)
    sidecars = (*companions.sidecars({save.dtype}), save.tracker)
    return Layout("megatron", tuple(files), sidecars, target.parallel, save.notes(), aliases, save.inlined_scalars)


def _file(save: MegatronSave, rank: Rank, name: str) -> TorchFile:
    """A new file in the rank's folder."""
    stage = f"_{rank.pp_rank:03d}" if save.sizes.pp > 1 else ""
    ep_rank = f"_{rank.ep_rank:03d}" if save.sizes.ep > 1 else ""
    return TorchFile(f"{save.name}/mp_rank_{rank.tp_rank:02d}{stage}{ep_rank}/{name}", rank.coordinates)


def _weights_file(save: MegatronSave, rank: Rank, chunks: Mapping[int, Sequence[Entry]], parameters: Sequence[ChunkTensor]) -> TargetFile:
    """The file with the settings, the model's chunks by their number in the stage, and the optimizer."""
    file, root = _file(save, rank, LEGACY_WEIGHTS), save.root(rank=rank.number)
    for number, entries in chunks.items():
        root["model" if save.sizes.vp == 1 else f"model{number}"] = {
            name: tensor and file.tensor(tensor.array.stored(name, tensor.dtype or F32, tensor.shape)) for name, tensor in entries
        }
    if save.has_optimizer:
        root |= {"optimizer": _optimizer(save, file, parameters), "opt_param_scheduler": save.scheduler()}
    return file.close(root)


def _optimizer(save: MegatronSave, file: TorchFile, parameters: Sequence[ChunkTensor]) -> Any:
    """The optimizer in a rank's file; with the distributed one only its param groups."""
    chain = []
    for number, members in enumerate(save.by_optimizer(parameters)):
        groups = save.optimizer.param_groups(members, is_expert=bool(number))
        if save.is_distributed_optimizer:
            chain.append({"optimizer": {"param_groups": [settings for settings, _ in groups]}})
        else:
            chain.append(_plain_optimizer(save, file, groups))
    return chain if len(chain) > 1 else chain[0]


def _plain_optimizer(save: MegatronSave, file: TorchFile, groups: Sequence[tuple[dict[str, Any], list[ChunkTensor]]]) -> dict[str, Any]:
    """torch's state dict, which numbers the parameters across the groups; and beside it the masters, group by group."""
    state: dict[int, dict[str, Any]] = {}
    numbered_groups: list[dict[str, Any]] = []
    masters: list[list[Any]] = []
    for settings, members in groups:
        numbers = list(range(len(state), len(state) + len(members)))
        for number, member in zip(numbers, members, strict=True):
            step = {STEP: save.optimizer.step_tensor(file, member.array.names)} if save.has_step_tensors else {}
            kinds = save.optimizer.kinds(member.array)
            state[number] = {**step, **{kind: file.tensor(_state_tensor(save, member, kind)) for kind in kinds}}
        numbered_groups.append({**settings, "params": numbers})
        narrow = [member for member in members if not member.is_own_master] if save.has_masters else []
        masters.append([file.tensor(_state_tensor(save, member, "master_param")) for member in narrow])
    inner = {"state": state, "param_groups": numbered_groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if save.has_masters else inner


def _state_tensor(save: MegatronSave, parameter: ChunkTensor, kind: str) -> StoredTensor:
    return save.optimizer.state_array(parameter.array, kind).stored(f"{kind}.{parameter.name}", F32, parameter.shape)


def _distributed_optimizer_file(save: MegatronSave, rank: Rank, parameters: Sequence[ChunkTensor]) -> TargetFile:
    """The buffers of the distributed optimizer. Those that several ranks would write are in the file of the first one."""
    file, by_optimizer = _file(save, rank, DISTRIBUTED_OPTIMIZER), save.by_optimizer(parameters)
    is_first = (rank.is_first_dense, rank.is_first_experts) if len(by_optimizer) > 1 else (True,)
    chain = [_buffers(save, rank, file, members) if is_own else None for is_own, members in zip(is_first, by_optimizer, strict=True)]
    return file.close(chain if len(chain) > 1 else chain[0])


def _buffers(save: MegatronSave, rank: Rank, file: TorchFile, parameters: Sequence[ChunkTensor]) -> dict[Any, Any]:
    """The arrays of each buffer: one buffer for each element type of each chunk. Without overlapping gradient reduction, and in later
    stages, a buffer has one bucket."""
    args = save.source_args
    size = bucket_size(args) if args.get("overlap_grad_reduce") and rank.pp_rank == 0 else None
    buffers: dict[Any, Any] = {"buckets_coalesced": True}
    for number, members in enumerate(by_buffer(parameters)):
        offsets, elements = buffer_of(members, size)
        arrays = {
            name: _flat_state(save, f"{name}.{number}", kind, zip(members, offsets, strict=True), elements)
            for name, kind in BUFFER_KINDS.items()
        }
        dtype = members[0].dtype or F32
        stored = {name: file.tensor(array) for name, array in arrays.items()}
        buffers[number] = {(Name("torch", dtype.torch), Name("torch", "float32")): {**stored, "numel_unpadded": elements}}
    return buffers


def _flat_state(save: MegatronSave, name: str, kind: str, parameters: Iterable[tuple[ChunkTensor, int]], elements: int) -> StoredTensor:
    """An array of a buffer: the state of that kind of all its parameters, each from its offset on."""
    sections: list[Section] = []
    for parameter, offset in parameters:
        array = save.optimizer.state_array(parameter.array, kind)
        sections.extend(array.sections(row_major(array.shape)).moved(offset))
    return StoredTensor(name, F32, (elements,), Sections.of(sections))
