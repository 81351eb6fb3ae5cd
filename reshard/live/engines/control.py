"""EngineControl: what source rank 0 asks of an engine. AskedServer is what engines with an HTTP server have in common."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from reshard.errors import CheckpointError, RequestError, SystemRefusal, printable
from reshard.storage.server import Question, Server, Silent, document

# What a request takes beyond the waits of the ranks among themselves.
_BEYOND = 60.0
_MOST_RANKS = 1 << 16


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

    def look(self) -> bool:
        """Whether it answers now. It may run requests of the others meanwhile. Raises SystemRefusal if it has ended."""

    def is_paused(self) -> bool | None:
        """Whether requests wait for `resume`; None: it does not tell."""


class AskedServer:
    """A server of an engine, asked by HTTP."""

    routes: ClassVar[tuple[str, str]]
    """Why a server of this engine may have no routes for updates, and how to start it with them."""

    def __init__(self, address: str, seconds: float, key: str | None = None) -> None:
        """seconds: the longest wait of a rank for another. key: what requests show a server that asks for a key."""
        self._server, self._seconds = Server(Server.at(address).address, key), seconds
        self._channel: dict[str, Any] = {}
        self.name = self._server.address

    def own_address(self) -> str:
        """This machine's address on the way to the server."""
        return self._server.own_address()

    def has(self, path: str) -> bool:
        """Whether it has a path, even if it asks for a key there."""
        return self._server.answer(path)[0] not in (404, 405)

    def look(self) -> bool:
        """Whether it answers now. Raises SystemRefusal if nobody listens at its address, or its engine has ended."""
        with suppress(Silent, CheckpointError):
            status, _, _ = self._server.answer("/health", seconds=self._seconds)
            if status == 503:
                raise SystemRefusal("the server's engine has ended: it answers 503 to /health", where=self.name)
            return True
        return False

    def _asked(self, path: str) -> Any:
        answer = self._server.ask(path)
        if answer is None:
            raise self._without_routes(path)
        return answer

    def _post(self, path: str, question: Question = None) -> dict[str, Any]:
        """What the server answers, if it is a JSON object; an empty one for another answer."""
        status, reason, body = self._server.answer(path, question or {}, seconds=2 * self._seconds + _BEYOND)
        if status in (404, 405) and b"NotFoundError" not in body:  # vLLM says so of an adapter
            raise self._without_routes(path)
        if not 200 <= status < 300:
            raise SystemRefusal(f"the server answered {status} {printable(reason)[:80]} to {path}: {_said(body)}", where=self.name)
        answer = document(body, self.name) if body.lstrip()[:1] == b"{" else {}
        return answer if isinstance(answer, dict) else {}

    def _counted(self, count: object) -> int:
        """A number of ranks in an answer. Raises CheckpointError if it is none."""
        if not isinstance(count, int) or not 0 < count < _MOST_RANKS:
            raise CheckpointError("the server does not say how many ranks it has", where=self.name)
        return count

    def _without_routes(self, path: str) -> RequestError:
        why, do = self.routes
        return RequestError(f"the server has no {path}", where=self.name, why=why, do=do)


def _said(body: bytes) -> str:
    """What the body of a refusal says, without the JSON around it: SGLang's error_message, vLLM's error with its message."""
    said: Any = body[:4096].decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):
        said = json.loads(said)
    for key in ("error_message", "error", "message", "detail"):
        said = said.get(key) or said if isinstance(said, dict) else said
    return printable(str(said))[:300]
