"""Small models of many families, made of random numbers. Names and shapes are those of transformers, by hand and without reshard."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Weights = dict[str, np.ndarray]
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

# Shapes are words of sizes: d hidden, q and k all query and all KV heads' rows, h one head's, f the MLP's, v vocabulary, e experts, m an
# expert's MLP, s the shared experts', p positions; of MLA: a and c the ranks of queries and KV, r and t the rotary and the other rows of a
# head, n heads.
NORMS = {"input_layernorm.weight": "d", "post_attention_layernorm.weight": "d"}
ATTENTION = {f"self_attn.{name}_proj.weight": shape for name, shape in (("q", "q d"), ("k", "k d"), ("v", "k d"), ("o", "d q"))}
BIASES = {f"self_attn.{name}_proj.bias": rows for name, rows in (("q", "q"), ("k", "k"), ("v", "k"))}
HEAD_NORMS = {"self_attn.q_norm.weight": "h", "self_attn.k_norm.weight": "h"}
ALL_HEADS_NORMS = {"self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k"}
MLA = {
    "self_attn.kv_a_proj_with_mqa.weight": "c+r d", "self_attn.kv_a_layernorm.weight": "c", "self_attn.kv_b_proj.weight": "n*(t+t) c",
    "self_attn.o_proj.weight": "d n*t",
}  # fmt: skip
Q_LORA = {"self_attn.q_a_proj.weight": "a d", "self_attn.q_a_layernorm.weight": "a", "self_attn.q_b_proj.weight": "n*(t+r) a"}


def mlp(prefix: str, rows: str) -> dict[str, str]:
    return {f"{prefix}gate_proj.weight": f"{rows} d", f"{prefix}up_proj.weight": f"{rows} d", f"{prefix}down_proj.weight": f"d {rows}"}


DENSE = mlp("mlp.", "f")
EXPERTS = {"mlp.gate.weight": "e d", **mlp("mlp.experts.{expert}.", "m")}
OUTSIDE = {"model.embed_tokens.weight": "v d", "model.norm.weight": "d", "lm_head.weight": "v d"}


@dataclass(frozen=True)
class Family:
    class_name: str
    layer: dict[str, str]
    """The tensors of each layer."""
    config: dict[str, str | int | float | bool | None]
    """Settings beyond those that all families have; text is computed from the sizes."""
    dense: dict[str, str] | None = None
    """The tensors of the first layer's MLP, if it has no experts; `sparse` are those of the others."""
    sparse: dict[str, str] | None = None
    outside: dict[str, str] | None = None
    prefix: str = "model.layers.{layer}."
    square: bool = False
    """Whether all heads together have the hidden size."""
    tied: bool | None = None
    """Whether the head is the embedding; None: either."""


