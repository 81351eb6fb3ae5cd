"""vLLM's own files of ranks: `save_sharded_state`, called as vLLM's example `save_sharded_state_offline.py` calls it."""

import shutil
from pathlib import Path


def answer(model: str, tensor_parallel_size: int, target: str) -> bool:
    """Load a Hugging Face folder with all ranks, dump what they hold, and copy the other files of the folder."""
    from vllm import LLM

    engine = LLM(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=64,
        disable_log_stats=True,
    )
    Path(target).mkdir()
    engine.llm_engine.engine_core.save_sharded_state(path=target)
    for path in Path(model).iterdir():
        if path.suffix not in (".bin", ".pt", ".safetensors"):
            shutil.copy(path, target)
    return True
