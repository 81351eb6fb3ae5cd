"""Which classes a run builds its layers from, and what that changes in the names and splits of a layer's tensors.

The local spec consists of Megatron's own classes, in which each norm is a separate module. `MegatronModel` uses the names of the local
spec.

Source: megatron/core/models/gpt/gpt_layer_specs.py, transformer/multi_latent_attention.py and transformer/moe/experts.py of 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from reshard.geometry.value import value

from .tensors import Tensors

ExpertLayout = Literal["sequential", "grouped", "te-grouped"]
"""How the experts of a rank are stored.

sequential: one MLP per expert. grouped: two tensors for all experts (GroupedMLP). te-grouped: two layers with one weight per expert.
"""

CORE_ATTENTION = "self_attention.core_attention"
"""The module that computes attention. With a state of an FP8 recipe it has an entry though it has no tensor."""
_DOWN_PROJECTION = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.")


@value
class LayerSpec:
    """The layer classes of a run."""

    te: bool = False
    """Whether the classes are Transformer Engine's, which fuse a norm into the linear layer after it."""
    experts: ExpertLayout = "sequential"
    """How the experts are stored."""
    extra_state: bool = False
    """Whether attention and separate norms have states of an FP8 recipe, as linear layers have. Transformer Engine's classes keep one each
    (get_extra_state of ops/op.py in 2.x): it is empty without FP8, but a strict load wants its key."""

    def has_fp8_state(self, module: str) -> bool:
        """Whether a module with tensors has an FP8 state."""
        name = module.rpartition(".")[2]
        return name.startswith(("linear_", "eh_proj", "in_proj", "out_proj")) or (self.extra_state and name.endswith("norm"))

    @classmethod
    def from_args(cls, args: Mapping[str, Any], transformer_impl: str, experts: ExpertLayout | None = None) -> LayerSpec:
        """The layer classes of a run with these settings; `experts` overrides the expert layout of the settings."""
        te = transformer_impl == "transformer_engine"
        if experts:
            return cls(te, experts)
        if not args.get("moe_grouped_gemm"):
            return cls(te)
        return cls(te, "grouped" if transformer_impl == "local" or args.get("moe_use_legacy_grouped_gemm") else "te-grouped")

    def tensors(self, layer: Tensors) -> Tensors:
        """The tensors of a layer, under their names in the local spec.

        Only one split changes: Transformer Engine replicates the down projections of latent attention (parallel_mode "duplicated",
        multi_latent_attention.py).
        """
        if not self.te:
            return layer
        return {name: replace(tensor, axis=None) if _DOWN_PROJECTION.match(name) else tensor for name, tensor in layer.items()}

    def stored_names(self, layer: Tensors) -> Tensors:
        """The tensors of a layer under their names in this spec, from those under their names in the local spec. A norm is fused into
        the linear layer after it, if the layer has that."""
        if not self.te:
            return layer
        linear = {name.rpartition(".")[0] for name in layer}
        return {_fused_name(name, linear): tensor for name, tensor in layer.items()}


# Norm -> the linear layer after it, into which Transformer Engine fuses it. Of experts the layer has no such linear layer.
_FUSED_INTO = {
    "input_layernorm": ("self_attention.linear_qkv", "self_attention.in_proj"),
    "norm": ("mixer.in_proj",),
    "pre_mlp_layernorm": ("mlp.linear_fc1",),
    "self_attention.q_layernorm": ("self_attention.linear_q_up_proj",),
    "self_attention.kv_layernorm": ("self_attention.linear_kv_up_proj",),
}


def _fused_name(name: str, linear: Collection[str]) -> str:
    module, _, parameter = name.rpartition(".")
    fused_into = next((each for each in _FUSED_INTO.get(module, ()) if each in linear), None)
    return f"{fused_into}.layer_norm_{parameter}" if fused_into else name


def local_keys(layer: Tensors) -> Tensors:
    """The tensors of a layer of the local spec under their keys in a distributed save, in which norms have Transformer Engine's names, also
    before experts (gpt_layer_specs.py, sharded_state_dict_keys_map). Latent attention has no such map."""
    if not any(name.startswith("self_attention.linear_qkv.") for name in layer):
        return layer
    return {_fused_name(name, ("self_attention.linear_qkv", "mlp.linear_fc1")): tensor for name, tensor in layer.items()}
