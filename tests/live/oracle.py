"""What vLLM's ranks hold of a llama, made from whole weights with plain torch: no boxes, no schedules, nothing of reshard."""

from __future__ import annotations

import torch


def rank_tensors(config: dict, weights: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """Name -> tensor of one rank, without what the engine computes itself."""

    def rows(name: str) -> torch.Tensor:
        return weights[name].chunk(tp, 0)[rank]

    def columns(name: str) -> torch.Tensor:
        return weights[name].chunk(tp, 1)[rank]

    def vocabulary(name: str) -> torch.Tensor:
        weight = weights[name]
        padding = weight.new_zeros(-len(weight) % 64, weight.shape[1])
        return torch.cat([weight, padding]).chunk(tp, 0)[rank]

    found = {"model.norm.weight": weights["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = vocabulary(name)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = weights[f"{at}{norm}.weight"]
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            module = fused.partition(".")[0]
            found[f"{at}{fused}.weight"] = torch.cat([rows(f"{at}{module}.{part}_proj.weight") for part in parts])
        for row_parallel in ("self_attn.o_proj", "mlp.down_proj"):
            found[f"{at}{row_parallel}.weight"] = columns(f"{at}{row_parallel}.weight")
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in found.items()}
