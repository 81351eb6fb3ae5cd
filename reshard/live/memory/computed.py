"""The memory of a training run that is not asked, but computed: from the model, the framework and the sizes of the run.

    FSDP2       each tensor's rows in runs of ceil(rows / ranks), one run on each rank, the last ones shorter or empty
    Megatron    what the format lays out in the memory of each rank

Where the ranks themselves can be asked, their descriptions are better (describe.py): they tell what is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from reshard.adapter import registry
from reshard.adapter.model_files import ModelFiles
from reshard.errors import RequestError
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import BF16, DType, from_torch
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.index import Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Located, PieceTable, Shards
from reshard.live.memory.index import format_of_framework, path_of
from reshard.live.plan.schedule import HeldTensor
from reshard.live.plan.transfer_plan import RankMemory
from reshard.models.model import Model
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.models import model_of
from reshard.opening.steps import classify
from reshard.plans.layout import ALIGNMENT, Layout
from reshard.plans.layout_index import index_of_layout
from reshard.requests.planning import CONTENT_STEPS
from reshard.requests.request import ConversionRequest, Draft
from reshard.storage.files import VirtualFiles


def computed_memory(config: Mapping[str, Any], of: str, sizes: Mapping[str, Any]) -> tuple[Checkpoint, Sequence[RankMemory]]:
    """What the ranks of a run hold: as a checkpoint, and the tensors of each rank.

    config: the model's Hugging Face config. of: a format of its checkpoints. sizes: the parallel sizes, such as {"dp": 512}, and
    other options of that format, such as Megatron's `stage_layers`.

    Raises: RequestError for sizes that the run cannot have, or a format that does not tell what ranks hold.
    """
    model, format = model_of(config), registry.target(of)
    if not format.tells_memory:
        known = [name for name, other in registry.formats().items() if other.tells_memory]
        raise RequestError(f"`of={of}`: the format does not tell what the ranks of a run hold", do=f"Formats that do: {', '.join(known)}")
    if format.holds_rows:
        if others := sorted(sizes.keys() - {"dp"}):
            raise RequestError(f"{of} shards by `dp=` alone, not by {', '.join(others)}")
        return _by_rows(model, config, int(sizes.get("dp", 1)))
    draft = Draft.of(_by_rows(model, config, 1)[0], ConversionRequest.of(of, sizes))
    for step in CONTENT_STEPS:
        draft = step(draft)
    # What is laid out is proven when it is the source of a transfer.
    layout = format.lay_out_memory(draft.content, draft.target)
    index = index_of_layout(layout, draft.content.shapes)
    facts = RunFacts(producer=of, parallel=dict(sizes), config=config)
    return replace(draft.source, index=replace(index, format=draft.source.format, facts=facts)), _memories(layout)


def _memories(layout: Layout) -> tuple[RankMemory, ...]:
    """The tensors of each rank. Ranks that are alike share one value."""
    by_form: dict[int, RankMemory] = {}
    for file in layout.files:
        if id(file.form) not in by_form:
            stored = [(item.tensor, item.byte_offset) for item in file.tensors]
            tensors = tuple(HeldTensor(tensor.name, tensor.dtype, tensor.shape, row_major(tensor.shape)) for tensor, _ in stored)
            by_form[id(file.form)] = RankMemory(tensors, np.array([offset for _, offset in stored], np.int64))
    return tuple(by_form[id(file.form)] for file in layout.files)


def _weights(model: Model, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], DType]]:
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = from_torch(str(stated), where="dtype") if stated else BF16
    return [(name, tuple(weight.shape), dtype) for name, weight in model.weights.items()]


def _by_rows(model: Model, config: Mapping[str, Any], ranks: int) -> tuple[Checkpoint, Sequence[RankMemory]]:
    weights = _weights(model, config)
    memories = _Rows(weights, ranks)
    files = VirtualFiles(f"the memory of {ranks} ranks")
    for rank in range(ranks):
        files.add(path_of(rank), int(memories.nbytes[rank]), [])
    tensors: dict[int, Tensor] = {}
    for ndim in sorted({len(shape) for _, shape, _ in weights}):
        tensors |= _tables([i for i, (_, shape, _) in enumerate(weights) if len(shape) == ndim], memories)
    facts = RunFacts(producer="FSDP2", parallel={"ranks": ranks}, config=config)
    stored = tuple(StoredFile(path_of(rank), int(memories.nbytes[rank])) for rank in range(ranks))
    index = Index(format_of_framework("torch").name, tuple(tensors[i] for i in range(len(weights))), stored, facts)
    model_files = ModelFiles(files, "", config, derived=True)
    return classify(Checkpoint(files.root, files, index, model_files, "computed")), memories


def _tables(numbers: Sequence[int], memories: _Rows) -> dict[int, Tensor]:
    """The tensors of these numbers, which have the same number of axes, as windows on one table."""
    paths = tuple(path_of(rank) for rank in range(memories.ranks))
    # [tensors, ranks], row by row; a rank without rows has no piece, except of an empty tensor.
    holds = memories.rows[numbers] > 0
    holds[:, 0] |= ~holds.any(axis=1)
    tensor, rank = np.nonzero(holds)
    shapes = np.array([memories.weights[i][1] or (1,) for i in numbers], np.int64)
    ndim = len(memories.weights[numbers[0]][1])
    offsets, sizes = np.zeros((len(tensor), ndim), np.int64), shapes[tensor][:, :ndim].copy()
    if ndim:
        offsets[:, 0], sizes[:, 0] = (rank * memories.chunks[numbers][tensor]), memories.rows[numbers][tensor, rank]
    addresses = memories.addresses[numbers][tensor, rank]
    strides = np.array([row_major(memories.weights[i][1]) for i in numbers], np.int64).reshape(len(numbers), ndim)[tensor]
    dtypes = [memories.weights[i][2] for i in numbers]
    bounds = np.append(np.flatnonzero(np.diff(tensor, prepend=-1)), len(tensor)).tolist()
    located = Located(paths, rank, addresses, strides, dtypes[0]) if len(set(dtypes)) == 1 else None
    assert located is not None, "all weights have the element type of the config"
    table = PieceTable(paths, offsets, sizes, rank, addresses, located, ranks=rank)
    return {
        i: Tensor(memories.weights[i][0], memories.weights[i][2], memories.weights[i][1], "weight", Shards(table, *bounds[k : k + 2]))
        for k, i in enumerate(numbers)
    }


@value(slots=False, eq=False)
class _Rows(Sequence[RankMemory]):
    """The memories of ranks that hold rows. The tensors of one are made when asked for."""

    weights: list[tuple[str, tuple[int, ...], DType]]
    """(name, shape, element type) of each tensor."""
    ranks: int
    """The number of ranks."""

    def __post_init__(self) -> None:
        first = np.array([shape[0] if shape else 1 for _, shape, _ in self.weights], np.int64)
        self.chunks: Columns = -(-first // self.ranks)
        """[tensors]: the rows of each run."""
        starts = np.arange(self.ranks) * self.chunks[:, None]
        self.rows: Columns = np.clip(first[:, None] - starts, 0, self.chunks[:, None])
        """[tensors, ranks]: the rows that each rank holds. A scalar is a row of the first rank."""
        inner = np.array([math.prod(shape[1:]) * dtype.itemsize for _, shape, dtype in self.weights], np.int64)
        sizes = -(-self.rows * inner[:, None] // ALIGNMENT) * ALIGNMENT
        self.addresses: Columns = np.cumsum(sizes, axis=0) - sizes
        """[tensors, ranks]: where each tensor starts in the memory of each rank."""
        self.nbytes: Columns = sizes.sum(axis=0)
        """[ranks]: the length of each memory."""

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, rank: int) -> RankMemory: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[RankMemory]: ...

    def __getitem__(self, rank: int | slice) -> RankMemory | Sequence[RankMemory]:
        if isinstance(rank, slice):
            return [self[i] for i in range(self.ranks)[rank]]
        held = [
            HeldTensor(name, dtype, local, row_major(local))
            for (name, shape, dtype), rows in zip(self.weights, self.rows[:, rank].tolist(), strict=True)
            for local in [(rows, *shape[1:]) if shape else ()]
        ]
        return RankMemory(tuple(held), self.addresses[:, rank])
