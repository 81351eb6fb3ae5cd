"""Models that Megatron Bridge builds of Megatron-Core's layers and some of its own: Gemma's.

Its modules are loaded alone. The packages around them would import all of the library, and with it CUDA.
"""

from __future__ import annotations

import importlib
import sys
import types
from argparse import Namespace
from pathlib import Path

import megatron.core
import torch
from megatron.core.activations import fast_gelu
from megatron.core.models.gpt import gpt_layer_specs

MODELS = ("gemma", "gemma2")


def module(name: str) -> types.ModuleType:
    """A module of megatron.bridge, by the rest of its name."""
    folder = Path(megatron.core.__file__).parents[1] / "bridge"
    for package in ("", ".models", ".models.gemma", ".peft", ".utils"):
        made = sys.modules.setdefault(f"megatron.bridge{package}", types.ModuleType(f"megatron.bridge{package}"))
        made.__path__ = [str(folder / package.removeprefix(".").replace(".", "/"))]
    provider = sys.modules.setdefault("megatron.bridge.models.gpt_provider", types.ModuleType("gpt_provider"))
    provider.GPTModelProvider = type("GPTModelProvider", (), {})
    return importlib.import_module(f"megatron.bridge.{name}")


def configure(config: object, args: Namespace) -> None:
    """What the providers set beside the arguments that reshard writes."""
    config.activation_func, config.gated_linear_unit = fast_gelu, True
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        if hasattr(args, name):
            setattr(config, name, getattr(args, name))


def spec(model_type: str, config: object) -> object:
    if model_type == "gemma2":
        return module("models.gemma.gemma2_provider").gemma2_layer_spec(config)
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()


def extend(model_type: str, chunk: torch.nn.Module) -> None:
    """What the providers do with a model that is built."""
    modules = module("models.gemma.modules")
    if chunk.pre_process:
        modules.extend_instance(chunk.embedding, modules.EmbeddingScalingMixin)
    if chunk.post_process and model_type == "gemma2":
        modules.extend_instance(chunk.output_layer, module("models.gemma.gemma2_provider").Gemma2OutputLayer)
