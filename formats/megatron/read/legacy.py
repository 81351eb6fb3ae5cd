"""Legacy checkpoints (--ckpt-format torch), read: from one torch.save file per model-parallel rank to an Index.

rank folders -> LegacySave -> RunModel -> per rank: ChunkTensors -> RankOptimizer -> Index
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import plain_settings
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from ..layout.arguments import NotUnderstoodError
from ..layout.names import parse_name
from ..layout.save_folders import unread_optimizers
from ..layout.tensors import EMBEDDING, QkvOrder
from .chunk_tensors import layer_offsets, locate_tensors
from .optimizer import RankParamGroup, adapter_optimizer, canonical_state, merged_param_groups, read_optimizer
from .ranks import LegacySave, read_ranks
from .run_model import RunModel, check_complete, describe_model, layout_question
from .tensor_boxes import local_tensors, whole_tensor

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
    model = describe_model(save.args, hints, _stored_vocab(save), save.first.path, qkv_order=_qkv_order(save))
    chunks = (chunk for rank in save.ranks for chunk in rank.chunks)
    return model.with_adapters((parse_name(name).name, stored.shape) for chunk in chunks for name, stored in chunk.items())


def _stored_vocab(save: LegacySave) -> int | None:
    """The rows of the embedding with padding: each tensor-parallel rank has an equal shard; None if no rank has any."""
    chunks = (chunk for rank in save.ranks for chunk in rank.chunks)
    embeddings = (stored for chunk in chunks for name, stored in chunk.items() if parse_name(name).name == EMBEDDING and stored.shape)
    embedding = next(embeddings, None)
    return embedding.shape[0] * save.sizes.tp if embedding else None


def _qkv_order(save: LegacySave) -> QkvOrder:
    """The order of q, k and v. It depends on the version only for GPT models before Megatron-Core, which are recognized by their names."""
    is_old = any("query_key_value" in name for chunk in save.first.chunks for name in chunk)
    return _OLD_QKV_ORDERS.get(save.first.version, "by_group") if is_old else "by_group"


def _index(files: Files, save: LegacySave, model: RunModel, unread: Sequence[str]) -> Index:
    builder = IndexBuilder(_FORMAT, files)
    builder.add_files(rank.path for rank in save.ranks)
    offsets = layer_offsets(save, model.megatron)
    groups: list[RankParamGroup] = []
    for number, rank in enumerate(save.ranks):
        tensors = locate_tensors(rank, model.megatron, save.sizes, offsets)
        optimizer = adapter_optimizer(rank) if model.adapters else read_optimizer(files, rank, save.args, tensors)
        for tensor in tensors:
            for name, local in local_tensors(tensor.array, tensor.stored, model.shapes):
                builder.add("weight", name, local, rank.path, number)
        for state in optimizer.states:
            for kind, name, local in canonical_state(state, model.shapes):
                builder.add(kind, name, local, optimizer.path, number)
        builder.add_objects(rank.objects)
        builder.add_files([optimizer.path])
        builder.add_notes(optimizer.notes)
        groups.extend(optimizer.groups)
    builder.add_notes(_unread_note(unread))
    builder.param_groups = merged_param_groups(groups, model.shapes)
    index = builder.build(_facts(save, config=model.config, unanswered=model.unanswered))
    if model.megatron.functions:
        index = replace(index, tensors=tuple(map(model.as_stored, index.tensors)))
    check_complete(model, index.tensors, files.root, with_optimizer=True)
    return index


def _unread_note(paths: Sequence[str]) -> list[str]:
    others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return [f"the optimizer's state in {paths[0]}{others} is left out: reshard does not read its form"] if paths else []


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
    degrees = {"tp": sizes.tp, "pp": sizes.pp, "vp": sizes.vp, "ep": sizes.ep}
    return RunFacts(
        "Megatron-LM",
        f"legacy, checkpoint version {first.version:g}",
        first.iteration,
        {name: size for name, size in degrees.items() if size > 1 or name in ("tp", "pp")}
        | ({"etp": sizes.etp} if sizes.ep > 1 and sizes.etp != sizes.tp else {}),
        state={**plain_settings(first.run_state), "args": plain_settings(save.args)},
        **other,
    )
