"""Distributed checkpoints (--ckpt-format torch_dist, zarr or torch_dcp), read: whole tensors, in boxes that any rank may have written.

    metadata.json         {"sharded_backend": "torch_dist", ...}; written last
    common.pt             args, iteration and everything else that all ranks share; since 2026 an entry called common_state
    .metadata, *.distcp   a folder of torch.distributed.checkpoint

    folder -> backend -> StoredFolder -> common values -> RunModel -> weights, optimizer state -> Index

Layers are stacked along a first axis and experts along a second one, unless layers differ from each other: then the keys have the layers'
numbers. Source: megatron/core/transformer/*.py (sharded_state_dict) and dist_checkpointing of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder, KeyedFolder
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import is_unnamed, plain_settings
from reshard.containers import torch_zip
from reshard.containers.inert_pickle import shown
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.index.index import Index, ParamGroup, RunFacts, Tensor
from reshard.models.lookup import changed_keys
from reshard.storage.files import Files, read_whole
from reshard.storage.json_input import parsed

from ..layout.arguments import NotUnderstoodError, bridge_expert_parallel, config_from_args, nemo_args, plain_args
from ..layout.chunks import ChunkTensor, RankView
from ..layout.names import is_run_key, is_weight_name, parse_key, strip_wrappers
from ..layout.save_folders import COMMON, METADATA_JSON, folder_of_save
from ..layout.stages import Args, ParallelSizes, Rank, split_into_chunks
from ..layout.tensors import EMBEDDING
from .flat_buffers import bucket_tensors
from .keyed_tensors import keyed_tensors
from .optimizer import OF_ADAPTER, OptimizerState, as_one, common_optimizer, folder_optimizer
from .run_model import RunModel, completed, describe_model, without_wrong_masters
from .zarr import StoredFolder, ZarrFolder

# Written as torch_dcp or fsdp_dtensor: a plain folder of torch.distributed.checkpoint, without metadata.json.
_PLAIN, _FSDP = "torch_dcp", "fsdp_dtensor"
_COMMON_ENTRY = "common_state/shard_0_1"
_RUN_STATE = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")

# Found by this name (adapter/format.py).
check_values = without_wrong_masters


def read(files: Files, hints: Hints) -> Index:
    """The index of the save: canonical tensors, or if the model is not known, the tensors under their stored keys.

    Raises: CheckpointError if the files are not one whole save.
    """
    folder = folder_of_save(files, METADATA_JSON)
    backend = read_backend(files, folder)
    stored = ZarrFolder(files, folder) if backend == "zarr" else DcpFolder(files, folder)
    common = read_common(files, stored, backend)
    args = plain_args(common.get("args")) or nemo_args(files, folder)
    builder = IndexBuilder("megatron-dist", files)
    builder.add_objects(stored.metadata.objects)
    builder.add_files(file.path for file in stored.files)
    try:
        items = stored.metadata.tensors.items()
        named = [(parse_key(key).in_shape(item.shape), item.shape) for key, item in items if is_weight_name(key) and not is_run_key(key)]
        base = describe_model(args, hints, _stored_vocab(stored), folder + COMMON)
        model = base.with_adapters((parsed.name, shape) for parsed, shape in named)
    except NotUnderstoodError as error:
        for key, item in stored.metadata.tensors.items():
            builder.add_tensor(Tensor(key, item.dtype, item.shape, "state" if is_run_key(key) else "weight", stored.shards(item)))
        return builder.build(RunFacts("Megatron-Core", backend, unanswered=(error.question,)))
    numbered = OptimizerState("") if model.adapters else folder_optimizer(stored, lambda: _stored_parameters(stored, model, args))
    form, sizes = _FSDP if backend == _PLAIN and args.get("ckpt_format") == _FSDP else backend, ParallelSizes.from_args(args)
    tensors = list(keyed_tensors(stored, model, numbered.states, sizes if form == _FSDP else None))
    if model.adapters:
        builder.add_notes([OF_ADAPTER] if any(map(is_run_key, stored.metadata.tensors)) else [])
        shared = next((parsed.name for parsed, _ in named if parsed.shares_experts), None)
        builder.add_notes([] if shared is None else _of_shared(shared, files, folder, args))
    else:
        weights = {tensor.name for tensor in tensors if tensor.kind == "weight"}
        groups, steps = common_optimizer(stored, common, model.megatron.model, weights)
        builder.param_groups = tuple(numbered.groups.values()) or groups
        keyed = {tensor.name for tensor in tensors if tensor.kind in ("master", "moment1")}
        keyed |= {tensor.name.rpartition(".")[0] for tensor in tensors if tensor.kind == "state"}
        tensors += [*bucket_tensors(stored, model, args, keyed), *steps]
        builder.add_notes([*numbered.notes, *_without_names(tensors)])
    for tensor in tensors:
        builder.add_tensor(tensor)
    builder.add_files([folder + COMMON] if files.size(folder + COMMON) is not None else [])
    step = common.get("iteration", common.get("global_step"))
    facts = RunFacts(
        producer="Megatron-Core",
        version=form,
        step=step if type(step) is int else None,
        config=model.config,
        state={**plain_settings(common), "args": plain_settings(args)},
        parallel={name: size for name, size in sizes.by_name.items() if size > 1},
        unanswered=model.unanswered,
    )
    index = builder.build(facts, param_groups=_groups_of_parameters(stored, model) if not builder.param_groups else None)
    return completed(index, model, files.root, with_optimizer=False)


def _groups_of_parameters(stored: StoredFolder, model: RunModel) -> Callable[[], tuple[ParamGroup, ...]]:
    """Reads the param groups of a save by Megatron-FSDP when they are needed; none of other saves."""

    def read_groups() -> tuple[ParamGroup, ...]:
        from .named_groups import named_groups

        return named_groups(stored, model.megatron) if isinstance(stored, DcpFolder) else ()

    return read_groups


def _without_names(tensors: Iterable[Tensor]) -> Iterator[str]:
    """A note on optimizer state whose parameter is not known."""
    if unnamed := [tensor for tensor in tensors if is_unnamed(tensor)]:
        yield (
            f"the model has no parameter for {plural(len(unnamed), 'tensor')} of the optimizer, such as "
            f"{unnamed[0].name.removeprefix('optim.state.')}; the weights are whole without them"
        )


def _of_shared(name: str, files: Files, folder: str, args: Args) -> Iterator[str]:
    """A note on an adapter that all experts share.

    Raises: UnsupportedError if several expert-parallel ranks had one each. Megatron Bridge 0.3.1 marks them as copies of each other, so a
    save takes some factors of one rank and some of another (measured with expert-parallel size 2).
    """
    size = args.get("expert_model_parallel_size") or bridge_expert_parallel(files, folder)
    if isinstance(size, int) and size > 1:
        raise UnsupportedError(
            f"{size} expert-parallel ranks had a LoRA adapter each for all of their experts, and the save holds one",
            where=f"{name} in {folder}",
            why="Megatron Bridge 0.3 saves some of its factors from one rank and some from another, so no rank trained it",
            do="Train with an adapter for each expert (share_expert_adapters=False of later versions), or leave the experts out",
        )
    told = "" if size else "; if the run had an expert-parallel size above 1, it mixes the adapters of several ranks, and is worth nothing"
    yield f"the experts of a layer share one LoRA adapter, as Megatron Bridge 0.3 trains them: each gets a copy{told}"


def read_memory(memory: KeyedFolder, settings: Args, hints: Hints) -> Index:
    """The index of what the ranks of a run hold in memory, under the keys of their sharded state dict.

    Raises: CheckpointError if the keys and the settings do not describe one model.
    """
    _check_settings(settings, hints)
    model = describe_model(settings, hints, _stored_vocab(memory), "the settings of the run")
    parallel = {name: size for name, size in ParallelSizes.from_args(settings).by_name.items() if size > 1}
    facts = RunFacts("Megatron-Core", config=model.config, parallel=parallel, unanswered=model.unanswered)
    index = Index("megatron-dist", tuple(keyed_tensors(memory, model, ())), memory.files, facts)
    return completed(index, model, "the memory of the ranks", with_optimizer=False)


def _check_settings(args: Args, hints: Hints) -> None:
    """Raises CheckpointError if the config describes another layout than the settings of the run; the number of MTP layers may differ."""
    if hints.config is None:
        return
    own = config_from_args(args, hints.config["vocab_size"])
    if own["model_type"] != hints.config.get("model_type"):
        return  # Megatron's settings do not tell some types from others; the shapes are compared.
    changed = [key for key in changed_keys(own, hints.config) if key.key != "num_nextn_predict_layers"]
    if changed:
        raise CheckpointError(
            f"the run's settings and the config differ: {', '.join(map(str, changed[:5]))}",
            where="the settings of the run",
            why="Heads and experts lie in fused weights as these values say",
            do="Give the config of the model that is trained",
        )


def _stored_parameters(stored: StoredFolder, model: RunModel, args: Args) -> list[ChunkTensor]:
    """The stored parameters in the order of the model. The whole model is one chunk, as tensors are stored whole."""
    dtypes = {strip_wrappers(key): item.dtype for key, item in stored.metadata.tensors.items()}
    (chunk,) = split_into_chunks((model.megatron.layers,), 1)
    parameters = RankView(model.megatron, chunk, ParallelSizes(), Rank(), model.spec(args, "local")).parameters()
    return [replace(parameter, dtype=dtypes[parameter.name]) for parameter in parameters if parameter.name in dtypes]


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


def read_common(files: Files, stored: StoredFolder, backend: str) -> Mapping[str, Any]:
    """The values that all ranks share: in a file of their own, in an entry (since 2026), or one entry each (torch_dcp).

    Raises: CheckpointError if there are none.
    """
    objects = stored.metadata.objects
    if backend == _PLAIN:  # the plain values at the root, and the state of the schedule
        state = {key: stored.value(objects[key]) for key in _RUN_STATE if key in objects}
        schedule = {key.partition(".")[2]: stored.value(item) for key, item in objects.items() if key.startswith("opt_param_scheduler.")}
        return {**state, "opt_param_scheduler": schedule} if schedule else state
    path = stored.prefix + COMMON
    if files.size(path) is not None:
        common = torch_zip.read(files, path)
    elif (entry := objects.get(_COMMON_ENTRY)) is not None:
        common = as_one(stored.value(entry))
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


def _stored_vocab(stored: KeyedFolder) -> int | None:
    """The rows of the embedding with padding; None if there is no embedding."""
    shapes = (item.shape for key, item in stored.metadata.tensors.items() if strip_wrappers(key) == EMBEDDING)
    shape = next(shapes, None)
    return shape[0] if shape else None
