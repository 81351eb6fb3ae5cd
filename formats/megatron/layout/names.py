"""The names of tensors: what the classes of a run change in them, and what the name of a stored tensor says.

The local spec consists of Megatron's own classes, in which each norm is a separate module. `MegatronModel` uses its names. Transformer
Engine's classes fuse a norm into the linear layer after it.

In a legacy save a name has the number of its layer within the chunk. In a distributed save a key often has no number, as the layers are
stacked along the tensor's first axis and the experts along the second one.

Source: megatron/core/models/gpt/gpt_layer_specs.py, transformer/multi_latent_attention.py and transformer/moe/experts.py of 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
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
# Norm -> the linear layer after it, into which Transformer Engine fuses it. Of experts the layer has no such linear layer.
_FUSED_INTO = {
    "input_layernorm": ("self_attention.linear_qkv", "self_attention.in_proj", "self_attention.linear_qkv_down_proj"),
    "norm": ("mixer.in_proj",),
    "pre_mlp_layernorm": ("mlp.linear_fc1",),
    "self_attention.q_layernorm": ("self_attention.linear_q_up_proj",),
    "self_attention.kv_layernorm": ("self_attention.linear_kv_up_proj",),
}
_NORM_IN = {linear: norm for norm, layers in _FUSED_INTO.items() for linear in layers}
# Modules of a layer in GPT models before Megatron-Core (legacy/model/transformer.py) -> their name in the local spec.
_OLD_MODULES = {
    "input_norm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# Names outside of layers before Megatron-Core.
_OLD_NAMES = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "lm_head.weight": "output_layer.weight",
}


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

    def keys(self, layer: Tensors) -> Tensors:
        """The tensors of a layer under their keys in a distributed save, from those under their names in the local spec.

        There the norms of the local spec have Transformer Engine's names, also before experts (gpt_layer_specs.py,
        sharded_state_dict_keys_map). Latent attention has no such map.
        """
        if self.te or not any(name.startswith("self_attention.linear_qkv.") for name in layer):
            return self.stored_names(layer)
        return {_fused_name(name, ("self_attention.linear_qkv", "mlp.linear_fc1")): tensor for name, tensor in layer.items()}


def _fused_name(name: str, linear: Collection[str]) -> str:
    module, _, parameter = name.rpartition(".")
    fused_into = next((layer for layer in _FUSED_INTO.get(module, ()) if layer in linear), None)
    return f"{fused_into}.layer_norm_{parameter}" if fused_into else name


def _local_name(name: str) -> str:
    """The name that `MegatronModel.layer` gives to a layer's tensor, from its name in any spec and version."""
    linear, _, norm_parameter = name.rpartition(".layer_norm_")
    if linear in _NORM_IN:
        return f"{_NORM_IN[linear]}.{norm_parameter}"
    module, _, parameter = name.rpartition(".")
    return f"{_OLD_MODULES[module]}.{parameter}" if module in _OLD_MODULES else name


@value
class ParsedName:
    """The name of a stored tensor, in its parts."""

    name: str
    """The name in the local spec, relative to the layer or the expert."""
    layer: int | None = None
    """The layer's number in the name, in its chunk (legacy) or in the model (distributed); None if it has none."""
    is_mtp: bool = False
    """Whether it is a layer for multi-token prediction, which the name counts separately."""
    expert: int | None = None
    """The expert's number in the name, on its rank (legacy) or in the model (distributed); None if it has none."""
    stacks_layers: bool = False
    """Whether the tensor's first axis counts the layers."""
    stacks_experts: bool = False
    """Whether the tensor's first axis, after that of the layers, counts the experts."""
    shares_experts: bool = False
    """Whether all experts share it: a factor of a LoRA adapter of grouped experts, without an axis of experts."""
    half: int | None = None
    """For linear_fc1, if gate and up are stored separately: 0 for gate, 1 for up. Otherwise None."""
    segment: str = ""
    """For a projection whose parts are stored separately: the part, such as "dt" (MegatronTensor.segments)."""

    @property
    def stacked_axes(self) -> int:
        """The number of leading axes that count layers and experts."""
        return self.stacks_layers + self.stacks_experts

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to an expert, or to all experts of a rank."""
        return self.stacks_experts or self.shares_experts or self.expert is not None or self.name.startswith("mlp.experts.")

    def in_model(self, layers: int, first: int = 0) -> ParsedName:
        """The name with the layer's number in a model of so many layers. first: the layer that the name calls 0."""
        return self if self.layer is None else replace(self, layer=self.layer + (layers if self.is_mtp else first))

    def in_shape(self, shape: tuple[int, ...]) -> ParsedName:
        """The name of a stored matrix of this shape: without an axis of experts, it is a factor of an adapter that they share."""
        shares = self.stacks_experts and (".adapter." in self.name or ".lora_" in self.name) and len(shape) == self.stacked_axes + 1
        return replace(self, stacks_experts=False, shares_experts=True) if shares else self


