"""The weights: in the module's state dict, in the files of layers and experts, or, if frozen under ZeRO-3, in fragments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from reshard.containers.torch_zip import AnyTensor, Locations, is_plain_tensor, memory_of
from reshard.errors import CheckpointError, IncompleteError

from ..layout.degrees import ModelRank, RunDegrees
from ..layout.experts import ExpertSlice
from ..layout.partitions import zero3_part_size, zero3_slice
from ..layout.states import ModelStates, Shape
from .flat_buffers import FlatBuffer, pieces_of_whole
from .parts import Contents, ParameterPart, merged, whole_part
from .run_states import RunStates, Tensors

# An AutoEP expert in a file of its own: <prefix>.<fused tensor>.<expert>.
_AUTOEP_EXPERT = re.compile(r"(?P<prefix>.*)\.(?P<tensor>w[123])\.(?P<expert>\d+)")


def weights_of_rank(states: RunStates, rank: ModelRank, locations: Locations) -> Contents:
    """The weights and the client states of one model-parallel rank, without the experts in files of their own.

    Raises: CheckpointError if a fragment of a frozen weight is missing or cannot be read.
    """
    models = states.models_of(rank.number)
    first = models[min(models)]
    steps = [Contents(objects=first.client_keys)]
    if first.module is not None and states.is_zero3:
        steps.append(zero3_module_weights(first, states.first_model.aliases, rank, locations))
    elif first.module is not None:
        steps.append(module_weights(first.module, first.trained_names, rank, locations))
    elif rank.stage == 0:
        # Nothing tells which stage holds which layer. It does not matter: all layers count as parts of the first stage.
        steps += [layer_weights(layer, tensors, rank, locations) for (layer, tp), tensors in states.layers.items() if tp == rank.tp_rank]
    if states.is_zero3:
        steps.append(frozen_weights(models, rank, locations))
    return merged(steps)


def zero3_module_weights(model: ModelStates, aliases: Mapping[str, str], rank: ModelRank, locations: Locations) -> Contents:
    """The tensors of a module that ZeRO-3 does not partition: its buffers. aliases: tied parameters, by their second names."""
    partitioned = {name for name, _ in model.frozen_shapes} | model.trained_names | aliases.keys()
    module = {name: value for name, value in (model.module or {}).items() if name not in partitioned or not is_plain_tensor(value)}
    buffers = module.keys() if model.buffers is None else model.buffers
    without_values = [name for name, value in module.items() if is_plain_tensor(value) and 0 in value.shape and name not in buffers]
    for name in without_values:
        del module[name]
    contents = module_weights(module, set(), rank, locations)
    if not without_values:
        return contents
    note = (
        f"{len(without_values)} names of the module have no values here (frozen weights that were left out of the save, or second names of "
        f"tied weights): {', '.join(without_values[:3])}"
    )
    return replace(contents, notes=(note,))


def module_weights(module: Mapping[str, object], trained: set[str], rank: ModelRank, locations: Locations) -> Contents:
    """The tensors of a module, and the aliases among them: names that share memory with a trained parameter. trained: their names."""
    by_memory = {_memory(value): name for name, value in module.items() if name in trained and is_plain_tensor(value)}
    tensors = {name: value for name, value in module.items() if is_plain_tensor(value)}
    return Contents(
        parts=tuple(whole_part("weight", name, tensor, rank, locations) for name, tensor in tensors.items()),
        empty_shapes={(name, rank.tp_rank): tensor.shape for name, tensor in tensors.items() if 0 in tensor.shape},
        aliases={
            name: by_memory[_memory(tensor)]
            for name, tensor in tensors.items()
            if name not in trained and 0 not in tensor.shape and _memory(tensor) in by_memory
        },
        objects=tuple(name for name, value in module.items() if value is not None and not is_plain_tensor(value)),
    )


def _memory(tensor: AnyTensor) -> tuple[object, ...]:
    """A key that is equal for the names of one tied parameter. The strides distinguish a square weight from its transpose."""
    return *memory_of(tensor), tensor.strides


def layer_weights(layer: int, tensors: Tensors, rank: ModelRank, locations: Locations) -> Contents:
    """The weights in a layer's file."""
    return Contents(tuple(whole_part("weight", f"{layer}.{name}", tensor, rank, locations) for name, tensor in tensors.items()))


