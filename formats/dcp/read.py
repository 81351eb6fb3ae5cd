"""The index of a DCP checkpoint, from its metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.save_folders import step_of
from reshard.index.index import Index, ParamGroup, RunFacts, Tensor
from reshard.storage.files import Files

from .keys import NumberNames, key_path, kind_and_name
from .optimizer import number_names, param_groups

Shape = tuple[int, ...]


def read(files: Files, prefixes: Sequence[str], hints: Hints) -> Index:
    """The index of the DCP directories that make up a checkpoint; `prefixes` are what their paths start with."""
    builder = IndexBuilder("dcp", files)
    folders = [DcpFolder(files, prefix) for prefix in prefixes]
    parameters: dict[str, Shape] = {}
    for folder in folders:
        parameters.update(parameters_of(folder, hints))
        names, notes = number_names(folder, parameters)
        for tensor in tensors_of(folder, names):
            builder.add_tensor(tensor)
        builder.add_notes(notes)
        builder.add_objects(folder.prefix + name for name in folder.metadata.objects)
        builder.add_files(folder.paths)
    facts = RunFacts(
        producer="torch.distributed.checkpoint",
        version=folders[-1].metadata.version,
        step=step_of(f"{files.root}/{prefixes[0]}"),
        parallel={"writing ranks": len({_writing_rank(path) for folder in folders for path in folder.paths})},
        config=hints.config,
    )

    def read_param_groups() -> tuple[ParamGroup, ...]:
        return tuple(group for folder in folders for group in param_groups(folder, number_names(folder, parameters)[0]))

    return builder.build(facts, param_groups=read_param_groups)


def parameters_of(folder: DcpFolder, hints: Hints) -> dict[str, Shape]:
    """The shapes of the model's floating-point tensors, in the order in which they were saved, without a tied head.

    An optimizer's numbers refer to positions in this order.
    """
    metadata = folder.metadata
    order = [fqn for fqn in metadata.planner or () if fqn in metadata.tensors] or list(metadata.tensors)
    tied_head = hints.model.architecture.tied[0] if hints.model and hints.model.is_tied else None
    shapes: dict[str, Shape] = {}
    for fqn in order:
        (kind, name), item = kind_and_name(key_path(metadata, fqn), {}), metadata.tensors[fqn]
        if kind == "weight" and item.dtype.floating and name != tied_head:
            shapes[name] = item.shape
    return shapes


def tensors_of(folder: DcpFolder, names: NumberNames) -> Iterator[Tensor]:
    """The tensors of a directory, under the names that they have in the model."""
    for fqn, item in folder.metadata.tensors.items():
        kind, name = kind_and_name(key_path(folder.metadata, fqn), names)
        yield Tensor(name, item.dtype, item.shape, kind, folder.shards(item))


def _writing_rank(path: str) -> str:
    match = re.search(r"__(\d+)_", path)
    return match[1] if match else path
