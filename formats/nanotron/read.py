"""The index of the files. Names are nanotron's; canonical/trainer_names.py finds the published ones.

nanotron stores the rows of queries and keys in pairs, or in the published order, and only model_config.json says which. Rows in pairs are
given here as pieces of the same tensor in the published order, so that the names mean one thing in every format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.model_files import read_json
from reshard.containers import safetensors
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files

from . import CONFIG, METADATA, OF_THE_RUN, TENSOR, WeightFile, weight_files
from .config import NanotronModel, model_of
from .slices import placed

_QKV = ".attn.qkv_proj.weight"


def read(files: Files, hints: Hints) -> Index:
    """The index, and the config that follows from model_config.json if the user gives none.

    Raises: CheckpointError if a file is missing, or files contradict each other, UnsupportedError for another model than Llama.
    """
    document = read_json(files, METADATA)
    model = model_of(read_json(files, CONFIG))
    weights = weight_files(files)
    builder = IndexBuilder("nanotron", files)
    builder.add_files([file.path for file in weights])
    builder.add_objects(folder.rstrip("/") for folder in OF_THE_RUN if folder in files.list())
    by_name: dict[str, list[WeightFile]] = {}
    for file in weights:
        by_name.setdefault(file.name, []).append(file)
    for name, parts in by_name.items():
        builder.add_tensor(_tensor(files, name, parts, model))
    notes = ["config.json follows from model_config.json"] if hints.config is None else []
    if model.in_pairs:
        notes.append("nanotron stored rotary rows in pairs; they are read in the published order")
    builder.add_notes(notes)
    divided = next((file for file in weights if file.tp_rank is not None), None)
    facts = RunFacts(
        "nanotron",
        step=_step(document),
        parallel={"tp": divided.tp, "pp": divided.pp} if divided else {},
        config=hints.config or model.config,
        unanswered=() if hints.config else model.unanswered,
    )
    return builder.build(facts)


def _step(document: dict[str, Any]) -> int | None:
    metas = document.get("metas")
    step = metas.get("last_train_step") if isinstance(metas, dict) else None
    return step if type(step) is int else None


def _tensor(files: Files, name: str, parts: list[WeightFile], model: NanotronModel) -> Tensor:
    """A weight. Raises CheckpointError if its files contradict each other."""
    first: tuple[DType, tuple[int, ...]] | None = None
    pieces: list[tuple[int, Piece]] = []
    for file in parts:
        header = safetensors.read_header(files, file.path)
        entry = next((entry for entry in header.entries if entry.name == TENSOR), None)
        if entry is None:
            raise CheckpointError(f"it holds no tensor {TENSOR!r}", where=file.path, do="Copy the file again")
        shape, boxes = placed(header.metadata if file.tp_rank is not None else {}, entry.shape, file.path)
        if first is None:
            first = entry.dtype, shape
        if first != (entry.dtype, shape):
            raise CheckpointError(
                f"{parts[0].path} has it as {first[0]} {list(first[1])}, {file.path} as {entry.dtype} {list(shape)}",
                where=name,
                why="The files are from different models or saves",
                do="Keep the files of one save only",
            )
        rank = file.pp_rank * file.tp + (file.tp_rank or 0)
        in_pairs = model.in_pairs and name.endswith(_QKV)
        for inside, whole in boxes:
            found = _piece(file.path, entry, inside, whole)
            pieces += ((rank, piece) for piece in (_in_published_order(found, model) if in_pairs else (found,)))
    assert first is not None
    ranks = np.array([rank for rank, _ in pieces], np.int64)
    return Tensor(name, *first, "weight", Shards.of([piece for _, piece in pieces]).replaced(ranks=ranks))


def _piece(path: str, entry: safetensors.TensorEntry, inside: Box, whole: Box) -> Piece:
    """A box of the whole weight, and where it lies in the file: at the box `inside` of the stored part."""
    strides = row_major(entry.shape)
    start = sum(offset * stride for offset, stride in zip(inside.offsets, strides, strict=True))
    return Piece(whole, Extent(path, entry.byte_offset + start * entry.dtype.itemsize, strides, entry.dtype))


def _in_published_order(piece: Piece, model: NanotronModel) -> Iterator[Piece]:
    """The pieces of [q; k; v] in a piece whose query and key heads have their rows in pairs.

    Stored row 2 i + half of a head is its row half * head_dim / 2 + i.

    Raises: CheckpointError if it begins or ends inside of a head.
    """
    width, rotated = model.head_dim, (model.heads + model.kv_heads) * model.head_dim
    (start, *left), (rows, *others) = piece.box.offsets, piece.box.sizes
    if start >= rotated:
        yield piece
        return
    if start % width or rows % width or start + rows > rotated:
        raise CheckpointError(
            f"it holds rows {start} to {start + rows}, which do not begin and end where query or key heads of {width} rows do",
            where=piece.extent.path,
            why="nanotron gives whole heads to each rank",
            do="Give the model_config.json of this checkpoint",
        )
    extent, step = piece.extent, piece.extent.strides[0]
    for first in range(0, rows, width):
        for half in (0, 1):
            box = Box((start + first + half * width // 2, *left), (width // 2, *others))
            byte_offset = extent.byte_offset + (first + half) * step * extent.dtype.itemsize
            yield Piece(box, Extent(extent.path, byte_offset, (2 * step, *extent.strides[1:]), extent.dtype))
