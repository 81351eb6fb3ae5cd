"""What a tensor is in its model, as far as its name tells: its layer, its expert, its family."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\bexperts\.)(\d+)\.")
_TABLE = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out|wte|wpe|\w*embed\w*|\w*embeddings?)\.(?:\w+\.)*weight$")
_SCALE = re.compile(r"(?:^|[._])(?:weight|input|[kvq]|kv|prob)_scale(?:_inv)?$")


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if the name tells none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> tuple[str, int] | None:
    """The group of experts and the number of the expert that a tensor belongs to; None for other tensors."""
    match = _EXPERT.match(name)
    return (match[1] + "*", int(match[2])) if match else None


def is_stacked_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds all experts of a layer, one after the other along its first axis."""
    return len(shape) == 3 and "experts" in name.split(".") and expert_of(name) is None


def family_of(name: str) -> str:
    """One name for the same tensor of all layers and experts."""
    return re.sub(r"\d+", "#", name)


def part_of_layer(name: str) -> str:
    """What a tensor is in its layer, such as "self_attn.q_proj.weight": its name after the number of the layer, with other numbers
    replaced; the family outside of layers."""
    match = _LAYER.search(name)
    return family_of(name[match.end() :] if match else name)


def is_table(name: str) -> bool:
    """Whether a tensor has one row for each token or position: an embedding or a head."""
    return _TABLE.search(name) is not None


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of a quantized weight, activation or cache."""
    return _SCALE.search(name) is not None
