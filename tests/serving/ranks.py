"""What each rank of real vLLM holds after a load format has filled it: digests of its state dict, as JSON.

    python ranks.py '{"model": DIR, "tensor_parallel_size": 2, "load_format": "reshard", ...}'

The options are those of vLLM's EngineArgs. As many processes as there are ranks form a gloo group; vLLM's own plugins, model class and
loader do all else.
"""

import hashlib
import json
import multiprocessing
import os
import socket
import sys
import traceback

SPELLED = {"torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float16": "F16", "torch.float8_e4m3fn": "F8_E4M3"}


def rank_state(options: dict[str, object], rank: int, ranks: int, port: int) -> dict[str, dict[str, object]]:
    """Key -> dtype, shape, sha256 of the row-major little-endian bytes."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    config = EngineArgs(**options, distributed_executor_backend="mp", skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1))
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
        # What is not loaded must not look as if it were because memory was handed out again. Placeholders of FP8 scales, which have no
        # axes, may stay as they are.
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.data.view(torch.uint8 if parameter.element_size() == 1 else torch.int16).fill_(0x5A)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        state = ShardedStateLoader._filter_subtensors(model.state_dict())
    return {key: described(tensor) for key, tensor in sorted(state.items()) if tensor.numel()}


def described(tensor) -> dict[str, object]:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": SPELLED[str(tensor.dtype)], "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def all_ranks(options: dict[str, object]) -> dict[str, object]:
    """The state of every rank, by the rank's part of its file name. Raises RuntimeError with the error of a rank that has one."""
    tp, pp = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work(rank: int) -> None:
        # The executor sets this for its workers: ranks of one group find each other's shared memory by it.
        os.environ["VLLM_DIST_IDENT"] = f"reshard-{port}"
        try:
            queue.put((rank, rank_state(options, rank, tp * pp, port), None))
        except BaseException:
            queue.put((rank, None, traceback.format_exc()))
        # gloo's threads sometimes abort an orderly exit; everything has been said.
        os._exit(0)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(tp * pp)]
    for process in processes:
        process.start()
    found = {}
    for _ in processes:
        rank, state, error = queue.get()
        if error:
            for process in processes:
                process.kill()
            raise RuntimeError(f"rank {rank}:\n{error}")
        # vLLM numbers ranks stage by stage.
        found[f"pp-{rank // tp}-tp-{rank % tp}" if pp > 1 else f"rank-{rank}"] = state
    for process in processes:
        process.join()
    return dict(sorted(found.items()))


if __name__ == "__main__":
    # Only the answer goes to stdout.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    import torch
    import vllm.model_executor.models.llama  # noqa: F401  imported once, before the ranks are forked
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    # A process of its own for each question about a model class keeps CUDA out of this one; here are no GPUs.
    registry._run_in_subprocess = lambda ask: ask()
    # A kernel is chosen when a layer is made, and none is called here: let those for FP8 blocks be found on any CPU.
    torch.cpu._is_amx_tile_supported = lambda: True
    load_general_plugins()
    os.write(answer_to, json.dumps(all_ranks(json.loads(sys.argv[1]))).encode())
    os._exit(0)
