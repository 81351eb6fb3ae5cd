"""The distributed optimizer's state as its buckets lie (dp_reshardable), in a distributed checkpoint: no name of a parameter is stored.

    [chained_C.]optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(P, D).bucket_idx_K.{param,exp_avg,exp_avg_sq}

G counts the ranks that have different parts of the model: tensor-parallel rank + size * stage; of experts (C 1) first their
tensor-parallel rank, then the expert-parallel rank, then the stage. B counts the buffers of such a rank, one for every element type of
every chunk; K its buckets.
Source: megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable, and optimizer/__init__.py of 0.16.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.canonical.optimizer_state import state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.errors import CheckpointError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.stored import Section
from reshard.index.index import Tensor
from reshard.index.shards import Shards, concatenated, subviews_of_flat

from ..layout.arguments import Args, size
from ..layout.chunks import Entry, LayerSpec, Sizes, chunks_of, entries
from ..layout.flat_buckets import KINDS, places_in_buckets
from ..layout.stages import counts_of
from ..layout.tensors import MegatronModel
from .tensor_boxes import flat_sections
from .zarr import Stored

_KEY = re.compile(
    r"(?:chained_(?P<link>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\((?:torch\.)?(?P<dtype>\w+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>param|exp_avg|exp_avg_sq)"
)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer: by kind its buckets, in order."""

    link: int | None
    group: int
    number: int
    dtype: str
    kinds: Mapping[str, Sequence[TensorItem]]


def read(stored: Stored, model: MegatronModel, args: Args, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Masters and moments of every parameter.

    Raises: CheckpointError if the buckets are not those of the parameters that the settings describe.
    """
    where, buffers = f"{stored.prefix}.metadata", list(_buffers(stored))
    if not buffers:
        return
    tp = size(args, "tensor_model_parallel_size")
    sizes = Sizes(
        tp,
        size(args, "pipeline_model_parallel_size"),
        size(args, "expert_model_parallel_size"),
        size(args, "virtual_pipeline_model_parallel_size"),
        size(args, "expert_tensor_parallel_size", default=tp),
    )
    impl = args.get("transformer_impl", "transformer_engine")
    spelling = LayerSpec.of(args, impl)
    chunks = chunks_of(counts_of(args, sizes, where), sizes.pp)
    found: dict[tuple[str, str], list[Shards]] = {}
    for stage in range(sizes.pp):
        for place in sizes.ranks():
            own = [(chunk.number, e) for chunk in chunks if chunk.stage == stage for e in entries(model, chunk, sizes, place, spelling)]
            parameters = [(number, entry) for number, entry in own if entry.is_parameter]
            dense, experts = place.tp + sizes.tp * stage, place.etp + sizes.etp * (place.ep + sizes.ep * stage)
            for expert, group, is_first in ((False, dense, place.has_dense), (True, experts, place.has_experts)):
                if not is_first:
                    continue
                is_chained = any(buffer.link is not None for buffer in buffers)
                if expert and not is_chained:
                    continue
                members = [each for each in parameters if each[1].is_expert is expert] if is_chained else parameters
                mine = [b for b in buffers if b.group == group and (b.link in (None, int(expert)))]
                for name, kind, shards in _placed(stored, mine, members, where):
                    found.setdefault((name, kind), []).append(shards)
    items = {kind: items[0].dtype for buffer in buffers for kind, items in buffer.kinds.items()}
    for (name, kind), parts in found.items():
        role, known = state_kind(name, name, KINDS[kind])
        yield Tensor(known, items[kind], shapes[name], role, concatenated(parts))


def _buffers(stored: Stored) -> Iterator[_Buffer]:
    listed: dict[tuple[Any, ...], dict[str, dict[int, TensorItem]]] = {}
    for key, item in stored.metadata.tensors.items():
        if match := _KEY.fullmatch(key):
            place = int(match["link"]) if match["link"] else None, int(match["group"]), int(match["buffer"]), match["dtype"]
            listed.setdefault(place, {}).setdefault(match["kind"], {})[int(match["bucket"])] = item
    for place, kinds in sorted(listed.items(), key=lambda item: item[0][1:3]):
        yield _Buffer(*place, {kind: [buckets[number] for number in sorted(buckets)] for kind, buckets in kinds.items()})


def _placed(
    stored: Stored, buffers: Sequence[_Buffer], parameters: Sequence[tuple[int, Entry]], where: str
) -> Iterator[tuple[str, str, Shards]]:
    """(canonical name, kind, pieces) of every parameter in the buffers of a rank, which follow each other as the chunks do."""
    chunks = [[entry for number, entry in parameters if number == chunk] for chunk in dict.fromkeys(number for number, _ in parameters)]
    if len(chunks) != len(buffers):
        raise CheckpointError(
            f"the optimizer has {len(buffers)} buffers of a rank whose parameters are in {len(chunks)} chunks",
            where=where,
            why="Parameters of several element types in one chunk are not told apart in this form",
            do="Save with --dist-ckpt-optim-fully-reshardable",
        )
    for buffer, members in zip(buffers, chunks, strict=True):
        arrays = [entry.array for entry in members if entry.array is not None]
        lengths = [item.shape[0] for item in next(iter(buffer.kinds.values()))]
        places = places_in_buckets([math.prod(array.shape) for array in arrays], lengths)
        if places is None:
            raise CheckpointError(
                f"the buckets of buffer {buffer.number} of rank {buffer.group} hold {', '.join(map(str, lengths))} elements, which its "
                f"{len(arrays)} parameters do not come to",
                where=where,
                why="The settings describe another model or other stages than those that were saved",
                do="Save with --dist-ckpt-optim-fully-reshardable",
            )
        for kind, items in buffer.kinds.items():
            shards = [stored.shards(item) for item in items]
            for array, (bucket, start) in zip(arrays, places, strict=True):
                yield from _pieces(kind, array, shards[bucket], start)


def _pieces(kind: str, array: Mosaic, shards: Shards, start: int) -> Iterator[tuple[str, str, Shards]]:
    """What the chunks of a bucket hold of an array that starts at that element of it."""
    count = math.prod(array.shape)
    rows: dict[str, list[tuple[int, Section]]] = {}
    for row in range(len(shards)):
        offset, length = int(shards.offsets[row, 0]), int(shards.sizes[row, 0])
        first, last = max(start, offset), min(start + count, offset + length)
        if first < last:
            for section in flat_sections(array, first - start, last - start, first - offset):
                rows.setdefault(section.name, []).append((row, section))
    for name, found in rows.items():
        yield name, kind, subviews_of_flat(shards, found)
