"""The meeting: where the ranks of a channel tell each other that they are there, and their addresses. Source rank 0 opens it at a port.

    meeting     nonce [16]                 first, whoever connects
    rank        nonce [16]
    rank        length [4] seal [32] JSON  [name, value, seconds, before]: set a value, or wait for one
    meeting     length [4] seal [32] JSON  the value; null: nobody has set it

The key of a connection follows from the channel's key and both nonces, so nothing of another connection can be said again, and both ends
prove that they know it. A length beyond its limit, then a seal that is not right end the connection, before anything is parsed. Strangers
take no thread, at most MOST_UNKNOWN connections and SECONDS_UNKNOWN seconds; more of them end the oldest ones.

Values that ranks leave for each other here outlive connections of the transport that are broken:

    here N      rank N is there
    cannot      why a rank cannot come
    go          empty, or why the ranks are not let in
    stop        why source rank 0 has stopped the update, for the other source ranks
    end         how the update ended, for source ranks that have stopped
    read N      source rank N has read the end
    turn N      whose turn the engine is whose first rank is target rank N: BUSY while source rank 0 updates it; who has taken it over, and
                when; or empty
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reshard.errors import SystemRefusal
from reshard.live.wire.secret import SAME, SEAL, Seal, derived

MOST_UNKNOWN = 128
"""Connections that have not said anything with a right seal."""
SECONDS_UNKNOWN = 10.0
"""How long they may take."""
_NONCE, _LENGTH = 16, 4
_MOST_FIRST, _MOST = 1 << 10, 1 << 20
_SLICE, _TRIES, _PAUSE, _SECONDS = 0.5, 20, 0.1, 3.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""All addresses of this machine -> one of them."""
CANNOT, BUSY = "cannot", "busy"


def turn_of(offset: int) -> str:
    """The name of the value that says whose turn an engine is. offset: the number of its first rank."""
    return f"turn {offset}"


class Meeting:
    """The end of source rank 0, served by a thread."""

    def __init__(self, host: str, port: int = 0) -> None:
        """host, port: of this machine; 0: a free port. Nobody is heard before `open`. Raises SystemRefusal if nothing can listen there."""
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise SystemRefusal(
                f"nothing can listen at {host}, port {port}: {error.strerror or error}",
                do="Choose an address of this machine and a free port, with --bind and --port, or Sender(..., bind=, port=)",
            ) from None
        self.port = int(self._socket.getsockname()[1])
        """The port."""
        self.strangers = 0
        """Connections that ended without a right seal."""
        self._key, self._values = b"", dict[str, str]()
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._unknown: dict[asyncio.StreamWriter, None] = {}
        self._came: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def open(self, key: bytes) -> Meeting:
        """Hear who knows the key; returns this meeting."""
        self._key = key
        threading.Thread(target=self._run, name="reshard meeting", daemon=True).start()
        return self

    def guest(self, seconds: float) -> Guest:
        """The end of source rank 0, which has come."""
        host, port = self._socket.getsockname()[:2]
        guest = Guest(ANY_ADDRESS.get(host, host), port, self._key, seconds)
        guest.close = self.close
        return guest

    def close(self) -> None:
        """End all connections soon, once answers that are due are on their way, and listen no more. A second call does nothing."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._met, sock=self._socket)
        await self._over.wait()
        server.close()
        await asyncio.sleep(_PAUSE)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, until it ends or says something that is not right."""
        self._unknown[writer] = None
        if len(self._unknown) > MOST_UNKNOWN:
            next(iter(self._unknown)).transport.abort()
            self._unknown.pop(next(iter(self._unknown)))
        is_known = False
        with suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(SECONDS_UNKNOWN):
                writer.write(nonce := secrets.token_bytes(_NONCE))
                seal = Seal(derived(self._key, nonce + await reader.readexactly(_NONCE)))
                asked = await _asked(reader, seal, _MOST_FIRST)
            is_known = True
            self._unknown.pop(writer, None)
            while True:
                writer.write(_framed(seal, "answer", await self._answer(*asked)))
                await writer.drain()
                asked = await _asked(reader, seal, _MOST)
        self.strangers += not is_known
        self._unknown.pop(writer, None)
        writer.close()

    async def _answer(self, name: str, value: str | None, seconds: float, before: str | None) -> str | None:
        if value is not None and before in (None, self._values.get(name, "")):
            self._values[name] = value
            self._came[name].set()
        elif seconds:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came[name].wait(), min(seconds, _SLICE))
        return self._values.get(name)


async def _asked(reader: asyncio.StreamReader, seal: Seal, most: int) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH))
    if length > most:
        raise ValueError(length)
    own, body = await reader.readexactly(SEAL), await reader.readexactly(length)
    seal.check("question", body, own, "a connection")
    return json.loads(body)


