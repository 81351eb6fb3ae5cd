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
    from reshard.planning import degrees, estimate
    from reshard.verbs import Checkpoint, convert, fingerprint, open, plan, roundtrip, verify

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
_ELSEWHERE = {"degrees": "reshard.planning", "estimate": "reshard.planning"}


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use: `import reshard` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    from importlib import import_module

    module = "reshard.errors" if name.endswith(("Error", "Found")) else _ELSEWHERE.get(name, "reshard.verbs")
    return getattr(import_module(module), name)
