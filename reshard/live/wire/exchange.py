"""Exchange: a schedule is carried out. Sources pack boxes into parcels and send them, targets receive parcels and unpack them.

    tensors of a source -> pack -> parcel -> wire -> parcel -> unpack -> staging of a target

Both ends find the parcels from the schedule alone (parcels.py). A rank has two parcels in memory: while one is under way, the next one is
packed, or the last one unpacked. A parcel of one box that lies contiguous is sent from where it lies, and received to where it belongs.

With `changes`, what a target holds already does not travel again (changes.py): the source keeps a copy of the tensors that it has sent, and
the target's staging keeps what has arrived.

Who talks to whom in which order? Way (source s, target t) of n sources and m targets has the turn (t - s) mod max(n, m): in a turn each
rank has one partner. Every rank goes through its ways by turn, so the ways that are waited for never form a circle:

    n = 4, m = 2     turn 0: 0-0 1-1     turn 1: 0-1 3-0     turn 2: 2-0 3-1     turn 3: 1-0 2-1

Nothing is raised for what goes wrong on the way: other ranks wait for their parcels. The rank goes on with the others, and the outcome
tells the failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.engine.origins.on_tensors import cast_tensor, torch_type
from reshard.geometry.value import value
from reshard.live.plan.schedule import Schedule, Way
from reshard.live.wire.changes import WHOLE, apply, body_bytes, encode
from reshard.live.wire.computing import on_wire
from reshard.live.wire.line import Line, Outcome
from reshard.live.wire.parcels import PARCEL, PARCEL_OF_CHANGES, PackedBox, Parcel, parcels
from reshard.live.wire.transport import Transport, payload_digest, reason

if TYPE_CHECKING:
    import torch


@value
class Members:
    """Who is in a channel: the ranks of the trainer, then those of the engines."""

    sources: int
    targets: int

    def turn(self, way: Way) -> int:
        """When the way has its turn."""
        return (way.target_rank - way.source_rank) % max(self.sources, self.targets)

    def target(self, target_rank: int) -> int:
        """The number of an engine's rank in the channel."""
        return self.sources + target_rank


