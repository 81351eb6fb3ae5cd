"""Distributed checkpoints (--ckpt-format torch_dist, zarr or torch_dcp), read: whole tensors, in boxes that any rank may have written.

    metadata.json         {"sharded_backend": "torch_dist", ...}; written last
    common.pt             args, iteration and everything else that all ranks share; since 2026 an entry called common_state
    .metadata, *.distcp   a folder of torch.distributed.checkpoint

    folder -> backend -> StoredFolder -> common values -> RunModel -> weights, optimizer state -> Index

Layers are stacked along a first axis and experts along a second one, unless layers differ from each other: then the keys have the layers'
numbers. Source: megatron/core/transformer/*.py (sharded_state_dict) and dist_checkpointing of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import plain_settings
from reshard.containers import torch_zip
from reshard.containers.inert_pickle import shown
from reshard.errors import CheckpointError
from reshard.index.index import Index, RunFacts, Tensor
from reshard.storage.files import Files, read_whole
from reshard.storage.json_input import parsed

from ..layout.arguments import Args, NotUnderstoodError, parallel_size, plain_args
from ..layout.names import strip_wrappers
from ..layout.save_folders import COMMON, METADATA_JSON
from ..layout.tensors import EMBEDDING
from .bucket_checkpoint import bucket_tensors
from .common_optimizer import CommonOptimizer, read_common_optimizer
from .keyed_tensors import is_run_key, keyed_tensors, with_stored_adapters
from .nemo import nemo_args
from .optimizer import OF_ADAPTER
from .plain_dcp import NumberedOptimizer, numbered_tensors, read_numbered_optimizer, read_run_state
from .run_model import RunModel, check_complete, describe_model, layout_question
from .zarr import StoredFolder, ZarrFolder

_FORMAT = "megatron-dist"
# Written as torch_dcp or fsdp_dtensor: a plain folder of torch.distributed.checkpoint, without metadata.json.
_PLAIN = "torch_dcp"
_COMMON_ENTRY = "common_state/shard_0_1"
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def read_distributed(files: Files, folder: str, hints: Hints) -> Index:
    """The index of the save in `folder`: canonical tensors, or if the model is not known, the tensors under their stored keys.

    Raises: CheckpointError if the files are not one whole save.
    """
    backend = read_backend(files, folder)
    stored = open_folder(files, folder, backend)
    common = read_common(files, stored, backend)
    args = plain_args(common.get("args")) or nemo_args(files, folder)
    try:
        model = with_stored_adapters(stored, describe_model(args, hints, _stored_vocab(stored), folder + COMMON))
    except NotUnderstoodError as error:
        return _index_as_stored(files, stored, RunFacts("Megatron-Core", backend, unanswered=layout_question(error)))
    numbered, has_adapter = NumberedOptimizer(), bool(model.adapters)
    if backend == _PLAIN and not has_adapter:
        numbered = read_numbered_optimizer(stored, model.megatron, args)
    found = [*keyed_tensors(stored, model), *numbered_tensors(stored, numbered, model)]
    if not has_adapter:
        found.extend(bucket_tensors(stored, model, args))
    tensors = [model.as_stored(tensor) for tensor in found] if model.megatron.functions else found
    check_complete(model, tensors, files.root, with_optimizer=False)
    stored_weights = {tensor.name for tensor in tensors if tensor.kind == "weight"}
    optimizer = CommonOptimizer() if has_adapter else read_common_optimizer(stored, common, model.megatron.model, stored_weights)
    builder = _builder(files, stored, [*tensors, *optimizer.steps])
    builder.add_files([folder + COMMON] if files.size(folder + COMMON) is not None else [])
    builder.add_notes([OF_ADAPTER] if has_adapter and any(map(is_run_key, stored.metadata.tensors)) else numbered.notes)
    builder.param_groups = numbered.param_groups() if backend == _PLAIN else optimizer.param_groups
    return builder.build(_facts(backend, common, args, model))


def read_backend(files: Files, folder: str) -> str:
    """The backend that stored the tensors: torch_dist, zarr or torch_dcp.

    Raises: CheckpointError if the save was not finished, or reshard does not read its backend.
    """
    if files.size(folder + METADATA_JSON) is None:
        if files.size(folder + COMMON) is not None:
            raise CheckpointError(
                f"there is a {COMMON} and no {METADATA_JSON}",
                where=f"{files.root}/{folder}",
                why=f"Megatron-Core writes {METADATA_JSON} last, so this save was not finished (or the file was lost)",
                do="Copy it from where the checkpoint was written, or take an earlier checkpoint",
            )
        return _PLAIN
    try:
        backend = str(parsed(read_whole(files, folder + METADATA_JSON, limit=1 << 16))["sharded_backend"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"it does not name the backend of a distributed checkpoint: {error}", where=folder + METADATA_JSON, do="Copy the file again"
        ) from None
    if backend not in ("torch_dist", "zarr", _PLAIN):
        raise CheckpointError(
            f"its tensors are stored by the backend {backend!r}",
            where=folder + METADATA_JSON,
            why="reshard reads torch_dist and zarr",
            do="Convert it to torch_dist with the Megatron-Core that wrote it",
        )
    return backend


def open_folder(files: Files, folder: str, backend: str) -> StoredFolder:
    """The tensors and objects of the save, not yet read."""
    return ZarrFolder(files, folder) if backend == "zarr" else DcpFolder(files, folder)


def read_common(files: Files, stored: StoredFolder, backend: str) -> Mapping[str, Any]:
    """The values that all ranks share: in a file of their own, in an entry (since 2026), or one entry each (torch_dcp).

    Raises: CheckpointError if there are none.
    """
    if backend == _PLAIN:
        return read_run_state(stored)
    path = stored.prefix + COMMON
    if files.size(path) is not None:
        common = torch_zip.read(files, path)
    elif (entry := stored.metadata.objects.get(_COMMON_ENTRY)) is not None:
        common = stored.value(entry)
        common = common[0] if isinstance(common, list) and common else common
    else:
        raise CheckpointError(
            f"there is neither {COMMON} nor an entry {_COMMON_ENTRY}",
            where=files.root,
            why="It holds the run's settings, and without them fused weights cannot be told apart",
            do="Copy it from where the checkpoint was written",
        )
    if not isinstance(common, Mapping):
        raise CheckpointError(f"it holds {shown(common)}, a dict is expected", where=path)
    return common


def _stored_vocab(stored: StoredFolder) -> int | None:
    """The rows of the embedding with padding; None if there is no embedding."""
    shapes = (item.shape for key, item in stored.metadata.tensors.items() if strip_wrappers(key) == EMBEDDING)
    shape = next(shapes, None)
    return shape[0] if shape else None


def _builder(files: Files, stored: StoredFolder, tensors: list[Tensor]) -> IndexBuilder:
    builder = IndexBuilder(_FORMAT, files)
    for tensor in tensors:
        builder.add_tensor(tensor)
    builder.add_objects(stored.metadata.objects)
    builder.add_files(file.path for file in stored.files)
    return builder


def _index_as_stored(files: Files, stored: StoredFolder, facts: RunFacts) -> Index:
    """Every tensor under its key."""
    tensors = [
        Tensor(key, item.dtype, item.shape, "state" if is_run_key(key) else "weight", stored.shards(item))
        for key, item in stored.metadata.tensors.items()
    ]
    return _builder(files, stored, tensors).build(facts)


def _facts(backend: str, common: Mapping[str, Any], args: Args, model: RunModel) -> RunFacts:
    step = common.get("iteration", common.get("global_step"))
    return RunFacts(
        producer="Megatron-Core",
        version=backend,
        step=step if type(step) is int else None,
        config=model.config,
        state={**plain_settings(common), "args": plain_settings(args)},
        parallel={name: size for name, key in _DEGREES.items() if (size := parallel_size(args, key)) > 1},
        unanswered=model.unanswered,
    )
