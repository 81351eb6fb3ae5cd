"""What the name of a stored tensor says: which tensor it is, of which layer, of which expert.

Two schemes. In a legacy save a name has the number of its layer within the chunk. In a distributed save a key often has no number, as the
layers are stacked along the tensor's first axis and the experts along the second one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from reshard.geometry.value import value

from .tensors import local_spec_name


@value
class ParsedName:
    """A tensor's name in a legacy save, in its parts."""

    name: str
    """The name in the local spec, relative to the layer or the expert."""
    layer: int | None = None
    """The layer's number in the name; None outside of layers. In an MTP layer it counts the MTP layers."""
    is_mtp: bool = False
    """Whether the layer is for multi-token prediction."""
    expert: int | None = None
    """The expert's number on its rank; None if the tensor belongs to no expert, or to all experts of the rank."""

    @property
    def is_expert(self) -> bool:
        return self.expert is not None or self.name.startswith("mlp.experts.")


@value
class ParsedKey:
    """A tensor's key in a distributed save, in its parts."""

    name: str
    """The name in the local spec, relative to the layer or the expert."""
    stacks_layers: bool = False
    """Whether the tensor's first axis counts the layers."""
    stacks_experts: bool = False
    """Whether the tensor's first axis, after that of the layers, counts the experts."""
    layer: int | None = None
    """The layer, if the key has its number."""
    mtp_layer: int | None = None
    """The layer for multi-token prediction, if the key has its number."""
    expert: int | None = None
    """The expert, if the key has its number."""
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
        return self.stacks_experts or self.expert is not None


# Tensors that are not weights: state of FP8 recipes, and buffers that the model computes again.
_NO_WEIGHT = re.compile(r"(.*\.)?_extra_state|.*rotary_pos_emb\.inv_freq|.*\.local_tokens_per_expert|.*\.core_attention\..*scale.*")
# Wrappers around the model, outermost first.
_WRAPPERS = re.compile(r"(?:module\.|model\.)+")
_DECODER = re.compile(r"(?:language_model\.)?(?:encoder|transformer|decoder)\.(.*)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(.*)")
_MTP_TRANSFORMER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.*)|(linear_fc[12])\.(weight|bias)(\d+)|(\d+)\.(linear_fc[12]\..*))")
# Names outside of layers before Megatron-Core.
_OLD_NAMES = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "lm_head.weight": "output_layer.weight",
}
_STACKED_KEY = re.compile(r"decoder\.layers\.(?!\d+\.)(.*)")
_NUMBERED_KEY = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)")
_EXPERT_KEY = re.compile(
    r"mlp\.experts\.(?:(?:local_)?experts\.)?(?:(?P<expert>\d+)\.)?(?P<name>linear_fc[12]\.(?:adapter\..*)?(?:weight|bias))"
)
_SEGMENT_KEY = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.([A-Za-z]+)")
_HALF_KEY = re.compile(r"(.*linear_fc1\.(?:weight|bias))_(w|v)")


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
    if match := re.fullmatch(r"decoder\.final_(?:layer)?norm\.(.*)", name):
        return ParsedName(f"decoder.final_layernorm.{match[1]}")
    if match := _LAYER.fullmatch(name):
        return _parse_in_layer(match[2], int(match[1]), is_mtp=False)
    if match := _MTP.fullmatch(name):
        layer, inner = int(match[1]), _MTP_TRANSFORMER.fullmatch(match[2])
        return _parse_in_layer(inner[1], layer, is_mtp=True) if inner else ParsedName(match[2], layer, is_mtp=True)
    return ParsedName(_OLD_NAMES.get(name, name))


def _parse_in_layer(name: str, layer: int, *, is_mtp: bool) -> ParsedName:
    if match := _EXPERT.fullmatch(name):
        if match[1]:
            return ParsedName(match[2], layer, is_mtp, int(match[1]))
        if match[3]:
            return ParsedName(f"{match[3]}.{match[4]}", layer, is_mtp, int(match[5]))
        return ParsedName(match[7], layer, is_mtp, int(match[6]))
    return ParsedName(local_spec_name(name), layer, is_mtp)


def parse_key(key: str) -> ParsedKey:
    """The parts of a weight's key in a distributed save."""
    key, half, segment = strip_wrappers(key), None, ""
    if match := _HALF_KEY.fullmatch(key):
        key, half = match[1], "wv".index(match[2])
    if match := _SEGMENT_KEY.fullmatch(key):
        key, segment = match[1], match[2]
    if match := _STACKED_KEY.fullmatch(key):
        return _with_name(ParsedKey("", stacks_layers=True, half=half, segment=segment), match[1])
    if match := _NUMBERED_KEY.fullmatch(key):
        number = int(match[2])
        layer, mtp_layer = (number, None) if match[1] == "decoder" else (None, number)
        return _with_name(ParsedKey("", layer=layer, mtp_layer=mtp_layer, half=half, segment=segment), match[3])
    return ParsedKey(parse_name(key).name, half=half)


def _with_name(layer: ParsedKey, name: str) -> ParsedKey:
    """`layer` completed by the name of a tensor in that layer."""
    if match := _EXPERT_KEY.fullmatch(name):
        expert = int(match["expert"]) if match["expert"] else None
        return replace(layer, name=match["name"], stacks_experts=expert is None, expert=expert)
    return replace(layer, name=local_spec_name(name))
