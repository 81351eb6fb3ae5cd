"""Which layers the chunks of a pipeline hold: counted, as every way of dealing them out keeps one order.

Chunks are dealt round the stages: chunk 0 of every stage, then chunk 1 of every stage (virtual pipeline). Within a chunk layers are
numbered from 0. Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset; measured with even and uneven stages,
virtual stages and pipeline_model_parallel_layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import CheckpointError


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
