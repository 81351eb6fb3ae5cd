"""The parallel sizes of a Megatron run, the ranks of a stage that write files, and the layers that each chunk of a stage holds.

A stage has one chunk of the model, or several with a virtual pipeline. The layers follow each other in the order of the model: chunk 0 of
every stage, then chunk 1 of every stage, and so on. How many layers a chunk has is told by the files, if every chunk has a file; by the
run's settings, if chunks have no files; by the user, for a target.

Source: megatron/core/parallel_state.py and transformer/transformer_layer.py (get_transformer_layer_offset) of 0.16.1; measured with even
and uneven stages, virtual stages and pipeline_model_parallel_layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from reshard.containers.inert_pickle import Inert, shown
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.value import value

from .hybrid import stages_of_pattern

Args = Mapping[str, Any]
"""The settings of a run, by Megatron's names."""


def parallel_size(args: Args, *keys: str, default: int = 1) -> int:
    """The first of these settings that is a positive integer; `default` if none is."""
    return next((value for key in keys if type(value := args.get(key)) is int and value > 0), default)


@value
class ParallelSizes:
    """The parallel sizes of a run."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size: the number of stages."""
    ep: int = 1
    """Expert-parallel size."""
    vp: int = 1
    """Chunks of layers per stage (virtual pipeline)."""
    etp: int = 1
    """Tensor-parallel size of the experts."""

    @classmethod
    def from_args(cls, args: Args, *, tp: int = 1, pp: int = 1) -> ParallelSizes:
        """The sizes that the settings of a run tell. tp, pp: the sizes if they do not."""
        tp = parallel_size(args, "tensor_model_parallel_size", "model_parallel_size", default=tp)
        return cls(
            tp,
            parallel_size(args, "pipeline_model_parallel_size", default=pp),
            parallel_size(args, "expert_model_parallel_size"),
            parallel_size(args, "virtual_pipeline_model_parallel_size"),
            parallel_size(args, "expert_tensor_parallel_size", default=tp),
        )

    @property
    def by_name(self) -> dict[str, int]:
        """The sizes of the axes, as users call them."""
        return {"tp": self.tp, "pp": self.pp, "vp": self.vp, "ep": self.ep}

    def ranks(self) -> Iterator[Rank]:
        """The ranks that write files: in each stage one for each pair of tensor-parallel and expert-parallel rank; and those that have
        a shard of experts which none of them has, if more ranks share an expert than share the rest of the model."""
        # A stage has at least so many ranks that they are a multiple of tp and of etp * ep.
        ranks_per_stage = math.lcm(self.tp, self.etp * self.ep)
        for pp_rank in range(self.pp):
            seen: set[tuple[str, int, int]] = set()
            for number in range(ranks_per_stage):
                tp_rank, ep_rank, etp_rank = number % self.tp, number // self.etp % self.ep, number % self.etp
                is_first = ("dense", tp_rank, 0) not in seen, ("experts", ep_rank, etp_rank) not in seen
                if ("file", tp_rank, ep_rank) not in seen or is_first[1]:
                    yield Rank(tp_rank, pp_rank, ep_rank, etp_rank, pp_rank * ranks_per_stage + number, *is_first)
                    seen |= {("file", tp_rank, ep_rank), ("dense", tp_rank, 0), ("experts", ep_rank, etp_rank)}

    def experts_of(self, ep_rank: int, experts: int) -> range:
        """The experts of an expert-parallel rank, of a model with so many per layer."""
        per_rank = experts // self.ep
        return range(ep_rank * per_rank, (ep_rank + 1) * per_rank)


@value
class Rank:
    """A rank of a run."""

    tp_rank: int = 0
    """Tensor-parallel rank."""
    pp_rank: int = 0
    """Pipeline-parallel rank: its stage."""
    ep_rank: int = 0
    """Expert-parallel rank."""
    etp_rank: int = 0
    """Tensor-parallel rank among the ranks that share an expert."""
    number: int = 0
    """The rank's number in the run, from 0."""
    is_first_dense: bool = True
    """Whether it is the first rank of its stage with its shard of the dense weights."""
    is_first_experts: bool = True
    """Whether it is the first rank of its stage with its shard of its experts."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Its rank along each axis, as users call them."""
        return {"tp": self.tp_rank, "pp": self.pp_rank, "ep": self.ep_rank}


