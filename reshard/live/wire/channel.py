"""A channel: how ranks of a trainer and of engines, which know nothing of each other, become ranks of one transport.

Source rank 0 opens a store at an address that the others can reach, and tells it to the engines by their own interface. Every rank says in
the store that it is there; then rank 0 says "go", or why not, so that nobody waits for ranks that do not come.

    store     "here <rank>"   this rank is there          "cannot"   why a rank cannot come          "go"   "" or why not
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from reshard.errors import RequestError, SystemRefusal, check_word
from reshard.geometry.value import value
from reshard.live.wire.notes import Notes
from reshard.live.wire.transport import SECONDS, TorchDistributed, Transport, reason
from reshard.storage.server import own_address

GROUP = "reshard.transports"
"""The entry points of other packages' transports: functions (store, rank, size, *, device, seconds, address) -> Transport."""
VERSION = 5
"""Of what the ranks say to each other. Both ends must have the same."""
_PAUSE = 0.02
# Who sets it has chosen the network interface for gloo.
_INTERFACE = "GLOO_SOCKET_IFNAME"


@value
class Joining:
    """What a rank must know to join."""

    host: str
    """Where source rank 0 can be reached."""
    port: int
    """The port of its store."""
    sources: int
    """The ranks of the trainer."""
    targets: int
    """The ranks of all engines."""
    offset: int = 0
    """Ranks of engines that come before those of this engine."""
    backend: str = "gloo"
    """What carries the bytes: gloo, nccl, shared, or the name of another transport."""
    seconds: float = SECONDS
    """The longest wait for another rank."""
    owner: str = "a sender"
    """Who sends: a program, its host and its process."""
    process: str = ""
    """A random text of its process, which no other one has."""
    take_over: bool = False
    """Whether it takes engines over that another sender has joined."""
    version: int = VERSION
    """The version of the protocol."""

    @staticmethod
    def of(info: Mapping[str, Any]) -> Joining:
        """From the values that the engine's interface has handed over. Raises RequestError for others than these."""
        if info.get("version") != VERSION:
            raise RequestError(
                f"the sender speaks version {info.get('version')} of the protocol of updates, the engine {VERSION}",
                do="Install the same version of reshard in the trainer's environment and in the engine's",
            )
        try:
            return Joining(**info)
        except TypeError as error:
            raise RequestError(f"the sender's values are not those of a channel: {error}") from None

    @property
    def size(self) -> int:
        """The ranks of the channel."""
        return self.sources + self.targets

    def to_json(self) -> dict[str, Any]:
        """What goes over the engine's interface."""
        return {name: getattr(self, name) for name in self.__slots__}  # type: ignore[attr-defined]


def channel_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a channel from others, of the values with which ranks join."""
    return {name: info.get(name) for name in ("host", "port")}


def opened_store(host: str, seconds: float = SECONDS) -> Any:
    """A store that other hosts can reach at this address, on a free port; it lives as long as this object."""
    distributed = _distributed()

    return distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def joined(joining: Joining, rank: int, store: Any = None, device: str = "cpu") -> tuple[Transport, Notes]:
    """The transport of a rank other than source rank 0, once all are there, and its way to the notes at source rank 0.

    Raises: RequestError with the reason of rank 0 if it does not let them go.
    """
    distributed = _distributed()

    seconds = joining.seconds
    store = store or distributed.TCPStore(
        joining.host, joining.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )
    try:
        if not 0 < rank < joining.size:
            raise RequestError(f"rank {rank} is not one of the {joining.size} of the channel", do="Ask the engine for its ranks again")
        join = _joins(joining.backend)
        store.set(f"here {rank}", "")
        if refusal := store.get("go").decode():
            raise RequestError(refusal)
        address = None if _INTERFACE in os.environ else own_address(f"http://{_bracketed(joining.host)}:{joining.port}")
        transport = join(_prefixed(store), rank, joining.size, device=device, seconds=seconds, address=address)
        return transport, notes_of(joining, store)
    except Exception as error:
        store.set("cannot", f"rank {rank}: {reason(error)}")
        raise


def led(joining: Joining, store: Any, check: Callable[[], None], device: str = "cpu") -> Transport:
    """The transport of source rank 0, once all are there.

    check: raises if the engines cannot come, such as when a request to one of them has failed.
    """
    awaited, ends_at = [f"here {rank}" for rank in range(1, joining.size)], time.monotonic() + joining.seconds
    try:
        join = _joins(joining.backend)
        while awaited:
            check()
            if store.check(["cannot"]):
                raise SystemRefusal(store.get("cannot").decode(), where="the channel between trainer and engine")
            if store.check(awaited[:1]):
                awaited.pop(0)
            elif time.monotonic() > ends_at:
                raise SystemRefusal(
                    f"{len(awaited)} of {joining.size} ranks did not come within {joining.seconds:.0f} s, the first is{awaited[0][4:]}",
                    where="the channel between trainer and engine",
                    do=f"Check that the engine's machine reaches {joining.host}:{joining.port}",
                )
            else:
                time.sleep(_PAUSE)
    except Exception as error:
        store.set("go", reason(error))
        raise
    store.set("go", "")
    address = None if _INTERFACE in os.environ else joining.host
    return join(_prefixed(store), 0, joining.size, device=device, seconds=joining.seconds, address=address)


def notes_of(joining: Joining, store: Any) -> Notes:
    """A rank's way to the notes at source rank 0."""
    return Notes(store, partial(own_address, f"http://{_bracketed(joining.host)}:{joining.port}"))


def _bracketed(host: str) -> str:
    """A host in an address: of version 6 of IP in brackets."""
    return f"[{host}]" if ":" in host else host


def _prefixed(store: Any) -> Any:
    """The part of the store that belongs to the transport."""
    return _distributed().PrefixStore("transport", store)


def _joins(backend: str) -> Callable[..., Transport]:
    """The function by which a rank joins: of this package, or of another one's entry point.

    Raises: RequestError for an unknown name.
    """
    if backend == "shared":
        from reshard.live.wire.shared_memory import SharedMemory

        return SharedMemory.meet
    if backend in ("gloo", "nccl"):
        return partial(TorchDistributed.join, backend=backend)
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=GROUP)}
    check_word("transport", backend, ["gloo", "nccl", "shared", *found])
    join: Callable[..., Transport] = found[backend].load()
    return join


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed
