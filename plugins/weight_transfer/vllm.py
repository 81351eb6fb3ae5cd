"""vLLM's weight-transfer backend `reshard`, and the installation of weights by layerwise reload. Run with vLLM 0.32.0.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

The registration is in plugins/vllm.py. A rank's load form is what its parameters were before vLLM loaded and repacked them: vLLM keeps
their shapes for reloading, and it is the form that `reshard convert --to vllm` writes. Layerwise reload takes it layer by layer, processes
it as after the start, and copies the result into the live tensors. What vLLM 0.32 does there that an update must know:

- Experts on a CPU are not packed a second time, unless their kernel is made anew.
- The router's gate is one module with two names, mlp.gate and mlp.experts.gate.
- A tied head and the embedding are one tensor of two layers, and a CPU packs a copy for each: both are loaded, by whichever name it came.
- Tensors such as e_score_correction_bias are left out of reloading, and are written live.
- `update_weights` of the base class synchronizes an accelerator, which a CPU does not have.
- A reload that stops midway leaves meta tensors behind, on which all workers hang: it is finished whatever happens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from reshard.errors import RequestError
from reshard.geometry.dtypes import from_torch
from reshard.live.plan.schedule import HeldTensor
from reshard.live.target_rank import TargetRank

from .vllm_loader import check_whole, load_whole

# Of the tensors that reloading leaves out: the one that training changes. The others are tables of experts.
_LIVE = "e_score_correction_bias"
NOTHING: Mapping[str, torch.Tensor] = {}


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What the sender says of its channel."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: what a rank receives was agreed when it joined the channel."""


class ReshardTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM's interface of a backend; TargetRank does the work, and raises nothing."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # vLLM shows the messages of its own loggers only.
        self._rank = TargetRank(ServedModel(self), logging.getLogger("vllm.reshard"))

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Any values: TargetRank says what is wrong with them."""
        return InitInfo(init_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the sender's channel."""
        self._rank.join(init_info.values)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._rank.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights."""
        self._rank.receive(update_info or None)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the weights."""
        self._rank.receive()

    def finish_weight_update(self) -> None:
        """Install the weights, or drop them."""
        self._rank.finish()

    def shutdown(self) -> None:
        """Leave the channel."""
        self._rank.close()


class ServedModel:
    """A worker's model: what it holds in load form, and how that is installed."""

    def __init__(self, engine: ReshardTransfer) -> None:
        self._engine = engine
        self.device = str(engine.device)

    def rank(self) -> int:
        """The number of this worker among all of the engine, as vLLM numbers the entries of an update."""
        parallel = self._engine.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def described(self) -> Mapping[str, Any]:
        """The fields of reshard.live.hello.Hello."""
        parallel, config, model = self._engine.parallel_config, self._engine.model_config, self._engine.model
        form, others = load_form(model)
        return {
            "engine": f"vllm {vllm.__version__}",
            "rank": self.rank(),
            "degrees": {
                "tp": parallel.tensor_parallel_size,
                "tp_rank": parallel.rank % parallel.tensor_parallel_size,
                "pp": parallel.pipeline_parallel_size,
                "pp_rank": parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size,
                "ep": parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
                "dp": parallel.data_parallel_size,
            },
            "config": json.loads(config.hf_config.to_json_string(use_diff=False)),
            "model": config.model,
            "quantization": config.quantization,
            "tensors": [[names, from_torch(str(kept.dtype), where=names[0]).name, list(kept.shape)] for names, kept in form],
            "others": others,
        }

    def all_agree(self, own: bool) -> bool:
        """Whether all workers say yes."""
        votes = torch.tensor([int(own)], dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
        return bool(votes.item())

    def check_whole(self, whole: Sequence[HeldTensor], planned: Collection[str]) -> None:
        """Raises RequestError unless the model's `load_weights` takes these tensors, and fills what is not planned."""
        check_whole(self._engine.model, load_form(self._engine.model)[0], whole, planned)

    def install(self, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor] = NOTHING) -> None:
        """Let vLLM process tensors of the load form and load whole ones, and copy the result into the live ones."""
        install(self._engine.model, self._engine.model_config, tensors, whole)


