"""One rank of vLLM in one process: fake process groups, vLLM's own model class and its own loader, checkpoint tensors without elements."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .stand_ins import stand_in

# Larger arrays are made without elements. Smaller ones are real, since models look at maps of experts and at slopes and scales.
LARGEST_REAL = 1 << 16
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # No tokens are computed, so a short limit saves memory for tables of positions, also where the model's own is shorter.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Parallel sizes, as vLLM takes them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """The number of ranks. Their numbers are pp_rank * tp + tp_rank."""
        return self.tp * self.pp


@dataclass
class LoadedRank:
    """A model in which the loader's work was recorded."""

    model: Any
    config: Any
    softened: list[str] = field(default_factory=list)


def prepare() -> None:
    """Import vLLM, and change what would need other processes, network or a GPU. Called once, before ranks are forked."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stand_in()
    import torch
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    # A process of its own for each model class would import everything again.
    registry._run_in_subprocess = lambda ask: ask()
    new_group, new_model_group = dist.new_group, state.init_model_parallel_group

    def fake_group(ranks: Any = None, *_: Any, **names: Any) -> Any:
        return new_group(ranks, backend="fake")

    def lonely_group(group_ranks: Any, local_rank: int, backend: str, *_: Any, **names: Any) -> Any:
        names |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        return new_model_group(group_ranks, local_rank, backend, **names)

    dist.new_group = fake_group
    state.init_model_parallel_group = lonely_group
    state._node_count = lambda group: 1
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)


def engine_config(model: str, case: Case, *, trust_remote_code: bool) -> Any:
    """vLLM's configuration of a model at these sizes. Raises what vLLM raises for sizes that it refuses."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        enable_expert_parallel=case.ep > 1,
        trust_remote_code=trust_remote_code,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,  # with it, vLLM refuses its own default for some models with linear attention
        distributed_executor_backend="mp",
    ).create_engine_config()


@contextlib.contextmanager
def loaded_rank(config: Any, case: Case, rank: int, recorder: Any, sources: dict[str, Any]) -> Iterator[LoadedRank]:
    """The model of one rank after vLLM's loader has loaded `sources`, with everything recorded. sources: name -> tensor on `meta`."""
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.parallel_config.rank = rank
    softened: list[str] = []
    with set_current_vllm_config(config):
        dist.init_process_group("fake", rank=rank, world_size=case.world, store=FakeStore())
        state.init_distributed_environment(case.world, rank, "env://", rank, "fake")
        state.initialize_model_parallel(case.tp, case.pp, backend="fake")
        loader = get_model_loader(config.load_config)
        loader.get_all_weights = lambda *_: iter(sources.items())
        with set_default_torch_dtype(config.model_config.dtype), without_kernels(softened):
            with recorder, large_on_meta():
                model = initialize_model(vllm_config=config, model_config=config.model_config)
            with recorder:
                try:
                    loader.load_weights(model, config.model_config)
                except ValueError as error:
                    if "not initialized" not in str(error):
                        raise
            yield LoadedRank(model, config, softened)


def large_on_meta() -> Any:
    """A mode in which large arrays are made on `meta`."""
    import torch
    from torch.overrides import TorchFunctionMode

    sized = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}

    class LargeOnMeta(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = dict(kwargs or {})
            size: Any = None
            if func in sized:
                size = names.get("size", args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args)
            elif func is torch.full or func is torch.empty_strided:
                size = args[0] if args else names.get("size")
            if isinstance(size, tuple | list) and all(isinstance(each, int) for each in size) and math.prod(size) > LARGEST_REAL:
                names["device"] = "meta"
                names.pop("pin_memory", None)
            return func(*args, **names)

    return LargeOnMeta()


class NoKernel:
    """In place of a kernel that this platform lacks. Nothing is computed, so nothing calls it."""

    input_dtype = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what the kernel takes."""

    def input_quant_key(self) -> None:
        """Its inputs are not quantized before it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"this platform has no such kernel ({name})")


def _no_kernel_class(*_: Any, **__: Any) -> type[NoKernel]:
    return NoKernel


