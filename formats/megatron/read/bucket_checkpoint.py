"""Optimizer state of a distributed save that is stored bucket by bucket (dp_reshardable), without the names of parameters.

    [chained_C.]optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(P, D).bucket_idx_K.{param,exp_avg,exp_avg_sq}

C is the optimizer in the chain: 0 for dense weights, 1 for experts. G is the number of a data-parallel group, whose ranks hold the same
part of the model: tp_rank + tp * stage for dense weights, etp_rank + etp * (ep_rank + ep * stage) for experts. B is the number of a buffer
of that group; there is one for every element type of every chunk. K is the number of a bucket in the buffer.

Source: megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable, and optimizer/__init__.py of 0.16.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from reshard.canonical.optimizer_state import state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.errors import CheckpointError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value
from reshard.index.index import Tensor
from reshard.index.shards import Shards, concatenated
from reshard.index.subviews import SubviewsBuilder

from ..layout.arguments import Args, parallel_size
from ..layout.chunks import Chunk, ChunkEntry, chunk_entries, split_into_chunks
from ..layout.flat_buckets import BUFFER_KINDS, positions_in_buckets
from ..layout.layer_spec import LayerSpec
from ..layout.parallel_sizes import ParallelSizes, StageRank
from ..layout.stages import layers_per_chunk
from .run_model import RunModel
from .tensor_boxes import flat_sections
from .zarr import StoredFolder

_KEY = re.compile(
    r"(?:chained_(?P<link>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\((?:torch\.)?(?P<dtype>\w+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<name>param|exp_avg|exp_avg_sq)"
)


@value
class _Buffer:
    """A buffer of the distributed optimizer."""

    link: int | None
    """The optimizer in the chain; None if there is only one."""
    group: int
    """The number of the data-parallel group that holds it (dp_group_idx)."""
    number: int
    """The number of the buffer in that group (gbuf_idx)."""
    dtype: str
    """The element type of its parameters."""
    arrays: Mapping[str, Sequence[TensorItem]]
    """The buckets of each array ("param", "exp_avg", "exp_avg_sq"), in order."""


@value
class _RankParameters:
    """The parameters of a rank that lie in the buffers of one optimizer."""

    is_expert: bool
    """Whether the optimizer is that of the experts."""
    group: int
    """The number of the rank's data-parallel group in the keys of that optimizer (dp_group_idx)."""
    chunks: Sequence[Sequence[ChunkEntry]]
    """The parameters of each chunk."""


@value
class _StatePieces:
    """The part of one canonical tensor's state that lies in some boxes of a bucket."""

    name: str
    """The canonical tensor."""
    array: str
    """The array of the buffer: "param", "exp_avg" or "exp_avg_sq"."""
    shards: Shards
    """The pieces."""


def bucket_tensors(stored: StoredFolder, model: RunModel, args: Args) -> Iterator[Tensor]:
    """The masters and moments of every parameter; empty if the save has no buckets.

    Raises: CheckpointError if the parameters that the settings describe do not fill the buckets.
    """
    buffers, where = _buffers(stored), f"{stored.prefix}.metadata"
    if not buffers:
        return
    is_chained = any(buffer.link is not None for buffer in buffers)
    pieces: dict[tuple[str, str], list[Shards]] = {}
    for parameters in _rank_parameters(model, args, where, is_chained=is_chained):
        rank_buffers = [
            buffer for buffer in buffers if buffer.group == parameters.group and buffer.link in (None, int(parameters.is_expert))
        ]
        for piece in _state_pieces(stored, rank_buffers, parameters.chunks, where):
            pieces.setdefault((piece.name, piece.array), []).append(piece.shards)
    dtypes = {array: buckets[0].dtype for buffer in buffers for array, buckets in buffer.arrays.items()}
    for (name, array), parts in pieces.items():
        kind, known_as = state_kind(name, name, BUFFER_KINDS[array])
        yield Tensor(known_as, dtypes[array], model.shapes[name], kind, concatenated(parts))


def _buffers(stored: StoredFolder) -> list[_Buffer]:
    """The buffers of all ranks, sorted by data-parallel group and number."""
    by_buffer: dict[tuple[int | None, int, int, str], dict[str, dict[int, TensorItem]]] = {}
    for key, item in stored.metadata.tensors.items():
        if match := _KEY.fullmatch(key):
            link = int(match["link"]) if match["link"] else None
            arrays = by_buffer.setdefault((link, int(match["group"]), int(match["buffer"]), match["dtype"]), {})
            arrays.setdefault(match["name"], {})[int(match["bucket"])] = item
    return [
        _Buffer(*key, {name: [buckets[number] for number in sorted(buckets)] for name, buckets in arrays.items()})
        for key, arrays in sorted(by_buffer.items(), key=lambda item: item[0][1:3])
    ]


