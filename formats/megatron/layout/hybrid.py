"""HybridModel of megatron-core 0.19, and MambaModel before it: a layer is attention, an MLP or experts alone, as a pattern of letters says.

    hybrid_layer_pattern     "*-*E|*-*E": attention (*), latent attention (+) or a gated delta net (G), then an MLP (-) or experts (E);
                             | separates the stages, / precedes layers for multi-token prediction
    decoder.layers.0         what a GPT model has in layer 0 up to its attention
    decoder.layers.1         what it has there after it
    decoder.final_norm       its final_layernorm

Other patterns have no GPT model that computes the same. Source: megatron/core/models/hybrid/hybrid_layer_allocation.py, hybrid_block.py and
dist_checkpointing/gpt_checkpoint_interop.py of 0.19.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.models.model import Model

from .tensors import MegatronModel, QkvOrder, Tensors

_SETTINGS = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "spec")
"""What the settings of such a run have in addition, the newest name of the pattern first."""
_PAIRS = re.compile(r"(?:[*+G][-E])+")
_BEFORE_MLP = ("input_layernorm.", "self_attention.")


def stages_of_pattern(args: Mapping[str, Any]) -> list[str]:
    """The letters of the layers of each stage, of a chunk each with a virtual pipeline; empty for a GPT model."""
    pattern = next((value for name in _SETTINGS[:2] if isinstance(value := args.get(name), str)), "")
    return pattern.split("|") if pattern else []


def gpt_settings(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the GPT model that computes the same as the run's model; `args` itself if it is none of two layers in turn."""
    pattern = "".join(stages_of_pattern(args))
    if _PAIRS.fullmatch(pattern) is None:
        return args
    sparse = [int(letter == "E") for letter in pattern[1::2]]
    settings = {name: value for name, value in args.items() if name not in _SETTINGS}
    settings |= {"num_layers": len(sparse), "moe_layer_freq": sparse}
    if not any(sparse):
        settings["num_experts"] = None
    if "G" in pattern:
        settings["experimental_attention_variant"] = "gated_delta_net"
    return settings


class PairedModel(MegatronModel):
    """A model whose layers Megatron splits in two: a layer with the attention, then a layer with the MLP or experts."""

    def __init__(self, model: Model, padded_vocab: int, qkv_order: QkvOrder = "by_group") -> None:
        super().__init__(model, padded_vocab, qkv_order)
        self._whole = MegatronModel(model, padded_vocab, qkv_order)

    @property
    def layers(self) -> int:
        """The number of layers as Megatron counts them."""
        return 2 * super().layers

    @property
    def mtp_layers(self) -> int:
        """None: patterns with layers for multi-token prediction are not read."""
        return 0

    def stored_name(self, name: str) -> str:
        """The name in a file of a tensor outside of the layers."""
        return name.replace("final_layernorm", "final_norm")

    def name_in(self, name: str, layer: int | None, expert: int | None) -> str:
        """The name that a canonical tensor of a layer or expert has in another one. expert: None for the same."""
        return super().name_in(name, None if layer is None else layer // 2, expert)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts."""
        return layer % 2 == 1 and super().is_sparse(layer // 2)

    def layer(self, layer: int) -> Tensors:
        """The tensors of a layer without its routed experts."""
        tensors = self._whole.layer(layer // 2)
        return {name: tensor for name, tensor in tensors.items() if name.startswith(_BEFORE_MLP) is (layer % 2 == 0)}

    def expert(self, layer: int, expert: int) -> Tensors:
        """The tensors of a routed expert."""
        return self._whole.expert(layer // 2, expert) if layer % 2 else {}

    def first_alike(self, layer: int) -> int:
        """The first layer whose weights are like those of `layer`."""
        return 2 * super().first_alike(layer // 2) + layer % 2

    def first_expert_alike(self, layer: int, expert: int) -> int:
        """The first expert of a layer whose weights have the same patterns of names as those of `expert`."""
        return self._whole.first_expert_alike(layer // 2, expert)
