"""Engines: what a sender asks of an engine. HttpEngine is a server's address, InProcessEngine vLLM's `LLM` in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from reshard.errors import RequestError, SystemRefusal, printable
from reshard.live.wire.channel import channel_of
from reshard.storage.server import Server, document

BACKEND = "reshard"
"""The name of the weight-transfer backend in the engine."""
_CONFIG = """`--weight-transfer-config '{"backend": "reshard"}'`"""
# What a request takes beyond the waits of the ranks among themselves.
_BEYOND = 60.0


class EngineControl(Protocol):
    """An engine, asked by source rank 0. Each method returns once all of the engine's ranks are done, and raises a ReshardError."""

    name: str
    """How messages call it."""

    def ranks(self) -> int:
        """The number of the engine's ranks. Raises RequestError if it cannot take updates by reshard."""

    def own_address(self) -> str:
        """The address at which the engine's ranks reach this process."""

    def init(self, info: dict[str, Any]) -> None:
        """Let its ranks join a channel (TargetRank.join)."""

    def pause(self, mode: str) -> None:
        """Let no request run until `resume`. mode: wait for those that run, abort them, or keep them for later."""

    def start(self) -> None:
        """Begin an update (TargetRank.start)."""

    def update(self) -> None:
        """Let its ranks receive (TargetRank.receive)."""

    def finish(self) -> None:
        """Install what was received, or drop it (TargetRank.finish)."""

    def version(self) -> str:
        """The version of its weights, as it was set last."""

    def set_version(self, version: str) -> None:
        """Set the version of its weights."""

    def clear_cache(self) -> None:
        """Forget what was computed with the weights before."""

    def resume(self) -> None:
        """Let requests run again."""

    def leave(self) -> None:
        """Let its ranks leave the channel and give the staging back (TargetRank.close). No update may be open."""


class HttpEngine:
    """A server of vLLM at an address. Run with vLLM 0.32."""

    def __init__(self, address: str, seconds: float) -> None:
        """seconds: the longest wait of a rank for another."""
        self._server, self._seconds = Server.at(address), seconds
        self._channel: dict[str, Any] = {}
        self.name = self._server.address

    def ranks(self) -> int:
        """The number of workers, data-parallel ones included."""
        size = self._asked("/get_world_size")
        config = self._asked("/server_info?config_format=json")["vllm_config"].get("weight_transfer_config")
        if not config or config.get("backend") != BACKEND:
            raise RequestError(
                f"the server's weight-transfer backend is {config['backend']!r}" if config else "the server has no weight-transfer backend",
                where=self.name,
                do=f"Start it with {_CONFIG}, in an environment in which reshard is installed",
            )
        return int(size["world_size"])

    def own_address(self) -> str:
        """This machine's address on the way to the server."""
        return self._server.own_address()

    def init(self, info: dict[str, Any]) -> None:
        """Let the workers join a channel."""
        self._channel = channel_of(info)
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def pause(self, mode: str) -> None:
        """Pause generation."""
        self._post(f"/pause?mode={mode}")

    def start(self) -> None:
        """Begin an update."""
        self._post("/start_weight_update")

    def update(self) -> None:
        """Let the workers receive."""
        self._post("/update_weights", {"update_info": self._channel})

    def finish(self) -> None:
        """Install what was received, or drop it."""
        self._post("/finish_weight_update")

    def version(self) -> str:
        """The version of the weights."""
        return str(self._asked("/weight_info")["weight_version"])

    def set_version(self, version: str) -> None:
        """Set the version of the weights."""
        self._post("/update_weight_version", {"new_version": version})

    def clear_cache(self) -> None:
        """Clear the prefix cache."""
        if self._post("/reset_prefix_cache").get("success") is False:
            raise SystemRefusal(
                "the server did not clear its prefix cache",
                where=self.name,
                why="Requests that run hold blocks of it, which were computed with the weights before",
                do="Clear it with `curl -X POST .../reset_prefix_cache` once they have ended, or pause with mode wait or abort",
            )

    def resume(self) -> None:
        """Resume generation."""
        self._post("/resume")

    def leave(self) -> None:
        """Release the connection."""
        self._post("/shutdown_weight_transfer_engine")

    def _asked(self, path: str) -> Any:
        answer = self._server.ask(path)
        if answer is None:
            raise self._without_routes(path)
        return answer

    def _post(self, path: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
        status, reason, body = self._server.answer(path, question or {}, seconds=2 * self._seconds + _BEYOND)
        if status in (404, 405):
            raise self._without_routes(path)
        if not 200 <= status < 300:
            said = body[:300].decode("utf-8", "replace")
            raise SystemRefusal(f"the server answered {status} {printable(reason)[:80]} to {path}: {printable(said)}", where=self.name)
        answer = document(body, self.name) if body.strip() else {}
        return answer if isinstance(answer, dict) else {}

    def _without_routes(self, path: str) -> RequestError:
        return RequestError(
            f"the server has no {path}",
            where=self.name,
            why="vLLM has routes for updates only in its development mode",
            do=f"Start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with {_CONFIG}",
        )


class InProcessEngine:
    """vLLM's `LLM` in this process. It runs no requests during an update, since the caller is here."""

    name = "the engine in this process"

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._channel: dict[str, Any] = {}

    def ranks(self) -> int:
        """The number of workers."""
        config = self._llm.llm_engine.vllm_config
        found = config.weight_transfer_config and config.weight_transfer_config.backend
        if found != BACKEND:
            raise RequestError(
                f"its weight-transfer backend is {found!r}",
                where=self.name,
                do='Make it with weight_transfer_config={"backend": "reshard"}',
            )
        return int(config.parallel_config.world_size_across_dp)

    def own_address(self) -> str:
        """Its workers run on this machine."""
        return "127.0.0.1"

    def init(self, info: dict[str, Any]) -> None:
        """Let the workers join a channel."""
        self._channel = channel_of(info)
        self._llm.init_weight_transfer_engine({"init_info": info})

    def pause(self, mode: str) -> None:
        """Nothing runs."""

    def start(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update(self) -> None:
        """Let the workers receive."""
        self._llm.update_weights({"update_info": self._channel})

    def finish(self) -> None:
        """Install what was received, or drop it."""
        self._llm.finish_weight_update()

    def version(self) -> str:
        """The version of the weights."""
        return str(self._llm.get_weight_version())

    def set_version(self, version: str) -> None:
        """Set the version of the weights."""
        self._llm.update_weight_version(version)

    def clear_cache(self) -> None:
        """Clear the prefix cache."""
        self._llm.reset_prefix_cache()

    def resume(self) -> None:
        """Nothing was paused."""

    def leave(self) -> None:
        """Release the connection."""
        self._llm.shutdown_weight_transfer_engine()


def controls(engine: Any, seconds: float) -> Sequence[EngineControl]:
    """The engines that a caller means: an address, an `LLM`, an object with the methods of EngineControl, or a list of them."""
    if isinstance(engine, list | tuple):
        return [each for part in engine for each in controls(part, seconds)]
    if isinstance(engine, str):
        return [HttpEngine(engine, seconds)]
    return [InProcessEngine(engine) if hasattr(engine, "llm_engine") else engine]
