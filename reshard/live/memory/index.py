"""Memory as a checkpoint: the index of what the ranks of a run hold. Each rank is a file, whose bytes are the rank's address space.

    descriptions of ranks -> tensors with pieces -> Index -> Checkpoint -> planned as any other source

The files have sizes and no bytes: the weights are read by the ranks themselves, when an update is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.adapter import registry
from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.renaming import without_wrappers
from reshard.containers.dcp_metadata import Chunks, DcpMetadata, TensorItem
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.index.coverage import check_index
from reshard.index.index import StoredFile
from reshard.index.shards import Located, PieceTable, Shards
from reshard.live.memory.description import MemoryBox, RankDescription
from reshard.live.plan.transfer_plan import RankMemory
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.steps import classify
from reshard.storage.files import VirtualFiles


def path_of(rank: int) -> str:
    """The file that stands for the memory of a rank."""
    return f"rank {rank}"


def checkpoint_of(descriptions: Sequence[RankDescription], *, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """The memory of all ranks as an opened checkpoint. config: the model's Hugging Face config; None: that of the descriptions.

    Raises: RequestError if the descriptions are not those of the ranks of one run, CheckpointError if two of them contradict each other.
    """
    ranks = sorted(descriptions, key=lambda description: description.rank)
    if not ranks or [description.rank for description in ranks] != list(range(len(ranks))):
        raise RequestError(
            f"there are descriptions of the ranks {', '.join(str(description.rank) for description in ranks[:5]) or 'of no run'}",
            do="Give one description of each rank of the run: reshard.live.describe(model) on each of them",
        )
    if len({description.framework for description in ranks}) > 1:
        raise RequestError("the descriptions are those of different frameworks", do="Give those of one run")
    files = VirtualFiles(f"the memory of {plural(len(ranks), 'rank')}")
    for description in ranks:
        files.add(path_of(description.rank), description.nbytes, [])
    config = config or ranks[0].config
    format = format_of_framework(ranks[0].framework)
    index = without_wrappers(format.read_memory(KeyedMemory(ranks), ranks[0].settings or {}, Hints(config)))
    check_index(index)
    adapter = next((description.adapter for description in ranks if description.adapter is not None), None)
    model_files = ModelFiles(files, "", config if index.facts.config is None else index.facts.config, derived=True, adapter_config=adapter)
    return classify(Checkpoint(files.root, files, index, model_files, "descriptions of ranks"))


def memories_of(descriptions: Sequence[RankDescription]) -> tuple[RankMemory, ...]:
    """The tensors of each rank, by its number."""
    ranks = sorted(descriptions, key=lambda description: description.rank)
    return tuple(RankMemory(description.tensors, np.array([*description.addresses.values()], np.int64)) for description in ranks)


def format_of_framework(framework: str) -> Format:
    """The format that reads the keys of a framework. Raises RequestError if there is none."""
    for format in registry.formats().values():
        if format.framework == framework:
            return format
    raise RequestError(f"the descriptions are those of {framework}, whose keys no format knows")


class KeyedMemory:
    """What the ranks of a run hold, as a folder of tensors under keys: what `.metadata` of a saved checkpoint says, without a file."""

    prefix = ""

    def __init__(self, ranks: Sequence[RankDescription]) -> None:
        self.paths = tuple(path_of(description.rank) for description in ranks)
        self.files = tuple(StoredFile(path_of(description.rank), description.nbytes) for description in ranks)
        self._shards: dict[str, Shards] = {}
        items: dict[str, TensorItem] = {}
        for key, dtype, shape, shards in _tensors(ranks):
            self._shards[key] = shards
            nbytes = shards.sizes.prod(axis=1) * dtype.itemsize
            chunks = Chunks(shards.offsets, shards.sizes, shards.files.astype(np.int32), shards.positions, nbytes)
            items[key] = TensorItem(key, dtype, shape, chunks)
        self.metadata = DcpMetadata(items, {}, self.paths, None, None)

    def shards(self, item: TensorItem) -> Shards:
        """Where the boxes of a tensor lie."""
        return self._shards[item.fqn]


def _tensors(ranks: Sequence[RankDescription]) -> Iterable[tuple[str, DType, tuple[int, ...], Shards]]:
    """(key, element type, shape, pieces) of each tensor of a run. Raises CheckpointError if ranks describe one tensor differently."""
    rows: dict[str, list[tuple[int, MemoryBox]]] = {}
    for number, description in enumerate(ranks):
        for held in description.boxes:
            rows.setdefault(held.key, []).append((number, held))
    paths = tuple(path_of(description.rank) for description in ranks)
    for key, held_rows in rows.items():
        first = held_rows[0][1]
        for number, held in held_rows:
            if (held.shape, held.held.dtype) != (first.shape, first.held.dtype):
                said = [f"rank {rank} says {box.held.dtype} {list(box.shape)}" for rank, box in (held_rows[0], (number, held))]
                raise CheckpointError(
                    " and ".join(said),
                    where=key,
                    why="The ranks of one run hold parts of one tensor",
                )
        filled = [(number, held) for number, held in held_rows if held.box.volume] or held_rows[:1]
        yield key, first.held.dtype, first.shape, _shards(ranks, filled, paths)


def _shards(ranks: Sequence[RankDescription], rows: Sequence[tuple[int, MemoryBox]], paths: tuple[str, ...]) -> Shards:
    itemsize, ndim = rows[0][1].held.dtype.itemsize, len(rows[0][1].shape)

    def column(values: Iterable[Any], width: int | None = None) -> Any:
        array = np.array(list(values), np.int64)
        return array if width is None else array.reshape(len(rows), width)

    files = column(number for number, _ in rows)
    byte_offsets = column(ranks[number].addresses[held.held.name] + held.start * itemsize for number, held in rows)
    strides = column((held.strides for _, held in rows), ndim)
    located = Located(paths, files, byte_offsets, strides, rows[0][1].held.dtype)
    offsets, sizes = (column((getattr(held.box, name) for _, held in rows), ndim) for name in ("offsets", "sizes"))
    table = PieceTable(paths, offsets, sizes, files, byte_offsets, located, ranks=files)
    return Shards(table)
