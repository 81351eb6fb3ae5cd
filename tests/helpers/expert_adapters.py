"""Adapters of experts in every form, bases for them, and the merge by numpy: W + scale * B x A for each expert."""

import json

import numpy as np
import safetensors.numpy

from reshard.models.lookup import find_model

WEIGHTS = "adapter_model.safetensors"
H, INNER, E, R, ALPHA = 20, 12, 3, 2, 6
SIZES = {
    "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50,
    "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_experts": E, "num_local_experts": E, "num_experts_per_tok": 2,
    "layer_types": ["full_attention"], "torch_dtype": "float32",
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 14, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8}  # fmt: skip
FAMILIES = {
    "qwen3_moe": ({"intermediate_size": 28}, "mlp.experts", "mlp.experts"),
    "mixtral": ({}, "mlp.experts", "block_sparse_moe.experts"),
    "qwen3_5_moe_text": (SHARED, "mlp.experts", "mlp.experts"),
    "gpt_oss": ({}, "mlp.experts", "mlp.experts"),
    "llama4_text": ({"intermediate_size_mlp": 28, "interleave_moe_layer_step": 1}, "feed_forward.experts", "feed_forward.experts"),
}
PROJECTIONS = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
W = {"gate": "w1", "up": "w3", "down": "w2"}


def numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def write(folder, tensors, name, config, text):
    folder.mkdir()
    safetensors.numpy.save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, folder / name)
    (folder / config).write_text(json.dumps(text))
    return folder


def base(family, tmp_path):
    config = SIZES | {"model_type": family} | FAMILIES[family][0]
    tensors = {name: numbers(i, *weight.shape) for i, (name, weight) in enumerate(find_model(config).weights.items())}
    return write(tmp_path / "base", tensors, "model.safetensors", "config.json", config), tensors


def adapter(folder, tensors, **settings):
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "peft_version": "0.21.2", "base_model_name_or_path": "x",
              "task_type": "CAUSAL_LM"}  # fmt: skip
    tensors = {f"base_model.model.model.layers.0.{name}.weight": tensor for name, tensor in tensors.items()}
    return write(folder, tensors, WEIGHTS, "adapter_config.json", config | settings)


def factors(shared_a=True):
    """(A, B) by expert and projection."""
    made = {}
    for e in range(E):
        for i, (name, (out, into)) in enumerate(PROJECTIONS.items()):
            a = numbers(100 + 10 * e + (0 if shared_a and name == "up" else i), R, into)
            made[e, name] = a, numbers(200 + 10 * e + i, out, R)
    return made


def split(made, family):
    _, _, module = FAMILIES[family]
    own = W if family == "mixtral" else {name: f"{name}_proj" for name in PROJECTIONS}
    named = {f"{module}.{e}.{own[name]}": pair for (e, name), pair in made.items()}
    return {f"{name}.lora_{which}": factor for name, pair in named.items() for which, factor in zip("AB", pair, strict=True)}


def stacked(made, family):
    module = FAMILIES[family][1]
    return {
        f"{module}.{W[name]}.lora_{which}": np.stack([made[e, name][i] for e in range(E)])
        for name in PROJECTIONS
        for i, which in enumerate("AB")
    }


def fused(made, family):
    """PEFT's: gate and up have one A; of gpt-oss their rows alternate; of llama4 A meets the output features."""
    module, deltas = FAMILIES[family][1], {}
    for target, inner in (("gate_up", ".base_layer"), ("down", "")):
        pairs = []
        for e in range(E):
            if target == "down":
                pairs.append(made[e, "down"])
                continue
            gate, up = made[e, "gate"][1], made[e, "up"][1]
            rows = np.stack([gate, up], axis=1).reshape(-1, R) if family == "gpt_oss" else np.concatenate([gate, up])
            pairs.append((made[e, "gate"][0], rows))
        if family == "llama4_text":
            pairs = [(b.T, a.T) for a, b in pairs]
        deltas[f"{module}{inner}.lora_A"] = np.concatenate([a for a, _ in pairs])
        deltas[f"{module}{inner}.lora_B"] = np.stack([b for _, b in pairs], axis=2).reshape(pairs[0][1].shape[0], -1)
    return deltas


def expected(family, before, made, scale=ALPHA / R):
    """The weights after the merge, by numpy."""
    after = {name: tensor.copy() for name, tensor in before.items()}
    for (e, name), (a, b) in made.items():
        delta = np.float32(scale) * (b @ a)
        prefix = f"model.layers.0.{FAMILIES[family][2]}"
        plain = f"{prefix}.{e}.{W[name] if family == 'mixtral' else f'{name}_proj'}.weight"
        if plain in after:
            after[plain] += delta
            continue
        whole = after[f"{prefix}.{'down_proj' if name == 'down' else 'gate_up_proj'}"][e]
        matrix = whole.T if family in ("gpt_oss", "llama4_text") else whole
        start = {"gate": 0, "up": 1, "down": 0} if family == "gpt_oss" else {"gate": 0, "up": INNER, "down": 0}
        step = 2 if family == "gpt_oss" and name != "down" else 1
        matrix[start[name] : start[name] + step * (delta.shape[0] - 1) + 1 : step] += delta
    return after


TARGETS = {family: [f"{row[1]}.gate_up_proj", f"{row[1]}.down_proj"] for family, row in FAMILIES.items()}
