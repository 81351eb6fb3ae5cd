"""A stand-in for Transformer Engine's FusedAdam, which needs a GPU.

With it Megatron's optimizers keep and load other things than with torch's: the count of steps is in the param groups, an int; a parameter's
state is its two moments, and anything else is refused; param groups that are loaded must say `bias_correction`. With torch's AdamW
megatron-core 0.16.1 cannot load what its own distributed optimizer saved: it looks there for the `step` of every parameter.
Source: transformer_engine/pytorch/optimizers/fused_adam.py (2.x), megatron/core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import torch

KEPT = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: object, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **others: object) -> None:
        assert others["adam_w_mode"]
        super().__init__(params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if unknown := state.keys() - set(KEPT):
                raise KeyError(f"FusedAdam has no room for {sorted(unknown)}")
            self.state[parameter] = {name: value.float() for name, value in state.items()}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            first, second = (1 - beta ** group["step"] if group["bias_correction"] else 1 for beta in group["betas"])
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                for name in KEPT:
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))
                average, squares = (self.state[parameter][name] for name in KEPT)
                average.lerp_(parameter.grad, 1 - beta1)
                squares.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                update = (average / first) / ((squares / second).sqrt() + group["eps"]) + group["weight_decay"] * parameter
                parameter.add_(update, alpha=-group["lr"])


def install() -> None:
    """Megatron finds it as it would find Transformer Engine's."""
    from megatron import core
    from megatron.core.optimizer import distrib_optimizer

    core.optimizer.Adam, core.optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
