"""Optimizer state in the flat buffers of the distributed optimizer, without the names of parameters (layout/flat_buckets.py).

A legacy save has the buffers of a rank in one file, distrib_optim.pt:

    {buffer: {(dtype of the parameters, dtype of the gradients): {"param", "exp_avg", "exp_avg_sq": flat tensor, "numel_unpadded"}}}

A distributed save in the form dp_reshardable has an entry per bucket:

    [chained_C.]optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(P, D).bucket_idx_K.{param,exp_avg,exp_avg_sq}

C is the optimizer in the chain: 0 for dense weights, 1 for experts. G is the number of a data-parallel group, whose ranks hold the same
part of the model: tp_rank + tp * stage for dense weights, etp_rank + etp * (ep_rank + ep * stage) for experts. B is the number of a buffer
of that group; there is one for every element type of every chunk. K is the number of a bucket in the buffer.

Source: megatron/core/optimizer/distrib_optimizer.py (sharded_param_state_dp_reshardable, get_parameter_state_dp_zero) and
optimizer/__init__.py of 0.16.1.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from reshard.adapter.state_dicts import elements_of
from reshard.canonical.optimizer_state import state_kind
from reshard.containers import torch_zip
from reshard.containers.dcp_metadata import TensorItem
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import row_major
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import ParamGroup, Tensor
from reshard.index.shards import Shards
from reshard.index.subviews import SubviewsBuilder
from reshard.storage.files import Files

from ..layout.chunks import ChunkTensor, RankView
from ..layout.flat_buckets import BUFFER_KINDS, bucket_size, buffer_of, by_buffer, offsets_in_buckets
from ..layout.save_folders import DISTRIBUTED_OPTIMIZER
from ..layout.stages import Args, ParallelSizes, chunks_of_run
from .arrays import flat_sections
from .keyed_tensors import merged
from .optimizer import OptimizerState, chain_links
from .ranks import MegatronRank
from .run_model import RunModel
from .zarr import StoredFolder

# ---- the buffers of a rank's file ----


def buffered_optimizer(files: Files, rank: MegatronRank, args: Args, parameters: Sequence[ChunkTensor]) -> OptimizerState | None:
    """The distributed optimizer of a rank; None if the rank has no file of it.

    Raises: CheckpointError if the buffers do not fit the parameters.
    """
    path = rank.folder + DISTRIBUTED_OPTIMIZER
    if files.size(path) is None:
        return None
    buffers = torch_zip.read(files, path, locate=False)
    by_link = buffers if isinstance(buffers, list) else [buffers]
    sizes = _bucket_sizes(rank, args, parameters)
    states: list[tuple[ChunkTensor, str, AnyTensor]] = []
    groups: dict[tuple[int, int], ParamGroup] = {}
    notes: list[str] = []
    for by_chunk, link in zip(by_link, chain_links(rank.optimizer, len(by_link)), strict=False):
        if not isinstance(by_chunk, Mapping):
            continue  # another rank's file has it
        groups |= link.param_groups(link.members(parameters))
        for buffered, arrays in _stored_buffers(by_chunk, link.parameters(parameters), path):
            layouts = [buffer_of(buffered, size) for size in sizes]
            offsets = {offsets for offsets, elements in layouts if elements == arrays.get("numel_unpadded")}
            if not offsets:
                raise CheckpointError(
                    f"a buffer of the distributed optimizer has {arrays.get('numel_unpadded')} elements, "
                    f"its {len(buffered)} parameters need {layouts[0][1]}",
                    where=path,
                    why="The bucket boundaries depend on settings that the file does not tell, and without them the parameters cannot be "
                    "located",
                    do="Save with --ckpt-format torch_dist, or take the weights alone: move distrib_optim.pt away",
                )
            if len(offsets) > 1:
                notes.append(f"the distributed optimizer's state is left out: it can have {len(offsets)} different bucket layouts ({path})")
                continue
            for parameter, offset in zip(buffered, offsets.pop(), strict=True):
                for name, kind in BUFFER_KINDS.items():
                    if is_plain_tensor(array := arrays.get(name)):
                        states.append((parameter, kind, elements_of(array, offset, parameter.shape, row_major(parameter.shape))))
    return OptimizerState(path, tuple(states), groups, tuple(notes))


def _bucket_sizes(rank: MegatronRank, args: Args, parameters: Sequence[ChunkTensor]) -> list[int | None]:
    """The bucket sizes that a rank can have had: stages after the first have none."""
    if rank.pp_rank:
        return [None]
    if type(count := args.get("ddp_num_buckets")) is int and count > 0:
        return [None, sum(parameter.elements for parameter in parameters) // count]
    return [None, bucket_size(args)]


def _stored_buffers(
    by_chunk: Mapping[Any, Any], parameters: Sequence[ChunkTensor], path: str
) -> Iterator[tuple[list[ChunkTensor], Mapping[str, Any]]]:
    """(its parameters, its arrays) of each buffer. Raises CheckpointError if there are other buffers than those of the parameters."""
    buffers = by_buffer(parameters)
    expected = [members[0].dtype.torch for members in buffers if members[0].dtype]
    stored = [(dtypes, arrays) for by_dtype in by_chunk.values() if isinstance(by_dtype, Mapping) for dtypes, arrays in by_dtype.items()]
    stored_dtypes = [str(dtypes[0]).removeprefix("torch.") if isinstance(dtypes, tuple) else "" for dtypes, _ in stored]
    if stored_dtypes != expected or not all(isinstance(arrays, Mapping) for _, arrays in stored):
        raise CheckpointError(
            f"it holds buffers of {', '.join(stored_dtypes) or 'nothing'}, the chunks of the model have {', '.join(expected)}",
            where=path,
            why="There is one buffer for each element type of each chunk",
            do="Copy the file again from where the checkpoint was written, or move it away to take the weights alone",
        )
    for members, (_, arrays) in zip(buffers, stored, strict=True):
        yield members, arrays


# ---- the buckets of a distributed save ----

_KEY = re.compile(
    r"(?:chained_(?P<link>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\((?:torch\.)?(?P<dtype>\w+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<name>param|exp_avg|exp_avg_sq)"
)


_Buffer = Mapping[str, Sequence[TensorItem]]
"""The buckets of each array ("param", "exp_avg", "exp_avg_sq") of a buffer, in order."""


def bucket_tensors(stored: StoredFolder, model: RunModel, args: Args, keyed: Collection[str]) -> Iterator[Tensor]:
    """The masters and moments of every parameter; empty if the save has no buckets.

    keyed: the canonical tensors that have state of their own. Beside matrices with Muon's state, the buckets hold the other parameters,
    experts or not (optimizer/layer_wise_optimizer.py of 0.19.2).
    Raises: CheckpointError if the parameters that the settings describe do not fill the buckets.
    """
    buffers, where = _bucketed_buffers(stored), f"{stored.prefix}.metadata"
    if keyed:
        buffers = {(None, group): of_group for (_, group), of_group in buffers.items()}
    is_chained = any(link is not None for link, _ in buffers)
    groups = _groups_of_run(model, args, where, is_chained=is_chained) if buffers else ()

    def parts() -> Iterator[Tensor]:
        for link, group, of_chunks in groups:
            chunks = [[parameter for parameter in of_chunk if not _has_state(parameter, keyed)] for of_chunk in of_chunks]
            yield from _parts(stored, model, buffers.get((link if is_chained else None, group), []), group, chunks, where)

    return merged(parts())


def _has_state(parameter: ChunkTensor, keyed: Collection[str]) -> bool:
    names = parameter.array.names  # none if a rank has nothing but padding of the vocabulary
    return bool(names) and all(name in keyed for name in names)


def _bucketed_buffers(stored: StoredFolder) -> dict[tuple[int | None, int], list[_Buffer]]:
    """The buffers in order by (the optimizer in the chain, None if there is only one; the number of the data-parallel group)."""
    by_key: dict[tuple[int | None, int], dict[tuple[int, str], dict[str, dict[int, TensorItem]]]] = {}
    for key, item in stored.metadata.tensors.items():
        if match := _KEY.fullmatch(key):
            buffers = by_key.setdefault((int(match["link"]) if match["link"] else None, int(match["group"])), {})
            arrays = buffers.setdefault((int(match["buffer"]), match["dtype"]), {})
            arrays.setdefault(match["name"], {})[int(match["bucket"])] = item
    return {
        key: [{name: [buckets[i] for i in sorted(buckets)] for name, buckets in buffers[number].items()} for number in sorted(buffers)]
        for key, buffers in by_key.items()
    }


def _groups_of_run(model: RunModel, args: Args, where: str, *, is_chained: bool) -> Iterator[tuple[int, int, list[list[ChunkTensor]]]]:
    """(the optimizer in the chain, the number of the data-parallel group, the parameters of each chunk) of all ranks' buffers."""
    sizes, spec = ParallelSizes.from_args(args), model.spec(args, "transformer_engine")
    chunks = chunks_of_run(args, sizes, where)
    for rank in sizes.ranks():
        of_chunks = [RankView(model.megatron, chunk, sizes, rank, spec).parameters() for chunk in chunks if chunk.stage == rank.pp_rank]
        dense, experts = ([[p for p in of_chunk if p.is_expert is is_expert] for of_chunk in of_chunks] for is_expert in (False, True))
        if rank.is_first_dense:
            group = rank.tp_rank + sizes.tp * rank.pp_rank
            yield 0, group, dense if is_chained else of_chunks
        if rank.is_first_experts and is_chained:
            group = rank.etp_rank + sizes.etp * (rank.ep_rank + sizes.ep * rank.pp_rank)
            yield 1, group, experts