# (module, function) that choose the kernels of packed weights.
_PACKED_KERNELS = (
    ("compressed_tensors.schemes.compressed_tensors_wNa16", "choose_mp_linear_kernel"),
    ("compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4", "init_nvfp4_linear_kernel"),
    ("compressed_tensors.schemes.compressed_tensors_w4a4_mxfp4", "init_mxfp4_linear_kernel"),
    ("compressed_tensors.schemes.compressed_tensors_w8a8_mxfp8", "init_mxfp8_linear_kernel"),
    ("modelopt", "select_linear_kernel"),
    ("auto_gptq", "choose_mp_linear_kernel"),
    ("auto_awq", "choose_mp_linear_kernel"),
)


@contextlib.contextmanager
def without_kernels(softened: list[str]) -> Iterator[None]:
    """A context in which layers can be built although this platform lacks their kernels. What was missing is appended to `softened`."""
    undo: list[Callable[[], None]] = []

    def soften(module_name: str, name: str, fallback: Callable[..., Any]) -> None:
        with contextlib.suppress(ImportError, AttributeError):
            owner: Any = importlib.import_module(module_name)
            *path, attribute = name.split(".")
            for each in path:
                owner = getattr(owner, each)
            real, stored = getattr(owner, attribute), vars(owner)[attribute]

            def soft(*args: Any, **names: Any) -> Any:
                try:
                    return real(*args, **names)
                except Exception as error:
                    line = f"{attribute}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
                    if line not in softened:
                        softened.append(line)
                    return fallback(*args, **names)

            replacement: Any = staticmethod(soft) if isinstance(stored, classmethod | staticmethod) else soft
            if isinstance(real, type):  # annotations name it
                replacement = type(attribute, (real,), {"__new__": lambda _, *args, **names: soft(*args, **names)})
            setattr(owner, attribute, replacement)
            undo.append(lambda: setattr(owner, attribute, stored))

    quantization = "vllm.model_executor.layers.quantization"
    soften(f"{quantization}.fp8", "init_fp8_linear_kernel", lambda *_, **__: NoKernel())
    soften(f"{quantization}.fp8", "select_fp8_moe_backend", lambda *_, **__: (None, None))
    soften(f"{quantization}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8", "init_fp8_linear_kernel", lambda *_, **__: NoKernel())
    for module, name in _PACKED_KERNELS:
        is_class = name.startswith("choose")
        soften(f"{quantization}.{module}", name, _no_kernel_class if is_class else NoKernel)
    moe = "vllm.model_executor.layers.fused_moe"
    soften(f"{moe}.unquantized_fused_moe_method", "select_unquantized_moe_backend", _first_moe_backend)
    soften("vllm.platforms.cpu", "CpuPlatform.get_attn_backend_cls", _dense_attention)
    soften("torch.cuda", "Stream", lambda *_, **__: NoKernel())
    soften("torch.cuda", "Event", lambda *_, **__: NoKernel())
    soften("torch.nn", "Module.to", _in_dtype)
    config: Any = importlib.import_module(f"{moe}.config")
    platform = config.current_platform
    # Experts without a gate are asserted to be on a GPU.
    config.current_platform = _WithGpuAssertions(platform)
    undo.append(lambda: setattr(config, "current_platform", platform))
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


class _WithGpuAssertions:
    """A platform that passes for one with kernels of a GPU where it is asked."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_xpu(self) -> bool:
        return True


def _in_dtype(module: Any, *args: Any, **names: Any) -> Any:
    """A module with arrays on `meta` in another element type, wherever it was to be moved."""
    import torch

    dtype = torch._C._nn._parse_to(*args, **names)[1]
    return module if dtype is None else module.to(dtype)


def _first_moe_backend(*_: Any, **__: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    return getattr(UnquantizedMoeBackend, "CPU", next(iter(UnquantizedMoeBackend))), None


def _dense_attention(*args: Any, **names: Any) -> Any:
    """Sparse attention holds the same weights as dense attention."""
    from vllm.platforms.cpu import CpuPlatform

    def dense(value: Any) -> Any:
        return value._replace(use_sparse=False) if hasattr(value, "use_sparse") else value

    return CpuPlatform.get_attn_backend_cls(*map(dense, args), **{name: dense(value) for name, value in names.items()})
