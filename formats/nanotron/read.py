"""The index of the files. Names are nanotron's; canonical/trainer_names.py finds the published ones.

nanotron stores the rows of queries and keys in pairs, or in the published order, and only model_config.json says which. Rows in pairs are
given here as pieces of the same tensor in the published order, so that the names mean one thing in every format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.model_files import read_json
from reshard.adapter.state_dicts import elements_of, part_of, stored_entry
from reshard.containers import safetensors
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, MissingFile, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.value import value
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from .config import NanotronModel, model_of
from .files import CONFIG, METADATA, OF_THE_RUN, TENSOR, WEIGHTS
from .slices import placed

_QKV = ".attn.qkv_proj.weight"
_NAME = re.compile(r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+)(_exp-rank-.*)?)?\.safetensors")
# No model has words in its names that deep: a folder that contains itself ends here.
_DEEPEST = 16


@value
class WeightFile:
    """A file of a weight."""

    path: str
    """Its path."""
    name: str
    """The name of the weight in nanotron's model."""
    tp_rank: int | None = None
    """The tensor-parallel rank whose part it is; None: it holds all of the weight."""
    pp_rank: int = 0
    """The pipeline stage that wrote it; 0 if the name does not say."""
    tp: int = 1
    """The number of tensor-parallel ranks."""
    pp: int = 1
    """The number of pipeline stages."""


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
    for file in weights:
        builder.add("weight", file.name, _part(files, file, model), file.path, file.pp_rank * file.tp + (file.tp_rank or 0))
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


def weight_files(files: Files) -> list[WeightFile]:
    """The files of all weights.

    Raises: MissingFile for a part that is not there, UnsupportedError for parts of experts, or of several saves.
    """
    weight_files = list(_below(files, WEIGHTS, 0))
    parts = [file for file in weight_files if file.tp_rank is not None]
    if len(divisions := {(file.tp, file.pp) for file in parts}) > 1:
        sizes = " and ".join(f"TP {tp} PP {pp}" for tp, pp in sorted(divisions))
        raise UnsupportedError(f"there are files of {sizes}", where=files.root, do="Keep the files of one save only")
    held = {(file.name, file.tp_rank) for file in parts}
    for file in {file.name: file for file in reversed(parts)}.values():
        if (rank := next((rank for rank in range(file.tp) if (file.name, rank) not in held), None)) is not None:
            path = file.path.replace(f"tp-rank-{file.tp_rank}-of", f"tp-rank-{rank}-of")
            raise MissingFile(
                f"there is no {path}", where=files.root, why="The names of the other files say that there is one", do="Copy it again"
            )
    return weight_files


def _below(files: Files, folder: str, depth: int) -> Iterator[WeightFile]:
    for path in files.list(folder):
        if path.endswith("/"):
            if depth < _DEEPEST:
                yield from _below(files, path, depth + 1)
            continue
        *modules, last = path.removeprefix(WEIGHTS).split("/")
        match = _NAME.fullmatch(last)
        if match is None:
            continue
        name, pp_rank, pp, tp_rank, tp, expert = match.groups()
        if expert:
            raise UnsupportedError("it is a part of the weights of experts, which reshard does not read", where=path)
        whole = ".".join((*modules, name))
        yield WeightFile(path, whole) if tp is None else WeightFile(path, whole, int(tp_rank), int(pp_rank), int(tp), int(pp))


def _part(files: Files, file: WeightFile, model: NanotronModel) -> LocalTensor:
    """What a file holds of its weight. Raises CheckpointError if it does not say where that belongs."""
    header = safetensors.read_header(files, file.path)
    entry = next((entry for entry in header.entries if entry.name == TENSOR), None)
    if entry is None:
        raise CheckpointError(f"it holds no tensor {TENSOR!r}", where=file.path, do="Copy the file again")
    shape, boxes = placed(header.metadata if file.tp_rank is not None else {}, entry.shape, file.path)
    stored = stored_entry(file.path, entry)
    shards = [(whole, part_of(stored, inside)) for inside, whole in boxes]
    if model.in_pairs and file.name.endswith(_QKV):
        shards = [ordered for box, part in shards for ordered in _in_published_order(box, part, model)]
    return LocalTensor(entry.dtype, shape, tuple(shards))


def _in_published_order(box: Box, part: AnyTensor, model: NanotronModel) -> Iterator[tuple[Box, AnyTensor]]:
    """A box of [q; k; v], whose query and key heads have their rows in pairs, in boxes whose rows are in the published order.

    Stored row 2 i + half of a head is its row half * head_dim / 2 + i.

    Raises: CheckpointError if it begins or ends inside of a head.
    """
    width = model.head_dim
    (start, *left), (rows, *others) = box.offsets, box.sizes
    if start >= model.rotated:
        yield box, part
        return
    if start % width or rows % width or start + rows > model.rotated:
        raise CheckpointError(
            f"it holds rows {start} to {start + rows}, which do not begin and end where query or key heads of {width} rows do",
            where=part.path,
            why="nanotron gives whole heads to each rank",
            do="Give the model_config.json of this checkpoint",
        )
    step, *strides = part.strides
    for first in range(0, rows, width):
        for half in (0, 1):
            rotated_box = Box((start + first + half * width // 2, *left), (width // 2, *others))
            yield rotated_box, elements_of(part, (first + half) * step, rotated_box.sizes, (2 * step, *strides))
