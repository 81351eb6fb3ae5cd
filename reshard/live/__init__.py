"""Weights from the memory of running ranks into the memory of others: what they hold, the plan of a transfer, and its execution.

from reshard.live import Sender

sender = Sender(model, engine="http://127.0.0.1:8000")
report = sender.update()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.live.memory.describe import describe
    from reshard.live.sender import Sender

__all__ = ["Sender", "describe"]
_MODULES = {"Sender": "sender", "describe": "memory.describe"}


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'reshard.live' has no attribute {name!r}")
    return getattr(import_module(f"reshard.live.{_MODULES[name]}"), name)
