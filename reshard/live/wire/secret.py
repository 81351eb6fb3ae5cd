"""Secret: what the ranks of one channel know and nobody else; how it reaches an engine, and the seal that it puts on what ranks say.

    file          one host: 32 bytes in the host's memory (own_memory.py), which the sender removes once all ranks have joined
    environment   RESHARD_LIVE_TOKEN, the same text for trainer and engine. An engine that has it takes no other secret
    request       in the request to the engine, where the caller trusts the network

The key of a channel follows from the secret and from all that its ranks are told: version, address, sizes, and a number of its own.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections import Counter
from contextlib import suppress

from reshard.errors import RequestError, SystemRefusal
from reshard.geometry.value import value
from reshard.live.wire import own_memory

TOKEN = "RESHARD_LIVE_TOKEN"
"""The environment variable."""
SECRET = "secret"
"""The key of what the request to the engine says of the secret."""
SEAL = 32
"""Bytes of a seal, HMAC-SHA256, of a key, and of a secret that is made here."""
SAME = f"Set {TOKEN} to the same text for the trainer and for the engine, before they start"
"""What to do where the secrets differ."""


@value(repr=False)
class Secret:
    """A secret, and how the engine gets it."""

    content: bytes
    """What is secret."""
    told: str
    """What the request to the engine says: how it gets the secret; of a way by the request, the secret itself."""

    @staticmethod
    def of(is_one_host: bool, trust_network: bool) -> Secret:
        """The secret of a new channel. Raises RequestError if it cannot reach the engine without being seen."""
        if token := os.environ.get(TOKEN):
            return Secret(token.encode(), "environment")
        content = secrets.token_bytes(SEAL)
        if trust_network:
            return Secret(content, f"request {content.hex()}")
        if not is_one_host:
            raise RequestError(
                "the engine is not asked at a loopback address, so it cannot be told the secret of the update without being overheard",
                why="Whoever knows it can take part in the update; nothing was sent",
                do=f"{SAME}; or, in a network that you trust, push with --trust-network or Sender(..., trust_network=True)",
            )
        number, descriptor = own_memory.made(SEAL)
        os.pwrite(descriptor, content, 0)
        os.close(descriptor)
        return Secret(content, f"file {number}")

    @staticmethod
    def heard(told: object) -> bytes:
        """The secret as an engine's rank gets it. Raises RequestError if it does not."""
        if token := os.environ.get(TOKEN):
            return token.encode()
        way, _, rest = told.partition(" ") if isinstance(told, str) else ("", "", "")
        if way == "file":
            descriptor = own_memory.opened(rest, SEAL)
            try:
                return os.pread(descriptor, SEAL, 0)
            finally:
                os.close(descriptor)
        with suppress(ValueError):
            if way == "request" and len(content := bytes.fromhex(rest)) == SEAL:
                return content
        raise RequestError(f"{TOKEN} is not set here, and the sender tells no other secret", do=SAME)

    def forget(self) -> None:
        """Remove the file: all ranks have the secret."""
        way, _, number = self.told.partition(" ")
        if way == "file":
            own_memory.removed(number)


def derived(key: bytes, purpose: bytes) -> bytes:
    """A key for one purpose."""
    return hmac.digest(key, purpose, "sha256")


class Seal:
    """The seals of messages, each with its way and its number on this way: none can be said twice, elsewhere or later."""

    def __init__(self, key: bytes) -> None:
        self._key, self._numbers = key, Counter[str]()

    def of(self, way: str, content: bytes) -> bytes:
        """The seal of the next message on a way."""
        seal = hmac.new(self._key, f"{way}, {self._numbers[way]}:".encode(), "sha256")
        self._numbers[way] += 1
        seal.update(content)
        return seal.digest()

    def check(self, way: str, content: bytes, seal: bytes, where: str) -> None:
        """Raises SystemRefusal unless this is the seal of the next message on a way."""
        if not hmac.compare_digest(self.of(way, content), seal):
            raise SystemRefusal("what came from there is not sealed with the secret of this update", where=where, do=SAME)
