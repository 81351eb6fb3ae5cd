"""Legacy checkpoints (--ckpt-format torch), read: from one torch.save file per model-parallel rank to an Index.

rank folders -> LegacySave -> RunModel -> per rank: ChunkTensors -> OptimizerState -> Index
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import plain_settings, state_kind
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, IncompleteError, UnsupportedError
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from ..layout.adapters import factor_of
from ..layout.arguments import NotUnderstoodError
from ..layout.chunks import ChunkTensor, shared_tables
from ..layout.names import ParsedName, parse_name
from ..layout.parameters import model_tensor, no_such_tensor
from ..layout.save_folders import LAYER_WISE, folder_of_save, unread_optimizers
from ..layout.stages import Chunk, ParallelSizes, split_into_chunks
from ..layout.tensors import EMBEDDING, MegatronModel, QkvOrder
from .arrays import Shape, local_tensors, shared_expert, state_tensors, stored_shard, whole_tensor
from .flat_buffers import buffered_optimizer
from .layer_wise import layer_wise_optimizer
from .optimizer import OF_ADAPTER, OptimizerState, merged_param_groups, numbered_optimizer
from .ranks import LegacySave, MegatronRank, read_ranks
from .run_model import RunModel, check_masters, completed, describe_model

_FORMAT = "megatron"
# The order of q, k and v by the version of the checkpoint (megatron/legacy, fix_query_key_value_ordering).
_OLD_QKV_ORDERS: dict[float, QkvOrder] = {0.0: "by_projection", 1.0: "by_row"}
# The two weights of GroupedMLP. Each holds all experts of a rank.
_GROUPED_EXPERTS = {"mlp.experts.weight1": "weight1", "mlp.experts.weight2": "weight2"}

# Found by this name (adapter/format.py).
check_values = check_masters


def read(files: Files, hints: Hints) -> Index:
    """The index of the save: canonical tensors, or if the model is not known, each rank's tensors as they are stored.

    Raises: CheckpointError if the files are not one whole save.
    """
    folder = folder_of_save(files, "rank folder such as mp_rank_00")
    save = read_ranks(files, folder)
    try:
        model = legacy_model(save, hints)
    except NotUnderstoodError as error:
        return _index_as_stored(files, save, error)
    return _index(files, save, model, unread_optimizers(files, folder))


def legacy_model(save: LegacySave, hints: Hints) -> RunModel:
    """The model of the run. Raises NotUnderstoodError if its layout is not known."""
    # The order of q, k and v depends on the version only for GPT models before Megatron-Core, which are recognized by their names.
    is_old = any("query_key_value" in name for chunk in save.first.chunks for name in chunk)
    qkv_order = _OLD_QKV_ORDERS.get(save.first.version, "by_group") if is_old else "by_group"
    # Each tensor-parallel rank has an equal shard of the embedding.
    vocab = next((stored.shape[0] * save.sizes.tp for parsed, stored in save.tensors() if parsed.name == EMBEDDING and stored.shape), None)
    model = describe_model(save.args, hints, vocab, save.first.path, qkv_order=qkv_order)
    return model.with_adapters((parsed.name, stored.shape) for parsed, stored in save.tensors())


def _index(files: Files, save: LegacySave, model: RunModel, unread: Sequence[str]) -> Index:
    builder = IndexBuilder(_FORMAT, files)
    builder.add_files(rank.path for rank in save.ranks)
    chunks = stored_chunks(save, model.megatron)
    optimizers: list[tuple[int, OptimizerState]] = []
    for number, rank in enumerate(save.ranks):
        tensors = rank_tensors(rank, model.megatron, save.sizes, chunks)
        for tensor, stored in tensors:
            for name, local in local_tensors(tensor.array, stored, model.shapes):
                builder.add("weight", name, local, rank.path, number)
        optimizers.extend((number, state) for state in read_optimizers(files, rank, save, model, [tensor for tensor, _ in tensors]))
        builder.add_objects(rank.objects)
    notes = [note for _, optimizer in optimizers for note in optimizer.notes]
    for number, optimizer in optimizers:
        for parameter, kind, stored in () if notes else optimizer.states:  # a part of it would be incomplete
            for name, local in state_tensors(parameter, stored, model.shapes):
                builder.add(*state_kind(name, name, kind), local, optimizer.path, number)
        builder.add_files([optimizer.path])
    builder.add_notes(notes)
    if unread:
        others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        why = "reshard does not read its form"
        if LAYER_WISE.fullmatch(unread[0]):
            why = "there the files of all ranks and of all saves replace each other, so it may be of another step"
        builder.add_notes([f"the optimizer's state in {unread[0]}{others} is left out: {why}"])
    builder.param_groups = merged_param_groups((optimizer for _, optimizer in optimizers), model.shapes)
    index = builder.build(_facts(save, config=model.config, unanswered=model.unanswered))
    return completed(index, model, files.root, with_optimizer=True)


def read_optimizers(
    files: Files, rank: MegatronRank, save: LegacySave, model: RunModel, tensors: Sequence[ChunkTensor]
) -> list[OptimizerState]:
    """The optimizer of a rank: the distributed one if the rank has its file, the parts of a layer-wise one if it has those, otherwise the
    plain one. Not that of a LoRA adapter, which numbers other parameters.

    Raises: CheckpointError if the buffers of the distributed optimizer do not fit the parameters.
    """
    if model.adapters:
        return [OptimizerState(rank.path, notes=(OF_ADAPTER,) if rank.optimizer else ())]
    parameters = [tensor for tensor in tensors if tensor.is_parameter]
    if buffered := buffered_optimizer(files, rank, save.args, parameters):
        return [buffered]
    parts = layer_wise_optimizer(files, rank, save.sizes, parameters)
    return parts or [numbered_optimizer(rank.optimizer, parameters, rank.path)]


def _index_as_stored(files: Files, save: LegacySave, error: NotUnderstoodError) -> Index:
    """Each rank's tensors under their stored names, with the rank's folder before the name."""
    builder = IndexBuilder(_FORMAT, files)
    for number, rank in enumerate(save.ranks):
        for chunk, tensors in enumerate(rank.chunks):
            prefix = f"{rank.folder}{f'model{chunk}.' if save.sizes.vp > 1 else ''}"
            for name, stored in tensors.items():
                builder.add("weight", prefix + name, whole_tensor(stored), rank.path, number)
    builder.add_files(rank.path for rank in save.ranks)
    builder.add_objects(save.first.objects)
    return builder.build(_facts(save, unanswered=(error.question,)))


def _facts(save: LegacySave, **other: Any) -> RunFacts:
    first, sizes = save.first, save.sizes
    return RunFacts(
        "Megatron-LM",
        f"legacy, checkpoint version {first.version:g}",
        first.iteration,
        {name: size for name, size in sizes.by_name.items() if size > 1 or name in ("tp", "pp")}
        | ({"etp": sizes.etp} if sizes.ep > 1 and sizes.etp != sizes.tp else {}),
        state={**plain_settings(first.run_state), "args": plain_settings(save.args)},
        **other,
    )


# ---- the tensors of a rank ----


def stored_chunks(save: LegacySave, model: MegatronModel) -> tuple[Chunk, ...]:
    """The chunks of all stages, by the layers in the ranks' files.

    Raises: CheckpointError if the layers of the chunks are not those of the model.
    """
    counts: dict[tuple[int, int], int] = {}
    for rank in save.ranks:
        for number, chunk in enumerate(rank.chunks):
            layers = {parsed.layer for parsed in map(parse_name, chunk) if parsed.layer is not None and not parsed.is_mtp}
            if layers and max(layers) + 1 != len(layers):
                raise IncompleteError(
                    f"it holds the layers {sorted(layers)}, and some numbers before the last one are missing",
                    where=rank.path,
                    why="Each chunk numbers its layers from 0",
                    do="Copy the file again",
                )
            if counts.setdefault((number, rank.pp_rank), len(layers)) != len(layers):
                raise CheckpointError(
                    f"it holds {len(layers)} layers, another rank of its stage holds {counts[number, rank.pp_rank]}",
                    where=rank.path,
                    do="Keep the folders of one save only",
                )
    if (stored := sum(counts.values())) != model.layers:
        by_stage = sorted((stage, chunk, count) for (chunk, stage), count in counts.items())
        text = ", ".join(f"stage {stage}{f' chunk {chunk}' if chunk else ''}: {count}" for stage, chunk, count in by_stage)
        raise CheckpointError(
            f"the stages hold {stored} layers ({text}), the model has {model.layers}",
            where=save.first.path,
            why="The files of a stage are missing or belong to another save, or the config belongs to another model",
            do="Copy all rank folders from where the checkpoint was written",
        )
    return split_into_chunks([count for _, count in sorted(counts.items())], save.sizes.pp)


def rank_tensors(
    rank: MegatronRank, model: MegatronModel, sizes: ParallelSizes, chunks: Sequence[Chunk]
) -> list[tuple[ChunkTensor, AnyTensor]]:
    """The tensors of a rank with the arrays that they hold, each with where it is stored. chunks: the result of `stored_chunks`.

    Raises: CheckpointError if the model does not have a stored tensor, or has it with another shape.
    """
    tensors: list[tuple[ChunkTensor, AnyTensor]] = []
    shared = shared_tables(model, sizes)
    for chunk in (chunk for chunk in chunks if chunk.stage == rank.pp_rank):
        for name, stored in rank.chunks[chunk.number].items():
            parsed, where = parse_name(name).in_model(model.layers, chunk.layers.start), f"{name} in {rank.path}"
            if parsed.layer is None and not model.mtp_layers:
                _check_stage(parsed, chunk, sizes, name, rank.path)
            array = _array(parsed, rank, model, sizes, stored.shape, where)
            is_shared = parsed.layer is None and parsed.name in shared
            tensors.append((ChunkTensor(name, array, stored.shape, chunk.number, parsed.is_expert, is_shared, stored.dtype), stored))
    return tensors


def _check_stage(parsed: ParsedName, chunk: Chunk, sizes: ParallelSizes, name: str, path: str) -> None:
    """Raises CheckpointError if a tensor outside of layers is in a chunk that has none of its kind."""
    if not (chunk.is_first if parsed.name.startswith("embedding.") else chunk.is_last):
        raise CheckpointError(
            f"{name} is in stage {chunk.stage}{f', chunk {chunk.number}' if sizes.vp > 1 else ''}",
            where=path,
            why="Only the first stage has embeddings, and only the last one a final norm and a head, so folders have changed places",
            do="Copy all rank folders again from where the checkpoint was written",
        )


def _array(parsed: ParsedName, rank: MegatronRank, model: MegatronModel, sizes: ParallelSizes, shape: Shape, where: str) -> Mosaic:
    """The array of the model that a rank's tensor of this shape holds."""
    if parsed.layer is None or not parsed.is_expert:
        return stored_shard(model_tensor(model, parsed, where), shape, sizes.tp, rank.tp_rank, where)
    experts, etp_rank = sizes.experts_of(rank.ep_rank, model.experts), rank.tp_rank % sizes.etp
    if parsed.name in _GROUPED_EXPERTS:
        tensor = model.grouped_experts(parsed.layer, experts, _GROUPED_EXPERTS[parsed.name])
        return stored_shard(tensor, shape, sizes.etp, etp_rank, where)
    if parsed.expert is None and factor_of(parsed.name):
        raise UnsupportedError(
            "all experts of a rank have one LoRA adapter, or one array of them",
            where=where,
            why="Megatron Bridge saves adapters of grouped experts as torch_dist, and no other form of them was seen",
            do="Save the adapter as torch_dist",
        )
    if parsed.expert is None:
        raise no_such_tensor({}, parsed.name, where)  # in a rank's file, every expert has its number
    if parsed.expert >= len(experts):
        raise CheckpointError(
            f"it is expert {parsed.expert} of its rank, which has {len(experts)}",
            where=where,
            why=f"The model has {model.experts} experts on {sizes.ep} ranks",
        )
    tensor = model_tensor(model, replace(parsed, expert=experts[parsed.expert]), where)
    if factor_of(parsed.name) and sizes.etp > 1:
        raise shared_expert(where)
    return stored_shard(tensor, shape, sizes.etp, etp_rank, where)
