"""What the name of a stored tensor says: which part of the model, which layer, which expert."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from .tensors import respelled


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs. layer: as the name numbers it, which may be within a chunk or through the model; of an extra layer its
    number among those (extra). name: within the layer or expert, or of what is no layer's."""

    name: str
    layer: int | None = None
    extra: bool = False
    expert: int | None = None

    @property
    def is_expert(self) -> bool:
        return self.expert is not None or self.name.startswith("mlp.experts.")


# Wrappers around the model, outermost first.
_WRAPPER = re.compile(r"(?:module\.|model\.)+")
_OLD = re.compile(r"(?:language_model\.)?(?:encoder|transformer|decoder)\.(.*)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXTRA = re.compile(r"mtp\.layers\.(\d+)\.(.*)")
_EXTRA_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.*)|(linear_fc[12])\.(weight|bias)(\d+)|(\d+)\.(linear_fc[12]\..*))")
_OLD_ENDS = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "lm_head.weight": "output_layer.weight",
}
# What is no weight: state of FP8 recipes, and buffers that every model computes anew.
IGNORED = re.compile(r".*\._extra_state|.*rotary_pos_emb\.inv_freq|.*\.local_tokens_per_expert|.*\.core_attention\..*scale.*|_extra_state")


def without_wrappers(name: str) -> str:
    return _WRAPPER.sub("", name, count=1) if _WRAPPER.match(name) else name


@lru_cache(maxsize=1 << 17)
def place_of(name: str) -> Place:
    """The place of a stored tensor's name."""
    name = without_wrappers(name)
    name = name.removeprefix("language_model.")
    if match := _OLD.fullmatch(name):
        name = "decoder." + match[1]
    if match := re.fullmatch(r"decoder\.final_(?:layer)?norm\.(.*)", name):
        return Place(f"decoder.final_layernorm.{match[1]}")
    if match := _LAYER.fullmatch(name):
        return _in_layer(match[2], int(match[1]), extra=False)
    if match := _EXTRA.fullmatch(name):
        number, inner = int(match[1]), _EXTRA_INNER.fullmatch(match[2])
        return _in_layer(inner[1], number, extra=True) if inner else Place(match[2], number, extra=True)
    return Place(_OLD_ENDS.get(name, name))


def _in_layer(name: str, layer: int, *, extra: bool) -> Place:
    if match := _EXPERT.fullmatch(name):
        if match[1]:
            return Place(match[2], layer, extra, int(match[1]))
        if match[3]:
            return Place(f"{match[3]}.{match[4]}", layer, extra, int(match[5]))
        return Place(match[7], layer, extra, int(match[6]))
    return Place(respelled(name), layer, extra)
