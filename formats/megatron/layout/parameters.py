"""The parameters of a save by name: the tensor of the model that a name means, and what follows a parameter's name in the keys of
fsdp_dtensor.

    optimizer.state.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg
                    |wrappers   |parameter                             |half|kind
    optimizer.param_to_group_meta.module.module.decoder.layers.0.mlp.linear_fc1.weight.lr

The number of wrappers depends on the run, and is another one for the model than for its optimizer. Settings belong to the parameter before
gate and up are separated. Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py of 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reshard.errors import CheckpointError, ReshardError, UnsupportedError
from reshard.geometry.value import value

from .names import ParsedName, is_run_key, strip_wrappers, without_half
from .tensors import MegatronModel, MegatronTensor, Tensors

FUSED_DOWN = "self_attention.linear_qkv_down_proj.weight"
"""Both down projections of latent attention, one after the other (mla_down_proj_fusion, FusedMLASelfAttention of 0.19.2). torch_dist
stores them separately; Megatron-FSDP does since a later version."""
_DOWN = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")


@value
class Parameters:
    """The names of the parameters of a save."""

    names: frozenset[str]
    """The names without wrappers, and without the mark of a half."""

    @classmethod
    def of(cls, keys: Iterable[str]) -> Parameters:
        """The parameters among the keys of a save."""
        return cls(frozenset(without_half(strip_wrappers(key)) for key in keys if not is_run_key(key)))

    def split(self, key: str) -> tuple[str, list[str]] | None:
        """The parameter at the start of a key, with its wrappers, and the words behind it; None if the key starts with none of them."""
        words = key.split(".")
        for count in range(len(words) - 1, 0, -1):
            name = ".".join(words[:count])
            if without_half(strip_wrappers(name)) in self.names:
                return name, words[count:]
        return None


def model_tensor(model: MegatronModel, parsed: ParsedName, where: str) -> MegatronTensor:
    """The tensor that a stored name means, with the numbers of layer and expert in the model. Raises what `named_tensor` raises."""
    if parsed.layer is None:
        tensors = model.outside_layers
    elif parsed.is_expert:
        tensors = model.expert(parsed.layer, parsed.expert or 0)
    else:
        tensors = {**model.layer(parsed.layer), **(model.mtp_module(parsed.layer - model.layers) if parsed.is_mtp else {})}
    if parsed.name == FUSED_DOWN and all(name in tensors for name in _DOWN):
        first, second = (tensors[name] for name in _DOWN)
        return replace(first, blocks=(*first.blocks, *second.blocks))
    return named_tensor(tensors, parsed.name, where)


def named_tensor(tensors: Tensors, name: str, where: str) -> MegatronTensor:
    """The tensor of that name. Raises CheckpointError if there is none, UnsupportedError for an unknown part of an adapter."""
    if name not in tensors:
        raise no_such_tensor(tensors, name, where)
    return tensors[name]


def no_such_tensor(tensors: Tensors, name: str, where: str) -> ReshardError:
    """The error for a stored tensor that is not among those of the model."""
    if ".adapter." in name or ".lora_" in name:
        return UnsupportedError(
            "it is a part of an adapter that reshard does not read",
            where=where,
            why="Read are both factors of LoRA beside linear_qkv, linear_proj, linear_fc1 and linear_fc2",
            do="Merge the adapter with the program that trained it, then convert the result",
        )
    return CheckpointError(
        "the model that the run's settings describe has no such tensor",
        where=where,
        why=f"Here it has {', '.join(list(tensors)[:6]) or 'no tensors'}, and a tensor that is not known would be lost",
        do="Give the config of the model with `model=DIR`",
    )
