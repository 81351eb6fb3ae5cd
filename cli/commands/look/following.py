"""The command that goes on from a checkpoint, as `reshard inspect` proposes it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.verbs.look.inspection import Inspection

# The bytes that an engine uses of a GPU of 80 GB. Weights that fit leave the rest for the KV cache.
_ROOM = int(80e9 * 0.9)


def following(opened: Inspection, model: str | None) -> str | None:
    """A command that goes on from here; None if nothing can be proposed. model: what --model was."""
    from reshard.adapter import registry
    from reshard.canonical.lora import LoraSettings
    from reshard.models.config_values import component_class
    from reshard.requests.outlook import SIZES

    path, about_model = shlex.quote(opened.checkpoint.path), f" --model {shlex.quote(model)}" if model else ""
    models, engines = opened.checkpoint.models, opened.outlook.engines
    if opened.outlook.problem:
        return f"reshard doctor {path}{about_model}"
    if opened.facts.delta is not None:
        return f"reshard apply {shlex.quote(opened.facts.delta.base or 'BASE')} {path} out --to hf"
    if opened.is_adapter:
        of_peft = f"reshard convert BASE merged --to hf --merge-adapter {path}"
        is_peft = registry.named(opened.index.format).holds_adapters
        if is_peft or LoraSettings(opened.adapter_config).alpha is not None:
            return of_peft
        return f"reshard convert {path} adapter --to peft{about_model or (' --model DIR' if opened.config is None else '')}"
    if len(models) > 1 and not any(component.is_main for component in models):
        return f"reshard convert {path} out --to hf --root {shlex.quote(models[0].root)}"
    if not {tensor.kind for tensor in opened.tensors} & {"weight", "master"}:
        return None
    if opened.index.format in engines:
        return f"reshard verify {path}"
    about_model = about_model or (" --model DIR" if opened.config is None or opened.checkpoint.config_problem else "")
    if opened.content is not None and opened.content.adapter:
        about_model += " --merge-adapter self" + ("" if LoraSettings(opened.adapter_config).alpha is not None else " --lora-alpha ALPHA")
    stored = opened.checkpoint.model and opened.checkpoint.model.quantization
    about_model += " --dequantize" if stored and stored.library else ""
    if engines:
        engine = "vllm" if "vllm" in engines else min(engines)
        tp = _smallest_tp(opened, engines[engine])
        return f"reshard convert {path} out --to {engine} --tp {tp}{about_model}" if tp else None
    if opened.has_undeclared_model:
        if (teacher := _engine_to_learn_from(opened)) and (tp := _smallest_tp(opened, SIZES)):
            return f"reshard convert {path} out --to {teacher} --tp {tp} --learn{about_model}"
        if opened.index.format == "hf":
            if component_class(opened.config):
                return f"reshard serve-check {path}"
            return f"reshard architectures --start {path} > my.yaml"
    return f"reshard convert {path} out --to hf{about_model}"


def _engine_to_learn_from(opened: Inspection) -> str | None:
    """An engine in this Python whose loader can tell the layout, if the config names a model."""
    from reshard.adapter import registry
    from reshard.serving.legality import has_engine

    if not (opened.config or {}).get("model_type"):
        return None
    traceable = [name for name, format in registry.serving_formats().items() if format.tracer and has_engine(name)]
    return max(traceable, default=None)  # vllm before sglang


def _smallest_tp(opened: Inspection, sizes: tuple[int, ...]) -> int | None:
    """The smallest of these tensor-parallel sizes at which a GPU of 80 GB has room for its part of the weights; None if none has."""
    stored = opened.checkpoint.model and opened.checkpoint.model.quantization
    weights = opened.content.weights.values() if opened.content else ()
    nbytes = 2 * opened.parameters if stored and stored.library else sum(tensor.nbytes for tensor in weights)
    return next((tp for tp in sizes if nbytes <= tp * _ROOM), None)