def frozen_weights(models: Mapping[int, ModelStates], rank: ModelRank, locations: Locations) -> Contents:
    """The frozen parameters of ZeRO-3, from the fragments of all data-parallel ranks. models: by data-parallel rank."""
    first = models[min(models)]
    parts = []
    for name, shape in first.frozen_shapes:
        fragments = {dp: model.frozen_fragments[name] for dp, model in models.items() if name in model.frozen_fragments}
        if not fragments or 0 in shape:
            continue
        if missing := [dp for dp in models if dp not in fragments]:
            raise IncompleteError(f"rank {missing[0]}'s file holds no part of it", where=f"{name} in {models[missing[0]].path}")
        parts.append(_frozen_part(name, shape, fragments, rank, locations))
    return Contents(tuple(parts), empty_shapes={(name, rank.tp_rank): shape for name, shape in first.frozen_shapes if 0 in shape})


def _frozen_part(name: str, shape: Shape, fragments: Mapping[int, AnyTensor], rank: ModelRank, locations: Locations) -> ParameterPart:
    """One frozen parameter. fragments: by data-parallel rank."""
    buffer = FlatBuffer.of(fragments, locations)
    if buffer.dtype.name in ("I8", "U8"):
        raise IncompleteError(
            f"it is stored quantized ({buffer.dtype}), and its scales are in no file",
            where=f"{name} in {buffer.rows[0].path}",
            why="zero_quantized_nontrainable_weights keeps the scales in an attribute that is not saved: the values are lost",
            do="Take this frozen weight from the model that the run started from, and save with exclude_frozen_parameters",
        )
    buffer.check_size([zero3_part_size(shape, len(fragments))] * len(fragments), f"part of {name}")
    shards = buffer.shards(zero3_slice(name, shape, ranks=len(fragments)))
    return ParameterPart("weight", name, rank.stage, rank.tp_rank, buffer.dtype, shape, shards)


def expert_weights(states: RunStates, degrees: RunDegrees, locations: Locations) -> Contents:
    """The weights in the experts' own files. Those of AutoEP are parts of fused tensors.

    Raises: CheckpointError if two files hold the same expert.
    """
    totals = {layer.get("expert_key_prefix"): layer.get("num_experts") for layer in states.first_model.autoep_layers}
    parts = []
    paths: dict[tuple[str, int], str] = {}
    for numbers, tensors in states.experts.items():
        rank, path = degrees.model_rank(numbers[2]), states.tag.experts[numbers]
        for name, tensor in tensors.items():
            if (other := paths.setdefault((name, rank.number), path)) != path:
                raise CheckpointError(
                    f"{other} and {path} hold the same expert",
                    where=name,
                    why="A file was copied over that of another expert, whose weights are lost",
                    do="Copy both files again from where the checkpoint was written",
                )
            match = _AUTOEP_EXPERT.fullmatch(name)
            total = totals.get(match["prefix"]) if match else None
            if match and type(total) is int:
                fused = ExpertSlice((total, *tensor.shape), (int(match["expert"]),))
                parts.append(_fused_part(f"{match['prefix']}.{match['tensor']}", tensor, fused, rank, locations))
            else:
                parts.append(whole_part("weight", name, tensor, rank, locations))
    return Contents(tuple(parts))


def _fused_part(name: str, tensor: AnyTensor, fused: ExpertSlice, rank: ModelRank, locations: Locations) -> ParameterPart:
    """One expert as a part of the fused tensor of all experts."""
    expert = replace(tensor, shape=(1, *tensor.shape), strides=(math.prod(tensor.shape), *tensor.strides))
    shards = fused.in_fused_tensor(pieces_of_whole(expert, locations), expert.shape)
    return ParameterPart("weight", name, rank.stage, rank.tp_rank, tensor.dtype, fused.fused_shape, shards)
