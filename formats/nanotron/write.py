"""The layout of new files: a safetensors file for each weight, or for each tensor-parallel rank's part of it, and the two documents.

All ranks are of one pipeline stage: nanotron's load_weights takes each rank's parts from whatever ranks saved them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from reshard.adapter.model_files import CONFIG as MODEL_CONFIG
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.trainer_names import named_places, rows_in_pairs
from reshard.errors import RequestError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.models.model import Model
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile, framed

from .config import document_of
from .files import CONFIG, METADATA, TENSOR, WEIGHTS
from .slices import metadata_of

_VERSION = "1.2"
# The last words of the names of weights that ranks share, and the axis that they divide; each rank holds all of the others.
_AXES = {"token_embedding": 0, "qkv_proj": 0, "o_proj": 1, "gate_up_proj": 0, "down_proj": 1, "lm_head.pp_block": 0}
_HEADS = ("attention.q", "attention.k", "attention.v")
_ROTATED = _HEADS[:2]


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of weights, model_config.json, checkpoint_metadata.json, and the tokenizer's files.

    Raises: RequestError if the tensor-parallel size does not divide the model; UnsupportedError for a model that nanotron's Llama is not.
    """
    target.parallel.allow("tp", what="a nanotron folder, whose ranks share the weights (`tp=`)")
    if content.states:
        raise RequestError("a nanotron folder is written without optimizer state", do="Leave out `optimizer=True`")
    places = named_places("nanotron", content.model, asked="`to=nanotron`")
    in_pairs = target.options.get("rotary_rows", "pairs") == "pairs"
    document = document_of(places.model, in_pairs=in_pairs)
    files, dtypes = list[TargetFile](), set[DType]()
    for name, array in places.written(content.weights.keys()).items():
        dtype = target.dtype_of(content.tensors[array.names[0]])
        files += _files_of(name, array, dtype, places.model, target.parallel.tp, in_pairs)
        dtypes.add(dtype)
    metas = {"consumed_train_samples": 0, "last_train_step": content.facts.step or 0}
    metadata = {"dp": 1, "metas": metas, "tp": target.parallel.tp, "version": _VERSION}
    carried = [sidecar for sidecar in companions.sidecars(dtypes) if sidecar.path != MODEL_CONFIG]
    documents = (Sidecar(CONFIG, json.dumps(document).encode()), Sidecar(METADATA, json.dumps(metadata, indent=2).encode()))
    order = "in pairs, as nanotron 0.4 rotates them" if in_pairs else "in the published order, for rope_interleaved: false"
    return Layout("nanotron", tuple(files), (*carried, *documents), target.parallel, (f"rotary rows are written {order}",))


def _files_of(name: str, array: Mosaic, dtype: DType, model: Model, ranks: int, in_pairs: bool) -> Iterator[TargetFile]:
    """The files of a weight. Raises RequestError if ranks cannot share it equally."""
    axis = next((axis for word, axis in _AXES.items() if name.endswith(f".{word}.weight")), None)
    if axis is None:
        yield framed(_path_of(name), [array.stored(TENSOR, dtype)], metadata={})
        return
    for rank in range(ranks):
        shape = tuple(size // ranks if i == axis else size for i, size in enumerate(array.shape))
        sections, boxes = _part(array, model, axis, (rank, ranks), row_major(shape), in_pairs)
        metadata = metadata_of(boxes, shape, array.shape, _VERSION)
        stored = StoredTensor(TENSOR, dtype, shape, Sections.of(sections))
        yield framed(_path_of(name, rank, ranks), [stored], {"tp": rank}, metadata=metadata)


def _part(
    array: Mosaic, model: Model, axis: int, of_ranks: tuple[int, int], strides: tuple[int, ...], in_pairs: bool
) -> tuple[list[Section], list[tuple[Box, Box]]]:
    """What a rank holds of a weight: sections of the published weights in a tensor with these strides, and pairs of equal boxes, in the
    part and in the whole. of_ranks: the rank and the number of ranks."""
    rank, ranks = of_ranks
    sections, boxes, start = list[Section](), list[tuple[Box, Box]](), 0
    for tile in array.tiles:
        role, size = model.weights[tile.name].role, tile.box.sizes[axis]
        width = model.dimensions["head_dim"] if role in _HEADS else 1
        if size % (width * ranks):
            what = f"{size // width} heads" if width > 1 else f"{size} {('rows', 'columns')[axis]}"
            raise RequestError(f"`tp={ranks}` does not divide the {what} of {tile.name}", do="Choose a size that divides them")
        box = tile.box.narrow(axis, rank * size // ranks, (rank + 1) * size // ranks)
        if in_pairs and role in _ROTATED:
            sections += rows_in_pairs(tile.name, box, width, start * strides[axis], strides)
        else:
            sections.append(Section(tile.name, box, start * strides[axis], strides))
        boxes.append((Box((start, 0) if axis == 0 else (0, start), box.sizes), box.shifted(tile.at)))
        start += size // ranks
    return sections, boxes


def _path_of(name: str, tp_rank: int | None = None, tp: int = 1) -> str:
    """The path of the file of a weight, or of a rank's part of it where there is one pipeline stage."""
    *modules, last = name.split(".")
    of_rank = "" if tp_rank is None else f"_pp-rank-0-of-1_tp-rank-{tp_rank}-of-{tp}"
    return f"{WEIGHTS}{'/'.join(modules)}/model_{last}{of_rank}.safetensors"
