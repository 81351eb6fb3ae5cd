"""DeepSeek-V4.1 as it is published: the names and shapes of its index, formats that keep names, and why vLLM's files are refused.

The published index (deepseek-ai/DeepSeek-V4.1-Flash, revision dba1be0a) has 96,085 names. 2,401 of them are those of three draft
layers: each has 6 tensors for each of 128 experts and 30 others, and 7 tensors stand around them.
"""

import sys

import pytest
from helpers.fixture_places import FIXTURES, rules_of

import reshard
from reshard.errors import UnsupportedError
from reshard.models.lookup import find_model
from reshard.serving.legality import check_served

sys.path.insert(0, str(FIXTURES))
import named_weights

QUANTIZED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
PUBLISHED = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "dtype": "bfloat16",
    "quantization_config": QUANTIZED,
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
        "n_routed_experts": 384,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "compress_ratios": [0, 0, *[2] * 18, *[1] * 20],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128, "hc_mult": 4,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256, "num_nextn_predict_layers": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14, "downsample_ratio": 3,
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 211, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
    "head_dim": 32,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "compress_ratios": [0, 2, 2, 1],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3], "index_n_heads": 2, "index_head_dim": 32,
    "engram_layer_ids": [0, 2],
    "engram_num_embeddings": [50, 61], "engram_head_dim": 32,
}  # fmt: skip
SMALL_TOWER = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 56, "patch_size": 4}


def small_config():
    text, tower = ({**PUBLISHED[key], **sizes} for key, sizes in (("text_config", SMALL), ("vision_config", SMALL_TOWER)))
    return {**PUBLISHED, "text_config": text, "vision_config": tower}


def test_the_published_config_gives_the_names_and_shapes_of_the_published_index():
    shapes = {weight.name: weight.shape for weight in find_model(PUBLISHED).weights.values()}
    assert len(shapes) == 96085 - (3 * (128 * 6 + 30) + 7)
    assert shapes["layers.1.engram.wkv.weight"] == (25600, 6144) and shapes["layers.1.engram.wkv.scale"] == (800, 192)
    assert shapes["layers.14.engram.embed.weight"] == (384016682, 256) and shapes["layers.14.engram.embed.scale"] == (384016682, 8)
    assert shapes["layers.7.ffn.experts.0.w1.scale"] == (2304, 160)


def test_formats_that_keep_names_carry_it_and_its_draft_layers(tmp_path):
    shapes = {weight.name: weight.shape for weight in find_model(small_config()).weights.values()} | {"mtp.0.main_norm.weight": (64,)}
    types = {r".*\.scale": "F8_E8M0", r".*\.ffn\.experts\..*": "I8", r".*\.(w\w+|embed)\.weight": "F8_E4M3"}
    plain = {r".*\.attn\.(compressor\.\w+|indexer\.(wk|weights_proj))\.weight|vision\..*|aligner\..*|embed\.weight": "BF16"}
    named_weights.write(tmp_path / "model", small_config(), shapes, types=plain | types)
    for to in ("dcp", "hf"):
        reshard.convert(reshard.plan(tmp_path / "model", to=to), tmp_path / to)
        reshard.verify(tmp_path / "model", tmp_path / to).raise_if_different()


def test_files_of_vllm_ranks_are_refused_with_the_reason():
    model = find_model(PUBLISHED)
    with pytest.raises(UnsupportedError, match="repeats block scales for each row"):
        check_served(model, rules_of("vllm", model))
