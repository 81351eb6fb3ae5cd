"""Resume a Megatron run in FSDP2: weights, moments, steps and learning rate, without a conversion.

    torchrun --nproc-per-node 4 examples/torch/resume_megatron.py MEGATRON_RUN CONFIG_FOLDER

CONFIG_FOLDER holds the model's Hugging Face config.json. The loss is of random tokens: put your own in its place.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from reshard.torch import Reader

run, config = sys.argv[1:]
dist.init_process_group()
# In float32: the parameters are filled from the full-precision copies of Megatron's optimizer.
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
# Megatron does not decay vectors. The groups here have to be those of the run, in any order.
decayed, others = ([each for each in model.parameters() if (each.dim() > 1) is wanted] for wanted in (True, False))
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], foreach=False)

weights, states = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optim": states}, storage_reader=Reader(run, optimizer=True, model=config))
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

tokens = torch.randint(model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
optimizer.step()
if dist.get_rank() == 0:
    group, state = optimizer.param_groups[0], next(iter(optimizer.state.values()))
    print(f"loss {loss.item():.4f}, learning rate {group['lr']:.6g}, step {int(state['step'])}", flush=True)
dist.destroy_process_group()
