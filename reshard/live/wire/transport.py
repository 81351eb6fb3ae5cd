"""Transport: what carries bytes between the ranks of trainers and engines. TorchDistributed does it with a process group of its own.

The ranks of a channel are numbered through: the trainer's 0..n-1 first, then the engines'. Two kinds of content travel between two ranks:

    tensors    contiguous, of a length that both ends know; counted in `nbytes_sent` and `nbytes_received`
    messages   a small JSON document, and bytes that belong to it; not counted, and sealed (secret.py): lengths, both, seal [32]

What one rank sends to another arrives in order. Another transport is another class with these methods (docs/extending/transport.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import RequestError, ReshardError, SystemRefusal, printable
from reshard.geometry.value import value
from reshard.live.wire.secret import SEAL, Seal, derived
from reshard.storage.json_input import parsed

if TYPE_CHECKING:
    import torch

SECONDS = 300.0
"""The longest wait for another rank, by default."""
# The hello of 40,000 tensors has 10 MB and 400,000 values. The schedule of a rank has a few megabytes.
_MOST_DOCUMENT, _MOST_CONTENT, _MOST_VALUES = 32 << 20, 256 << 20, 1 << 20
_NO_KEY = bytes(SEAL)
_NOTHING = 1
"""A tag under which no rank sends."""


@value(eq=False)
class Message:
    """A document, and bytes that belong to it."""

    document: Mapping[str, Any]
    content: bytes = b""


class Pending(Protocol):
    """A tensor that is under way."""

    def wait(self) -> object:
        """Wait until it has left, or has arrived. Raises an exception of the transport if it did not."""


class Transport(Protocol):
    """Point-to-point connections between the ranks of a channel, of which this process is one. Errors are SystemRefusal, or any exception
    of the library that carries the bytes: a connection that ends and a wait that takes too long are such errors."""

    rank: int
    """This process's rank in the channel."""
    size: int
    """The number of ranks."""
    device: str
    """Where tensors must lie that are sent and received, such as "cpu" or "cuda:0"."""
    nbytes_sent: int
    """The bytes of tensors that were sent."""
    nbytes_received: int
    """The bytes of tensors that were received."""
    key: bytes
    """32 bytes that the ranks of the channel know and nobody else: the `key` of the store."""

    def send(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to send a contiguous tensor, which must not change until it has left."""

    def receive(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to receive into a contiguous tensor."""

    def tell(self, peer: int, document: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message, and wait until it has left."""

    def hear(self, peer: int) -> Message:
        """Wait for a message."""

    def close(self) -> None:
        """End the connections. Waits in other threads, and those of the other ranks for this one, end with an error. A second call does
        nothing."""


class TorchDistributed:
    """A process group of torch that has only these ranks, apart from the default group of trainer or engine."""

    def __init__(self, group: Any, device: str = "cpu", store: Any = None) -> None:
        """group: a ProcessGroup that can send and receive. device: where its tensors lie. store: that of the group."""
        self.group, self.store = group, store
        # A store of torch's own has no key: then seals tell damage only.
        self.key = getattr(store, "key", _NO_KEY)
        self._seal = Seal(self.key)
        self.rank, self.size, self.device = group.rank(), group.size(), device
        self.nbytes_sent = self.nbytes_received = 0

    @staticmethod
    def join(
        store: Any,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        seconds: float = SECONDS,
        address: str | None = None,
    ) -> TorchDistributed:
        """Become one rank of a channel; returns once all have. store: a torch store that all ranks share, and nobody else.

        backend: gloo, whose tensors lie in the memory of the host, or nccl, whose tensors lie on `device`. address: where the other ranks
        reach this one by gloo; None: what gloo finds, by GLOO_SOCKET_IFNAME or by the name of the host.
        """
        import torch.distributed as dist

        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=seconds)
            options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
            group: Any = gloo(store, rank, size, options)
        elif backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds)
            group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            raise RequestError(f"backend {backend!r} is unknown", do="Use gloo or nccl")
        return TorchDistributed(group, device if backend == "nccl" else "cpu", store)

    def send(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to send a contiguous tensor."""
        self.nbytes_sent += tensor.nbytes
        return self.begun("send", peer, tensor)

    def receive(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to receive into a contiguous tensor."""
        self.nbytes_received += tensor.nbytes
        return self.begun("recv", peer, tensor)

    def tell(self, peer: int, document: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message: the lengths of its two parts, then both and the seal."""
        import torch

        text = json.dumps(document, separators=(",", ":")).encode()
        lengths = torch.tensor([len(text), len(content)], dtype=torch.int64, device=self.device)
        seal = self._seal.of(f"{self.rank} to {peer}", _sealed(len(text), text + content))
        body = torch.frombuffer(bytearray(text + content + seal), dtype=torch.uint8).to(self.device)
        self.begun("send", peer, lengths).wait()
        self.begun("send", peer, body).wait()

    def hear(self, peer: int) -> Message:
        """Wait for a message. Raises SystemRefusal for what is too large, not sealed, or not a JSON object, in this order."""
        import torch

        where = f"rank {peer} of the channel"
        lengths = torch.empty(2, dtype=torch.int64, device=self.device)
        self.begun("recv", peer, lengths).wait()
        text, content = lengths.tolist()
        if not (0 < text <= _MOST_DOCUMENT and 0 <= content <= _MOST_CONTENT):
            raise SystemRefusal(f"a message claims {text:,} and {content:,} bytes", where=where)
        body = torch.empty(text + content + SEAL, dtype=torch.uint8, device=self.device)
        self.begun("recv", peer, body).wait()
        data = body.cpu().numpy().tobytes()
        self._seal.check(f"{peer} to {self.rank}", _sealed(text, data[:-SEAL]), data[-SEAL:], where)
        return Message(_document(data[:text], where), data[text:-SEAL])

    def close(self) -> None:
        """End the connections."""
        group, self.group = self.group, None
        if group is not None:
            self._break(group)
            group.abort()

    def _break(self, group: Any) -> None:
        """Let the waits of gloo end, on both sides; `abort` of torch 2.13 leaves them asleep. A wait that takes too long breaks all
        connections of its group (gloo/transport/tcp/unbound_buffer.cc), so one is made that waits for what nobody sends."""
        import torch

        if self.device == "cpu":
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], (self.rank + 1) % self.size, _NOTHING).wait(timedelta(milliseconds=1))

    def begun(self, operation: str, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin `send` or `recv` of the group; what goes wrong names the other rank."""
        group = self.group
        if group is None:
            raise ConnectionEnded("this rank has ended the connection to it", where=f"rank {peer} of the channel")
        try:
            pending: Pending = getattr(group, operation)([tensor], peer, 0)
        except RuntimeError as error:
            raise lost(peer, error) from None
        return _Work(pending, peer)


def _sealed(text: int, body: bytes) -> bytes:
    """What the seal of a message is about: the length of its document, too."""
    return text.to_bytes(8) + body


def _document(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a message. Raises SystemRefusal for another one, and for too many values, which are counted before."""
    if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise SystemRefusal(f"a message has more than {_MOST_VALUES:,} values", where=where)
    try:
        told = parsed(text)
    except ValueError as error:
        raise SystemRefusal(f"a message is not JSON: {printable(str(error))[:80]}", where=where) from None
    if not isinstance(told, dict):
        raise SystemRefusal("a message is not a JSON object", where=where)
    return told


class _Work:
    """A work of torch whose exceptions name the other rank."""

    def __init__(self, work: Any, peer: int) -> None:
        self._work, self._peer = work, peer

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise lost(self._peer, error) from None


def payload_digest(transport: Transport) -> Any:
    """A BLAKE3 digest with a key that only the ranks of the channel know: who changes bytes on their way cannot change it with them."""
    from blake3 import blake3

    return blake3(key=derived(transport.key, b"payload"))


class ConnectionEnded(SystemRefusal):
    """A connection to another rank of the channel carries nothing more."""


def lost(peer: int, error: Exception) -> ConnectionEnded:
    """The error for a connection that carries nothing more."""
    # Gloo puts its own file before its sentence, and advice behind it.
    said = reason(error).partition(" This is typically")[0].partition("] ")
    return ConnectionEnded(f"the connection to it ended: {said[2] or said[0]}", where=f"rank {peer} of the channel")


def reason(error: Exception) -> str:
    """An exception as a sentence for other ranks: reshard's own as they are, others with their type, without a stack."""
    if isinstance(error, ReshardError):
        return str(error)
    return printable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
