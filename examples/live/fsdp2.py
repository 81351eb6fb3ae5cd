"""Train with FSDP2, and update a running vLLM server after each step.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL -tp 2 --weight-transfer-config '{"backend": "reshard"}'
    torchrun --nproc-per-node 4 examples/live/fsdp2.py MODEL http://127.0.0.1:8000 [--steps 2] [--tp 2] [--save FOLDER]

MODEL is a Hugging Face folder. The loss is of random tokens: put your own in its place. Runs on CPUs with gloo, and on GPUs.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from reshard.live import Sender

# Of a llama, with --tp.
TENSOR_PARALLEL = dict.fromkeys(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel
)
TENSOR_PARALLEL |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("engine", nargs="+")
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--save")
    given = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size() // given.tp, given.tp), mesh_dim_names=("fsdp", "tp"))
    if given.tp > 1:
        parallelize_module(model, mesh["tp"], {f"model.layers.*.{name}": style() for name, style in TENSOR_PARALLEL.items()})
    mesh = mesh["fsdp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # One by one: with --tp the parameters are on two meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    # Asks the server for the model and its parallel sizes, plans, proves, and checks both sides. Nothing is sent yet.
    sender = Sender(model, engine=given.engine, verify=True)

    torch.manual_seed(mesh.get_local_rank())
    for step in range(given.steps):
        tokens = torch.randint(model.config.vocab_size, (2, 32), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = sender.update()
        if dist.get_rank() == 0:
            print(f"step {step}: {report.nbytes:,} bytes in {report.seconds:.2f} s, version {report.version}", flush=True)
    if given.save:
        dcp.save(get_model_state_dict(model), checkpoint_id=given.save)
    sender.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
