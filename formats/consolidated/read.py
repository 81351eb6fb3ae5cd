"""The index of the files. Its names are the stored ones; canonical/trainer_names.py finds the published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.model_files import read_json
from reshard.adapter.state_dicts import decoded, model_part
from reshard.canonical.trainer_names import axis_of
from reshard.containers import safetensors, torch_zip
from reshard.containers.distributed_tensors import LocalTensor
from reshard.errors import CheckpointError, MissingFile, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.quantities import plural
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files, missing

from .files import EMBEDDING, PARAMS, expected_files, rank_of, weight_files
from .params import config_of


def read(files: Files, hints: Hints) -> Index:
    """The index, and the config that follows from params.json if the user and the folder give none.

    Raises: CheckpointError if a file is missing, or tensors contradict each other or params.json.
    """
    paths = weight_files(files)
    for path in expected_files(paths):
        if path not in paths:
            raise missing(files, path)
    builder = IndexBuilder("consolidated", files)
    builder.add_files(paths)
    is_ranks = rank_of(paths[0]) is not None
    if is_ranks:
        _read_ranks(builder, paths)
    else:
        _read_safetensors(builder, paths)
    facts = RunFacts("torch.save" if is_ranks else "safetensors", parallel={"tp": len(paths)} if is_ranks else {}, config=hints.config)
    params = read_json(files, PARAMS) if files.size(PARAMS) is not None else {}
    params = params["model"] if isinstance(params.get("model"), dict) else params
    if is_ranks:
        _check_last_ranks({tensor.name: tensor.shape for tensor in builder.tensors()}, params, paths)
    if hints.config is None and params:
        derived = config_of(params, {tensor.name: tensor.shape for tensor in builder.tensors()})
        builder.add_notes(derived.notes)
        facts = replace(facts, config=derived.config, unanswered=derived.unanswered)
    return builder.build(facts)


def _check_last_ranks(shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Any], paths: list[str]) -> None:
    """Raises MissingFile if the output of the attention has a fraction of the columns that the model has: the files of the last ranks are
    lost. shapes: those of the ranks that are there, joined."""
    hidden, columns = shapes.get("norm.weight", (0,))[0], shapes.get("layers.0.attention.wo.weight", (0, 0))[-1]
    heads, size = params.get("n_heads"), params.get("head_dim")
    expected = heads * size if isinstance(heads, int) and isinstance(size, int) else hidden
    of_rank = columns // len(paths)
    if 0 < columns < expected and expected % of_rank == 0:
        raise MissingFile(
            "the file is not there",
            where=f"consolidated.{len(paths):02d}.pth",
            why=f"The model was saved by {expected // of_rank} ranks: each file holds {of_rank} of {expected} columns of attention.wo, and "
            f"there {'is' if len(paths) == 1 else 'are'} {plural(len(paths), 'file')}",
            do="Copy the missing files from where the checkpoint was written",
        )


def _read_ranks(builder: IndexBuilder, paths: list[str]) -> None:
    """Add what the ranks hold, each at its place in the whole tensors."""
    hidden: int | None = None
    for rank, path in enumerate(paths):
        model, _ = model_part(torch_zip.read(builder.files, path, locate=False))
        if model is None:
            raise CheckpointError("it does not hold a dict of tensors", where=path, do="Copy the file again")
        tensors_of_file, objects = decoded(model, path)
        builder.add_objects(objects)
        tensors = dict(tensors_of_file)
        if hidden is None and "norm.weight" in tensors:
            hidden = math.prod(tensors["norm.weight"].shape)
        for name, local in tensors.items():
            if not local.is_whole:
                raise CheckpointError(
                    "it is a distributed tensor; a plain one is expected",
                    where=f"{name} in {path}",
                    do="Give the files that Meta's code saved",
                )
            axis = None if len(paths) == 1 or local.dtype.is_unread else _axis(name, local.shape, len(paths), hidden, path)
            builder.add("weight", name, local if axis is None else _of_rank(local, axis, rank, len(paths)), path, rank)


def _axis(name: str, shape: tuple[int, ...], ranks: int, hidden: int | None, path: str) -> int | None:
    """The axis along which ranks divide a tensor of which one holds an array of that shape; None if each holds all of it."""
    if name == EMBEDDING:
        # Llama 3 divides its rows, Llama 1 and 2 its columns.
        if len(shape) == 2 and hidden in (shape[1], shape[1] * ranks):
            return 0 if shape[1] == hidden else 1
        raise CheckpointError(
            f"its shape is {list(shape)}; of {ranks} ranks each has {hidden} columns, or {ranks} times fewer, by norm.weight",
            where=f"{name} in {path}",
            why="The files are not those of one model",
            do="Give the files of one model only",
        )
    try:
        axis = axis_of(name)
    except KeyError:
        raise UnsupportedError(
            "Meta's models have no tensor of this name",
            where=f"{name} in {path}",
            why=f"How {ranks} ranks divide it is not known, and is not guessed",
            do="Convert the files with the code that wrote them",
        ) from None
    if axis is not None and axis >= len(shape):
        raise CheckpointError(f"its shape is {list(shape)}; a matrix is expected", where=f"{name} in {path}", do="Copy the file again")
    return axis


def _of_rank(local: LocalTensor, axis: int, rank: int, ranks: int) -> LocalTensor:
    ((_, stored),) = local.shards
    size = local.shape[axis]
    shape = tuple(ranks * length if i == axis else length for i, length in enumerate(local.shape))
    return replace(local, shape=shape, shards=((Box.whole(shape).narrow(axis, rank * size, (rank + 1) * size), stored),))


def _read_safetensors(builder: IndexBuilder, paths: list[str]) -> None:
    holders: dict[str, str] = {}
    for path in paths:
        for name, dtype, shape, start, _ in safetensors.read_header(builder.files, path).entries:
            if holders.setdefault(name, path) != path:
                raise CheckpointError(
                    f"two files hold it: {holders[name]} and {path}", where=name, do="Remove the file that does not belong to this model"
                )
            piece = Piece(Box.whole(shape), Extent(path, start, row_major(shape), dtype))
            builder.add_tensor(Tensor(name, dtype, shape, "weight", Shards.of([piece])))
