"""Checkpoints of thousands of parts, written by torch without their data: what is measured is metadata.

    python benchmarks/scale.py ranks DIR [--ranks 1024] [--part I/N]    FSDP2 files of a 405B Llama, one per rank, sparse
    python benchmarks/scale.py metadata DIR [--entries 128000]          a DCP .metadata and its empty files
    python benchmarks/scale.py zero3 DIR [--ranks 512] [--part I/N]     DeepSpeed's ZeRO-3 files of a 70B Llama, two per rank, sparse

torch.save under torch.serialization.skip_data writes all but the tensors' bytes, and leaves holes for them. Needs torch only.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from types import ModuleType

import torch
from shapes import LLAMA_405B as CONFIG
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

LLAMA_70B = CONFIG | {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ranks", "metadata", "zero3"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--part", default="0/1", help="I/N: write every Nth rank's file, from the Ith on")
    parser.add_argument("--entries", type=int, default=128_000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(LLAMA_70B if options.what == "zero3" else CONFIG))
    if options.what == "metadata":
        write_metadata(options.folder, options.entries)
        return
    first, step = map(int, options.part.split("/"))
    ranks = options.ranks or (512 if options.what == "zero3" else 1024)
    for rank in range(first, ranks, step):
        (write_zero3_rank if options.what == "zero3" else write_rank)(options.folder, rank, ranks)


def write_rank(folder: Path, rank: int, ranks: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
    mesh._dim_group_names = ["0"]
    state = OrderedDict()
    for name, shape in shapes().items():
        rows = -(-shape[0] // ranks)
        start = min(shape[0], rank * rows)
        stride = (shape[1], 1) if len(shape) > 1 else (1,)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size(shape), stride, torch.bfloat16))
        local = torch.empty((min(shape[0], start + rows) - start, *shape[1:]), dtype=torch.bfloat16)
        state[name] = DTensor(local, spec, requires_grad=False)
    with torch.serialization.skip_data():
        torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")


def write_metadata(folder: Path, entries: int) -> None:
    """Tensors of the 405B model over as many ranks as give that many entries; the files are there, and hold nothing."""
    model = shapes()
    ranks = -(-entries // len(model))
    tensors, storage, ends = {}, {}, [0] * ranks
    for name, shape in model.items():
        chunks = []
        rows = -(-shape[0] // ranks)
        for rank in range(ranks):
            start, stop = min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows)
            if start == stop:
                continue
            sizes, offsets = torch.Size((stop - start, *shape[1:])), torch.Size((start,) + (0,) * (len(shape) - 1))
            nbytes = 2 * sizes.numel() + 1600
            chunks.append(dcp.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            storage[dcp.MetadataIndex(name, offsets, len(chunks) - 1)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], nbytes)
            ends[rank] += nbytes
        properties = dcp.TensorProperties(dtype=torch.bfloat16)
        tensors[name] = dcp.TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=chunks)
    planner = {name: (name,) for name in tensors}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(tensors, planner, storage)))
    for rank, nbytes in enumerate(ends):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(nbytes)
    print(f"{len(storage):,} entries")


def write_zero3_rank(folder: Path, rank: int, ranks: int) -> None:
    """The two files of a rank, with the keys that DeepSpeed 0.19 writes (fixtures/deepspeed/z3-bf16), under the tag global_step0."""
    folder.joinpath("latest").write_text("global_step0")
    tag = folder / "global_step0"
    tag.mkdir(exist_ok=True)
    model = shapes(LLAMA_70B)
    part = sum(-(-torch.Size(shape).numel() // ranks) for shape in model.values())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    states = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in model),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in model.items())],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 0,
        "global_samples": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": "0.19.8",
    }
    stage, scaler = _deepspeed_classes()
    master = torch.empty(part, requires_grad=True)
    master.ds_id = f"0_{len(model)}"
    moments = {"step": torch.tensor(0.0), "exp_avg": torch.empty(part), "exp_avg_sq": torch.empty(part)}
    optimizer = {
        "optimizer_state_dict": {
            "zero_stage": stage(3),
            "loss_scaler": scaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {0: moments},
                "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}],
            },
            "fp32_flat_groups": [master],
        },
        "ds_config": config,
        "ds_version": "0.19.8",
    }
    with torch.serialization.skip_data():
        torch.save(states, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(optimizer, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _deepspeed_classes() -> tuple[type, type]:
    """Classes under the names that DeepSpeed pickles: ZeroStageEnum and LossScaler."""
    made = {}
    for module, name, bases in (("zero.config", "ZeroStageEnum", ()), ("fp16.loss_scaler", "LossScaler", (object,))):
        full = f"deepspeed.runtime.{module}"
        made[name] = IntEnum(name, {"weights": 3}, module=full) if not bases else type(name, bases, {"__module__": full})
        for prefix in ("deepspeed", "deepspeed.runtime", full.rpartition(".")[0], full):
            sys.modules.setdefault(prefix, ModuleType(prefix))
        setattr(sys.modules[full], name, made[name])

    def scaler() -> object:
        instance = made["LossScaler"]()
        instance.cur_scale, instance.dynamic = 1.0, False
        return instance

    return made["ZeroStageEnum"], scaler


def shapes(config: dict = CONFIG) -> OrderedDict[str, tuple[int, ...]]:
    hidden, inner, vocab, kv = config["hidden_size"], config["intermediate_size"], config["vocab_size"], 8 * 128
    found = OrderedDict({"model.embed_tokens.weight": (vocab, hidden)})
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {prefix + f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", hidden), ("k", kv), ("v", kv))}
        found[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
        found |= {prefix + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        found |= {prefix + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


if __name__ == "__main__":
    main()
