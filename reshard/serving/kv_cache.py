"""What a served model remembers of each token: elements of the KV cache per layer and rank.

    attention             2 x head_dim x KV heads of the rank: max(1, kv_heads / tp), so from tp = kv_heads on more ranks save nothing
    latent (MLA)          kv_rank + rope_dim, one vector for all heads, the same on every rank

Layers with a sliding window remember no more tokens of a sequence than fit into it.

Source: vLLM 0.32, ModelConfig.get_num_kv_heads and v1/kv_cache_interface.py (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec).
"""

from __future__ import annotations

from reshard.models.model import Model


def layer_elements(model: Model, tp: int) -> int:
    """Elements that one layer keeps per token on one of `tp` ranks."""
    dimensions = model.dimensions
    if "kv_rank" in dimensions:
        return dimensions["kv_rank"] + dimensions["rope_dim"]
    return 2 * dimensions["head_dim"] * max(1, dimensions["kv_heads"] // tp)


def windows(model: Model) -> tuple[int | None, ...]:
    """Per layer how many tokens it remembers at most; None for all. Only a config's `layer_types` says it layer by layer."""
    layers, window = model.dimensions["layers"], model.setting("sliding_window")
    types = model.setting("layer_types") or ()
    if not window or len(types) < layers:
        return (None,) * layers
    return tuple(int(window) if types[layer] == "sliding_attention" else None for layer in range(layers))


def unsaid_window(model: Model) -> int | None:
    """A sliding window that the config has without saying whose; every layer counts in full then."""
    window = model.setting("sliding_window")
    used = model.setting("use_sliding_window") is not False
    return int(window) if window and used and not model.setting("layer_types") else None
