"""What torch, accelerate and verl do on the same work, and the checkpoints that they do it on. Runs in an environment with both.

    python peers.py save-dcp HF_DIR DCP_DIR           4 ranks save the weights of HF_DIR as an FSDP2 run does
    python peers.py save-hf-shards HF_DIR DIR         the same through torch's HuggingFaceStorageWriter
    python peers.py save-verl HF_DIR DIR              the same as verl's files of one rank each
    python peers.py safetensors HF_DIR OUT            load_file and save_file
    python peers.py dcp_to_torch_save DCP_DIR OUT
    python peers.py accelerate-merge DCP_DIR OUT
    python peers.py hf-consolidation DIR OUT
    python peers.py verl-merge DIR OUT                verl's own class; of its package only what merging needs is imported

Environment: pip install torch==2.13.0 (CPU) accelerate safetensors transformers; and verl==0.9.1 with --no-deps.
"""

import os
import sys
from pathlib import Path

RANKS = 4


def _rank(rank: int, source: str, target: str, kind: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # verl's merger accepts the name that verl gives its mesh only.
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    state = {}
    with safe_open(Path(source) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            rows = part.get_shape()[0]
            size = -(-rows // RANKS)
            local = part[min(rows, rank * size) : min(rows, (rank + 1) * size)].clone()
            shape = torch.Size(part.get_shape())
            stride = torch.empty(shape, device="meta").stride()
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride, run_check=False)
    if kind == "dcp":
        dcp.save({"model": state}, checkpoint_id=target)
    elif kind == "verl":
        Path(target, "huggingface").mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(target) / f"model_world_size_{RANKS}_rank_{rank}.pt")
        if rank == 0:
            Path(target, "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {RANKS}}}')
            Path(target, "huggingface", "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    else:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        dcp.save(state, storage_writer=HuggingFaceStorageWriter(target, save_distributed=True))
    dist.barrier()
    os._exit(0)


def save(source: str, target: str, kind: str) -> None:
    import torch.multiprocessing as multiprocessing

    multiprocessing.spawn(_rank, (source, target, kind), nprocs=RANKS)


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def verl_merge(source: str, target: str) -> None:
    """verl.model_merger, without the packages (ray, ...) that the rest of verl imports."""
    import importlib.util
    import types

    root = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    for name, folder in (("verl", root), ("verl.utils", root / "utils"), ("verl.model_merger", root / "model_merger")):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(folder)]
    sys.modules["verl.utils"].hf_processor = sys.modules["verl.utils"].hf_tokenizer = lambda *_, **__: None
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig("merge", "fsdp", target_dir=target, local_dir=source, hf_model_config_path=f"{source}/huggingface")
    FSDPModelMerger(config).merge_and_save()


def main() -> None:
    job, source, target = sys.argv[1:4]
    if job == "save-dcp":
        save(source, target, "dcp")
    elif job == "save-hf-shards":
        save(source, target, "hf")
    elif job == "save-verl":
        save(source, target, "verl")
    elif job == "verl-merge":
        verl_merge(source, target)
    elif job == "safetensors":
        from safetensors.torch import load_file, save_file

        os.makedirs(target, exist_ok=True)
        save_file(load_file(f"{source}/model.safetensors"), f"{target}/model.safetensors")
    elif job == "dcp_to_torch_save":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(source, target)
    elif job == "accelerate-merge":
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(source, target)
    elif job == "hf-consolidation":
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

        os.makedirs(target, exist_ok=True)
        names = [name for path in Path(source).glob("*.safetensors") for name in _names(path)]
        # Three files of about equal size: its threads share the work by output file.
        mapping = {name: 1 + 3 * i // len(set(names)) for i, name in enumerate(sorted(set(names)))}
        consolidate_safetensors_files(source, target, fqn_to_index_mapping=mapping, num_threads=2)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
