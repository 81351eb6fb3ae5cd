"""vLLM in one process for each rank: fake process groups, vLLM's own model class and its own loader, checkpoint tensors without elements.

Measured with vLLM 0.32.0 (build for CPUs) and torch 2.13.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from .ranks import Case, LoadedRank, NoKernel, Softening, fake_new_groups, large_on_meta, set_environment
from .stand_ins import Anything, stand_in

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # No tokens are computed, so a short limit saves memory for tables of positions, also where the model's own is shorter.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The rows of a table of rotary positions. Those of towers have fewer: they count the patches of an image.
MOST_POSITIONS = 8192
# The classes of a model that ask for kernels when they are built. Importing them takes half a second, so only the model itself does.
QWEN4_EXP = "vllm.models.qwen4_exp.nvidia"
# Of image processing, and of the languages in which kernels for GPUs are written.
STAND_INS = ("torchvision", "cutlass", "cuda")


def prepare() -> None:
    """Import vLLM, and change what would need other processes, network or a GPU. Called once, before ranks are forked."""
    set_environment(ENVIRONMENT)
    stand_in(STAND_INS)
    stand_in_for_tokenizers()
    import torch
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    # A process of its own for each model class would import everything again.
    registry._run_in_subprocess = lambda ask: ask()
    fake_new_groups()
    new_model_group = state.init_model_parallel_group

    def lonely_group(group_ranks: Any, local_rank: int, backend: str, *_: Any, **names: Any) -> Any:
        names |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        return new_model_group(group_ranks, local_rank, backend, **names)

    state.init_model_parallel_group = lonely_group
    _shorten_rotary_tables()
    state._node_count = lambda group: 1
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)


def stand_in_for_tokenizers() -> None:
    """Let model classes find the numbers of tokens without a tokenizer: no token is computed. Called before they are imported. What makes
    processors of images keeps vLLM's own function: without a tokenizer no processor is made, and none is needed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm.multimodal.registry")
        tokenizers: Any = importlib.import_module("vllm.tokenizers")
        tokenizers.cached_tokenizer_from_config = lambda *_, **__: Anything()


def _shorten_rotary_tables() -> None:
    """Let tables of rotary positions have few rows: models ask for all positions of their config, which takes a gigabyte for a million of
    them. No position is computed, and the tables are in no state dict."""
    with contextlib.suppress(ImportError, AttributeError):
        base: Any = importlib.import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbeddingBase
        made = base.__init__

        def made_short(self: Any, head_size: int, rotary_dim: int, max_position_embeddings: int, *rest: Any, **names: Any) -> None:
            made(self, head_size, rotary_dim, min(max_position_embeddings, MOST_POSITIONS), *rest, **names)

        base.__init__ = made_short


def about() -> dict[str, str]:
    """vLLM's version, and the platform of its build."""
    import vllm
    from vllm.platforms import current_platform

    return {"engine": "vllm", "version": vllm.__version__, "platform": current_platform.device_name}


