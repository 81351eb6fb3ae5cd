"""SGLang's part in an update: each scheduler is one TargetRank, reached by hooks on SGLang's own routes. Run with SGLang 0.5.23.

The registration is in plugins/sglang.py. SGLang's ranks hold unquantized weights as `reshard convert --to sglang` writes them. An update is
copied into the live tensors, between the steps by which SGLang takes weights that others write there. What SGLang 0.5.23 does that an
update must know:

- Kernels of some platforms repack weights in place, and only SGLang's own loader can fill them again: such a model takes no update.
- `/update_weights_from_distributed` wants a session of `/begin_weight_update`, which changes live weights; the step comes before both.
- SGLang has no pause that waits for requests that run. Its pause by `abort` waits for them after it has ended them; here nothing is ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import from_torch
from reshard.live.engines.sglang import MARK, step_of
from reshard.live.plan.schedule import HeldTensor
from reshard.live.target_rank import TargetRank

NOTHING: Mapping[str, torch.Tensor] = {}

_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""SGLang's classes for layers whose weights are not quantized."""
_EXPERT_FORMS = ("use_triton_kernels", "use_flashinfer_trtllm_moe", "w13_swiglu_interleaved")
"""What tells of experts' weights that are transposed, in blocks, or interleaved."""
_SECONDS = 0.05


def step(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """A step of an update, if the request asks for one; else SGLang's own method. It runs on all schedulers at once."""
    asked = step_of(request.group_name)
    if asked is None:
        return original(manager, request)
    name, values = asked
    rank = _rank_of(manager.tp_worker)
    steps: Mapping[str, Callable[[], None]] = {
        "join": lambda: rank.join(values),
        "receive": lambda: rank.receive(values),
        "finish": rank.finish,
        "leave": rank.close,
    }
    if name in steps:
        steps[name]()
    return _answer_to(request)(success=name in steps, message="" if name in steps else f"reshard has no step {name!r}")


def tell(state: Any, *_: Any) -> None:
    """Say in /server_info that reshard is here."""
    state.internal_state[MARK] = True


async def pause(original: Callable[..., Any], manager: Any, request: Any) -> None:
    """Pause once the requests that run have ended, if reshard asks for it: new ones wait from now on."""
    if request.rid != MARK:
        await original(manager, request)
        return
    async with manager.is_pause_cond:
        manager.is_pause = True
        while await manager.model_update_lock.is_locked():
            await asyncio.sleep(_SECONDS)


@cache
def _rank_of(worker: Any) -> TargetRank:
    """The rank of a scheduler's worker, from the first update on."""
    # SGLang shows the messages of its own loggers.
    return TargetRank(SglangModel(worker), logging.getLogger("sglang.reshard"))


def _answer_to(request: Any) -> Any:
    """The class of SGLang's answers to a request."""
    from sglang.srt.managers import io_struct

    return getattr(io_struct, type(request).__name__.replace("Input", "Output"))


class SglangModel:
    """A scheduler's model: what it holds, and how that is replaced."""

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        device = self._runner.device
        self.device = f"{device}:{self._runner.gpu_id}" if device == "cuda" else str(device)

    def rank(self) -> int:
        """The tensor-parallel rank of this scheduler."""
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)

    def described(self) -> Mapping[str, Any]:
        """The fields of reshard.live.hello.Hello. Raises UnsupportedError if a kernel holds weights in a form of its own."""
        import sglang
        from sglang.srt.runtime_context import get_parallel

        parallel, config, model = get_parallel(), self._runner.model_config, self._runner.model
        if (repacked := next(_repacked(model), None)) is not None:
            raise UnsupportedError(
                repacked[1], where=repacked[0], why="SGLang cannot put new weights into this form, except those that its own loader reads"
            )
        return {
            "engine": f"sglang {sglang.__version__}",
            "rank": self.rank(),
            "degrees": {"tp": parallel.tp_size, "tp_rank": parallel.tp_rank, "pp": 1, "pp_rank": 0, "ep": parallel.moe_ep_size},
            "config": {**json.loads(config.hf_config.to_json_string(use_diff=False)), "dtype": str(config.dtype).removeprefix("torch.")},
            "model": config.model_path,
            "quantization": config.quantization,
            "tensors": [[names, from_torch(str(live.dtype), where=names[0]).name, list(live.shape)] for names, live in load_form(model)],
            "others": [],
        }

    def all_agree(self, own: bool) -> bool:
        """Whether all schedulers say yes."""
        from sglang.srt.runtime_context import get_parallel

        votes = torch.tensor([int(own)], dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=get_parallel().tp_group.cpu_group)
        return bool(votes.item())

    def check_whole(self, whole: Sequence[HeldTensor], planned: Collection[str]) -> None:
        """Raises UnsupportedError: SGLang's own loader is not asked for weights that no plan cuts."""
        raise UnsupportedError("SGLang takes no whole tensors beside those of a plan", where=whole[0].name, do="Leave out `fallback=`")

    def install(self, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor] = NOTHING) -> None:
        """Copy tensors into the live ones, and let SGLang compute what it derives from them. whole: none, as `check_whole` says."""
        updater = self._runner.weight_updater
        with torch.no_grad():
            updater.begin_weight_update()
            try:
                for names, live in load_form(self._runner.model):
                    live.copy_(next(tensors[name] for name in names if name in tensors))
            finally:
                updater.end_weight_update(run_post_load=True)


def load_form(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors that an update brings, each with all its names: what SGLang's ShardedStateLoader would save."""
    by_memory: dict[object, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        by_memory.setdefault(key, ([], tensor))[0].append(name)
    return list(by_memory.values())


def _repacked(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Module -> why its tensors are not in the form of files."""
    from sglang.srt.layers.quantization import unquant

    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method).__name__
        if kind not in _PLAIN:
            yield name, f"its weights are quantized ({kind})"
        elif getattr(module, "use_intel_amx_backend", False):
            yield name, "its weights are packed for AMX"
        elif kind == "UnquantizedFusedMoEMethod" and (unquant._use_aiter or any(getattr(method, form) for form in _EXPERT_FORMS)):
            yield name, "the kernel of the experts holds their weights in a form of its own"
