"""A ZeRO-3 checkpoint by real DeepSpeed, and what DeepSpeed's own tools do with it. Runs in an environment that has DeepSpeed.

    python deepspeed_peers.py save GIGABYTES DIR         4 ranks on gloo train a llama for one step and save it: 12 bytes per parameter
    python deepspeed_peers.py zero_to_fp32 DIR OUT       the script that DeepSpeed puts beside every checkpoint, into safetensors
    python deepspeed_peers.py ds_to_universal DIR OUT    with two workers, as many as the machine has processors

Environment: pip install torch==2.13.0 (CPU) transformers==5.23.0; DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed==0.19.8
"""

import os
import runpy
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
RANKS = 4


def _rank(rank: int, gigabytes: float, target: str) -> None:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="29621")
    torch.set_num_threads(1)
    hidden, layers = 1024, 8
    while _parameters(hidden, layers) * 12 < gigabytes * 1e9:
        layers += 1
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": 16000}
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 3},
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        },
    )
    ids = torch.arange(16).reshape(1, 16)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(target)
    if rank == 0:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(target)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def _parameters(hidden: int, layers: int) -> int:
    return 2 * 16000 * hidden + layers * (14.5 * hidden * hidden)


def main() -> None:
    job, source, target = sys.argv[1:4]
    if job == "save":
        import torch.multiprocessing as multiprocessing

        multiprocessing.spawn(_rank, (float(source), target), nprocs=RANKS)
    elif job == "zero_to_fp32":
        sys.argv = ["zero_to_fp32.py", source, target, "--safe_serialization"]
        runpy.run_path(str(Path(source) / "zero_to_fp32.py"), run_name="__main__")
    elif job == "ds_to_universal":
        tag = Path(source, "latest").read_text()
        Path(target).mkdir(parents=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{source}/{tag}"]
        command += ["--output_folder", f"{target}/{tag}_universal", "--num_extract_workers", "2", "--num_merge_workers", "2"]
        os.execv(sys.executable, command)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
