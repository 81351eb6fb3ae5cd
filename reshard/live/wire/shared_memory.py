"""SharedMemory: a transport for ranks on one host. Bytes go through memory that they share, and gloo carries only notes of it.

Each rank has a file of SLOTS slots in the memory of the host (own_memory.py); nothing of it takes memory before it is used. What it sends
is copied into the next slot that is free:

    sender      copies into a slot     note [slot, bytes] ──▶     waits for the note that comes back, then uses the slot again
    receiver                           copies out of the slot     ◀── note

The files have no name any more once all ranks have opened them, so nothing is left behind, whatever ends.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError
from reshard.live.wire import own_memory
from reshard.live.wire.transport import SECONDS, Pending, TorchDistributed

if TYPE_CHECKING:
    import torch

SLOTS = 3
SLOT = 32 << 20
"""Bytes of a slot. A longer tensor goes through several."""


class SharedMemory(TorchDistributed):
    """A process group of torch on one host, whose tensors travel through shared memory."""

    def __init__(self, group: Any, files: dict[int, torch.Tensor], store: Any = None) -> None:
        """files: of each rank its slots. store: that of the group."""
        super().__init__(group, store=store)
        self._files = files
        self._busy = [_Notes() for _ in range(SLOTS)]
        self._next = 0

    @staticmethod
    def meet(
        store: Any, rank: int, size: int, *, device: str = "cpu", seconds: float = SECONDS, address: str | None = None
    ) -> SharedMemory:
        """Become one rank of a channel; returns once all have.

        Raises: RequestError if a rank is on another host, or cannot see the files of this one.
        """
        joined = TorchDistributed.join(store, rank, size, seconds=seconds, address=address)
        own, descriptor = own_memory.made(SLOTS * SLOT)
        try:
            files = {rank: _mapped(descriptor)}
            store.set(f"file {rank}", own)
            for other in range(size):
                if other != rank:
                    files[other] = _mapped(own_memory.opened(store.get(f"file {other}").decode(), SLOTS * SLOT))
            store.set(f"opened {rank}", "")
            for other in range(size):
                store.get(f"opened {other}")
        finally:
            own_memory.removed(own)
        return SharedMemory(joined.group, files, store)

    def send(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to send a contiguous tensor. It may change at once: it has been copied."""
        import torch

        self.nbytes_sent += tensor.nbytes
        data = tensor.reshape(-1).view(torch.uint8)
        last = _Notes()
        for start in range(0, len(data), SLOT):
            part, slot = data[start : start + SLOT], self._next
            self._next = (slot + 1) % SLOTS
            self._busy[slot].wait()
            self._files[self.rank][slot * SLOT : slot * SLOT + len(part)].copy_(part)
            last = self._busy[slot] = _Notes(self._note(peer, slot, len(part)), self._noted(peer)[1])
        return last

    def receive(self, peer: int, tensor: torch.Tensor) -> Pending:
        """Begin to receive into a contiguous tensor; it is filled by `wait`."""
        import torch

        self.nbytes_received += tensor.nbytes
        data = tensor.reshape(-1).view(torch.uint8)
        parts = [data[start : start + SLOT] for start in range(0, len(data), SLOT)]
        return _Arriving(self, peer, [(part, *self._noted(peer)) for part in parts])

    def close(self) -> None:
        """End the connections, and give the memory back."""
        super().close()
        self._files = {}

    def take(self, peer: int, part: torch.Tensor, note: torch.Tensor) -> None:
        """Copy out of a slot what a note announces, and send the note back."""
        slot, nbytes = note.tolist()
        if not 0 <= slot < SLOTS or nbytes != len(part):
            raise RequestError(f"{nbytes:,} bytes are in slot {slot}, {len(part):,} are expected", where=f"rank {peer} of the channel")
        part.copy_(self._files[peer][slot * SLOT : slot * SLOT + nbytes])
        self._note(peer, slot, nbytes).wait()

    def _note(self, peer: int, slot: int, nbytes: int) -> Pending:
        import torch

        return self.begun("send", peer, torch.tensor([slot, nbytes]))

    def _noted(self, peer: int) -> tuple[torch.Tensor, Pending]:
        import torch

        note = torch.empty(2, dtype=torch.int64)
        return note, self.begun("recv", peer, note)


class _Notes:
    """Notes under way, for which one may wait more than once."""

    def __init__(self, *pending: Pending) -> None:
        self._pending = [*pending]

    def wait(self) -> None:
        while self._pending:
            self._pending.pop(0).wait()


class _Arriving:
    """Parts of a tensor, each with the note that will announce it."""

    def __init__(self, transport: SharedMemory, peer: int, parts: list[tuple[torch.Tensor, torch.Tensor, Pending]]) -> None:
        self._transport, self._peer, self._parts = transport, peer, parts

    def wait(self) -> None:
        for part, note, pending in self._parts:
            pending.wait()
            self._transport.take(self._peer, part, note)


def _mapped(descriptor: int) -> torch.Tensor:
    """The slots in a file as one tensor of bytes; closes the descriptor."""
    import torch

    with open(descriptor, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), SLOTS * SLOT), dtype=torch.uint8)
