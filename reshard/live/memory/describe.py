"""describe: what a model in this process holds, from FSDP2's and tensor parallelism's DTensors, and from plain modules.

Megatron-Core's modules say it themselves, in their sharded state dict (describe_megatron.py). Nothing is gathered, and no value is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import from_torch
from reshard.live.memory.description import MemoryBox, RankDescription
from reshard.live.plan.schedule import HeldTensor


def describe(model: Any, *, rank: int | None = None) -> RankDescription:
    """What this process holds of a model: its parameters and its persistent buffers.

    model: a torch module, or a state dict of tensors by name. rank: this process's number in the run; None: its rank in torch.distributed's
    default group, 0 without one.

    Raises: UnsupportedError for a tensor that no box describes, such as one of which each rank holds a partial sum.
    """
    if _is_keyed(model):
        from reshard.live.memory.describe_megatron import describe_megatron

        return describe_megatron(model, rank=_rank(rank))
    boxes = tuple(held_box(name, tensor) for name, tensor in local_tensors(model))
    return RankDescription(_rank(rank), boxes, config=config_of(model), adapter=adapter_of(model))


def arrays_of(model: Any) -> dict[str, Any]:
    """The arrays of this process by the names that `describe` gives them. Nothing is copied."""
    if _is_keyed(model):
        from reshard.live.memory.describe_megatron import megatron_tensors

        return megatron_tensors(model)
    return {name: local_of(tensor) for name, tensor in local_tensors(model)}


def _is_keyed(model: Any) -> bool:
    """Whether the model, or the first of its virtual stages, has a sharded state dict, as megatron-core's modules have."""
    first = model[0] if isinstance(model, list | tuple) and model else model
    return hasattr(first, "sharded_state_dict")


def local_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and the persistent buffers of a model by name, each tensor under its first name."""
    if isinstance(model, Mapping):
        yield from model.items()
        return
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "shape") and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def config_of(model: Any) -> Mapping[str, Any] | None:
    """The Hugging Face config of a transformers model, also of a wrapped one; None if there is none."""
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_dict") and hasattr(config, "model_type")):
        return None
    # As config.json has it: keys are texts, and torch's element types are words.
    return _plain(config.to_dict())


def adapter_of(model: Any) -> Mapping[str, Any] | None:
    """The settings of the LoRA adapter of a PEFT model; None for another model, and if several adapters could be meant."""
    adapters: Any = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or len(adapters) != 1:
        return None
    (settings,) = adapters.values()
    return _plain(settings.to_dict()) if hasattr(settings, "to_dict") else None


def _plain(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings as JSON has them."""
    plain: Mapping[str, Any] = json.loads(json.dumps(settings, default=_word))
    return plain


def _word(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value)).removeprefix("torch.")


def local_of(tensor: Any) -> Any:
    """The plain tensor in this process's memory that a tensor or DTensor stands for. Nothing is copied or gathered."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def held_box(name: str, tensor: Any) -> MemoryBox:
    """The box of a tensor that this process holds."""
    local = local_of(tensor)
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if hasattr(tensor, "device_mesh"):
        offsets = _offsets(name, tensor, tuple(local.shape))
    held = HeldTensor(name, from_torch(str(local.dtype), where=name), tuple(local.shape), tuple(local.stride()))
    return MemoryBox(held, name, shape, Box(offsets, held.shape), held.strides)


def _offsets(name: str, tensor: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            "each rank holds a partial sum of this tensor", where=name, do="Reduce it before the update: redistribute it to shards"
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != sizes:
        raise UnsupportedError(f"its local shape is {list(sizes)}, its placements {tensor.placements} make {list(shape)}", where=name)
    # torch puts the offset of an empty shard beyond the tensor, or at 0.
    return tuple(min(offset, size) for offset, size in zip(offsets, tensor.shape, strict=True))


def _rank(given: int | None) -> int:
    if given is not None:
        return given
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