def _framed(seal: Seal, way: str, document: Any) -> bytes:
    body = json.dumps(document).encode()
    return len(body).to_bytes(_LENGTH) + seal.of(way, body) + body


class Guest:
    """The end of a rank, also of source rank 0."""

    def __init__(self, host: str, port: int, key: bytes, seconds: float) -> None:
        """seconds: the longest wait for a value. Raises SystemRefusal if nobody who knows the key listens there."""
        self.key, self._seconds, self._lock = key, seconds, threading.Lock()
        self._place, self._where = (host, port), f"{host}, port {port}"
        ends_at = time.monotonic() + SECONDS_UNKNOWN
        for _ in range(_TRIES):
            # Strangers who flood the meeting end the oldest connections that have not said anything yet: then this one comes again.
            with suppress(OSError):
                self._connection = socket.create_connection((host, port), SECONDS_UNKNOWN)
                nonce = self._received(_NONCE)
                self._connection.sendall(own := secrets.token_bytes(_NONCE))
                self._seal = Seal(derived(key, nonce + own))
                self._exchanged([CANNOT, None, 0.0, None])
                self._connection.settimeout(seconds)
                self.address = str(self._connection.getsockname()[0])
                """The address of this machine on the way to source rank 0."""
                self.close: Callable[[], None] = self._connection.close
                """Ends the connection; that of source rank 0 ends the meeting."""
                return
            if time.monotonic() > ends_at:
                break
            time.sleep(_PAUSE)
        raise SystemRefusal("the sender is not there, or does not know the secret of this update", where=self._where, do=SAME)

    def ask(self, name: str, value: str | None = None, seconds: float = 0.0, before: str | None = None) -> str | None:
        """The value of a name; None: there is none. value: set it first, in any case or if it is `before`, which is empty if there is none.
        seconds: wait for it so long."""
        try:
            told: str | None = self._exchanged([name, value, seconds, before])
            return told
        except OSError as error:
            raise SystemRefusal(f"the connection to the sender ended: {error}", where=self._where) from None

    def wait(self, name: str, seconds: float | None = None) -> str:
        """The value of a name. Raises SystemRefusal if nobody sets it in time, or a rank says that it cannot come."""
        ends_at = time.monotonic() + (self._seconds if seconds is None else seconds)
        while (value := self.ask(name, seconds=_SLICE)) is None:
            if refusal := self.ask(CANNOT):
                raise SystemRefusal(refusal, where="the channel between trainer and engine")
            if time.monotonic() > ends_at:
                raise SystemRefusal(f"nobody has told {name!r} within {self._seconds:.0f} s", where=self._where)
        return value

    def is_heard(self) -> bool:
        """Whether source rank 0 is there, without waiting for an answer of it: a process that is stopped is there."""
        try:
            socket.create_connection(self._place, _SECONDS).close()
        except OSError:
            return False
        return True

    def _exchanged(self, question: list[Any]) -> Any:
        with self._lock:
            self._connection.sendall(_framed(self._seal, "question", question))
            length = int.from_bytes(self._received(_LENGTH))
            if length > _MOST:
                raise SystemRefusal(f"an answer claims {length:,} bytes", where=self._where)
            seal, body = self._received(SEAL), self._received(length)
            self._seal.check("answer", body, seal, self._where)
        return json.loads(body)

    def _received(self, nbytes: int) -> bytes:
        content = bytearray()
        while len(content) < nbytes:
            if not (part := self._connection.recv(min(nbytes - len(content), 1 << 16))):
                raise ConnectionError("the connection was closed")
            content += part
        return bytes(content)


def torch_store(guest: Guest) -> Any:
    """A store of torch.distributed in the meeting, for a transport; its `key` is known to the ranks of the channel alone."""
    from torch._C import _distributed_c10d

    base: Any = _distributed_c10d.Store  # the same to mypy where torch is not installed

    class MeetingStore(base):  # type: ignore[misc]
        key = derived(guest.key, b"transport")

        def set(self, name: str, value: str | bytes) -> None:
            content = value.encode() if isinstance(value, str) else bytes(value)
            guest.ask(f"transport/{name}", content.decode("latin-1"))

        def get(self, name: str) -> bytes:
            return guest.wait(f"transport/{name}").encode("latin-1")

        def wait(self, names: list[str], timeout: Any = None) -> None:
            for name in names:
                guest.wait(f"transport/{name}", timeout and timeout.total_seconds())

        def check(self, names: list[str]) -> bool:
            return all(guest.ask(f"transport/{name}") is not None for name in names)

    return MeetingStore()
