"""reshard: training checkpoints into what serving engines load, on one CPU machine, in constant memory, bit-exact, proven.

import reshard

ckpt = reshard.open("step-1000")                       # what is in it; no weight is read
plan = reshard.plan(ckpt, to="vllm", tp=8)             # what goes where, proven
reshard.convert(plan, "out/")
reshard.verify("step-1000", "out/").raise_if_different()
rank3 = ckpt.view(to="vllm", tp=8, rank=3)             # name -> array, read when asked for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.errors import CheckpointError, DifferenceFound, RequestError, ReshardError
    from reshard.verbs.checkpoint import Checkpoint, open, plan
    from reshard.verbs.convert import convert
    from reshard.verbs.degrees import degrees
    from reshard.verbs.estimate import estimate
    from reshard.verbs.roundtrip import roundtrip
    from reshard.verbs.verify import fingerprint, verify

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DifferenceFound",
    "RequestError",
    "ReshardError",
    "convert",
    "degrees",
    "estimate",
    "fingerprint",
    "open",
    "plan",
    "roundtrip",
    "verify",
]
_MODULES = {
    "Checkpoint": "checkpoint",
    "open": "checkpoint",
    "plan": "checkpoint",
    "convert": "convert",
    "degrees": "degrees",
    "estimate": "estimate",
    "fingerprint": "verify",
    "roundtrip": "roundtrip",
    "verify": "verify",
}


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use: `import reshard` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    from importlib import import_module

    module = f"reshard.verbs.{_MODULES[name]}" if name in _MODULES else "reshard.errors"
    return getattr(import_module(module), name)
