"""The stream: what a single sender, whose source is files, writes into the staging of the ranks of an engine.

The sender is rank 0 of the channel and the trainer's only rank. When the channel is joined, it hears what each engine rank holds, and
answers with the tensors of that rank in the order in which its staging holds them (staging.places: offsets are multiples of 64). An update
of mode "stream" then consists of messages from the sender to each engine rank. Different engine ranks may be served in any order, and from
several threads, as long as one rank is served by one thread at a time. A message is three tensors, sent one after the other:

    head    int64 [2]     number of runs k, number of bytes n
    runs    int64 [k, 4]  k rows: offset, length, count, stride
    body    uint8 [n]     the bytes of the runs, one after the other

A row stands for `count` runs of `length` bytes whose starts in the staging lie `stride` bytes apart; the first is at `offset`. A single
run has the count 1, and any stride. n is the sum of length * count, and at most MOST_BYTES; k is at most MOST_RUNS.

    head [0, 0]           ends the stream; nothing else follows
    head [-1, 0]          the sender gives up: the rank keeps its old weights; nothing else follows

With `changes`, a body travels as a parcel does (changes.py): a head int64 [1], and what has changed since the update before, which the
staging still holds. With `verify`, the end [0, 0] is followed by the digest of all bodies, uint8 [32], as they are without changes: BLAKE3
with a key of the channel. Bytes that no message writes stay as they are in the staging: constants and zeros before the first update, then
the bytes of the update before. The rank counts: the stream must bring exactly as many bytes as the sender announced for it (`expected`), or
the update fails. After the stream, rank and sender agree as in every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reshard.errors import RequestError
from reshard.live.wire.changes import WHOLE, apply, body_bytes, encode
from reshard.live.wire.transport import Transport, payload_digest

if TYPE_CHECKING:
    import torch

MOST_BYTES = 32 << 20
"""Bytes of one message."""
MOST_RUNS = 1 << 16
"""Rows of one message."""

Runs = Sequence[tuple[int, int, int, int]] | npt.NDArray[np.int64]
"""Rows of offset, length, count and stride."""


class StreamWriter:
    """The sender's end of the stream to one engine rank."""

    def __init__(self, transport: Transport | None, peer: int = 0, *, verify: bool = False, changes: bool = False) -> None:
        """transport: None: bytes are counted, and nothing is sent. peer: the engine rank's number in the channel."""
        self._transport, self._peer, self._digest, self._changes = (
            transport,
            peer,
            payload_digest(transport) if verify and transport else None,
            changes,
        )
        self.nbytes = 0
        """The bytes of weights that were sent."""

    def write(self, runs: Runs, body: Any, held: Any = None) -> None:
        """Write bytes to runs of the staging, and wait until they have left. body: anything with the buffer protocol. held: with `changes`,
        what the staging holds there; None: that is not known."""
        import torch

        table = np.ascontiguousarray(runs, np.int64).reshape(-1, 4)
        data = _writeable(body)
        if not len(table) or not len(data):
            return
        assert len(table) <= MOST_RUNS and len(data) <= MOST_BYTES and int((table[:, 1] * table[:, 2]).sum()) == len(data)
        if self._digest is not None:
            self._digest.update(data.data)
        self._send(torch.tensor([len(table), len(data)], dtype=torch.int64))
        self._send(torch.from_numpy(table))
        parts: tuple[torch.Tensor | None, ...] = (torch.from_numpy(data),)
        if self._changes:
            parts = encode(torch.from_numpy(data), None if held is None else torch.from_numpy(_writeable(held)))
        for part in parts:
            if part is not None:
                self._send(part)
                self.nbytes += part.nbytes

    def end(self) -> None:
        """End the stream: everything was written."""
        import torch

        self._send(torch.zeros(2, dtype=torch.int64))
        if self._digest is not None:
            self._send(torch.frombuffer(bytearray(self._digest.digest()), dtype=torch.uint8))

    def give_up(self) -> None:
        """End the stream of an update that fails."""
        import torch

        self._send(torch.tensor([-1, 0], dtype=torch.int64))

    def _send(self, tensor: torch.Tensor) -> None:
        if self._transport is not None:
            self._transport.send(self._peer, tensor.to(self._transport.device)).wait()


def receive_stream(
    transport: Transport, peer: int, staging: torch.Tensor, *, expected: int, verify: bool = False, changes: bool = False
) -> int:
    """Receive a stream into the staging, a flat uint8 tensor; returns the number of bytes that it brought. With `changes` the staging holds
    the update before.

    Raises: RequestError for what does not follow the protocol, lies outside the staging or does not come completely; then nothing more is
    received.
    """
    import torch

    def received(size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype, device=transport.device)
        transport.receive(peer, tensor).wait()
        return tensor.cpu()

    digest, nbytes = payload_digest(transport) if verify else None, 0
    while True:
        count, length = received(2, torch.int64).tolist()
        if count == -1:
            raise _refused("the sender gave up")
        if count == 0:
            break
        if not (0 < count <= MOST_RUNS and 0 < length <= MOST_BYTES):
            raise _refused(f"a message claims {count:,} runs and {length:,} bytes")
        parts = _parts(staging, received(4 * count, torch.int64).reshape(count, 4).numpy(), length)
        number = int(received(1, torch.int64)) if changes else WHOLE
        body = received(length, torch.uint8) if number == WHOLE else torch.cat([part.reshape(-1) for part in parts])
        if number != WHOLE and (of_changes := body_bytes(length, number)):
            apply(received(of_changes, torch.uint8), number, body)
        if digest is not None:
            digest.update(body.numpy().data)
        if number:
            _place(parts, body)
        nbytes += length
    if digest is not None and not compare_digest(received(32, torch.uint8).numpy().tobytes(), digest.digest()):
        raise _refused("the digest of the bytes that arrived is not the sender's")
    if nbytes != expected:
        raise _refused(f"{nbytes:,} bytes arrived, and {expected:,} were announced")
    return nbytes


def _writeable(data: Any) -> npt.NDArray[np.uint8]:
    """Bytes as an array, of which torch makes a tensor."""
    array = np.frombuffer(data, np.uint8)
    return array if array.flags.writeable else array.copy()


def _parts(staging: torch.Tensor, runs: npt.NDArray[np.int64], length: int) -> list[torch.Tensor]:
    """The runs of a message of so many bytes, as views [count, length of a run] of the staging."""
    offset, size, count, stride = runs.T
    last = offset + np.where(count > 1, (count - 1) * stride, 0) + size
    fits = (offset >= 0) & (size > 0) & (count > 0) & ((stride >= size) | (count == 1)) & (last <= len(staging))
    if not fits.all() or int((size * count).sum()) != length:
        raise _refused(f"runs lie outside the staging of {len(staging):,} bytes, or are not those of the bytes that came with them")
    return [
        staging.as_strided((times, nbytes), (step if times > 1 else nbytes, 1), staging.storage_offset() + first)
        for first, nbytes, times, step in runs.tolist()
    ]


def _place(parts: Sequence[torch.Tensor], body: torch.Tensor) -> None:
    start = 0
    for part in parts:
        part.copy_(body[start : start + part.numel()].view(part.shape))
        start += part.numel()


def _refused(what: str) -> RequestError:
    return RequestError(what, where="the stream", why="The weights would be incomplete", do="Update again")
