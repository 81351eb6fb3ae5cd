"""Distributed checkpoints, written: a file of entries for every model-parallel rank, each with what that rank's part of the model is.

As a run of these sizes would save it with one data-parallel rank; a run of any other loads it. The optimizer's state is in the model's form
(fully_reshardable), or that of the plain optimizer. Source: megatron/core/dist_checkpointing, transformer/transformer_block.py,
transformer/moe/experts.py and optimizer/*.py (sharded_state_dict) of 0.16.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.adapter.dcp_writer import DcpFile, written_metadata
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.errors import RequestError
from reshard.geometry.mosaics import Mosaic
from reshard.plans.layout import Layout, Sidecar
from reshard.plans.target import Target

from ..layout.chunks import Chunk, LayerSpec, RankPlace
from ..layout.save_folders import METADATA, TRACKER
from ..layout.tensors import BUFFERS, MegatronTensor, is_decayed
from .save import F32, Writing, begin_writing

_COMMON = "common.pt"
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True, slots=True, eq=False)
class _Sharded:
    """A tensor of a stage under its key. lead: (number, count) of every axis that it is stacked along; is_expert: experts' ranks cut it."""

    key: str
    tensor: MegatronTensor
    lead: tuple[tuple[int, int], ...]
    is_expert: bool
    is_parameter: bool

    def parts(self, tp: int, rank: int) -> Iterator[tuple[Mosaic, tuple[int, ...]]]:
        """What a rank has of it, block by block, and where that starts in the whole. What is not cut is the first rank's."""
        tensor, start = self.tensor, 0
        for block in tensor.blocks:
            rest = (0,) * (len(block.shape) - 1)
            if tensor.axis is None:
                if rank == 0:
                    yield block, (start, *rest)
            else:
                try:
                    part = block.part(tensor.axis, tp, rank)
                except ValueError as error:
                    raise RequestError(
                        f"{tp} tensor-parallel ranks cannot share it: {error}",
                        where=self.key,
                        do="Choose a tensor-parallel size that divides it (--tp, or --etp for experts)",
                    ) from None
                offsets = [start, *rest]
                offsets[tensor.axis] += rank * part.shape[tensor.axis]
                yield part, tuple(offsets)
            start += block.shape[0]


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every rank, what all have in common, and the metadata that make them a checkpoint."""
    writing = begin_writing(content, target, "a Megatron checkpoint")
    save = f"iter_{writing.step:07d}/" if writing.has_optimizer else "release/"
    files: list[DcpFile] = []
    ranks: list[Mapping[str, int]] = []
    for stage in range(writing.sizes.pp):
        for place in writing.sizes.ranks():
            file = DcpFile(f"__{len(files)}_0.distcp")
            for chunk in writing.chunks:
                if chunk.stage == stage:
                    _add_chunk(writing, file, chunk, place)
            files.append(file)
            ranks.append({"tp": place.tp, "pp": stage, "ep": place.ep})
    common, copies = _common(writing, save)
    metadata = Sidecar(f"{save}.metadata", written_metadata(files))
    backend = Sidecar(f"{save}{METADATA}", json.dumps(_BACKEND).encode())
    tracker = Sidecar(TRACKER, (str(writing.step) if writing.has_optimizer else "release").encode())
    placed = tuple(file.close(rank, folder=save) for file, rank in zip(files, ranks, strict=True))
    sidecars = (*companions.sidecars({writing.dtype}), metadata, backend, tracker)
    return Layout(
        "megatron-dist", (*placed, common), sidecars, target.parallel, writing.notes(), {**writing.copies, **copies}, writing.told
    )


def _add_chunk(writing: Writing, file: DcpFile, chunk: Chunk, place: RankPlace) -> None:
    """What a rank has of a chunk and no rank before it."""
    for each in _sharded(writing, chunk, place.ep):
        if not (place.has_experts if each.is_expert else place.has_dense):
            continue
        parts = each.parts(writing.sizes.etp, place.etp) if each.is_expert else each.parts(writing.sizes.tp, place.tp)
        counts = tuple(count for _, count in each.lead)
        for array, offsets in parts:
            _add_array(writing, file, each, array, (*(number for number, _ in each.lead), *offsets), (*counts, *each.tensor.shape))
    for key in _states(writing, chunk, place):
        file.add_object(key, [None])


def _add_array(writing: Writing, file: DcpFile, each: _Sharded, array: Mosaic, offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """A part of a tensor, and of what the optimizer keeps of it."""
    sizes = (*(1 for _ in each.lead), *array.shape)
    dtype = writing.dtype_of(array) if each.is_parameter else F32
    file.add_tensor(each.key, array.stored(each.key, dtype, sizes), offsets, shape)
    if not writing.has_optimizer or not each.is_parameter:
        return
    names = {kind: kind for kind in writing.kinds(array)}
    if writing.is_distributed or dtype.itemsize < 4:
        names["master_param"] = "param" if writing.is_distributed else "fp32_param"
    for kind, name in names.items():
        key = f"optimizer.state.{name}.{each.key}"
        stored = writing.state_array(array, kind).stored(key, F32, sizes)
        file.add_tensor(key, stored, offsets, shape)


def _sharded(writing: Writing, chunk: Chunk, ep_rank: int) -> Iterator[_Sharded]:
    """The tensors of a chunk, those of its experts as far as they are a rank's."""
    model, ends = writing.model, writing.model.ends
    for name, tensor in ends.items():
        is_here = chunk.is_first if name.startswith("embedding.") else chunk.is_last
        if is_here and not (name.startswith("output_layer.") and model.model.is_tied):
            yield _Sharded(name, tensor, (), False, True)
    for layer in chunk.layers:
        prefix, lead = _prefix(writing, layer)
        yield from _layer(writing, prefix, layer, lead, ep_rank)
    for extra in range(model.extra_layers if chunk.is_last else 0):
        prefix = f"mtp.layers.{extra}."
        for name, tensor in model.extra(extra).items():
            yield _Sharded(prefix + name, tensor, (), False, True)
        yield from _layer(writing, prefix + "transformer_layer.", model.layers + extra, (), ep_rank)


