"""Ranks of ZeRO-3 save a model with the adapters of its experts by DeepSpeed; check.py compares what reshard writes.

    torchrun --nproc-per-node 2 zero_ranks.py BASE SETTINGS FOLDER

As dcp_ranks.py. FOLDER gets checkpoint/ (engine.save_checkpoint), excluded/ (without frozen parameters) and gathered/ (PEFT's own save of
the values, gathered in this process). Environment: that of requirements.txt.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from dcp_ranks import adapted

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def main(base: str, settings: str, folder: str) -> None:
    # Its operators for CPUs, which would be compiled, are not needed to save.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    dist.init_process_group("gloo")
    model = adapted(base, settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=1e-3), config=CONFIG)
    engine.save_checkpoint(str(Path(folder) / "checkpoint"), tag="global_step0")
    engine.save_checkpoint(str(Path(folder) / "excluded"), tag="global_step0", exclude_frozen_parameters=True)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if dist.get_rank() == 0:
            model.save_pretrained(Path(folder) / "gathered")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
