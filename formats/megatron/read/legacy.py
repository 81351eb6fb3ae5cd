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
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from ..layout.arguments import NotUnderstoodError
from ..layout.chunks import ChunkTensor
from ..layout.names import parse_name
from ..layout.save_folders import unread_optimizers
from ..layout.stages import Args
from ..layout.tensors import EMBEDDING, QkvOrder
from .arrays import local_tensors, state_tensors, whole_tensor
from .flat_buffers import buffered_optimizer
from .optimizer import OF_ADAPTER, OptimizerState, merged_param_groups, rank_optimizer
from .rank_tensors import rank_tensors, stored_chunks
from .ranks import LegacySave, MegatronRank, read_ranks
from .run_model import RunModel, check_complete, describe_model, layout_question

_FORMAT = "megatron"
# The order of q, k and v by the version of the checkpoint (megatron/legacy, fix_query_key_value_ordering).
_OLD_QKV_ORDERS: dict[float, QkvOrder] = {0.0: "by_projection", 1.0: "by_row"}


def read_legacy(files: Files, folder: str, hints: Hints) -> Index:
    """The index of the save in `folder`: canonical tensors, or if the model is not known, each rank's tensors as they are stored.

    Raises: CheckpointError if the files are not one whole save.
    """
    save = read_ranks(files, folder)
    try:
        model = legacy_model(save, hints)
    except NotUnderstoodError as error:
        return _index_as_stored(files, save, layout_question(error))
    return _index(files, save, model, unread_optimizers(files, folder))


def legacy_model(save: LegacySave, hints: Hints) -> RunModel:
    """The model of the run. Raises NotUnderstoodError if its layout is not known."""
    # The order of q, k and v depends on the version only for GPT models before Megatron-Core, which are recognized by their names.
    is_old = any("query_key_value" in name for chunk in save.first.chunks for name in chunk)
    qkv_order = _OLD_QKV_ORDERS.get(save.first.version, "by_group") if is_old else "by_group"
    model = describe_model(save.args, hints, _stored_vocab(save), save.first.path, qkv_order=qkv_order)
    stored = ((parse_name(name), stored.shape) for rank in save.ranks for chunk in rank.chunks for name, stored in chunk.items())
    return model.with_adapters((parsed.factor_name(shape), shape) for parsed, shape in stored)


def _stored_vocab(save: LegacySave) -> int | None:
    """The rows of the embedding with padding: each tensor-parallel rank has an equal shard; None if no rank has any."""
    chunks = (chunk for rank in save.ranks for chunk in rank.chunks)
    embeddings = (stored for chunk in chunks for name, stored in chunk.items() if parse_name(name).name == EMBEDDING and stored.shape)
    embedding = next(embeddings, None)
    return embedding.shape[0] * save.sizes.tp if embedding else None


def _index(files: Files, save: LegacySave, model: RunModel, unread: Sequence[str]) -> Index:
    builder = IndexBuilder(_FORMAT, files)
    builder.add_files(rank.path for rank in save.ranks)
    chunks = stored_chunks(save, model.megatron)
    optimizers: list[OptimizerState[AnyTensor]] = []
    for number, rank in enumerate(save.ranks):
        tensors = rank_tensors(rank, model.megatron, save.sizes, chunks)
        for tensor, stored in tensors:
            for name, local in local_tensors(tensor.array, stored, model.shapes):
                builder.add("weight", name, local, rank.path, number)
        optimizer = read_optimizer(files, rank, save.args, model, [tensor for tensor, _ in tensors])
        for parameter, kind, stored in optimizer.states:
            for name, local in state_tensors(parameter, stored, model.shapes):
                builder.add(*state_kind(name, name, kind), local, optimizer.path, number)
        builder.add_objects(rank.objects)
        builder.add_files([optimizer.path])
        builder.add_notes(optimizer.notes)
        optimizers.append(optimizer)
    if unread:
        others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        builder.add_notes([f"the optimizer's state in {unread[0]}{others} is left out: reshard does not read its form"])
    builder.param_groups = merged_param_groups(optimizers, model.shapes)
    index = builder.build(_facts(save, config=model.config, unanswered=model.unanswered))
    index = replace(index, tensors=tuple(map(model.as_stored, index.tensors)))
    check_complete(model, index.tensors, files.root, with_optimizer=True)
    return index


def read_optimizer(
    files: Files, rank: MegatronRank, args: Args, model: RunModel, tensors: Sequence[ChunkTensor]
) -> OptimizerState[AnyTensor]:
    """The optimizer of a rank: the distributed one if the rank has its file, otherwise the plain one. Not that of a LoRA adapter, which
    numbers other parameters.

    Raises: CheckpointError if the buffers of the distributed optimizer do not fit the parameters.
    """
    if model.adapters:
        return OptimizerState(rank.path, notes=(OF_ADAPTER,) if rank.optimizer else ())
    parameters = [tensor for tensor in tensors if tensor.is_parameter]
    return buffered_optimizer(files, rank, args, parameters) or rank_optimizer(rank, parameters)


def _index_as_stored(files: Files, save: LegacySave, unanswered: tuple[str, ...]) -> Index:
    """Each rank's tensors under their stored names, with the rank's folder before the name."""
    builder = IndexBuilder(_FORMAT, files)
    for number, rank in enumerate(save.ranks):
        for chunk, tensors in enumerate(rank.chunks):
            prefix = f"{rank.folder}{f'model{chunk}.' if save.sizes.vp > 1 else ''}"
            for name, stored in tensors.items():
                builder.add("weight", prefix + name, whole_tensor(stored), rank.path, number)
    builder.add_files(rank.path for rank in save.ranks)
    builder.add_objects(save.first.objects)
    return builder.build(_facts(save, unanswered=unanswered))


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
