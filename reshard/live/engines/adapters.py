"""A server that takes LoRA adapters while it runs. Run with vLLM 0.32 and SGLang 0.5.23; the source of vLLM 0.33 has the same routes.

vLLM                            SGLang
POST /v1/load_lora_adapter      /load_lora_adapter      {"lora_name", "lora_path"}: from a folder that it sees
                                /load_lora_adapter_from_tensors         the tensors themselves (adapter_tensors.py); vLLM has no such route
POST /v1/unload_lora_adapter    /unload_lora_adapter    {"lora_name"}
GET  /v1/models                 the same                the base, and the adapters: as loaded; SGLang: those used last at the end
"model": ADAPTER                "model": BASE:ADAPTER   how a request asks for an adapter
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from reshard.errors import CheckpointError, RequestError, SystemRefusal, UnsupportedError
from reshard.geometry.value import value
from reshard.live.engines.control import AskedServer
from reshard.live.wire.transport import SECONDS

KEY = "RESHARD_SERVER_KEY"
"""The environment variable with the key of a server that asks for one (--api-key of vLLM)."""
_FROM_TENSORS = "/load_lora_adapter_from_tensors"


@value
class ServedModels:
    """What a server serves."""

    base: str
    """The name of its base model."""
    folder: str | None
    """The path or name from which the server opened the base; None if it does not say."""
    adapters: tuple[str, ...]
    """The names of its adapters: in the order in which they were loaded, or last used (SGLang)."""


class AdapterServer(AskedServer):
    """A server of vLLM that takes adapters."""

    engine: ClassVar[str] = "vLLM"
    """The engine."""
    prefix: ClassVar[str] = "/v1"
    """What its routes for adapters begin with."""
    routes = (
        "vLLM has routes for adapters only if its environment allows it",
        "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and with --enable-lora and --max-lora-rank",
    )

    def __init__(self, address: str) -> None:
        super().__init__(address, SECONDS, os.environ.get(KEY))

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the address is one of this machine's own, so that both see the same folders."""
        return self._server.own_address() == self._server.peer_address()

    def models(self) -> ServedModels:
        """What the server serves. Raises CheckpointError if it does not say."""
        if self._server.answer("/v1/models")[0] == 401:
            raise _asks_for_key(self.name)
        try:
            cards: Any = self._asked("/v1/models")["data"]
            (base,) = [card for card in cards if not card.get("parent")][:1]
            adapters = tuple(str(card["id"]) for card in cards if card.get("parent"))
            return ServedModels(str(base["id"]), self._folder_of(base), adapters)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError("the server does not say which models it serves", where=self.name) from None

    def load(self, adapter: str, folder: str) -> None:
        """Load an adapter from a folder. Raises SystemRefusal with what the server says, such as that its rank is too large."""
        self._post(f"{self.prefix}/load_lora_adapter", {"lora_name": adapter, "lora_path": folder})

    @property
    def takes_tensors(self) -> bool:
        """Whether it takes an adapter by `send`, without a folder that it sees."""
        return False

    def send(self, adapter: str, folder: Path) -> None:
        """Load an adapter from its tensors and settings, which lie in a folder of this machine. Raises as `load`."""
        raise UnsupportedError(f"{self.engine} takes adapters from folders alone", where=self.name)

    def unload(self, adapter: str) -> None:
        """Forget an adapter. Requests that run with it end first."""
        self._post(f"{self.prefix}/unload_lora_adapter", {"lora_name": adapter})

    def one_token(self, adapter: str) -> None:
        """Let the server generate a token with an adapter. Raises SystemRefusal if it does not."""
        answer = self._post("/v1/completions", {"model": adapter, "prompt": [1], "max_tokens": 1, "temperature": 0})
        self._check(answer.get("choices"))

    def _check(self, generated: object) -> None:
        if not generated:
            raise SystemRefusal("the server generated no token with the adapter", where=self.name)

    def _folder_of(self, base: dict[str, Any]) -> str | None:
        """The path or name from which the server opened the base. base: what it lists of the base."""
        return base.get("root") and str(base["root"])


class SglangAdapterServer(AdapterServer):
    """A server of SGLang that takes adapters."""

    engine = "SGLang"
    prefix = ""
    routes = ("SGLang has had these routes since 0.5", "Start it with --enable-lora, --max-lora-rank and --lora-target-modules")

    @property
    def takes_tensors(self) -> bool:
        # 405: the route is there, for POST alone.
        return self._server.answer(_FROM_TENSORS)[0] == 405

    def send(self, adapter: str, folder: Path) -> None:
        from reshard.live.engines.adapter_tensors import body_of

        self._post(_FROM_TENSORS, body_of(adapter, folder, self._counted(self._asked("/server_info").get("tp_size"))))

    def one_token(self, adapter: str) -> None:
        # Its own route, which answers without a tokenizer (--skip-tokenizer-init), as trainers start it.
        question = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "lora_path": adapter}
        self._check(self._post("/generate", question).get("meta_info"))

    def _folder_of(self, base: dict[str, Any]) -> str | None:
        return str(self._asked("/model_info")["model_path"])


def adapter_server(address: str) -> AdapterServer:
    """The server at an address. Raises UnsupportedError if its engine is not known."""
    server = AdapterServer(address)
    if server.has("/version"):
        return server
    if server.has("/model_info"):
        return SglangAdapterServer(address)
    raise UnsupportedError(
        "it is no server of vLLM or SGLang",
        where=server.name,
        why="Adapters alone go to vLLM and SGLang",
        do="Write the adapter with `to=peft`, and load it with the server's own route",
    )


def refusal(error: SystemRefusal, server: str, goes_on: bool) -> SystemRefusal | RequestError:
    """The error of a server that did not take an adapter. goes_on: whether it still answers, and so serves what it served before."""
    if " 401 " in f" {error.what} ":
        return _asks_for_key(server)
    why = "It goes on with the adapters that it had" if goes_on else "It does not answer any more"
    return SystemRefusal(error.what, where=server, why=why, do=error.do)


def _asks_for_key(server: str) -> RequestError:
    return RequestError(
        "the server asks for a key, or for another one",
        where=server,
        do=f"Set {KEY} in the environment to the server's --api-key, or its --admin-api-key",
    )