# Tensors that are not weights: state of FP8 recipes, and buffers that the model computes again.
_NO_WEIGHT = re.compile(r"(.*\.)?_extra_state|.*rotary_pos_emb\.inv_freq|.*\.local_tokens_per_expert|.*\.core_attention\..*scale.*")
# Wrappers around the model, outermost first.
_WRAPPERS = re.compile(r"(?:module\.|model\.)+")
_DECODER = re.compile(r"(?:language_model\.)?(?:encoder|transformer|decoder)\.(.*)")
_FINAL_NORM = re.compile(r"decoder\.final_(?:layer)?norm\.(.*)")
_NUMBERED = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.*)")
_MTP_TRANSFORMER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.*)")
# local_experts.0.linear_fc1.weight, 0.linear_fc1.weight or linear_fc1.weight0; with an axis of experts, experts.linear_fc1.weight.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:(?:local_)?experts\.)?(?:(\d+)\.)?(linear_fc[12]\.(?:adapter\..*|lora_[AB]\..*)?(?:weight|bias))(?(1)|(\d+)?)"
)
_SEGMENT = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.([A-Za-z]+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias)\d*)_(w|v)")


# What belongs to the state of the run.
_RUN_KEYS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler")


def is_run_key(key: str) -> bool:
    """Whether a key of a distributed save belongs to the state of the run, and not to the model."""
    return key.startswith(_RUN_KEYS)


def without_half(key: str) -> str:
    """The key of the parameter whose gate or up has this key."""
    return match[1] if (match := _HALF.fullmatch(key)) else key


def is_weight_name(name: str) -> bool:
    """Whether a name can be that of a weight."""
    return _NO_WEIGHT.fullmatch(name) is None


def strip_wrappers(name: str) -> str:
    """The name without the wrappers around the model."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


@lru_cache(maxsize=1 << 17)
def parse_name(name: str) -> ParsedName:
    """The parts of a tensor's name in a legacy save."""
    name = strip_wrappers(name).removeprefix("language_model.")
    if match := _DECODER.fullmatch(name):
        name = "decoder." + match[1]
    if match := _FINAL_NORM.fullmatch(name):
        return ParsedName(f"decoder.final_layernorm.{match[1]}")
    if match := _NUMBERED.fullmatch(name):
        in_layer, is_mtp = match[3], match[1] == "mtp"
        if is_mtp and (inner := _MTP_TRANSFORMER.fullmatch(in_layer)):
            in_layer = inner[1]
        return replace(_parse_in_layer(in_layer), layer=int(match[2]), is_mtp=is_mtp)
    return ParsedName(_OLD_NAMES.get(name, name))


def parse_key(key: str) -> ParsedName:
    """The parts of a weight's key in a distributed save."""
    key, half, segment = strip_wrappers(key), None, ""
    if match := _HALF.fullmatch(key):
        key, half = match[1], "wv".index(match[2])
    if match := _SEGMENT.fullmatch(key):
        key, segment = match[1], match[2]
    match = _STACKED.fullmatch(key)
    parsed = replace(_parse_in_layer(match[1]), stacks_layers=True) if match else parse_name(key)
    return replace(parsed, half=half, segment=segment)


def _parse_in_layer(name: str) -> ParsedName:
    """The parts of a name that is relative to its layer."""
    if match := _EXPERT.fullmatch(name):
        number = match[1] or match[3]
        return ParsedName(match[2], expert=int(number) if number else None, stacks_experts=not number)
    return ParsedName(_local_name(name))
