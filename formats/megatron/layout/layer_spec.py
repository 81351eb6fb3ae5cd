"""Which classes a run builds its layers from, and what that changes in the names and splits of a layer's tensors.

The local spec consists of Megatron's own classes, in which each norm is a separate module. `MegatronModel` uses the names of the local
spec.

Source: megatron/core/models/gpt/gpt_layer_specs.py, transformer/multi_latent_attention.py and transformer/moe/experts.py of 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .tensors import Tensors

ExpertLayout = Literal["sequential", "grouped", "te-grouped"]
"""How the experts of a rank are stored.

sequential: one MLP per expert. grouped: two tensors for all experts (GroupedMLP). te-grouped: two layers with one weight per expert.
"""

_DOWN_PROJECTION = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The layer classes of a run."""

    te: bool = False
    """Whether the classes are Transformer Engine's, which fuse a norm into the linear layer after it."""
    experts: ExpertLayout = "sequential"
    """How the experts are stored."""

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

    def stored_name(self, name: str, *, is_sparse: bool, is_latent: bool) -> str:
        """The name of a layer's tensor in this spec, from its name in the local spec."""
        if not self.te:
            return name
        module, _, parameter = name.rpartition(".")
        fused_into = {
            "input_layernorm": None if is_latent else "self_attention.linear_qkv",
            "pre_mlp_layernorm": None if is_sparse else "mlp.linear_fc1",
            "self_attention.q_layernorm": "self_attention.linear_q_up_proj" if is_latent else None,
            "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
        }.get(module)
        return f"{fused_into}.layer_norm_{parameter}" if fused_into else name
