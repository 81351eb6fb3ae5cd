"""What it takes to fill one rank's parameters at the start of a server. Runs in an environment with reshard, torch and safetensors.

    python serving_start.py reshard|whole|slices MODEL TP RANK      prints JSON: wall and processor seconds after the imports, MB read

reshard: `view` and `read_into`. whole: safetensors maps every tensor, and the rank copies its part, so that only that is read. slices: the
same with `get_slice`, and without the tensors that are cut along columns. Neither fuses, proves that nothing is missing, or casts.
"""

import json
import sys
import time

import torch

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def by_reshard(model: str, tp: int, rank: int) -> int:
    import reshard

    view = reshard.open(model).view(to="vllm", tp=tp, rank=rank)
    total = 0
    for tensor in view.values():
        tensor.read_into(torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.torch)))
        total += tensor.nbytes
    return total


def by_safetensors(model: str, tp: int, rank: int, *, slices: bool) -> int:
    from safetensors import safe_open

    total = 0
    with safe_open(f"{model}/model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            columns = name.endswith(ROW_PARALLEL)
            if slices and columns:
                continue
            part = file.get_slice(name) if slices else file.get_tensor(name)
            shape = part.get_shape() if slices else part.shape
            step = shape[int(columns)] // tp
            cut = slice(rank * step, (rank + 1) * step) if len(shape) > 1 else slice(None)
            kept = part[:, cut] if columns else part[cut]
            total += torch.empty(kept.shape, dtype=kept.dtype).copy_(kept).nbytes
    return total


def main() -> None:
    who, model, tp, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    began, used = time.monotonic(), time.process_time()
    nbytes = by_reshard(model, tp, rank) if who == "reshard" else by_safetensors(model, tp, rank, slices=who == "slices")
    print(json.dumps([time.monotonic() - began, time.process_time() - used, nbytes / 1e6]))


if __name__ == "__main__":
    main()
