"""Elements of the KV cache per token, layer and rank.

    attention             2 x head_dim x KV heads of the rank, max(1, kv_heads / tp): with tp > kv_heads it shrinks no further;
                          head_dim + value_dim, if values have another width
    latent (MLA)          kv_rank + rope_dim: one vector for all heads, the same on every rank

A layer with a sliding window caches at most the window's tokens of a sequence. A layer without attention caches nothing for a token.

Source: vLLM 0.32, ModelConfig.get_num_kv_heads and v1/kv_cache_interface.py (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec).
"""

from __future__ import annotations

from reshard.models.model import Model


def layer_elements(model: Model, layer: int, tp: int) -> int:
    """Elements that a layer caches per token on one of `tp` ranks."""
    dimensions = model.dimensions_in(layer)
    if "kv_rank" in dimensions:
        return dimensions["kv_rank"] + dimensions["rope_dim"]
    key_and_value = dimensions["head_dim"] + dimensions.get("value_dim", dimensions["head_dim"])
    return key_and_value * max(1, dimensions["kv_heads"] // tp)


def caching_layers(model: Model) -> frozenset[int]:
    """The layers that cache something for each token: those with keys. Linear attention and state-space models have a fixed state."""
    keys = {"attention.k", "mla.kv_a"}
    kinds = (kind for kind in model.layer_kinds if any(keys & {weight.role, *weight.declared.fuses} for weight in kind.weights))
    return frozenset(layer for kind in kinds for layer in kind.layers if layer < model.dimensions["layers"])


def windows(model: Model) -> tuple[int | None, ...]:
    """Per layer, the most tokens of a sequence that are cached; None: all. The config's `layer_types` says which layers have a window."""
    layers, window = model.dimensions["layers"], model.count("sliding_window")
    types = model.listed("layer_types")
    if not window or len(types) < layers:
        return (None,) * layers
    return tuple(window if types[layer] == "sliding_attention" else None for layer in range(layers))


def unassigned_window(model: Model) -> int | None:
    """The config's sliding window if there is no `layer_types` to say which layers have it; otherwise None."""
    window = model.count("sliding_window")
    is_used = model.setting("use_sliding_window") is not False
    return window if window and is_used and not model.listed("layer_types") else None