def _rank_parameters(model: RunModel, args: Args, where: str, *, is_chained: bool) -> Iterator[_RankParameters]:
    """The parameters of every rank with a different part of the model, for each optimizer of the chain."""
    sizes, spec = _run_sizes(args), LayerSpec.from_args(args, args.get("transformer_impl", "transformer_engine"))
    chunks = split_into_chunks(layers_per_chunk(args, sizes, where), sizes.pp)
    for stage in range(sizes.pp):
        for rank in sizes.stage_ranks():
            parameters = [_parameters(model, chunk, sizes, rank, spec) for chunk in chunks if chunk.stage == stage]
            if rank.is_first_dense:
                group = rank.tp_rank + sizes.tp * stage
                yield _RankParameters(False, group, _of_optimizer(parameters, is_expert=False) if is_chained else parameters)
            if rank.is_first_experts and is_chained:
                group = rank.etp_rank + sizes.etp * (rank.ep_rank + sizes.ep * stage)
                yield _RankParameters(True, group, _of_optimizer(parameters, is_expert=True))


def _run_sizes(args: Args) -> ParallelSizes:
    tp = parallel_size(args, "tensor_model_parallel_size")
    return ParallelSizes(
        tp,
        parallel_size(args, "pipeline_model_parallel_size"),
        parallel_size(args, "expert_model_parallel_size"),
        parallel_size(args, "virtual_pipeline_model_parallel_size"),
        parallel_size(args, "expert_tensor_parallel_size", default=tp),
    )


def _parameters(model: RunModel, chunk: Chunk, sizes: ParallelSizes, rank: StageRank, spec: LayerSpec) -> list[ChunkEntry]:
    return [entry for entry in chunk_entries(model.megatron, chunk, sizes, rank, spec) if entry.is_parameter]


def _of_optimizer(chunks: Sequence[Sequence[ChunkEntry]], *, is_expert: bool) -> list[list[ChunkEntry]]:
    return [[entry for entry in entries if entry.is_expert is is_expert] for entries in chunks]


def _state_pieces(
    stored: StoredFolder, buffers: Sequence[_Buffer], chunks: Sequence[Sequence[ChunkEntry]], where: str
) -> Iterator[_StatePieces]:
    """The pieces of every parameter of a rank, whose buffers follow the order of its chunks. Chunks without parameters have no buffer."""
    chunks = [entries for entries in chunks if entries]
    if len(chunks) != len(buffers):
        raise CheckpointError(
            f"the optimizer has {len(buffers)} buffers for a rank with parameters in {len(chunks)} chunks",
            where=where,
            why="In this form, parameters of several element types in one chunk cannot be told apart",
            do="Save with --dist-ckpt-optim-fully-reshardable",
        )
    for buffer, entries in zip(buffers, chunks, strict=True):
        arrays = [entry.array for entry in entries if entry.array is not None]
        lengths = [bucket.shape[0] for bucket in next(iter(buffer.arrays.values()))]
        positions = positions_in_buckets([math.prod(array.shape) for array in arrays], lengths)
        if positions is None:
            raise CheckpointError(
                f"the buckets of buffer {buffer.number} of rank {buffer.group} hold {', '.join(map(str, lengths))} elements, which its "
                f"{len(arrays)} parameters do not fill",
                where=where,
                why="The settings describe another model or other stages than those that were saved",
                do="Save with --dist-ckpt-optim-fully-reshardable",
            )
        for name, buckets in buffer.arrays.items():
            shards = [stored.shards(bucket) for bucket in buckets]
            for array, (bucket, offset) in zip(arrays, positions, strict=True):
                yield from _array_pieces(name, array, shards[bucket], offset)


def _array_pieces(array_name: str, array: Mosaic, bucket: Shards, offset: int) -> Iterator[_StatePieces]:
    """The pieces of an array in the stored boxes of a bucket. The array starts at element `offset` of the bucket."""
    end = offset + math.prod(array.shape)
    found = SubviewsBuilder()
    for row in range(len(bucket)):
        box_start, box_size = int(bucket.offsets[row, 0]), int(bucket.sizes[row, 0])
        start, stop = max(offset, box_start), min(end, box_start + box_size)
        if start < stop:
            for section in flat_sections(array, start - offset, stop - offset, start - box_start):
                found.add_section(row, section)
    for name, shards in found.build().of(bucket):
        yield _StatePieces(name, array_name, shards)
