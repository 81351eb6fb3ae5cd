"""Train with Megatron-Core, and update a running vLLM server after each step.

    reshard convert MODEL START --to megatron-dist --tp 2
    torchrun --nproc-per-node 2 examples/live/megatron.py MODEL START http://127.0.0.1:8000 [--steps 2] [--lr 0.01]

MODEL is the Hugging Face folder of a llama, START a checkpoint of Megatron-Core. The loss is of random tokens: put your own in its place.
Each rank sends what it holds. Nothing is converted back to Hugging Face's form.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from reshard.live import Sender


def build(config: dict, tp: int) -> GPTModel:
    """A llama of these sizes."""
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        layernorm_epsilon=config["rms_norm_eps"],
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec, rows = get_gpt_layer_local_spec(normalization="RMSNorm"), -(-config["vocab_size"] // (128 * tp)) * 128 * tp
    tied, positions = config["tie_word_embeddings"], config["max_position_embeddings"]
    return GPTModel(settings, spec, rows, positions, share_embeddings_and_output_weights=tied, position_embedding_type="rope")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("start", type=Path)
    options.add_argument("engine", nargs="+")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--lr", type=float, default=0.01)
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = json.loads((given.model / "config.json").read_text())
    model = build(config, dist.get_world_size()).to(device).bfloat16()
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(given.start / "release")), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    sender = Sender(model, engine=given.engine, verify=True)
    for step in range(given.steps):
        torch.manual_seed(step)
        tokens, positions = torch.randint(config["vocab_size"], (2, 32), device=device), torch.arange(32, device=device).expand(2, -1)
        model(tokens, positions, None, labels=tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = sender.update()
        if dist.get_rank() == 0:
            print(f"step {step}: {report.nbytes:,} bytes in {report.seconds:.2f} s, version {report.version}", flush=True)
    sender.close()


if __name__ == "__main__":
    main()
