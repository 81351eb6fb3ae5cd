"""Plain torch in place of what runs on GPUs alone: Transformer Engine's layers, mamba_ssm's scan, flash-linear-attention's norm.

Megatron-Core has no layers of its own for Mamba, gated delta nets and norms stored minus one, only those that are built from these parts.
Around them everything is Megatron-Core's: its specs, its mixers, the split over ranks and sharded_state_dict. `install()` comes before a
model is built.

Source of the names: transformer_engine/pytorch/module (layernorm_linear.py: layer_norm_weight and then weight; rmsnorm.py), mamba_ssm
(ops/triton/ssd_combined.py, layernorm_gated.py).
"""

from __future__ import annotations

import importlib
import sys
import types

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention


class Norm(torch.nn.Module):
    """TENorm of RMSNorm."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.added, self.eps = int(config.layernorm_zero_centered_gamma), eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size) - self.added)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.added, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: object, **options: object) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.norm_of = lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight + norm.added, norm.eps)
        self._parameters = {"layer_norm_weight": norm.weight, **self._parameters}

    def forward(self, x: torch.Tensor) -> tuple:
        return super().forward(self.norm_of(x, self.layer_norm_weight))


class Linear(torch.nn.Module):
    """TELinear that every rank has whole."""

    def __init__(self, input_size: int, output_size: int, *, config: object, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(output_size, input_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple:
        return x @ self.weight.t(), None


class GatedNorm(torch.nn.Module):
    """mamba_ssm's RMSNorm: the gate first, then a norm of each group of channels."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, **_: object) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size, self.weight = eps, group_size, torch.nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        groups = (x * torch.nn.functional.silu(z)).unflatten(-1, (-1, self.group_size))
        return torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def scan(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, _: int, **options: object) -> torch.Tensor:
    """mamba_chunk_scan_combined, one token after the other. x: [batch, token, head, channel]; b and c: [batch, token, group, state]."""
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    dt = torch.nn.functional.softplus(dt + options["dt_bias"])
    state, found = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        state = state * torch.exp(dt[:, t] * a)[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        found.append((state * c[:, t, :, None]).sum(-1) + options["D"][:, None] * x[:, t])
    return torch.stack(found, 1)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def install() -> None:
    """Put them where Megatron-Core looks for the real ones."""
    for name, content in {
        "layernorm_gated": {"RMSNorm": GatedNorm},
        "ssd_combined": {"mamba_chunk_scan_combined": scan, "mamba_split_conv1d_scan_combined": lambda *_: None},
    }.items():
        _module(f"mamba_ssm.ops.triton.{name}", **content)
    kernels = types.ModuleType("tensor_ops")
    vars(kernels).update(dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")))  # of inference
    sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = kernels
    from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider

    layers = {
        "TENorm": Norm,
        "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": DotProductAttention,
        "TELinear": Linear,
    }
    for module in (transformer_engine, transformer_engine_spec_provider):
        vars(module).update(layers)
    transformer_engine_spec_provider.is_te_min_version = lambda version: True
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_layer

    for module in (experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs):
        module.TESpecProvider, module.HAVE_TE = transformer_engine_spec_provider.TESpecProvider, True
    transformer_block.LayerNormImpl = Norm
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear
    gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, l2norm
    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
    from megatron.core.ssm import mamba_mixer

    if not mamba_mixer.HAVE_MAMBA_SSM:
        importlib.reload(mamba_mixer)
    from megatron.core.ssm import mamba_block

    vars(mamba_block).update(layers)


def _module(name: str, **content: object) -> None:
    """A module of that name, and the packages around it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        made = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        made.__dict__.setdefault("__path__", [])
        made.__dict__.setdefault("__version__", "2.3.0")
    vars(made).update(content)
