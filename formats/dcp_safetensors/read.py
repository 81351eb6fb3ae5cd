"""The index of the ranks' files, from their headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reshard.adapter.dcp_keys import add_folder, number_names, param_groups
from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.rank_files import first_missing
from reshard.adapter.save_folders import OPTIMIZERS, below, step_of
from reshard.adapter.state_dicts import stored_entry
from reshard.containers import safetensors
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import LocatedTensor
from reshard.errors import CheckpointError, MissingFile, ReshardError
from reshard.geometry.boxes import Box
from reshard.index.coverage import check_coverage
from reshard.index.index import Index, ParamGroup, RunFacts, Tensor
from reshard.models.model import Model
from reshard.storage.files import Files
from reshard.storage.json_input import parsed

from .files import ShardFile, shard_files

_METADATA, _INFO = ".metadata", "DCP_SHARDING_INFO"
# Offsets beyond this are damage: no tensor has as many elements along an axis.
_MOST_ELEMENTS = 1 << 40


def read(files: Files, hints: Hints) -> Index:
    """The index of the ranks' files.

    Raises: CheckpointError if a file is missing, or the files contradict each other or the model's config.
    """
    shards = shard_files(files)
    if not shards:
        raise MissingFile("there is no shard-<rank>-model-<i>-of-<n>.safetensors", where=files.root)
    builder = IndexBuilder("dcp-safetensors", files)
    builder.add_files(file.path for file in shards)
    for name, boxes in _boxes(files, shards).items():
        shape = _shape(name, boxes)
        for file, box, stored in boxes:
            builder.add("weight", name, LocalTensor(stored.dtype, shape, ((box, stored),)), file.path, file.rank)
    if hints.model is None:
        note = "no file tells the shapes, so each tensor reaches as far as its boxes; with `model=` they are compared with the config"
        builder.add_notes([note])
    facts = RunFacts(
        producer="torch.distributed.checkpoint (HuggingFaceStorageWriter)",
        step=step_of(files.root),
        parallel={"writing ranks": len({file.rank for file in shards})},
        config=hints.config,
    )
    param_groups = _add_optimizer(builder, files)
    index = builder.build(facts, param_groups=param_groups)
    _check_files(files, shards, index.tensors)
    if hints.model is not None:
        _check_shapes(index.tensors, hints.model, 1 + max(file.rank for file in shards))
    return index


def _add_optimizer(builder: IndexBuilder, files: Files) -> Callable[[], tuple[ParamGroup, ...]]:
    """Add the optimizer of a DCP folder beside the weights. Returns a reader of its param groups.

    If it cannot be read, a note says why: the weights do not need it.
    """
    prefix = next(iter(below(files, OPTIMIZERS, _METADATA)), None)
    if prefix is None:
        return tuple
    parameters = {tensor.name: tensor.shape for tensor in builder.tensors() if tensor.dtype.floating}
    try:
        folder, states = DcpFolder(files, prefix), IndexBuilder(builder.format_name, files)
        add_folder(states, folder, parameters)
    except ReshardError as error:
        builder.add_notes([f"the optimizer is left out: {error.what} ({error.where or prefix})"])
        return tuple
    builder.join(states)
    return lambda: tuple(param_groups(folder, number_names(folder, parameters)[0]))


def _boxes(files: Files, shards: Sequence[ShardFile]) -> dict[str, list[tuple[ShardFile, Box, LocatedTensor]]]:
    """Tensor -> its boxes, each with its file and where it lies there."""
    boxes: dict[str, list[tuple[ShardFile, Box, LocatedTensor]]] = {}
    for file in shards:
        header = safetensors.read_header(files, file.path)
        saved_offsets = _saved_offsets(header, file.path)
        for entry in header.entries:
            box = _box(entry.name, entry.shape, saved_offsets.get(entry.name), file.path)
            boxes.setdefault(entry.name, []).append((file, box, stored_entry(file.path, entry)))
    return boxes


def _saved_offsets(header: safetensors.Header, path: str) -> Mapping[str, object]:
    """Tensor -> where the file's box of it starts in the whole tensor."""
    try:
        info = parsed(header.metadata[_INFO])
        return {name: value["saved_offsets"] for name, value in info.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"its header has no readable {_INFO}",
            where=path,
            why="Only this entry says where a rank's boxes belong",
            do="Copy the file again",
        ) from None


def _box(name: str, sizes: tuple[int, ...], offsets: object, path: str) -> Box:
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(sizes)
        or not all(type(offset) is int and 0 <= offset < _MOST_ELEMENTS for offset in offsets)
    ):
        raise CheckpointError(
            f"{_INFO} places the box of shape {list(sizes)} at {offsets!r:.80}", where=f"{name} in {path}", do="Copy the file again"
        )
    return Box(tuple(offsets), sizes)


def _shape(name: str, boxes: Sequence[tuple[ShardFile, Box, LocatedTensor]]) -> tuple[int, ...]:
    """The shape to which the boxes of a tensor reach. Raises CheckpointError for different element types or numbers of axes."""
    first, ndim = boxes[0][2], len(boxes[0][2].shape)
    for _, _, stored in boxes:
        if stored.dtype != first.dtype or len(stored.shape) != ndim:
            raise CheckpointError(
                f"{first.path} has it as {first.dtype} with {ndim} axes, {stored.path} as {stored.dtype} with {len(stored.shape)}",
                where=name,
                why="The files are from different saves",
                do="Keep the files of one save only",
            )
    return tuple(max(stops) for stops in zip(*(box.stops for _, box, _ in boxes), strict=True))


def _check_files(files: Files, shards: Sequence[ShardFile], tensors: Sequence[Tensor]) -> None:
    """Raises CheckpointError if, by the file names, a part or a rank is missing, and for a rank also a box of a tensor."""
    divisions = sorted({file.parts for file in shards})
    if len(divisions) > 1:
        raise CheckpointError(
            f"there are files of saves in {' and '.join(map(str, divisions))} parts",
            where=files.root,
            do="Keep the files of one save only",
        )
    parts, ranks = {file.part for file in shards}, {file.rank for file in shards}
    for part in range(1, divisions[0] + 1):
        if part not in parts:
            raise MissingFile(
                f"there is no shard-*-model-{part:05d}-of-{divisions[0]:05d}.safetensors",
                where=files.root,
                why="The names of the other files say that there is one",
                do="Copy it again",
            )
    missing_ranks = first_missing(ranks, max(ranks))
    for tensor in tensors if missing_ranks else ():
        try:
            check_coverage(tensor)
        except CheckpointError as error:
            raise MissingFile(
                f"there is no shard-{missing_ranks[0] + 1:05d}-model-*.safetensors",
                where=tensor.name,
                why=error.what,
                do="Copy it from where the checkpoint was written",
            ) from None


def _check_shapes(tensors: Sequence[Tensor], model: Model, ranks: int) -> None:
    """ranks: up to which there are files. Raises CheckpointError if a tensor is smaller than the config says: then its last box is lost."""
    for tensor in tensors:
        weight = model.weights.get(tensor.name)
        if weight and len(weight.shape) == len(tensor.shape) and any(a < b for a, b in zip(tensor.shape, weight.shape, strict=True)):
            raise CheckpointError(
                f"the stored boxes reach to {list(tensor.shape)}, the config says {list(weight.shape)}",
                where=tensor.name,
                why="No file tells the shape of a tensor, so the file of the last rank may be lost; or the config is of another model",
                do=f"Copy the file of rank {ranks}, shard-{ranks + 1:05d}-model-..., from where the checkpoint was written; rank 0 to "
                f"{ranks - 1} have theirs",
            )
