"""A channel: how ranks of a trainer and of engines, which know nothing of each other, become ranks of one transport.

Source rank 0 opens a meeting (meeting.py) at an address that the others can reach, and tells it to the engines by their own interface. Only
who knows the secret (secret.py) is heard there. Every rank says that it is there; then rank 0 says "go", or why not, so that nobody waits
for ranks that do not come.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from ipaddress import ip_address
from typing import Any

from reshard.errors import RequestError, ReshardError, SystemRefusal, check_word
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.live.wire.meeting import CANNOT, Guest, Meeting, torch_store
from reshard.live.wire.secret import SECRET, derived
from reshard.live.wire.transport import SECONDS, TorchDistributed, Transport, reason

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
    """The port of its meeting."""
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

    channel: str = ""
    """The number of this channel, which no other one has."""

    @staticmethod
    def of(info: Mapping[str, Any]) -> Joining:
        """From the values that the engine's interface has handed over. Raises RequestError for others than these."""
        if info.get("version") != VERSION:
            raise RequestError(
                f"the sender speaks version {info.get('version')} of the protocol of updates, the engine {VERSION}",
                do="Install the same version of reshard in the trainer's environment and in the engine's",
            )
        try:
            return Joining(**{name: told for name, told in info.items() if name != SECRET})
        except TypeError as error:
            raise RequestError(f"the sender's values are not those of a channel: {error}") from None

    def key(self, secret: bytes) -> bytes:
        """The key of the channel, which follows from the secret and from all that every rank is told."""
        return derived(secret, json.dumps(asdict(replace(self, offset=0)), sort_keys=True).encode())

    @property
    def size(self) -> int:
        """The ranks of the channel."""
        return self.sources + self.targets


def channel_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a channel from others, of the values with which ranks join."""
    return {name: info.get(name) for name in ("host", "port", "channel")}


def joined(joining: Joining, rank: int, key: bytes, device: str = "cpu") -> tuple[Transport, Guest]:
    """The transport of a rank other than source rank 0, once all are there, and its end of the meeting.

    Raises: RequestError with the reason of rank 0 if it does not let them go. SystemRefusal if it does not know the key.
    """
    guest = Guest(joining.host, joining.port, key, joining.seconds)
    try:
        if not 0 < rank < joining.size:
            raise RequestError(f"rank {rank} is not one of the {joining.size} of the channel", do="Ask the engine for its ranks again")
        join = _joins(joining.backend)
        guest.ask(f"here {rank}", "")
        if refusal := guest.wait("go"):
            raise RequestError(refusal)
        address = None if _INTERFACE in os.environ else guest.address
        transport = join(torch_store(guest), rank, joining.size, device=device, seconds=joining.seconds, address=address)
        return transport, guest
    except Exception as error:
        if not guest.ask(CANNOT):
            guest.ask(CANNOT, f"rank {rank}: {reason(error)}")
        raise


def led(joining: Joining, meeting: Meeting, check: Callable[[], None], device: str = "cpu") -> tuple[Transport, Guest]:
    """The transport of source rank 0, once all are there, and its end of the meeting, which ends with it.

    check: raises if the engines cannot come, such as when a request to one of them has failed.
    """
    guest = meeting.guest(joining.seconds)
    awaited, ends_at = [*range(1, joining.size)], time.monotonic() + joining.seconds
    try:
        join = _joins(joining.backend)
        while awaited:
            if refusal := guest.ask(CANNOT):
                raise SystemRefusal(refusal, where="the channel between trainer and engine")
            check()
            if guest.ask(f"here {awaited[0]}", seconds=_PAUSE) is not None:
                awaited.pop(0)
            elif time.monotonic() > ends_at:
                raise SystemRefusal(
                    f"{len(awaited)} of {joining.size} ranks did not come within {joining.seconds:.0f} s, the first is {awaited[0]}",
                    where="the channel between trainer and engine",
                    do=f"Check that the engine's machine reaches {joining.host}:{joining.port}",
                )
        guest.ask("go", "")
        address = None if _INTERFACE in os.environ else joining.host
        return join(torch_store(guest), 0, joining.size, device=device, seconds=joining.seconds, address=address), guest
    except Exception as error:
        if isinstance(error, ReshardError) and meeting.strangers:
            error.why = f"{plural(meeting.strangers, 'connection')} did not know the secret of this update"
        guest.ask("go", reason(error))
        meeting.close()
        raise


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


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

    by_name = {point.name: point for point in entry_points(group=GROUP)}
    check_word("transport", backend, ["gloo", "nccl", "shared", *by_name])
    join: Callable[..., Transport] = by_name[backend].load()
    return join
