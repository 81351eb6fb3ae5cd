"""What the configs of published models say of their sizes."""

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_8B = {**LLAMA_70B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "resid_pdrop": 0.1}
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip
# What one layer of each kind shows, without the other 57.
DEEPSEEK_V3_OF_4_LAYERS = {**DEEPSEEK_V3, "num_hidden_layers": 4}


def parameters_of_deepseek_v3(layers: int) -> int:
    """By hand, from the shapes in the paper: 671,026,419,200 for the 61 layers of the release, without the layer of MTP."""
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 256 * 7168 + 256 + 257 * 3 * 7168 * 2048
    return 2 * 129280 * 7168 + 7168 + layers * (attention + 2 * 7168) + 3 * 3 * 7168 * 18432 + (layers - 3) * experts
