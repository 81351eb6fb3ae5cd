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
from reshard.geometry.value import value
from reshard.models.model import Model
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile, framed

from . import CONFIG, METADATA, TENSOR, WEIGHTS
from .config import document_of
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


@value
class _Part:
    """What a rank holds of one of the published weights in a weight of nanotron's model."""

    name: str
    """The published weight."""
    box: Box
    """The part of it."""
    inside: Box
    """Where the part lies in what the rank holds."""
    whole: Box
    """Where it lies in the whole."""
    width: int
    """The rows of a head whose rows are written in pairs; 0: they keep their order."""

    def sections(self, strides: tuple[int, ...]) -> Iterator[Section]:
        """Its sections in a tensor with these strides."""
        start = sum(offset * stride for offset, stride in zip(self.inside.offsets, strides, strict=True))
        if self.width:
            yield from rows_in_pairs(self.name, self.box, self.width, start, strides)
        else:
            yield Section(self.name, self.box, start, strides)


def _files_of(name: str, array: Mosaic, dtype: DType, model: Model, ranks: int, in_pairs: bool) -> Iterator[TargetFile]:
    """The files of a weight. Raises RequestError if ranks cannot share it equally."""
    axis = next((axis for word, axis in _AXES.items() if name.endswith(f".{word}.weight")), None)
    if axis is None:
        yield framed(_path_of(name), [array.stored(TENSOR, dtype)], metadata={})
        return
    for rank in range(ranks):
        parts = list(_parts(array, model, axis, ranks, rank, in_pairs))
        shape = tuple(max(stops) for stops in zip(*(part.inside.stops for part in parts), strict=True))
        sections = Sections.of([section for part in parts for section in part.sections(row_major(shape))])
        metadata = metadata_of([(part.inside, part.whole) for part in parts], shape, array.shape, _VERSION)
        yield framed(_path_of(name, rank, ranks), [StoredTensor(TENSOR, dtype, shape, sections)], {"tp": rank}, metadata=metadata)


def _parts(array: Mosaic, model: Model, axis: int, ranks: int, rank: int, in_pairs: bool) -> Iterator[_Part]:
    """What a rank holds of each of the published weights in a weight of nanotron's model."""
    start = 0
    for tile in array.tiles:
        role, size = model.weights[tile.name].role, tile.box.sizes[axis]
        width = model.dimensions["head_dim"] if role in _HEADS else 1
        if size % (width * ranks):
            what = f"{size // width} heads" if width > 1 else f"{size} {('rows', 'columns')[axis]}"
            raise RequestError(f"`tp={ranks}` does not divide the {what} of {tile.name}", do="Choose a size that divides them")
        box = tile.box.narrow(axis, rank * size // ranks, (rank + 1) * size // ranks)
        inside = Box((start, 0) if axis == 0 else (0, start), box.sizes)
        yield _Part(tile.name, box, inside, box.shifted(tile.at), width if in_pairs and role in _ROTATED else 0)
        start += size // ranks


def _path_of(name: str, tp_rank: int | None = None, tp: int = 1) -> str:
    """The path of the file of a weight, or of a rank's part of it where there is one pipeline stage."""
    *modules, last = name.split(".")
    of_rank = "" if tp_rank is None else f"_pp-rank-0-of-1_tp-rank-{tp_rank}-of-{tp}"
    return f"{WEIGHTS}{'/'.join(modules)}/model_{last}{of_rank}.safetensors"
