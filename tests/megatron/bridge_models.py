"""Models that Megatron Bridge builds of Megatron-Core's layers and some of its own: Gemma's."""

from __future__ import annotations

from argparse import Namespace

import torch
from bridge import module  # fixtures/megatron/bridge.py
from megatron.core.activations import fast_gelu
from megatron.core.models.gpt import gpt_layer_specs

MODELS = ("gemma", "gemma2")


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