class Exchange:
    """A rank's schedule, carried out as often as wanted."""

    def __init__(
        self,
        transport: Transport,
        members: Members,
        schedule: Schedule,
        *,
        verify: bool = False,
        changes: bool = False,
        most: int | None = None,
    ) -> None:
        """verify: whether targets compare the keyed digest of each way's bytes with that of the source. changes: whether parcels of which
        little has changed travel as changes; both ends must have the same. most: bytes of a parcel."""
        self._transport, self._members, self._schedule, self._verify, self._changes = transport, members, schedule, verify, changes
        self._most = most or (PARCEL_OF_CHANGES if changes else PARCEL)
        self._ways = sorted(schedule.ways, key=members.turn)
        self._buffers: list[torch.Tensor] = []
        self._kept: dict[str, torch.Tensor] | None = None
        self._base: torch.Tensor | None = None

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Outcome:
        """Send what the schedule takes from these tensors, by name."""
        outcome, digests = Outcome(), []
        line = Line(self._transport, self._buffers, outcome)
        for way in self._ways:
            peer, digest = self._members.target(way.target_rank), payload_digest(self._transport) if self._verify else None
            for parcel in parcels(self._schedule, way, self._most):
                packed, buffer = None, None
                try:
                    packed = self._lying(parcel, tensors)
                    if packed is None:
                        packed = buffer = line.buffer(parcel.nbytes)
                        self._pack(parcel, tensors, buffer)
                except Exception as error:
                    # The target waits for the parcel, whatever it holds.
                    outcome.failures.append(reason(error))
                    packed = buffer = line.buffer(parcel.nbytes) if packed is None else packed
                _add(digest, packed)
                for part in self._as_sent(parcel, packed):
                    line.begin(self._transport.send, peer, part, is_buffer=part is buffer)
                    outcome.nbytes += part.nbytes
            digests.append((peer, digest))
        line.end()
        for peer, digest in digests:
            if digest is not None:
                outcome.attempt(peer, partial(self._transport.tell, peer, {"digest": digest.hexdigest()}))
        return outcome

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """With `changes`: the targets hold what was sent of these tensors. Memory: a copy of them, where the transport needs them."""
        import torch

        if not self._changes:
            return
        kept = self._kept or {}
        for name in dict.fromkeys(held.name for held in self._schedule.sources):
            tensor = tensors[name].detach()
            if name not in kept:
                kept[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            kept[name].copy_(tensor)
        self._kept = kept

    def forget(self) -> None:
        """It is not known what the targets hold: the next update sends all of it."""
        self._kept = None

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> Outcome:
        """Receive what the schedule brings, into contiguous tensors by name. With `changes` they hold the update before."""
        outcome, digests = Outcome(), []
        line = Line(self._transport, self._buffers, outcome)
        for way in self._ways:
            digest = payload_digest(self._transport) if self._verify else None
            for parcel in parcels(self._schedule, way, self._most):
                if self._changes:
                    outcome.attempt(
                        way.source_rank, partial(self._receive_changes, parcel, tensors, way.source_rank, line, outcome, digest)
                    )
                    continue
                direct = self._direct(parcel, tensors)
                is_packed, buffer = direct is None, line.buffer(parcel.nbytes) if direct is None else direct
                then = partial(self._arrived, parcel, tensors, buffer, digest, is_packed=is_packed)
                line.begin(self._transport.receive, way.source_rank, buffer, then, is_buffer=is_packed)
                outcome.nbytes += parcel.nbytes
            digests.append((way, digest))
        line.end()
        for way, digest in digests:
            if digest is not None:
                outcome.attempt(way.source_rank, partial(self._compare, way, digest, outcome))
        return outcome

    def _as_sent(self, parcel: Parcel, packed: torch.Tensor) -> Iterator[torch.Tensor]:
        """What is sent for a parcel."""
        import torch

        if not self._changes:
            yield packed
            return
        base = None
        # What the target casts it does not hold as it was sent.
        if self._kept is not None and all(box.form.wire == box.form.target for box in parcel.boxes):
            base = self._lying(parcel, self._kept)
            if base is None:
                if self._base is None or len(self._base) < parcel.nbytes:
                    self._base = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)
                base = self._base[: parcel.nbytes]
                self._pack(parcel, self._kept, base)
        head, body = encode(packed, base)
        yield head
        if body is not None:
            yield body

    def _receive_changes(
        self, parcel: Parcel, tensors: Mapping[str, torch.Tensor], peer: int, line: Line, outcome: Outcome, digest: Any
    ) -> None:
        """Receive a parcel of an update with changes."""
        import torch

        def received(into: torch.Tensor) -> torch.Tensor:
            self._transport.receive(peer, into).wait()
            outcome.nbytes += into.nbytes
            return into

        number = int(received(torch.empty(1, dtype=torch.int64, device=self._device)))
        if not number and digest is None:
            return
        direct = self._direct(parcel, tensors)
        if direct is not None and direct.storage_offset() % 2:
            direct = None
        packed = line.buffer(parcel.nbytes) if direct is None else direct
        if number == WHOLE:
            received(packed)
        else:
            if direct is None:
                for box in parcel.boxes:
                    _put(packed, box, self._target(box, tensors))
            if nbytes := body_bytes(parcel.nbytes, number):
                apply(received(torch.empty(nbytes, dtype=torch.uint8, device=self._device)), number, packed)
        self._arrived(parcel, tensors, packed, digest, is_packed=direct is None)

    def _lying(self, parcel: Parcel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The bytes of a parcel, if they lie in a source as they are sent."""
        import torch

        packed = parcel.boxes[0]
        box = self._source(packed, tensors)
        if len(parcel.boxes) > 1 or not box.is_contiguous() or box.dtype != torch_type(packed.form.wire) or box.device != self._device:
            return None
        return box.reshape(-1).view(torch.uint8)

    def _pack(self, parcel: Parcel, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        for packed in parcel.boxes:
            _put(buffer, packed, on_wire(self._source(packed, tensors), packed.form))

    def _direct(self, parcel: Parcel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Where the bytes of a parcel belong, if they lie there as they come."""
        import torch

        packed, form = parcel.boxes[0], parcel.boxes[0].form
        box = self._target(packed, tensors)
        if len(parcel.boxes) > 1 or not box.is_contiguous() or form.wire != form.target or box.device != self._device:
            return None
        return box.reshape(-1).view(torch.uint8)

    def _arrived(self, parcel: Parcel, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor, digest: Any, *, is_packed: bool) -> None:
        _add(digest, buffer)
        if not is_packed:
            return
        for packed in parcel.boxes:
            box = self._target(packed, tensors)
            part = buffer[packed.start : packed.start + packed.nbytes]
            part = part.clone() if packed.start % packed.form.wire.itemsize else part
            part = part.view(torch_type(packed.form.wire)).view(packed.sizes)
            box.copy_(cast_tensor(part, packed.form.wire, packed.form.target))

    @property
    def _device(self) -> torch.device:
        import torch

        return torch.device(self._transport.device)

    def _source(self, packed: PackedBox, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self._schedule.sources[packed.source].name].detach()
        sizes = packed.form.held if packed.form.derived else packed.sizes
        return tensor.as_strided(sizes, packed.form.source_strides, tensor.storage_offset() + packed.source_start)

    def _target(self, packed: PackedBox, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self._schedule.targets[packed.target].name]
        return tensor.as_strided(packed.sizes, packed.form.target_strides, tensor.storage_offset() + packed.target_start)

    def _compare(self, way: Way, digest: Any, outcome: Outcome) -> None:
        if self._transport.hear(way.source_rank).document.get("digest") != digest.hexdigest():
            outcome.failures.append(f"the digest of the bytes from rank {way.source_rank} of the trainer is not the one of what it sent")


def _put(buffer: torch.Tensor, packed: PackedBox, box: torch.Tensor) -> None:
    """Put a box, as it travels, into a parcel."""
    out = buffer[packed.start : packed.start + packed.nbytes]
    if packed.start % packed.form.wire.itemsize:
        out.copy_(box.reshape(-1).view(buffer.dtype))
    else:
        out.view(torch_type(packed.form.wire)).view(packed.sizes).copy_(box)


def _add(digest: Any, tensor: torch.Tensor) -> None:
    if digest is not None:
        digest.update(tensor.cpu().numpy().data)
