"""The memory of the ranks of a run: the parameters and buffers of each, which its state dict names, without a save.

rank of tp_rank 0, pp_rank 0, ep_rank 0    laid out
the same with ep_rank 1, 2, ...            alike: other experts in the places of its experts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.canonical.content import Content
from reshard.geometry.sections import StoredTensor
from reshard.plans.layout import AlikeTensors, FileForm, Layout, Target, TargetFile, unframed

from ..layout.chunks import ChunkTensor
from ..layout.stages import Rank
from .save import F32, MegatronSave, begin_save


def lay_out_memory(content: Content, target: Target) -> Layout:
    """What each rank holds, in the order of the ranks. Raises RequestError if Megatron cannot hold the model, or it does not divide."""
    save = begin_save(content, target)
    firsts: dict[tuple[int, int, int], tuple[Rank, TargetFile] | None] = {}
    files: list[TargetFile] = []
    for number, rank in enumerate(save.sizes.ranks()):
        path, place = f"rank {number}", (rank.pp_rank, rank.tp_rank, rank.etp_rank)
        if alike := firsts.get(place):
            first, file = alike
            assert file.form is not None
            names = _other_experts(save, file.form, rank.ep_rank - first.ep_rank)
            files.append(replace(file, path=path, tensors=AlikeTensors(file.form, 0, names), ranks=rank.coordinates))
            continue
        tensors = list(_tensors(save, rank))
        files.append(unframed(path, (stored for _, stored in tensors), rank.coordinates))
        firsts[place] = (rank, files[-1]) if all(_is_separate(save, tensor) for tensor, _ in tensors) else None
    return Layout("megatron", tuple(files), (), target.parallel, save.notes(), dict(save.aliases))


def _tensors(save: MegatronSave, rank: Rank) -> Iterator[tuple[ChunkTensor, StoredTensor]]:
    """The tensors of a rank. Those of a virtual stage have its number before their names."""
    for chunk in save.chunks_of(rank):
        prefix = "" if save.sizes.vp == 1 else f"model{chunk.number}."
        for name, tensor in save.entries(chunk, rank):
            if tensor:
                yield tensor, tensor.array.stored(prefix + name, tensor.dtype or F32, tensor.shape)


def _is_separate(save: MegatronSave, tensor: ChunkTensor) -> bool:
    """Whether a tensor of experts holds weights that belong to one expert each, so that only their names differ on another rank."""
    weights = save.model.model.weights
    return not tensor.is_expert or all(weights[name].expert is not None for name in tensor.array.names)


def _other_experts(save: MegatronSave, form: FileForm, ep_ranks: int) -> dict[str, str]:
    """The names of weights of experts -> the names of those that a rank holds so many expert-parallel ranks further."""
    weights, step = save.model.model.weights, ep_ranks * len(save.sizes.experts_of(0, save.model.experts))
    experts = ((name, weights[name]) for name in form.names if weights[name].expert is not None)
    return {name: save.model.name_in(name, weight.layer, (weight.expert or 0) + step) for name, weight in experts}
