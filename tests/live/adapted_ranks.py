"""Ranks of FSDP2 train a LoRA adapter of PEFT, and update a running server with the merged weights.

    torchrun --nproc-per-node 4 tests/live/adapted_ranks.py MODEL ADDRESS ADAPTER STEP

ADAPTER gets the trained adapter, gathered from the live model and written by PEFT, and STEP the live model, saved by torch's DCP. Prints
the bytes of each update; the last one's version is the name of STEP.

Environment: that of tests/peft/requirements.txt, in which reshard is installed.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from reshard.live import Sender

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(folder: str, address: str, adapter: str, step: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=10, target_modules=MODULES, task_type="CAUSAL_LM"), autocast_adapter_dtype=False
    )
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-1)
    sender = Sender(model, engine=address, verify=True, changes=True)
    torch.manual_seed(dist.get_rank())
    for i in range(3):
        tokens = torch.randint(base.config.vocab_size, (2, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = sender.update(step.rpartition("/")[2] if i == 2 else None)
        if dist.get_rank() == 0:
            print(f"{report.nbytes} bytes sent, {sender.plan.nbytes} planned", flush=True)
    trained = {name: each.full_tensor() for name, each in model.named_parameters() if ".lora_" in name}
    if dist.get_rank() == 0:
        model.save_pretrained(adapter, state_dict={name.replace(".default.", "."): each.detach() for name, each in trained.items()})
    dcp.save(dict(model.named_parameters()), checkpoint_id=step)
    sender.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
