"""The weights: in the module's state dict, in the files of layers and experts, or, if frozen under ZeRO-3, in fragments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.state_dicts import decoded
from reshard.containers.torch_zip import AnyTensor, Locations, is_plain_tensor, memory_of
from reshard.errors import CheckpointError, IncompleteError
from reshard.index.index import Tensor

from ..layout.experts import ExpertSlice
from ..layout.partitions import zero3_part_size, zero3_slice
from ..layout.states import ModelStates
from ..layout.tag import ModelRank, model_rank, of_model_rank
from .flat_buffers import FlatBuffer, pieces_of_copies
from .one_save import check_ranks
from .parts import Parts
from .run_states import RunStates

# An AutoEP expert in a file of its own: <prefix>.<fused tensor>.<expert>.
_AUTOEP_EXPERT = re.compile(r"(?P<prefix>.*)\.(?P<tensor>w[123])\.(?P<expert>\d+)")


def add_weights(parts: Parts, states: RunStates, rank: ModelRank) -> None:
    """Add the weights of one model-parallel rank, without the experts in files of their own.

    Raises: CheckpointError if a fragment of a frozen weight is missing or cannot be read.
    """
    models = of_model_rank(states.models, rank.number)
    model = models[min(models)]
    tensors, without_values = model.tensors, []
    if states.is_zero3:
        partitioned = {name for name, _ in model.frozen_shapes} | model.trained_names | states.first_model.facts.tied.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in partitioned}
        buffers = tensors.keys() if model.facts.buffers is None else set(model.facts.buffers)
        without_values = [name for name, tensor in tensors.items() if 0 in tensor.shape and name not in buffers]
        tensors = {name: tensor for name, tensor in tensors.items() if 0 not in tensor.shape or name in buffers}
    # Nothing tells which stage holds which layer. It does not matter: all layers count as parts of the first stage.
    for (layer, tp_rank), of_layer in states.layers.items() if model.module is None and rank.stage == 0 else ():
        tensors |= {f"{layer}.{name}": tensor for name, tensor in of_layer.items()} if tp_rank == rank.tp_rank else {}
    for name, tensor in tensors.items():
        parts.add_whole(rank, "weight", name, tensor)
    for weight in _frozen_weights(models, parts.locations) if states.is_zero3 else ():
        parts.add(rank, weight)
    if without_values:
        note = (
            f"{len(without_values)} names of the module have no values here (frozen weights that were left out of the save, or second "
            f"names of tied weights): {', '.join(without_values[:3])}"
        )
        parts.builder.add_notes([note])


def add_objects(builder: IndexBuilder, states: RunStates) -> None:
    """Add what the files of model states hold that is not a plain tensor: client states, and objects and arrays in the module."""
    for model in states.models.values():
        others = {name: value for name, value in (model.module or {}).items() if value is not None and not is_plain_tensor(value)}
        arrays, names = decoded(others, model.path)
        for name, local in arrays:
            builder.add("weight", name, local, model.path)
        builder.add_objects((*model.client_keys, *names))


def tied_names(states: RunStates) -> dict[str, str]:
    """Tied parameters: second name -> the name under which the parameter is stored. The files list them; without ZeRO-3 they are also the
    names in a module that share memory with a trained parameter."""
    tied = dict(states.first_model.facts.tied)
    for model in states.models.values() if not states.is_zero3 else ():
        trained = model.trained_names
        # The strides distinguish a square weight from its transpose.
        memories = {name: (*memory_of(tensor), tensor.strides) for name, tensor in model.tensors.items() if 0 not in tensor.shape}
        stored = {memory: name for name, memory in memories.items() if name in trained}
        for name, memory in memories.items():
            if memory in stored and name not in trained:
                tied.setdefault(name, stored[memory])
    return tied


def _frozen_weights(models: Mapping[int, ModelStates], locations: Locations) -> Iterator[Tensor]:
    """The frozen parameters of ZeRO-3, from the fragments of all data-parallel ranks. models: by data-parallel rank."""
    for name, shape in models[min(models)].frozen_shapes:
        fragments = {dp: model.frozen_fragments[name] for dp, model in models.items() if name in model.frozen_fragments}
        if not fragments:
            continue
        if missing := [dp for dp in models if dp not in fragments]:
            raise IncompleteError(f"rank {missing[0]}'s file holds no part of it", where=f"{name} in {models[missing[0]].path}")
        buffer, ranks = FlatBuffer(fragments, locations), len(fragments)
        if buffer.dtype.name in ("I8", "U8"):
            raise IncompleteError(
                f"it is stored quantized ({buffer.dtype}), and its scales are in no file",
                where=f"{name} in {buffer.paths[0]}",
                why="zero_quantized_nontrainable_weights keeps the scales in an attribute that is not saved: the values are lost",
                do="Take this frozen weight from the model that the run started from, and save with exclude_frozen_parameters",
            )
        held = buffer.rows[0].shape[0]
        if 0 < held < zero3_part_size(shape, ranks) and zero3_part_size(shape, saved := -(-math.prod(shape) // held)) == held:
            why = f"The part of {name} in {buffer.paths[0]}, {held:,} elements, is that of one of {saved} ranks"
            check_ranks({dp: models[dp].path for dp in fragments}, saved, "data-parallel", why=why)
        buffer.check_size([zero3_part_size(shape, ranks)] * ranks, f"part of {name}")
        yield Tensor(name, buffer.dtype, shape, "weight", buffer.shards(zero3_slice(name, shape, ranks)))


def add_experts(parts: Parts, states: RunStates, tp: int) -> None:
    """Add the weights in the experts' own files. Those of AutoEP are parts of fused tensors.

    Raises: CheckpointError if two files hold the same expert.
    """
    totals = {layer.get("expert_key_prefix"): layer.get("num_experts") for layer in states.first_model.autoep_layers}
    paths: dict[tuple[str, int], str] = {}
    for numbers, tensors in states.experts.items():
        rank, path = model_rank(numbers[2], tp), states.tag.experts[numbers]
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
                parts.add(rank, _fused_tensor(match, tensor, total, parts.locations))
            else:
                parts.add_whole(rank, "weight", name, tensor)


def _fused_tensor(name: re.Match[str], tensor: AnyTensor, experts: int, locations: Locations) -> Tensor:
    """One expert as a part of the fused tensor of all experts of a layer."""
    fused = ExpertSlice((experts, *tensor.shape), (int(name["expert"]),))
    expert = replace(tensor, shape=(1, *tensor.shape), strides=(math.prod(tensor.shape), *tensor.strides))
    shards = fused.in_fused_tensor(pieces_of_copies({0: expert}, locations), expert.shape)
    return Tensor(f"{name['prefix']}.{name['tensor']}", tensor.dtype, fused.fused_shape, "weight", shards)