def _prefix(writing: Writing, layer: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Layers that are all alike are stacked; where they differ their names hold their numbers."""
    if writing.is_stacked:
        return "decoder.layers.", ((layer, writing.model.layers),)
    return f"decoder.layers.{layer}.", ()


def _layer(writing: Writing, prefix: str, layer: int, lead: tuple[tuple[int, int], ...], ep_rank: int) -> Iterator[_Sharded]:
    model = writing.model
    for name, tensor in writing.spelling.tensors(model.layer(layer)).items():
        yield _Sharded(prefix + _key(writing, name, layer), tensor, lead, False, name not in BUFFERS)
    if model.is_sparse(layer):
        own = model.experts // writing.sizes.ep
        for expert in range(ep_rank * own, (ep_rank + 1) * own):
            for name, tensor in model.expert(layer, expert).items():
                yield _Sharded(f"{prefix}mlp.experts.experts.{name}", tensor, (*lead, (expert, model.experts)), True, True)


def _key(writing: Writing, name: str, layer: int) -> str:
    """The name of a layer's tensor in the keys: norms before fused layers are called as Transformer Engine calls them, whoever trained."""
    sparse, latent = writing.model.is_sparse(layer), writing.model.is_latent
    if writing.spelling.te or latent:
        return writing.spelling.name(name, sparse=sparse, latent=latent)
    return LayerSpec(te=True).name(name, sparse=False, latent=False)


def _states(writing: Writing, chunk: Chunk, place: RankPlace) -> Iterator[str]:
    """The keys of the linear layers' FP8 states, which are not used: loaders ask for them."""
    seen: dict[str, None] = {}
    for each in _sharded(writing, chunk, place.ep):
        is_own = place.has_experts and not place.etp if each.is_expert else place.has_dense and not place.tp
        module = re.sub(r"\.(weight|bias)$", "", each.key)
        if module != each.key and module.rpartition(".")[2].startswith(("linear_", "eh_proj")) and is_own:
            numbers = each.lead or ((0, 1),)
            shard = ".".join(str(number) for number, _ in numbers) + "_" + ".".join(str(count) for _, count in numbers)
            seen[f"{module}._extra_state/shard_{shard}"] = None
    yield from seen


def _common(writing: Writing, save: str) -> tuple[Any, dict[str, str]]:
    """What all ranks agree on; and which tensors others stand for."""
    file = TorchFile(save + _COMMON)
    copies: dict[str, str] = {}
    root: dict[str, Any] = {
        "args": writing.args(ckpt_format="torch_dist", dist_ckpt_optim_fully_reshardable=True),
        "checkpoint_version": 3.0,
        "iteration": writing.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if writing.has_optimizer:
        root["opt_param_scheduler"] = writing.scheduler()
        root["optimizer"] = _optimizer(writing, file, copies)
        if writing.is_distributed:
            root["content_metadata"]["distrib_optim_sharding_type"] = "fully_reshardable"
    return file.close(root), copies


def _optimizer(writing: Writing, file: TorchFile, copies: dict[str, str]) -> Any:
    """The param groups; experts have an optimizer of their own if they are shared out."""
    by_expert: dict[bool, dict[bool, list[str]]] = {}
    for chunk in writing.chunks:
        for each in (each for ep_rank in range(writing.sizes.ep) for each in _sharded(writing, chunk, ep_rank)):
            if each.is_parameter:
                own = by_expert.setdefault(each.is_expert and writing.sizes.ep > 1, {True: [], False: []})
                own[is_decayed(each.key, each.tensor.shape)].extend(each.tensor.tensors)
    if not writing.is_distributed and not writing.has_masters:
        # The weights are their own full-precision copies.
        copies.update({kinds["master_param"]: name for name, kinds in writing.states.items()})
    chain: list[dict[str, Any]] = []
    for is_expert, groups in sorted(by_expert.items()):
        found = [
            writing.group_settings(names, is_decayed=is_decayed, is_expert=is_expert)
            for is_decayed, names in groups.items()
            if names or not is_expert
        ]
        chain.append(_one(writing, found, [name for names in groups.values() for name in names], file, copies))
    return dict(enumerate(chain)) if len(chain) > 1 else chain[0]


def _one(writing: Writing, groups: list[dict[str, Any]], names: Sequence[str], file: TorchFile, copies: dict[str, str]) -> dict[str, Any]:
    if writing.is_distributed:
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    steps = {"common_step": writing.step_tensor(file, names, copies)} if writing.has_steps else {}
    inner = {"state": steps, "param_groups": groups}
    # Masters are entries only: a key for them here would be merged with those entries, list by list.
    return {"optimizer": inner} if writing.has_masters else inner
