"""Which layers the chunks of a pipeline hold: counted where there are files of every chunk, as every way of dealing them out keeps one
order; otherwise as the settings say.

Chunks are dealt round the stages: chunk 0 of every stage, then chunk 1 of every stage (virtual pipeline). Within a chunk layers are
numbered from 0. Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset; measured with even and uneven stages,
virtual stages and pipeline_model_parallel_layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.containers.inert_pickle import Inert, shown
from reshard.errors import CheckpointError

from .chunks import Sizes


def first_layers(counts: Mapping[tuple[int, int], int], layers: int | None, where: str) -> dict[tuple[int, int], int]:
    """(stage, chunk) -> the number in the model of its first layer, from how many layers each holds.

    Raises: CheckpointError if they do not add up to `layers`.
    """
    found: dict[tuple[int, int], int] = {}
    start = 0
    for chunk, stage in sorted((chunk, stage) for stage, chunk in counts):
        found[stage, chunk] = start
        start += counts[stage, chunk]
    if layers is not None and start != layers:
        held = ", ".join(f"stage {stage}{f' chunk {chunk}' if chunk else ''}: {count}" for (stage, chunk), count in sorted(counts.items()))
        raise CheckpointError(
            f"the stages hold {start} layers ({held}), the model has {layers}",
            where=where,
            why="A stage's files are missing or of another save, or the config is another model's",
            do="Copy all ranks' folders from where the checkpoint was written",
        )
    return found


def counts_of(args: Mapping[str, Any], sizes: Sizes, where: str) -> tuple[int, ...]:
    """The layers of every chunk, in the order of the model, as the settings deal them out (get_num_layers_to_build, layer layout).

    Raises: CheckpointError if they do not come out even.
    """
    layers, chunks = args["num_layers"], sizes.pp * sizes.vp
    if layout := args.get("pipeline_model_parallel_layout"):
        counts = [_decoders(chunk) for chunk in _chunks_of_layout(layout, where)]
    else:
        first, last = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
        counts = _dealt(args, layers, sizes, first, last)
    if len(counts) != chunks or sum(counts) != layers:
        raise CheckpointError(
            f"its settings deal out {sum(counts)} of {layers} layers to {len(counts)} of {chunks} chunks",
            where=where,
            why="Which parameters a stage's buffers hold is known by its layers only",
        )
    return tuple(counts)


def _dealt(args: Mapping[str, Any], layers: int, sizes: Sizes, first: int | None, last: int | None) -> list[int]:
    chunks = sizes.pp * sizes.vp
    if first is not None or last is not None:
        middle = sizes.pp - (first is not None) - (last is not None)
        each = (layers - (first or 0) - (last or 0)) // middle if middle else 0
        stages = [each] * sizes.pp
        stages[0], stages[-1] = first if first is not None else stages[0], last if last is not None else stages[-1]
        return [stages[chunk % sizes.pp] // sizes.vp for chunk in range(chunks)]
    embedding, loss = (bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    counts = [(layers + embedding + loss) // chunks] * chunks
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _chunks_of_layout(layout: Any, where: str) -> list[Any]:
    """The chunks of a pipeline_model_parallel_layout: "Ett|(tt|)*2,m|L" or lists of layer types; also in an object around them."""
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


def _decoders(chunk: Any) -> int:
    return sum(str(kind).lower() in ("t", "decoder") for kind in chunk)
