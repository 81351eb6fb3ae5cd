"""Save each step of an FSDP2 run as the shards that vLLM's ranks load, while the next step is computed.

    torchrun --nproc-per-node 4 examples/torch/save_for_vllm.py MODEL OUT [TP]
    vllm serve OUT/step-2 --load-format sharded_state -tp 2

MODEL is a Hugging Face folder. The loss is of random tokens: put your own in its place.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from reshard.torch import Writer

model_folder, out, *size = sys.argv[1:]
dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

# The save runs in a thread: its collectives need a group of their own.
group, saving = dist.new_group(backend="gloo"), None
for step in (1, 2):
    tokens = torch.randint(model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank() + step))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if saving is not None:
        saving.result()  # the step before is there, whole, or its error is raised here
    writer = Writer(f"{out}/step-{step}", to="vllm", tp=int(size[0]) if size else 2, model=model_folder)
    saving = dcp.async_save(get_model_state_dict(model), storage_writer=writer, process_group=group)
saving.result()
if dist.get_rank() == 0:
    print(f"saved {out}/step-1 and {out}/step-2", flush=True)
dist.destroy_process_group()