LoadForm = list[tuple[list[str], torch.Tensor]]
"""Tensors of the load form, each with all its names."""


def load_form(model: torch.nn.Module) -> tuple[LoadForm, list[str]]:
    """The tensors that an update brings, each with all its names, and the names of those that vLLM computes itself."""
    by_tensor: dict[object, tuple[list[str], torch.Tensor]] = {}
    others: list[str] = []
    for prefix, layer in model.named_modules(remove_duplicate=False):
        parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
        live = {name: tensor for name, tensor in [*layer._parameters.items(), *layer._buffers.items()] if tensor is not None}
        # Parameters of attention itself are scales of its cache, which vLLM sets from other tensors or from constants.
        own = {} if is_deferred_attention_layer(layer) else dict(parameters)
        own |= {name: tensor for name, tensor in live.items() if name == _LIVE or (name in SKIP_TENSORS and name in layer._parameters)}
        own = {name: tensor for name, tensor in own.items() if name == _LIVE or name not in SKIP_LOAD_TENSORS}
        for name, tensor in own.items():
            # One tensor may belong to several modules, and one module may have several names.
            key: object = id(live[name]) if name in live else (id(layer), name)
            by_tensor.setdefault(key, ([], tensor))[0].append(_joined(prefix, name))
        others += [_joined(prefix, name) for name in {*parameters, *buffers, *live} - own.keys()]
    return list(by_tensor.values()), others


def install(
    model: torch.nn.Module, model_config: Any, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor] = NOTHING
) -> None:
    """Make tensors of the load form the weights of a model, by layerwise reload. whole: tensors for the model's own `load_weights`.

    Raises: RequestError if a parameter was not loaded, after the reload has been finished as far as it goes.
    """
    form, _ = load_form(model)
    with torch.no_grad():
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None and _is_on_cpu(model):
                method.moe_kernel = None
        initialize_layerwise_reload(model)
        loaders = list(_with_plain_loaders(model, {name for names, _ in form if tensors.keys().isdisjoint(names) for name in names}))
        try:
            _load(model, form, tensors)
            if whole:
                load_whole(model, whole)
        finally:
            finalize_layerwise_reload(model, model_config)
            # vLLM's own reloading starts from the same tensors.
            for parameter, loader in loaders:
                parameter.weight_loader = loader
        if not _is_on_cpu(model):
            torch.accelerator.synchronize()
        if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
            raise RequestError(f"it was not loaded, nor were {len(missing) - 1} more", where=missing[0])


def _with_plain_loaders(model: torch.nn.Module, filled: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """Give the parameters the loader that copies; yields each with the loader that it had. filled: those that whole tensors fill, which
    keep their own."""
    kept = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in filled}
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None and id(parameter) not in kept:
                yield parameter, layerwise._get_original_loader(parameter)
                _with_loader(parameter).weight_loader = default_weight_loader
        layerwise._wrap_parameters_weight_loader(layer)


def _load(model: torch.nn.Module, form: LoadForm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load each tensor into its parameters. A layer that is complete is processed at once."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for names, _ in form:
        tensor = next((tensors[name] for name in names if name in tensors), None)
        if tensor is None:
            continue  # whole tensors fill it
        if names[0].rpartition(".")[2] == _LIVE:
            live = parameters[names[0]] if names[0] in parameters else buffers[names[0]]
            live.data.copy_(tensor)
            continue
        # A gate has two names and is one parameter; a tied head is another parameter than the embedding, and is packed by itself.
        for parameter in {id(parameters[name]): parameters[name] for name in names}.values():
            _with_loader(parameter).weight_loader(parameter, tensor)


def _with_loader(parameter: Any) -> Any:
    """A parameter, whose attribute `weight_loader` only vLLM knows."""
    return parameter


def _is_on_cpu(model: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
