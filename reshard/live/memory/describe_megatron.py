"""What a rank of megatron-core holds, by its own sharded state dict: key, global box and the array in memory of each tensor.

Source: megatron/core/dist_checkpointing/mapping.py of 0.16.1: ShardedTensor, and ShardedTensorFactory, which stands for several of them,
such as gate and up of a fused matrix. Nothing of megatron is imported: the model brings it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import from_torch
from reshard.live.memory.description import MemoryBox, RankDescription
from reshard.live.plan.schedule import HeldTensor

FRAMEWORK = "megatron-core"


def describe_megatron(model: Any, *, rank: int) -> RankDescription:
    """What this rank holds of a model of megatron-core. model: the module, or the list of its virtual stages, wrapped or not."""
    boxes = tuple(_box(name, entry) for name, entry in sharded_tensors(model))
    return RankDescription(rank, boxes, FRAMEWORK, _settings(_unwrapped(model)[0]))


def megatron_tensors(model: Any) -> dict[str, Any]:
    """The arrays of this rank by the names that its description gives them."""
    return {name: entry.data.detach() for name, entry in sharded_tensors(model)}


def sharded_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, ShardedTensor) of each tensor of this rank. Two arrays of one key have the coordinates of their boxes in their names."""
    for chunk in _unwrapped(model):
        for entry in _entries(chunk.sharded_state_dict(metadata=_metadata())):
            if entry.data is not None:
                yield f"{entry.key}{list(entry.global_offset)}", entry


def _metadata() -> dict[str, Any]:
    """What layers for multi-token prediction ask for. The model has loaded the module."""
    state = sys.modules["megatron.core.parallel_state"]
    return {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}


def _unwrapped(model: Any) -> list[Any]:
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    return [_inner(chunk) for chunk in chunks]


def _inner(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _entries(value: Any) -> Iterator[Any]:
    """The ShardedTensors in a sharded state dict; other objects, such as the extra state of Transformer Engine, are no weights."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _entries(inner)
    elif hasattr(value, "build"):
        yield from _entries(value.build())
    elif hasattr(value, "global_offset") and hasattr(value, "local_shape"):
        yield value


def _box(name: str, entry: Any) -> MemoryBox:
    if getattr(entry, "flattened_range", None) is not None:
        raise UnsupportedError("this rank holds a flat range of the tensor", where=entry.key, do="Describe the model, not its optimizer")
    data, prepended = entry.data, int(entry.prepend_axis_num)
    held = HeldTensor(name, from_torch(str(data.dtype), where=name), tuple(data.shape), tuple(data.stride()))
    box = Box(tuple(entry.global_offset), (1,) * prepended + held.shape)
    is_replica = any(entry.replica_id) if isinstance(entry.replica_id, tuple) else bool(entry.replica_id)
    return MemoryBox(held, entry.key, tuple(entry.global_shape), box, (0,) * prepended + held.strides, is_replica=is_replica)


def _settings(chunk: Any) -> dict[str, Any]:
    """The settings of the model, as the arguments of a run name them (megatron/training/arguments.py)."""
    config = chunk.config
    given = {name: value for name, value in vars(config).items() if isinstance(value, str | int | float | bool | list | None)}
    embedding = getattr(chunk, "vocab_size", None)
    return given | {
        "normalization": config.normalization,
        "swiglu": bool(config.gated_linear_unit),
        "num_experts": config.num_moe_experts,
        "multi_latent_attention": bool(getattr(config, "multi_latent_attention", False)),
        "group_query_attention": config.num_query_groups not in (None, config.num_attention_heads),
        "untie_embeddings_and_output_weights": not getattr(chunk, "share_embeddings_and_output_weights", False),
        "position_embedding_type": getattr(chunk, "position_embedding_type", None),
        "rotary_base": getattr(chunk, "rotary_base", None),
        "max_position_embeddings": getattr(chunk, "max_sequence_length", None),
        "padded_vocab_size": embedding,
        "params_dtype": str(getattr(config, "params_dtype", "")),
    }
