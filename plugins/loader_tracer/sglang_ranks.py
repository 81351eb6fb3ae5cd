"""SGLang in one process for each rank: fake process groups, its own model class and its own loader, checkpoint tensors without elements.

SGLang's files hold what its ranks have after `process_weights_after_loading`, so that this step is recorded as well. It runs as on a device
that SGLang does not know: no kernel of a CPU repacks a weight.

Measured with SGLang 0.5.23, installed without its kernels, and torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .ranks import Case, LoadedRank, NoKernel, Softening, fake_new_groups, large_on_meta, set_environment
from .stand_ins import stand_in

ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * 64)}
# Kernels, image processing, and packages that only serve requests.
STAND_INS = (
    *("IPython", "cuda", "cutlass", "datasets", "decord", "deep_gemm", "flashinfer", "gguf", "llguidance", "modelscope", "outlines"),
    *("pynvml", "sgl_deep_gemm", "sgl_kernel", "soundfile", "timm", "torch_memory_saver", "torchao", "torchaudio", "torchvision"),
    *("tvm_ffi", "vllm", "xgrammar"),
)


def prepare() -> None:
    """Import SGLang, and change what would need other processes, network or a GPU. Called once, before ranks are forked."""
    set_environment(ENVIRONMENT)
    stand_in(STAND_INS)
    import logging

    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.mamba import mamba
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    # Some classes import these kernels by name, and only serving calls them.
    for kernel in ("causal_conv1d_fn", "causal_conv1d_fn_triton", "causal_conv1d_update", "causal_conv1d_update_triton"):
        vars(mamba).setdefault(kernel, NoKernel())
    import sglang.srt.models.registry  # noqa: F401

    fake_new_groups()
    init = dist.init_process_group

    def fake_process_group(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    new_model_group = parallel_state.init_model_parallel_group

    def lonely_group(*given: Any, **names: Any) -> Any:
        return new_model_group(*given, **{**names, "use_message_queue_broadcaster": False, "use_custom_allreduce": False})

    dist.init_process_group = fake_process_group  # type: ignore[assignment,unused-ignore]
    parallel_state.init_model_parallel_group = lonely_group


def about() -> dict[str, str]:
    """SGLang's version, and the platform of its build."""
    import sglang
    from sglang.srt.utils import is_cuda, is_hip

    return {"engine": "sglang", "version": sglang.__version__, "platform": "cuda" if is_cuda() else "rocm" if is_hip() else "cpu"}


def engine_config(model: str, case: Case, *, trust_remote_code: bool) -> dict[str, Any]:
    """The model and its sizes, as SGLang's server takes them. Each rank makes a configuration, which is kept for the whole process."""
    return {"model_path": model, "tp_size": case.tp, "ep_size": case.ep, "trust_remote_code": trust_remote_code}


@contextlib.contextmanager
def loaded_rank(config: dict[str, Any], case: Case, rank: int, recorder: Any, sources: dict[str, Any]) -> Iterator[LoadedRank]:
    """The model of one rank after SGLang's loader has loaded `sources` and processed them. sources: name -> tensor on `meta`."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    softened: list[str] = []
    with without_kernels(softened):
        arguments = ServerArgs(
            **config,
            device="cpu",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            # As the notes of a conversion ask for: with the fusion, a shared expert lies among the routed ones.
            disable_shared_experts_fusion=True,
            # Without these, SGLang refuses some models on a CPU. The weights are the same.
            disable_radix_cache=True,
            attention_backend="fa3",
            mem_fraction_static=0.5,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        model_config = ModelConfig.from_server_args(arguments)
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=1)
        bootstrap.init_layer_runtime(model_config=model_config)
        initialize_moe_config()
        load_config, device = LoadConfig(), torch.device("cpu")
        quantization = loader._get_quantization_config(model_config, load_config)
        with loader.set_default_torch_dtype(model_config.dtype):
            with recorder, large_on_meta(), device:
                model = loader._initialize_model(model_config, load_config, quantization)
            with recorder:
                loader.DefaultModelLoader.load_weights_and_postprocess(model, iter(sources.items()), device)
        yield LoadedRank(model, str(model_config.dtype).removeprefix("torch."), softened)


def without_kernels(softened: list[str]) -> Softening:
    """A context in which layers can be built although this platform lacks their kernels. What was missing is appended to `softened`."""
    softening = Softening(softened)
    softening.soften("sglang.srt.layers.rotary_embedding.factory", "get_rope_cpu", _rope_without_kernel)
    softening.soften("sglang.srt.platforms.device_mixin", "DeviceMixin.get_device", lambda *_: "cpu")
    softening.soften("torch.cuda", "get_device_capability", lambda *_: (9, 0))
    softening.soften("torch.cuda", "Stream", lambda *_, **__: NoKernel())
    softening.soften("torch.cuda", "Event", lambda *_, **__: NoKernel())
    return softening


def _rope_without_kernel(*args: Any, device: Any = None, **names: Any) -> Any:
    """The rotary positions as other platforms compute them. They hold no weight."""
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(*args[:8], **names)  # the last one is the device


def kernel_choices(model: Any) -> Iterator[tuple[str, str]]:
    """Module -> why the form of its tensors depends on the kernel that the platform chooses."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method).__name__
        if kind == "UnquantizedFusedMoEMethod":
            yield name, "some kernels for experts store it in another form (flashinfer_trtllm, triton_kernel, AITER, AMX)"
        elif not kind.startswith("Unquantized"):
            yield name, f"{kind} stores it in the form of a kernel of this platform"
