"""Which engines a caller means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.live.engines.control import EngineControl
from reshard.live.engines.sglang import INFO, SglangServer
from reshard.live.engines.vllm import VllmInProcess, VllmServer
from reshard.storage.server import Server


def controls(engine: Any, seconds: float) -> Sequence[EngineControl]:
    """The engines that a caller means: an address, an `LLM`, an object with the methods of EngineControl, or a list of them.

    seconds: the longest wait of a rank for another.

    Raises: SystemRefusal if a server cannot be reached.
    """
    if isinstance(engine, list | tuple):
        return [control for part in engine for control in controls(part, seconds)]
    if isinstance(engine, str):
        return [server_control(engine, seconds)]
    return [VllmInProcess(engine) if hasattr(engine, "llm_engine") else engine]


def server_control(address: str, seconds: float) -> EngineControl:
    """The server at an address, known by its routes: SGLang's, or vLLM's. Raises SystemRefusal if it cannot be reached."""
    return (VllmServer if Server.at(address).ask(INFO) is None else SglangServer)(address, seconds)
