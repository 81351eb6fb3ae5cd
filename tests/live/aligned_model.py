"""A folder with a tiny model whose sizes SGLang takes on a CPU as they are: it pads intermediate sizes there to a multiple of 32 * TP.

    python aligned_model.py CONFIG_FOLDER TARGET

Run with an interpreter that has transformers.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if __name__ == "__main__":
    config = AutoConfig.from_pretrained(sys.argv[1])
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name, None):
            setattr(config, name, 128)
    config.initializer_range = 0.2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[2])
