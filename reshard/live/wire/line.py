"""Line: tensors under way between this rank and others, in their order; Outcome: what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

from reshard.geometry.value import mutable, value
from reshard.live.wire.transport import Pending, Transport, reason

if TYPE_CHECKING:
    import torch

_BUFFERS = 2
_UNDER_WAY = 8
Result = TypeVar("Result")


@mutable
class Outcome:
    """What became of a rank's part of an update."""

    nbytes: int = 0
    """Bytes of weights that were sent or received."""
    failures: list[str] = field(default_factory=list)
    """What went wrong, in the order of time; empty: nothing."""
    fingerprint: str = ""
    """That of what was sent, if it is known."""
    lost: set[int] = field(default_factory=set)
    """Ranks of the channel whose connections ended."""

    def attempt(self, peer: int, action: Callable[[], Result]) -> Result | None:
        """Do something with another rank, unless its connection has ended; returns what comes of it. What goes wrong is noted."""
        if peer not in self.lost:
            try:
                return action()
            except Exception as error:
                self.lost.add(peer)
                self.failures.append(reason(error))
        return None


@value(eq=False)
class _UnderWay:
    """A tensor under way."""

    peer: int
    """The other rank."""
    pending: Pending
    """Ends when it has left, or has arrived."""
    then: Callable[[], None] | None
    """What is done once it has arrived."""
    buffer: int
    """The number of the buffer that it lies in; -1: none."""
    tensor: torch.Tensor
    """It must live until it has left."""


class Line:
    """Parcels under way, in their order: at most two in buffers, and some more that lie where they belong."""

    def __init__(self, transport: Transport, buffers: list[torch.Tensor], outcome: Outcome) -> None:
        self._transport, self._buffers, self._outcome = transport, buffers, outcome
        self._under_way: deque[_UnderWay] = deque()
        self._turn = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A buffer that nothing uses: the other one's parcel may still be under way."""
        import torch

        self._turn = (self._turn + 1) % _BUFFERS
        while any(sending.buffer == self._turn for sending in self._under_way):
            self._settle()
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._transport.device))
        if len(self._buffers[self._turn]) < nbytes:
            self._buffers[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device=self._transport.device)
        return self._buffers[self._turn][:nbytes]

    def begin(
        self,
        operation: Callable[[int, torch.Tensor], Pending],
        peer: int,
        tensor: torch.Tensor,
        then: Callable[[], None] | None = None,
        *,
        is_buffer: bool,
    ) -> None:
        """Begin to send or receive a parcel. then: what is done once it has arrived. is_buffer: whether it lies in the latest buffer."""
        if len(self._under_way) == _UNDER_WAY:
            self._settle()
        buffer = self._turn if is_buffer else -1
        self._outcome.attempt(peer, lambda: self._under_way.append(_UnderWay(peer, operation(peer, tensor), then, buffer, tensor)))

    def end(self) -> None:
        """Wait for all parcels."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        first = self._under_way.popleft()
        self._outcome.attempt(first.peer, first.pending.wait)
        if first.then is not None and first.peer not in self._outcome.lost:
            try:
                first.then()
            except Exception as error:
                self._outcome.failures.append(reason(error))
