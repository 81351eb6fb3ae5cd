"""Distributed checkpoints, written: one file of entries per model-parallel rank, with that rank's part of the model.

    iter_0000010/__{rank}_0.distcp, .metadata    a folder of torch.distributed.checkpoint
                 common.pt                       settings and everything else that all ranks share
                 metadata.json                   the backend
    latest_checkpointed_iteration.txt

The save is that of a run of these sizes with one data-parallel rank; a run of any other sizes loads it. The optimizer's state is in the
model's form (fully_reshardable), or that of the plain optimizer.

Source: megatron/core/dist_checkpointing, transformer/transformer_block.py, transformer/moe/experts.py and optimizer/*.py
(sharded_state_dict) of 0.16.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from reshard.adapter.dcp_writer import DcpFile, written_metadata
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile

from ..layout.chunks import ChunkTensor, cannot_split
from ..layout.names import CORE_ATTENTION
from ..layout.save_folders import COMMON, DCP_METADATA, METADATA_JSON
from ..layout.stages import Chunk, Rank
from ..layout.tensors import BUFFERS, HEAD, MegatronTensor, is_hybrid
from .memory import lay_out_memory as lay_out_memory
from .save import F32, MegatronSave, begin_save

_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_FULLY_RESHARDABLE = "fully_reshardable"

_Lead = tuple[tuple[int, int], ...]
"""(number, count) per stacked axis: the layer's number among all layers, then the expert's among all experts."""


@value(eq=False)
class _KeyedTensor:
    """A tensor of one layer or expert, and where it lies in the stored tensor."""

    key: str
    """The key of the stored tensor."""
    tensor: MegatronTensor
    """The tensor without stacked axes."""
    lead: _Lead = ()
    """Its position along the stacked axes."""
    is_expert: bool = False
    """Whether it belongs to a routed expert, and is split over the ranks that share the expert."""

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer updates it."""
        return not self.key.endswith(BUFFERS)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return (*(count for _, count in self.lead), *self.tensor.shape)

    def shards(self, tp: int, tp_rank: int) -> Iterator[tuple[Mosaic, tuple[int, ...]]]:
        """(array, its offsets in the stored tensor) of each block of a rank's shard. Only the first rank stores a replicated tensor.

        Raises: RequestError if a block does not divide by the ranks.
        """
        numbers, axis, start = tuple(number for number, _ in self.lead), self.tensor.axis, 0
        for block in self.tensor.blocks:
            offsets = [start, *(0 for _ in block.shape[1:])]
            start += block.shape[0]
            if axis is None:
                if tp_rank == 0:
                    yield block, (*numbers, *offsets)
                continue
            try:
                shard = block.part(axis, tp, tp_rank)
            except ValueError as error:
                raise cannot_split(self.key, tp, error) from None
            offsets[axis] += tp_rank * shard.shape[axis]
            yield shard, (*numbers, *offsets)


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The file of every rank, the values that all share, and the metadata that make them a checkpoint.

    Raises: RequestError if Megatron cannot hold the model, or it does not divide by the parallel sizes.
    """
    save = begin_save(content, target)
    folder = f"{save.name}/"
    ranks = list(save.sizes.ranks())
    files = [_rank_file(save, f"__{number}_0.distcp", rank) for number, rank in enumerate(ranks)]
    rank_files = [file.close(rank.coordinates, folder=folder) for file, rank in zip(files, ranks, strict=True)]
    sidecars = (
        *companions.sidecars({save.dtype}),
        Sidecar(folder + DCP_METADATA, written_metadata(files)),
        Sidecar(folder + METADATA_JSON, json.dumps(_BACKEND).encode()),
        save.tracker,
    )
    parameters, aliases = _parameters(save) if save.has_optimizer else [], dict(save.aliases)
    if save.has_optimizer and not save.is_distributed_optimizer:
        steps_shared_by = map(_names, save.by_optimizer(parameters)) if save.has_step_tensors else ()
        aliases |= save.optimizer.aliases(parameters, steps_shared_by)
    all_files = (*rank_files, _common_file(save, folder, parameters))
    return Layout("megatron-dist", all_files, sidecars, target.parallel, save.notes(), aliases, save.inlined_scalars)


def _rank_file(save: MegatronSave, path: str, rank: Rank) -> DcpFile:
    """The file of one rank: the entries that no earlier rank of its stage stores."""
    file, sizes = DcpFile(path), save.sizes
    for chunk in save.chunks_of(rank):
        tensors = list(_keyed_tensors(save, chunk, rank.ep_rank))
        for tensor in tensors:
            if rank.is_first_experts if tensor.is_expert else rank.is_first_dense:
                tp, tp_rank = (sizes.etp, rank.etp_rank) if tensor.is_expert else (sizes.tp, rank.tp_rank)
                for array, offsets in tensor.shards(tp, tp_rank):
                    _add_shard(save, file, tensor, array, offsets)
        for key in _fp8_state_keys(save, tensors, rank):
            file.add_object(key, [None])
    return file


def _add_shard(save: MegatronSave, file: DcpFile, tensor: _KeyedTensor, array: Mosaic, offsets: tuple[int, ...]) -> None:
    """A rank's shard of a tensor, and of the optimizer's state of it."""
    shape = (*(1 for _ in tensor.lead), *array.shape)
    dtype = save.dtype_of(array) if tensor.is_parameter else F32
    file.add_tensor(tensor.key, array.stored(tensor.key, dtype, shape), offsets, tensor.global_shape)
    if not save.has_optimizer or not tensor.is_parameter:
        return
    stored_names = {kind: kind for kind in save.optimizer.kinds(array)}
    if save.is_distributed_optimizer:
        stored_names["master_param"] = "param"
    elif dtype.itemsize < 4:
        stored_names["master_param"] = "fp32_param"
    for kind, name in stored_names.items():
        key = f"optimizer.state.{name}.{tensor.key}"
        state = save.optimizer.state_array(array, kind).stored(key, F32, shape)
        file.add_tensor(key, state, offsets, tensor.global_shape)


def _keyed_tensors(save: MegatronSave, chunk: Chunk, ep_rank: int) -> Iterator[_KeyedTensor]:
    """The tensors of a chunk, with the experts of one expert-parallel rank."""
    model = save.model
    for name, tensor in model.outside_layers.items():
        is_here = chunk.is_first if name.startswith("embedding.") else chunk.is_last
        if is_here and not (name.startswith("output_layer.") and model.model.is_tied):
            yield _KeyedTensor(model.stored_name(name), tensor)
    for layer in chunk.layers:
        # Where layers can differ, the keys have their numbers; otherwise the layers are stacked.
        prefix, lead = ("decoder.layers.", ((layer, model.layers),)) if save.stacks_layers else (f"decoder.layers.{layer}.", ())
        yield from _layer_tensors(save, prefix, layer, lead, ep_rank)
    for mtp_layer in range(model.mtp_layers if chunk.is_last else 0):
        prefix = f"mtp.layers.{mtp_layer}."
        for name, tensor in model.mtp_module(mtp_layer).items():
            yield _KeyedTensor(prefix + name, tensor)
        yield from _layer_tensors(save, prefix + "transformer_layer.", model.layers + mtp_layer, (), ep_rank)


def _layer_tensors(save: MegatronSave, prefix: str, layer: int, lead: _Lead, ep_rank: int) -> Iterator[_KeyedTensor]:
    model = save.model
    tensors = save.spec.tensors(model.layer(layer))
    for name, tensor in save.spec.keys(tensors).items():
        for key, part in tensor.by_segment(prefix + name).items():
            yield _KeyedTensor(key, part, lead)
    if model.is_sparse(layer):
        for expert in save.sizes.experts_of(ep_rank, model.experts):
            for name, tensor in model.expert(layer, expert).items():
                yield _KeyedTensor(f"{prefix}mlp.experts.experts.{name}", tensor, (*lead, (expert, model.experts)), is_expert=True)


def _fp8_state_keys(save: MegatronSave, tensors: Sequence[_KeyedTensor], rank: Rank) -> list[str]:
    """The keys of the unused FP8 states, which loaders require. GPTModel leaves out that of the head, MambaModel does not."""
    spec, keys = save.spec, dict[str, None]()
    for tensor in tensors:
        is_own = rank.is_first_experts and not rank.etp_rank if tensor.is_expert else rank.is_first_dense and not rank.tp_rank
        module = re.sub(r"\.(weight|bias)(\.[A-Za-z]+)?$", "", tensor.key)
        has_state = spec.has_fp8_state(module) or (is_hybrid(save.model.model) and tensor.key == HEAD)
        if is_own and module != tensor.key and has_state:
            lead = tensor.lead or ((0, 1),)
            shard = ".".join(str(number) for number, _ in lead) + "_" + ".".join(str(count) for _, count in lead)
            keys[f"{module}._extra_state/shard_{shard}"] = None
            if spec.extra_state and module.endswith(".self_attention.linear_proj"):
                keys[f"{module.removesuffix('self_attention.linear_proj')}{CORE_ATTENTION}._extra_state/shard_{shard}"] = None
    return list(keys)


def _common_file(save: MegatronSave, folder: str, parameters: Sequence[ChunkTensor]) -> TargetFile:
    """common.pt."""
    file = TorchFile(folder + COMMON)
    root = save.root(ckpt_format="torch_dist", dist_ckpt_optim_fully_reshardable=True)
    root["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if save.has_optimizer:
        root["opt_param_scheduler"] = save.scheduler()
        root["optimizer"] = _optimizer(save, file, parameters)
        if save.is_distributed_optimizer:
            root["content_metadata"]["distrib_optim_sharding_type"] = _FULLY_RESHARDABLE
    return file.close(root)


def _parameters(save: MegatronSave) -> list[ChunkTensor]:
    """The parameters of the whole model, as their stored tensors hold them."""
    parameters: list[ChunkTensor] = []
    for chunk, ep_rank in product(save.chunks, range(save.sizes.ep)):
        for keyed in _keyed_tensors(save, chunk, ep_rank):
            array = keyed.tensor.whole
            parameter = ChunkTensor(keyed.key, array, array.shape, chunk.number, keyed.is_expert, dtype=save.dtype_of(array))
            if parameter.is_parameter and (keyed.is_expert or ep_rank == 0):
                parameters.append(parameter)
    return parameters


def _optimizer(save: MegatronSave, file: TorchFile, parameters: Sequence[ChunkTensor]) -> Any:
    """The optimizer in common.pt: its param groups, and the step count of the plain optimizer."""
    chain: list[dict[str, Any]] = []
    for number, own in enumerate(save.by_optimizer(parameters)):
        groups = save.optimizer.param_groups(own, is_expert=bool(number))
        settings = [settings for settings, _ in groups]
        if save.is_distributed_optimizer:
            chain.append({"optimizer": {"param_groups": settings}, "param_state_sharding_type": _FULLY_RESHARDABLE})
            continue
        names = _names(member for _, members in groups for member in members)
        steps = {"common_step": save.optimizer.step_tensor(file, names)} if save.has_step_tensors else {}
        inner = {"state": steps, "param_groups": settings}
        # Masters are entries only: Megatron would merge a key for them here with those entries, list by list.
        chain.append({"optimizer": inner} if save.has_masters else inner)
    return dict(enumerate(chain)) if len(chain) > 1 else chain[0]


def _names(parameters: Iterable[ChunkTensor]) -> list[str]:
    return [name for parameter in parameters for name in parameter.array.names]
