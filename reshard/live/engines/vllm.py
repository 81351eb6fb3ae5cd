"""vLLM: a server at an address, and `LLM` in this process. Run with vLLM 0.32."""

from __future__ import annotations

from typing import Any

from reshard.errors import RequestError, SystemRefusal
from reshard.live.engines.control import AskedServer
from reshard.live.wire.channel import channel_of

BACKEND = "reshard"
"""The name of the weight-transfer backend in the engine."""
_CONFIG = """`--weight-transfer-config '{"backend": "reshard"}'`"""


class VllmServer(AskedServer):
    """A server of vLLM at an address."""

    routes = (
        "vLLM has routes for updates only in its development mode",
        f"Start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with {_CONFIG}",
    )

    def ranks(self) -> int:
        """The number of workers, data-parallel ones included."""
        size, about = self._asked("/get_world_size"), self._asked("/server_info?config_format=json")
        try:
            count, transfer = size["world_size"], about["vllm_config"].get("weight_transfer_config") or {}
            backend = transfer.get("backend")
        except (AttributeError, KeyError, TypeError):
            count, backend = 0, None
        count = self._counted(count)
        if backend != BACKEND:
            raise RequestError(
                f"the server's weight-transfer backend is {backend!r}" if backend else "the server has no weight-transfer backend",
                where=self.name,
                do=f"Start it with {_CONFIG}, in an environment in which reshard is installed",
            )
        return count

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

    def is_paused(self) -> bool | None:
        """Whether requests wait."""
        answer = self._asked("/is_paused")
        return bool(answer["is_paused"]) if isinstance(answer, dict) and "is_paused" in answer else None


class VllmInProcess:
    """vLLM's `LLM` in this process. It runs no requests during an update, since the caller is here."""

    name = "the engine in this process"

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._channel: dict[str, Any] = {}

    def ranks(self) -> int:
        """The number of workers."""
        config = self._llm.llm_engine.vllm_config
        backend = config.weight_transfer_config and config.weight_transfer_config.backend
        if backend != BACKEND:
            raise RequestError(
                f"its weight-transfer backend is {backend!r}",
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

    def look(self) -> bool:
        """It is in this process; its requests fail when its workers have ended."""
        return True

    def is_paused(self) -> bool:
        """It runs nothing while the caller is here."""
        return False
