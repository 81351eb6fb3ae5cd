"""How many layers each chunk of a pipeline holds.

There are three sources: the files, if every chunk has a file; the run's settings, if chunks have no files; the user, for a target. In all
three, the layers follow each other in the order of the model: chunk 0 of every stage, then chunk 1 of every stage (virtual pipeline).

Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset; measured with even and uneven stages, virtual stages
and pipeline_model_parallel_layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.containers.inert_pickle import Inert, shown
from reshard.errors import CheckpointError, RequestError

from .parallel_sizes import ParallelSizes


def first_layers(layer_counts: Mapping[tuple[int, int], int], layers: int, where: str) -> dict[tuple[int, int], int]:
    """(stage, chunk) -> the model's number of the chunk's first layer. layer_counts: (stage, chunk) -> number of layers in the files.

    Raises: CheckpointError if they do not add up to `layers`.
    """
    first: dict[tuple[int, int], int] = {}
    start = 0
    for chunk, stage in sorted((chunk, stage) for stage, chunk in layer_counts):
        first[stage, chunk] = start
        start += layer_counts[stage, chunk]
    if start != layers:
        counts = ", ".join(f"stage {stage}{f' chunk {i}' if i else ''}: {count}" for (stage, i), count in sorted(layer_counts.items()))
        raise CheckpointError(
            f"the stages hold {start} layers ({counts}), the model has {layers}",
            where=where,
            why="The files of a stage are missing or belong to another save, or the config belongs to another model",
            do="Copy all rank folders from where the checkpoint was written",
        )
    return first


def layers_per_chunk(args: Mapping[str, Any], sizes: ParallelSizes, where: str) -> tuple[int, ...]:
    """The number of layers of each chunk, as the settings of a run distribute them (get_num_layers_to_build, pipeline layout).

    Raises: CheckpointError if they do not add up to the model's layers.
    """
    layers, chunks = args["num_layers"], sizes.pp * sizes.vp
    if layout := args.get("pipeline_model_parallel_layout"):
        counts = [_decoder_layers(chunk) for chunk in _chunks_of_layout(layout, where)]
    else:
        counts = _distributed_layers(args, layers, sizes)
    if len(counts) != chunks or sum(counts) != layers:
        raise CheckpointError(
            f"its settings give {sum(counts)} of {layers} layers to {len(counts)} of {chunks} chunks",
            where=where,
            why="Without the layers of a stage, the parameters in its buffers are not known",
        )
    return tuple(counts)


def _distributed_layers(args: Mapping[str, Any], layers: int, sizes: ParallelSizes) -> list[int]:
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


def _decoder_layers(chunk: Any) -> int:
    return sum(str(layer_type).lower() in ("t", "decoder") for layer_type in chunk)


def requested_layers_per_chunk(layers: int, sizes: ParallelSizes, requested: Sequence[int] | None) -> tuple[int, ...]:
    """The number of layers of each chunk of a target: `requested`, or equal numbers.

    Raises: RequestError if the layers do not divide by the chunks, or `requested` does not add up to the model's layers.
    """
    chunks = sizes.pp * sizes.vp
    if requested is None:
        if layers % chunks:
            legal = [pp for pp in range(1, layers + 1) if layers % (pp * sizes.vp) == 0]
            raise RequestError(
                f"{layers} layers do not divide by {chunks} chunks ({sizes.pp} stages{f' of {sizes.vp} chunks' if sizes.vp > 1 else ''})",
                do=f"Legal pipeline-parallel sizes are {', '.join(map(str, legal))}; or give the layers of each chunk with --stage-layers",
            )
        return (layers // chunks,) * chunks
    if len(requested) != chunks or sum(requested) != layers:
        raise RequestError(
            f"--stage-layers {','.join(map(str, requested))}: {len(requested)} chunks with {sum(requested)} layers",
            why=f"The model has {layers} layers, and the target has {chunks} chunks"
            + (", chunk 0 of every stage before chunk 1 of any stage" if sizes.vp > 1 else ""),
            do=f"Give {chunks} numbers that add up to {layers}",
        )
    return tuple(requested)
