"""What SGLang's own loader makes of LoRA adapters of experts, asked by learned_sglang.py, which runs in another Python.

    python tests/serving/sglang_adapters.py QUESTIONS ANSWERS

QUESTIONS is a JSON list of {"model": folder, "adapter": folder}. ANSWERS gets for each layer.expert.projection -> lora_B x lora_A of
SGLang's buffers, in which the scale is, or the error as a text. SGLang's kernels for experts need a GPU; its LoRAManager and LoRAMemoryPool
do not.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

# `plugins` has a module called sglang, so it is not among the places of imports.
_PLACE = Path(__file__).resolve().parents[2] / "plugins" / "loader_tracer"
_spec = spec_from_file_location("loader_tracer", _PLACE / "__init__.py", submodule_search_locations=[str(_PLACE)])
assert _spec is not None and _spec.loader is not None
sys.modules["loader_tracer"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["loader_tracer"])

from loader_tracer import sglang_ranks  # noqa: E402

RANK = 8  # --max-lora-rank
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def loaded(folder: str, adapter: str) -> dict[str, Any]:
    """The updates in the buffers after a first request asks for the adapter."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    of_lora = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": MODULES, "lora_backend": "torch_native"}
    quiet = {"skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_radix_cache": True, "attention_backend": "fa3"}
    with sglang_ranks.without_kernels([]):
        arguments = ServerArgs(model_path=folder, device="cpu", dtype="float32", mem_fraction_static=0.5, **quiet, **of_lora)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        model_config, load_config = ModelConfig.from_server_args(arguments), LoadConfig()
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=1)
        bootstrap.init_layer_runtime(model_config=model_config)
        initialize_moe_config()
        with loader.set_default_torch_dtype(torch.float32), torch.device("cpu"):
            model = loader._initialize_model(model_config, load_config, None)
        manager = LoRAManager(
            model, model_config.hf_config, 2, load_config, torch.float32, arguments, "torch_native", RANK, set(MODULES), lora_paths=None
        )
        reference = LoRARef(lora_name="adapter", lora_path=adapter, pinned=False)
        if not (result := manager.load_lora_adapter(reference)).success:
            raise ValueError(result.error_message)
        manager.fetch_new_loras({reference.lora_id})
    pool, slot = manager.memory_pool, manager.memory_pool.get_buffer_id(reference.lora_id)
    updates = {}
    for layer in range(pool.num_layer):
        keys = ("gate_up_proj_moe", "down_proj_moe")
        gate_up, down = ([buffer[key][layer][slot] for buffer in (pool.A_buffer, pool.B_buffer)] for key in keys)
        for expert in range(len(down[0])):
            updates[f"{layer}.{expert}.down"] = (down[1][expert] @ down[0][expert]).tolist()
            for name, a, b in zip(("gate", "up"), gate_up[0][expert].chunk(2), gate_up[1][expert].chunk(2), strict=True):
                updates[f"{layer}.{expert}.{name}"] = (b @ a).tolist()
    return updates


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch without memory that is pinned for a GPU."""

    def on_cpu(*args: Any, pin_memory: bool = False, **names: Any) -> Any:
        return function(*args, **names)

    return on_cpu


if __name__ == "__main__":
    sglang_ranks.prepare()
    answers: list[object] = []
    for question in json.loads(Path(sys.argv[1]).read_text()):
        # A process has one configuration, so each model is loaded in its own.
        if (process := os.fork()) == 0:
            try:
                answer: object = loaded(question["model"], question["adapter"])
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"[:500]
            Path(sys.argv[2]).write_text(json.dumps(answer))
            os._exit(0)
        os.waitpid(process, 0)
        answers.append(json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answers))