def _parts(
    stored: StoredFolder, model: RunModel, buffers: Sequence[_Buffer], group: int, chunks: Sequence[Sequence[ChunkTensor]], where: str
) -> Iterator[Tensor]:
    """What the buffers of a rank hold of the state of canonical tensors. The buffers follow the order of the chunks; chunks without
    parameters have none."""
    chunks = [parameters for parameters in chunks if parameters]
    if len(chunks) != len(buffers):
        raise CheckpointError(
            f"the optimizer has {len(buffers)} buffers for a rank with parameters in {len(chunks)} chunks",
            where=where,
            why="In this form, parameters of several element types in one chunk cannot be told apart",
            do="Save with --dist-ckpt-optim-fully-reshardable",
        )
    for number, (buffer, parameters) in enumerate(zip(buffers, chunks, strict=True)):
        lengths = [bucket.shape[0] for bucket in next(iter(buffer.values()))]
        offsets = offsets_in_buckets(parameters, lengths)
        if offsets is None:
            raise CheckpointError(
                f"the buckets of buffer {number} of rank {group} hold {', '.join(map(str, lengths))} elements, which its "
                f"{len(parameters)} parameters do not fill",
                where=where,
                why="The settings describe another model or other stages than those that were saved",
                do="Save with --dist-ckpt-optim-fully-reshardable",
            )
        starts = list(accumulate(lengths, initial=0))
        for array_name, buckets in buffer.items():
            shards = [stored.shards(bucket) for bucket in buckets]
            for parameter, offset in zip(parameters, offsets, strict=True):
                bucket = bisect_right(starts, offset) - 1
                for name, pieces in _array_pieces(parameter.array, parameter.elements, shards[bucket], offset - starts[bucket]):
                    kind, known_as = state_kind(name, name, BUFFER_KINDS[array_name])
                    yield Tensor(known_as, buckets[0].dtype, model.shapes[name], kind, pieces)


def _array_pieces(array: Mosaic, elements: int, bucket: Shards, offset: int) -> Iterator[tuple[str, Shards]]:
    """(canonical tensor, its pieces) of an array in the stored boxes of a bucket, which it fills from element `offset` on."""
    builder = SubviewsBuilder()
    for row in range(len(bucket)):
        box_start, box_size = int(bucket.offsets[row, 0]), int(bucket.sizes[row, 0])
        start, stop = max(offset, box_start), min(offset + elements, box_start + box_size)
        if start < stop:
            for section in flat_sections(array, start - offset, stop - offset, start - box_start):
                builder.add_section(row, section)
    return builder.build().of(bucket)
