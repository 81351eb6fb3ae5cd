"""The index of a DCP checkpoint, from its metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.adapter.dcp_keys import ModelRoots, add_folder, kind_and_name, number_names, param_groups, stored_path
from reshard.adapter.dcp_reader import DcpFolder, KeyedFolder
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.save_folders import step_of, the_one_save
from reshard.canonical.tensor_classes import RUN_ROOTS, root_of
from reshard.errors import CheckpointError, IncompleteError, RequestError
from reshard.geometry.boxes import Shape
from reshard.index.index import Index, ParamGroup, RunFacts, Tensor
from reshard.storage.files import Files

from . import ANY_METADATA, DATA, METADATA, folders_below, weights_and_optimizer

_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/")


def read(files: Files, hints: Hints) -> Index:
    """The index of the DCP directories that make up a checkpoint."""
    builder, prefixes = IndexBuilder("dcp", files), _folders(files)
    folders = [DcpFolder(files, prefix) for prefix in prefixes]
    parameters: dict[str, Shape] = {}
    beside: dict[str, None] = {}
    for folder in folders:
        parameters.update(parameters_of(folder, hints))
        beside.update(dict.fromkeys(add_folder(builder, folder, parameters)))
    facts = RunFacts(
        producer="torch.distributed.checkpoint",
        version=folders[-1].metadata.version,
        step=next((step for place in (f"{files.root}/{prefixes[0]}", files.root) if (step := step_of(place)) is not None), None),
        parallel={"writing ranks": len({_writing_rank(path) for folder in folders for path in folder.paths})},
        config=hints.config,
        roots=tuple(beside),
    )

    def read_param_groups() -> tuple[ParamGroup, ...]:
        return tuple(group for folder in folders for group in param_groups(folder, number_names(folder, parameters)[0]))

    return builder.build(facts, param_groups=read_param_groups)


def _folders(files: Files) -> list[str]:
    """The DCP directories that make up this checkpoint: "" is the directory itself, others have a slash at their end.

    Raises: CheckpointError if the save was not finished, or there is no save; RequestError for several saves.
    """
    listing = files.list()
    if any(ANY_METADATA.fullmatch(path) for path in listing):
        return [""]
    if any(path.endswith(DATA) for path in listing):
        raise CheckpointError(
            f"there are {DATA} files and no {METADATA}" + (" but .metadata.tmp" if ".metadata.tmp" in listing else ""),
            where=files.root,
            why=f"torch writes {METADATA} last, so this save was not finished, or a copy skipped files that start with a dot",
            do=f"Copy {METADATA} from where the checkpoint was written, or take an earlier checkpoint",
        )
    below = folders_below(files)
    # accelerate: the model before the optimizer, whose numbers count the model's parameters.
    if accelerate := [folder for folder in below if _ACCELERATE.fullmatch(folder)]:
        if len(models := sorted(folder for folder in accelerate if not folder.startswith("optimizer"))) > 1:
            raise RequestError(
                f"{len(models)} models lie here: {', '.join(folder.rstrip('/') for folder in models)}",
                where=files.root,
                why="Their tensors may have the same names",
                do=f"Choose one, such as with `part={models[0].rstrip('/')}`",
            )
        return sorted(accelerate, reverse=True)
    if both := weights_and_optimizer(below):
        return both
    folder = the_one_save(files, below)
    if folder is None:
        raise IncompleteError(f"there is no {METADATA}", where=files.root, do="Give the directory that holds it, or another `format=`")
    return [folder]


def read_memory(memory: KeyedFolder, settings: Mapping[str, Any], hints: Hints) -> Index:
    """The index of what the ranks of a run hold in memory, under the names of the model's parameters and buffers."""
    items = memory.metadata.tensors.values()
    tensors = tuple(Tensor(item.fqn, item.dtype, item.shape, "weight", memory.shards(item)) for item in items)
    facts = RunFacts(producer="torch", parallel={"ranks": len(memory.files)}, config=hints.config)
    return Index("dcp", tensors, memory.files, facts)


def parameters_of(folder: DcpFolder, hints: Hints) -> dict[str, Shape]:
    """The shapes of the model's floating-point tensors, in the order in which they were saved, without further names of a weight.

    An optimizer's numbers refer to positions in this order.
    """
    metadata = folder.metadata
    order = [fqn for fqn in metadata.planner or () if fqn in metadata.tensors] or list(metadata.tensors)
    aliases = hints.model.aliases if hints.model else {}
    roots = ModelRoots.of(metadata)
    shapes: dict[str, Shape] = {}
    for fqn in order:
        (kind, name, root), item = kind_and_name(stored_path(metadata, fqn), {}, roots), metadata.tensors[fqn]
        is_of_model = kind == "weight" and root is None and root_of(name) not in RUN_ROOTS
        if is_of_model and item.dtype.floating and name not in aliases:
            shapes[name] = item.shape
    return shapes


def _writing_rank(path: str) -> str:
    match = re.search(r"__(\d+)_", path)
    return match[1] if match else path