def engine_config(model: str, case: Case, *, trust_remote_code: bool) -> Any:
    """vLLM's configuration of a model at these sizes, with its class imported. Raises what vLLM raises for sizes that it refuses."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    config = EngineArgs(
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
    get_model_architecture(config.model_config)
    return config


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
            yield LoadedRank(model, str(config.model_config.dtype).removeprefix("torch."), softened)


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


# (module, function, oracle, kernel): the functions that choose the kernels of packed experts, and the kernel that is taken instead: the one
# that rounds the fewest sizes up.
_COMPRESSED_MOE = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
_PACKED_MOE_BACKENDS = (
    ("mxfp4", "select_mxfp4_moe_backend", "mxfp4", "Mxfp4MoeBackend.EMULATION"),
    ("mxfp4", "select_deepseek_v4_mxfp4_moe_backend", "mxfp4", "Mxfp4MoeBackend.EMULATION"),
    (f"{_COMPRESSED_MOE}_wna16", "select_wna16_moe_backend", "int_wna16", "WNA16MoEBackend.EMULATION"),
    ("auto_awq", "select_wna16_moe_backend", "int_wna16", "WNA16MoEBackend.EMULATION"),
    ("auto_gptq", "select_wna16_moe_backend", "int_wna16", "WNA16MoEBackend.EMULATION"),
    ("modelopt", "select_fp8_moe_backend", "fp8", "Fp8MoeBackend.EMULATION"),
    ("modelopt", "select_nvfp4_moe_backend", "nvfp4", "NvFp4MoeBackend.EMULATION"),
    ("modelopt", "select_mxfp8_moe_backend", "fp8", "Fp8MoeBackend.EMULATION"),
    (f"{_COMPRESSED_MOE}_w4a4_nvfp4", "select_nvfp4_moe_backend", "nvfp4", "NvFp4MoeBackend.EMULATION"),
    (f"{_COMPRESSED_MOE}_w8a8_mxfp8", "select_mxfp8_moe_backend", "fp8", "Fp8MoeBackend.EMULATION"),
)


def without_kernels(softened: list[str]) -> Softening:
    """A context in which layers can be built although this platform lacks their kernels. What was missing is appended to `softened`."""
    softening = Softening(softened)
    soften = softening.soften
    quantization = "vllm.model_executor.layers.quantization"
    soften(f"{quantization}.fp8", "init_fp8_linear_kernel", lambda *_, **__: NoKernel())
    soften(f"{quantization}.fp8", "select_fp8_moe_backend", lambda *_, **__: (None, None))
    soften(f"{quantization}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8", "init_fp8_linear_kernel", lambda *_, **__: NoKernel())
    for module, name in _PACKED_KERNELS:
        soften(f"{quantization}.{module}", name, (lambda *_, **__: NoKernel) if name.startswith("choose") else NoKernel)
    moe = "vllm.model_executor.layers.fused_moe"
    first_backend = partial(_moe_backend, f"{moe}.oracle.unquantized", "UnquantizedMoeBackend.CPU")
    soften(f"{moe}.unquantized_fused_moe_method", "select_unquantized_moe_backend", first_backend)
    for module, function, oracle, backend in _PACKED_MOE_BACKENDS:
        soften(f"{quantization}.{module}", function, partial(_moe_backend, f"{moe}.oracle.{oracle}", backend))
    soften("vllm.platforms.cpu", "CpuPlatform.get_attn_backend_cls", _dense_attention)
    soften("vllm.v1.attention.backends.mla.amx_mla", "AMXMLAImpl", _dense_latent_attention)
    soften("torch.cuda", "Stream", lambda *_, **__: NoKernel())
    soften("torch.cuda", "Event", lambda *_, **__: NoKernel())
    soften("torch.nn", "Module.to", _in_dtype)
    if f"{QWEN4_EXP}.model" in sys.modules:
        soften(f"{QWEN4_EXP}.ngram_embedding", "Qwen4ExpPLEPinnedHostEmbedding", _table_on_device)
        soften(f"{QWEN4_EXP}.qsa", "Qwen4ExpQSAFlashAttentionImpl", NoKernel)
    config: Any = importlib.import_module(f"{moe}.config")
    # Experts without a gate are asserted to be on a GPU.
    softening.replace(config, "current_platform", _WithGpuAssertions(config.current_platform))
    return softening


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


def _table_on_device(*args: Any, **names: Any) -> Any:
    """A table of n-grams that is not in pinned memory, which needs a GPU; it holds the same rows."""
    from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpPLEDeviceEmbedding

    return Qwen4ExpPLEDeviceEmbedding(*args, **names)


def _moe_backend(oracle: str, backend: str, *_: Any, **__: Any) -> Any:
    """A kernel for experts, without its class: the first one, if there is none by that name."""
    kind, name = backend.split(".")
    kinds: Any = getattr(importlib.import_module(oracle), kind)
    return getattr(kinds, name, next(iter(kinds))), None


def _dense_attention(*args: Any, **names: Any) -> Any:
    """Sparse attention holds the same weights as dense attention."""
    from vllm.platforms.cpu import CpuPlatform

    def dense(value: Any) -> Any:
        return value._replace(use_sparse=False) if hasattr(value, "use_sparse") else value

    return CpuPlatform.get_attn_backend_cls(*map(dense, args), **{name: dense(value) for name, value in names.items()})


def _dense_latent_attention(*args: Any, topk_indices_buffer: Any, **names: Any) -> Any:
    """Latent attention of the CPU for a layer that is sparse elsewhere."""
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

    return AMXMLAImpl(*args, **names)


def kernel_choices(model: Any) -> Iterator[tuple[str, str]]:
    """Module -> why the shapes of its tensors depend on the kernel that the platform chooses."""
    for name, module in model.named_modules():
        if "cpu" in type(module).__module__.split("."):
            yield name, "vLLM has other classes for it on other platforms"
            continue
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method).__name__
        if kind == "UnquantizedFusedMoEMethod":
            if rounded := _rounded_by_a_kernel(module):
                yield name, rounded
        elif not kind.startswith("Unquantized") and _scheme_of(module, kind) not in _SAME_FOR_ALL_KERNELS:
            yield name, f"{kind} allocates it for the kernel of this platform"


# Linear layers with packed weights, and scales of the KV cache, whose create_weights allocates the same tensors whatever the kernel is
# (read in vLLM 0.32).
_SAME_FOR_ALL_KERNELS = {
    "CompressedTensorsKVCacheMethod",
    "ModelOptKVCacheMethod",
    "CompressedTensorsWNA16",
    "CompressedTensorsW4A4Fp4",
    "CompressedTensorsW4A4Mxfp4",
    "CompressedTensorsW8A8Mxfp8",
    "CompressedTensorsW4A4Mxfp4MoEMethod",
    "CompressedTensorsW4A4Nvfp4MoEMethod",
    "CompressedTensorsW8A8Mxfp8MoEMethod",
    "CompressedTensorsWNA16MoEMethod",
    "AutoAWQMoEMethod",
    "AutoGPTQMoEMethod",
    "ModelOptFp8MoEMethod",
    "ModelOptNvFp4FusedMoE",
    "ModelOptMxFp8FusedMoE",
    "AutoGPTQLinearMethod",
    "AutoAWQLinearMethod",
    "AutoAWQMarlinLinearMethod",
    "ModelOptLinearMethod",
}


def _scheme_of(module: Any, kind: str) -> str:
    """The class that allocates the weights of a linear layer."""
    scheme = getattr(module, "scheme", None) if kind == "CompressedTensorsLinearMethod" else None
    return type(scheme).__name__ if scheme else kind


def _rounded_by_a_kernel(module: Any) -> str | None:
    """Why another kernel for unquantized experts would allocate other sizes; None if all kernels allocate the same."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    sizes = module.hidden_size, module.moe_config.intermediate_size_per_partition
    for backend in unquantized.UnquantizedMoeBackend:
        try:
            others = unquantized.unquantized_round_up_hidden_size_and_intermediate_size(backend, *sizes)
        except Exception:  # a backend that this build lacks
            continue
        if tuple(others) != sizes:
            return f"the kernel {backend.name} would round the experts' width up"
    return None
