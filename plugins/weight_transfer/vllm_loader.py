"""Whole tensors for vLLM's own loader: before an update, whether it takes them. Run with vLLM 0.32.0.

A model's `load_weights` takes tensors under the names of its checkpoint, cuts out this rank's part and calls the loader of a parameter.
For the check it does so with tensors that have shapes and no memory, into parameters of the load form that have none either: vLLM keeps
these for layerwise reload. The elements of each parameter that would be written are counted.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, get_tensor_load_numel, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from reshard.errors import RequestError
from reshard.live.plan.schedule import HeldTensor


def check_whole(
    model: torch.nn.Module, form: Sequence[tuple[list[str], torch.Tensor]], whole: Sequence[HeldTensor], planned: Collection[str]
) -> None:
    """Raises RequestError unless the model's loader takes these tensors, and fills from them each parameter that is not planned.

    form: the load form, each tensor with all its names. planned: the names of those that a plan brings.
    """
    loaded: Counter[str] = Counter()
    with torch.no_grad(), _without_memory(model, loaded):
        taken = [whole[0].name]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for tensor in whole:
                taken.append(tensor.name)
                yield tensor.name, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.torch), device="meta")

        try:
            _loading(model)(tensors())
        except Exception as error:
            raise _refused(f"its own loader does not take it: {error!r}", taken[-1]) from None
    padded = {f"{prefix}.{name}" for prefix, layer in _padded(model) for name in layer._parameters}
    for of_tensor, kept in form:
        count = max(loaded[name] for name in of_tensor)
        if any(name in planned for name in of_tensor):
            if count:
                raise _refused("its own loader fills it from a whole tensor, and the plan brings it as well", of_tensor[0])
        elif not count or (count < get_tensor_load_numel(kept) and padded.isdisjoint(of_tensor)):
            raise _refused(f"the plan does not bring it, and whole tensors fill {count:,} of its {kept.numel():,} elements", of_tensor[0])


def load_whole(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let the model's loader take whole tensors."""
    _loading(model)(tensors.items())


def _loading(model: Any) -> Callable[[Any], object]:
    load: Callable[[Any], object] = model.load_weights
    return load


def _padded(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers whose parameters have rows that no tensor fills."""
    return ((name, layer) for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, VocabParallelEmbedding))


@contextmanager
def _without_memory(model: torch.nn.Module, loaded: Counter[str]) -> Iterator[None]:
    """The model with the load form's parameters, which have no memory, in place of its own. Their loaders count in `loaded`."""
    before = []
    try:
        for prefix, layer in model.named_modules():
            before.append((layer, dict(layer._parameters), dict(layer._buffers)))
            kept: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = layerwise.get_layerwise_info(layer).restore_metadata
            for own, of_load_form in zip((layer._parameters, layer._buffers), kept, strict=True):
                forms: dict[str, Any] = {name: to_meta_tensor(tensor) for name, tensor in own.items() if tensor is not None}
                forms |= {name: restore_layer_refs(to_meta_tensor(tensor), layer) for name, tensor in of_load_form.items()}
                for name, tensor in forms.items():
                    tensor.weight_loader = _counting(tensor, f"{prefix}.{name}" if prefix else name, loaded)
                    own[name] = tensor
        yield
    finally:
        for layer, parameters, buffers in before:
            for own, former in ((layer._parameters, parameters), (layer._buffers, buffers)):
                own.clear()
                own.update(former)


def _counting(tensor: torch.Tensor, name: str, loaded: Counter[str]) -> Callable[..., object]:
    loader = layerwise._get_original_loader(tensor)
    signature = inspect.signature(loader)

    def load(*args: Any, **kwargs: Any) -> object:
        count, result = get_numel_loaded(loader, signature.bind(*args, **kwargs))
        loaded[name] += count
        return result

    return load


def _refused(what: str, name: str) -> RequestError:
    return RequestError(
        what,
        where=f"{name} in vLLM",
        why="Nothing was sent, the engine answers with the weights that it has",
        do="Check that trainer and engine have the same model",
    )
