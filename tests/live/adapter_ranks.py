"""Ranks of FSDP2 send the adapter of a model alone: `Sender(model, adapter=True)`. test_push_adapter.py runs it.

    python adapter_ranks.py RANK PORT SERVER SHARED TRUTH MESH

MESH: the sizes of the device mesh, such as 2 or 2,2: the first one replicates then (HSDP). 1,2 in place of FSDP2: whole on each rank.

The names are those of PEFT's get_peft_model around experts with target_parameters. TRUTH gets the gathered adapter of each update,
and in `step` what torch.distributed.checkpoint saves after the second one.
"""

import json
import math
import os
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.expert_adapters import ALPHA, FAMILIES, INNER, SIZES, E, H, R
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

from module_trees import tree

from reshard.errors import ReshardError
from reshard.live import Sender

SHAPES = {
    "mlp.experts.base_layer.lora_A": (E * R, H), "mlp.experts.base_layer.lora_B": (2 * INNER, R * E), "mlp.experts.lora_A": (E * R, INNER),
    "mlp.experts.lora_B": (H, R * E), "self_attn.q_proj.lora_A": (R, H), "self_attn.q_proj.lora_B": (16, R),
}  # fmt: skip


class Said:
    """Settings with to_dict, as those of PEFT and transformers."""

    def __init__(self, **settings):
        self._settings, self.model_type = settings, settings.get("model_type")

    def to_dict(self):
        return self._settings


def main(rank, port, server, shared, truth, mesh):
    sizes = tuple(map(int, mesh.split(",")))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": str(math.prod(sizes))}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    adapted = {f"base_model.model.model.layers.0.{name}.default.weight": shape for name, shape in SHAPES.items()}
    shapes = {**adapted, "base_model.model.model.norm.weight": (H,)}
    model = tree({name: torch.randn(shape) for name, shape in shapes.items()})
    if sizes != (1, 2):
        names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names))
    model.config = Said(**SIZES | FAMILIES["qwen3_moe"][0] | {"model_type": "qwen3_moe"})
    model.peft_config = {"default": Said(peft_type="LORA", r=R, lora_alpha=ALPHA, bias="none", task_type="CAUSAL_LM", peft_version="0.21.2",
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])}  # fmt: skip
    sender = Sender(model, engine=server, adapter=True, name="tutor", shared_dir=shared)
    for number in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        report = sender.update()
        whole = {
            name.replace(".default.", "."): getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
            for name, tensor in model.named_parameters()
            if ".lora_" in name
        }
        if rank == "0":
            safetensors.torch.save_file({name: tensor.detach() for name, tensor in whole.items()}, f"{truth}/{number}.safetensors")
        print(json.dumps([report.version, report.nbytes]), flush=True)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{truth}/step")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    open(f"{truth}/refuse", "w").close()
    try:
        sender.update()
    except ReshardError as error:
        print(json.dumps(str(error)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