SLIDING = {"sliding_window": None}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": "m", "decoder_sparse_step": 1, "norm_topk_prob": False}
DEEPSEEK = {
    "kv_lora_rank": "c", "qk_rope_head_dim": "r", "qk_nope_head_dim": "t", "v_head_dim": "t", "qk_head_dim": "t+r", "head_dim": "r",
    "first_k_dense_replace": 1, "moe_intermediate_size": "m", "n_routed_experts": "e", "n_shared_experts": 2, "num_experts_per_tok": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5, "num_key_value_heads": "n",
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", NORMS | ATTENTION | DENSE, {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", NORMS | ATTENTION | DENSE, SLIDING),
    "qwen2": Family("Qwen2ForCausalLM", NORMS | ATTENTION | BIASES | DENSE, SLIDING | {"use_sliding_window": False}, square=True),
    "qwen3": Family("Qwen3ForCausalLM", NORMS | ATTENTION | HEAD_NORMS | DENSE, SLIDING | {"attention_bias": False}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"post_attention_layernorm.weight": "d", "post_feedforward_layernorm.weight": "d"} | ATTENTION | ALL_HEADS_NORMS | DENSE,
        {"attention_bias": False},
        square=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        NORMS | {"pre_feedforward_layernorm.weight": "d", "post_feedforward_layernorm.weight": "d"} | ATTENTION | DENSE,
        {"query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        tied=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        NORMS
        | {"self_attn.qkv_proj.weight": "q+k+k d", "self_attn.o_proj.weight": "d q"}
        | {"mlp.gate_up_proj.weight": "f+f d", "mlp.down_proj.weight": "d f"},
        SLIDING | {"original_max_position_embeddings": 64},
        square=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        NORMS
        | ATTENTION
        | {"block_sparse_moe.gate.weight": "e d"}
        | {f"block_sparse_moe.experts.{{expert}}.w{i}.weight": "d f" if i == 2 else "f d" for i in (1, 2, 3)},
        SLIDING | {"num_local_experts": "e", "num_experts_per_tok": 2},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        NORMS | ATTENTION | HEAD_NORMS,
        SLIDING | MOE | {"num_experts": "e", "mlp_only_layers": "[0]"},
        dense=DENSE,
        sparse=EXPERTS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        NORMS | ATTENTION | BIASES | EXPERTS | mlp("mlp.shared_expert.", "s") | {"mlp.shared_expert_gate.weight": "1 d"},
        SLIDING | MOE | {"num_experts": "e", "shared_expert_intermediate_size": "s", "mlp_only_layers": "[]", "qkv_bias": True},
        square=True,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        NORMS | MLA | {"self_attn.q_proj.weight": "n*(t+r) d"},
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_method": "greedy"},
        dense=DENSE,
        sparse=EXPERTS | mlp("mlp.shared_experts.", "2*m"),
        tied=False,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        NORMS | MLA | Q_LORA,
        DEEPSEEK | {"q_lora_rank": "a", "n_group": 2, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
        dense=DENSE,
        sparse=EXPERTS | {"mlp.gate.e_score_correction_bias": "e"} | mlp("mlp.shared_experts.", "2*m"),
        tied=False,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {f"{norm}.{part}": "d" for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
        | {"attn.c_attn.weight": "d 3*d", "attn.c_attn.bias": "3*d", "attn.c_proj.weight": "d d", "attn.c_proj.bias": "d"}
        | {"mlp.c_fc.weight": "d f", "mlp.c_fc.bias": "f", "mlp.c_proj.weight": "f d", "mlp.c_proj.bias": "d"},
        {"n_embd": "d", "n_head": "n", "n_inner": "f", "n_layer": "layers", "n_positions": "p", "activation_function": "gelu_new"},
        outside={f"transformer.{name}.weight": shape for name, shape in (("wte", "v d"), ("wpe", "p d"), ("ln_f", "d"))}
        | {"transformer.ln_f.bias": "d"},
        prefix="transformer.h.{layer}.",
        square=True,
        tied=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {f"{norm}.{part}": "d" for norm in NORMS for norm in [norm.removesuffix(".weight")] for part in ("weight", "bias")}
        | {"attention.query_key_value.weight": "3*d d", "attention.query_key_value.bias": "3*d"}
        | {"attention.dense.weight": "d d", "attention.dense.bias": "d", "mlp.dense_h_to_4h.weight": "f d", "mlp.dense_h_to_4h.bias": "f"}
        | {"mlp.dense_4h_to_h.weight": "d f", "mlp.dense_4h_to_h.bias": "d"},
        {"attention_bias": True, "use_parallel_residual": False, "hidden_act": "gelu", "num_key_value_heads": "n", "layer_norm_eps": 1e-5},
        outside={"gpt_neox.embed_in.weight": "v d", "embed_out.weight": "v d"}
        | {f"gpt_neox.final_layer_norm.{part}": "d" for part in ("weight", "bias")},
        prefix="gpt_neox.layers.{layer}.",
        square=True,
        tied=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    family: str
    sizes: dict[str, int]
    config: dict[str, Any]
    weights: Weights


def tiny_model(family: str, chance: random.Random, *, dtype: str | None = None) -> TinyModel:
    """A model of random sizes, one to three layers, whose elements are all different as far as the element type allows."""
    row, dtype = FAMILIES[family], dtype or chance.choice(("BF16", "BF16", "BF16", "F16", "F32"))
    heads = chance.choice((2, 4, 8))
    sizes = {"n": heads, "h": chance.choice((4, 8)), "layers": chance.choice((1, 2, 2, 3)), "v": chance.randrange(17, 140)}
    sizes |= {"q": heads * sizes["h"], "k": sizes["h"] * chance.choice([each for each in (1, 2, 4, 8) if heads % each == 0])}
    sizes |= {"d": sizes["q"] if row.square else chance.choice((16, 24, 32)), "f": 8 * chance.randrange(1, 8), "p": 16}
    sizes |= {"e": chance.choice((4, 8)), "m": 8 * chance.randrange(1, 3), "s": 8 * chance.randrange(1, 4)}
    sizes |= {"a": 8, "c": 12, "r": 4, "t": 6}
    tied = chance.random() < 0.3 if row.tied is None else row.tied
    shapes = {name: shape for name, shape in (row.outside or OUTSIDE).items() if not (tied and name == "lm_head.weight")}
    for layer in range(sizes["layers"]):
        inside = row.layer | ((row.dense if layer == 0 else row.sparse) or {})
        for name, shape in inside.items():
            for expert in range(sizes["e"]) if "{expert}" in name else [0]:
                shapes[row.prefix.format(layer=layer) + name.format(expert=expert)] = shape
    numbers = np.random.default_rng(chance.getrandbits(64))
    weights = {}
    for name, shape in shapes.items():
        kind = "F32" if name.endswith("e_score_correction_bias") else dtype
        weights[name] = numbers.standard_normal([_size(word, sizes) for word in shape.split()]).astype(DTYPES[kind])
    return TinyModel(family, sizes, _config(family, row, sizes, dtype, tied), weights)


def _size(word: str, sizes: dict[str, int]) -> Any:
    return eval(word, {"__builtins__": {}}, sizes)


def _config(family: str, row: Family, sizes: dict[str, int], dtype: str, tied: bool) -> dict[str, Any]:
    config = {
        "architectures": [row.class_name], "model_type": family, "hidden_size": sizes["d"], "num_attention_heads": sizes["n"],
        "num_key_value_heads": sizes["k"] // sizes["h"], "intermediate_size": sizes["f"], "vocab_size": sizes["v"], "rms_norm_eps": 1e-6,
        "num_hidden_layers": sizes["layers"], "max_position_embeddings": sizes["p"], "tie_word_embeddings": tied, "hidden_act": "silu",
        "torch_dtype": TORCH_NAMES[dtype], "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    if not row.square:
        config["head_dim"] = sizes["h"]
    words = {"greedy", "noaux_tc", "gelu", "gelu_new", "gelu_pytorch_tanh"}
    extra = {key: _size(value, sizes) if isinstance(value, str) and value not in words else value for key, value in row.config.items()}
    return config | extra


# ---------------------------------------------------------------- safetensors, in a few lines


def write_hf(folder: Path, model: TinyModel, files: int = 1) -> None:
    """The model as a Hugging Face folder of that many files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    names = list(model.weights)
    parts = [names[i::files] for i in range(files)]
    paths = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for path, part in zip(paths, parts, strict=True):
        header, at = {}, 0
        for name in part:
            array = model.weights[name]
            dtype = next(word for word, each in DTYPES.items() if each == array.dtype)
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(model.weights[name].tobytes() for name in part))
    if files > 1:
        where = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def read_safetensors(*paths: Path) -> Weights:
    """The tensors of files. Raises ValueError if one occurs twice."""
    found: Weights = {}
    for path in paths:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            if name in found:
                raise ValueError(f"{name} is in two files")
            start, stop = (8 + length + each for each in entry["data_offsets"])
            found[name] = np.frombuffer(raw[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def difference(expected: Weights, found: Weights) -> str | None:
    """The first difference in names, element types, shapes or bits; None if there is none."""
    if expected.keys() != found.keys():
        return f"missing {sorted(expected.keys() - found.keys())[:3]}, extra {sorted(found.keys() - expected.keys())[:3]}"
    for name, array in expected.items():
        other = found[name]
        if (array.dtype, array.shape) != (other.dtype, other.shape):
            return f"{name}: {other.dtype} {other.shape}, expected {array.dtype} {array.shape}"
        if array.tobytes() != other.tobytes():
            return f"{name}: {int((array.view(np.uint8) != other.view(np.uint8)).sum())} bytes differ"
    return None