@value
class Chunk:
    """A chunk of a stage."""

    stage: int
    """The stage that holds it."""
    number: int
    """Its number in the stage."""
    layers: range
    """Its layers, as the model numbers them."""
    is_first: bool
    """Whether it is the first chunk of the model."""
    is_last: bool
    """Whether it is the last chunk of the model."""


def split_into_chunks(layers_per_chunk: Sequence[int], pp: int) -> tuple[Chunk, ...]:
    """All chunks of `pp` stages, in the order of the model, from the number of layers of each."""
    ends, last = list(accumulate(layers_per_chunk)), len(layers_per_chunk) - 1
    return tuple(
        Chunk(i % pp, i // pp, range(end - layers, end), i == 0, i == last)
        for i, (layers, end) in enumerate(zip(layers_per_chunk, ends, strict=True))
    )


def chunks_of_run(args: Args, sizes: ParallelSizes, where: str) -> tuple[Chunk, ...]:
    """The chunks to which the settings of a run distribute its layers (get_num_layers_to_build, pipeline layout).

    Raises: CheckpointError if they do not add up to the model's layers.
    """
    layers, chunks = args["num_layers"], sizes.pp * sizes.vp
    if len(letters := stages_of_pattern(args)) > 1:
        counts = [len(of_chunk.partition("/")[0]) for of_chunk in letters]
    elif layout := args.get("pipeline_model_parallel_layout"):
        counts = [sum(str(kind).lower() in ("t", "decoder") for kind in chunk) for chunk in _chunks_of_layout(layout, where)]
    else:
        counts = _distributed_layers(args, layers, sizes)
    if len(counts) != chunks or sum(counts) != layers:
        raise CheckpointError(
            f"its settings give {sum(counts)} of {layers} layers to {len(counts)} of {chunks} chunks",
            where=where,
            why="Without the layers of a stage, the parameters in its buffers are not known",
        )
    return split_into_chunks(counts, sizes.pp)


def _distributed_layers(args: Args, layers: int, sizes: ParallelSizes) -> list[int]:
    first, last = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
    chunks = sizes.pp * sizes.vp
    if first is not None or last is not None:
        middle_stages = sizes.pp - (first is not None) - (last is not None)
        middle_layers = (layers - (first or 0) - (last or 0)) // middle_stages if middle_stages else 0
        stages = [middle_layers] * sizes.pp
        stages[0], stages[-1] = first if first is not None else stages[0], last if last is not None else stages[-1]
        return [stages[chunk % sizes.pp] // sizes.vp for chunk in range(chunks)]
    embedding, loss = (bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    counts = [(layers + embedding + loss) // chunks] * chunks
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _chunks_of_layout(layout: Any, where: str) -> list[Any]:
    """The chunks of a pipeline_model_parallel_layout: "Ett|(tt|)*2,m|L" or lists of layer types; also inside an object."""
    if isinstance(layout, Inert):
        layout = layout.get("input_data")
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
            text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
        return text.split("|")
    if isinstance(layout, list):
        return layout
    raise CheckpointError(f"its pipeline_model_parallel_layout is {shown(layout)}", where=where)


def chunks_of_target(layers: int, sizes: ParallelSizes, requested: Sequence[int] | None) -> tuple[Chunk, ...]:
    """The chunks of a target, with `requested` numbers of layers, or equal ones.

    Raises: RequestError if the layers do not divide by the chunks, or `requested` does not add up to the model's layers.
    """
    chunks = sizes.pp * sizes.vp
    if requested is None and layers % chunks:
        legal = [pp for pp in range(1, layers + 1) if layers % (pp * sizes.vp) == 0]
        raise RequestError(
            f"{layers} layers do not divide by {chunks} chunks ({sizes.pp} stages{f' of {sizes.vp} chunks' if sizes.vp > 1 else ''})",
            do=f"Legal pipeline-parallel sizes are {', '.join(map(str, legal))}; or give the layers of each chunk with `stage_layers=`",
        )
    counts = (layers // chunks,) * chunks if requested is None else requested
    if len(counts) != chunks or sum(counts) != layers:
        raise RequestError(
            f"`stage_layers=` {','.join(map(str, counts))}: {len(counts)} chunks with {sum(counts)} layers",
            why=f"The model has {layers} layers, and the target has {chunks} chunks"
            + (", chunk 0 of every stage before chunk 1 of any stage" if sizes.vp > 1 else ""),
            do=f"Give {chunks} numbers that add up to {layers}",
        )
    return split_into_chunks(counts, sizes.pp)
