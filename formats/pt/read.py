"""The index of a model's torch.save file and of its optimizer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.save_folders import notes_on_optimizer, step_of
from reshard.adapter.state_dicts import beside_model, decoded, model_part, parameter_shapes, saved_optimizer
from reshard.canonical.optimizer_state import state_kind
from reshard.canonical.tensor_classes import root_of
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Shape
from reshard.geometry.dtypes import unread
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from .files import candidates


def read(files: Files, hints: Hints) -> Index:
    """The index of the one model, and of the optimizer if there is one.

    Raises: RequestError if several files may hold the model; CheckpointError if none holds a dict of tensors.
    """
    models, optimizers = candidates(files)
    if len(several := models or optimizers) > 1:
        raise RequestError(
            f"{len(several)} files could hold the model: {', '.join(several[:4])}",
            where=files.root,
            do="Give one of them instead of the folder",
            id="ambiguous",
        )
    paths = (*models, *optimizers)
    if not paths:
        raise CheckpointError("torch.save has written none of these files", where=files.root, do="Give the file itself")
    builder = IndexBuilder("pt", files)
    builder.add_files(paths)
    parameters: dict[str, Shape] = {}
    beside: dict[str, None] = {}
    for path in paths:
        root = torch_zip.read(files, path, locate=False)
        optimizer = saved_optimizer(root, path)
        model, other_keys = model_part(root) if optimizer is None or root is not optimizer.state_dict else (None, [])
        if model is not None:
            parameters |= read_model(builder, model, path)
        roots = read_beside_model(builder, root, path)
        beside.update(roots)
        builder.add_objects(key for key in other_keys if key not in roots)
        if optimizer is not None:
            names = optimizer.add_groups(builder, parameters)
            for parameter, kind, local in optimizer.tensors:
                builder.add(*state_kind(names.get(parameter), parameter, kind), local, path, local.rank or 0)
    builder.add_notes(notes_on_optimizer(files))
    index = builder.build(RunFacts("torch.save", step=step_of(files.root), config=hints.config, roots=tuple(beside)))
    if not index.tensors:
        raise CheckpointError("it holds no dict of tensors", where=paths[0], do="Give the file that holds the model's state dict")
    return index


def read_model(builder: IndexBuilder, model: Mapping[Any, Any], path: str) -> dict[str, Shape]:
    """Add the tensors of a model's state dict. Returns the shapes of its parameters.

    Raises: CheckpointError if the file holds only a part of a tensor.
    """
    tensors, others = decoded(model, path)
    builder.add_objects(others)
    for name, local in tensors:
        if not local.is_whole:
            raise CheckpointError(
                f"the file holds only a part of it: {local.shards[0][0] if local.shards else 'nothing'} of {list(local.shape)}",
                where=f"{name} in {path}",
                why="It is the file of one rank, and its name does not tell which rank",
                do="Give the directory with all ranks' files, named ..rank<r>.pt",
            )
        builder.add("weight", name, local, path, local.rank or 0)
    return parameter_shapes(tensors)


def read_beside_model(builder: IndexBuilder, root: Any, path: str) -> dict[str, None]:
    """Add the tensors beside the model, such as an EMA. Returns the keys of the state dict that hold them."""
    decoder, roots = Decoder(path), dict[str, None]()
    for name, value in beside_model(root):
        local = decoder.decode(name, value)
        if local is not None:
            local = local if local.is_whole else LocalTensor(unread("DTensor of which the file holds a part"), local.shape, ())
            builder.add("weight", name, local, path, local.rank or 0)
            roots[root_of(name)] = None
    return roots
