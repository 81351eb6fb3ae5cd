"""Exchange: a schedule is carried out. Sources pack boxes into parcels and send them, targets receive parcels and unpack them.

    tensors of a source -> pack -> parcel -> wire -> parcel -> unpack -> staging of a target

A parcel is at most PARCEL bytes: boxes of one way, in their order, without gaps. A longer box is cut along its first axes. Both ends find
the parcels from the schedule alone. A rank has two parcels in memory: while one is under way, the next one is packed, or the last one
unpacked. A parcel of a single box that lies contiguous is sent from where it lies, and received to where it belongs; so a box of ALONE
bytes or more shares no parcel.

Who talks to whom in which order? Way (source s, target t) of n sources and m targets has the turn (t - s) mod max(n, m): in a turn each
rank has one partner. Every rank goes through its ways by turn, so the ways that are waited for never form a circle:

    n = 4, m = 2     turn 0: 0-0 1-1     turn 1: 0-1 3-0     turn 2: 2-0 3-1     turn 3: 1-0 2-1

Nothing is raised for what goes wrong on the way: other ranks wait for their parcels. The rank goes on with the others, and the outcome
tells the failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.engine.recipes.on_tensors import cast_tensor, torch_type
from reshard.geometry.value import mutable, value
from reshard.live.plan.schedule import BoxForm, Schedule, Way
from reshard.live.wire.computing import on_wire
from reshard.live.wire.transport import Pending, Transport, reason

if TYPE_CHECKING:
    import torch

PARCEL = 32 << 20
"""Bytes of a parcel at most."""
ALONE = 1 << 20
"""A box of so many bytes has parcels of its own, since it may lie contiguous."""
_BUFFERS = 2
_UNDER_WAY = 8


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


@mutable
class Outcome:
    """What became of a rank's part of an update."""

    nbytes: int = 0
    """Bytes of weights that were sent or received."""
    failures: list[str] = field(default_factory=list)
    """What went wrong, in the order of time; empty: nothing."""
    lost: set[int] = field(default_factory=set)
    """Ranks of the channel whose connections ended."""

    def attempt(self, peer: int, action: Callable[[], object]) -> None:
        """Do something with another rank, unless its connection has ended. What goes wrong is noted."""
        if peer not in self.lost:
            try:
                action()
            except Exception as error:
                self.lost.add(peer)
                self.failures.append(reason(error))


@value
class PackedBox:
    """A box, or a part of one, in a parcel."""

    form: BoxForm
    """The form of the whole box."""
    sizes: tuple[int, ...]
    """Elements along each axis of this part."""
    source: int
    """The source's tensor, as an index into the schedule's sources."""
    source_start: int
    """Where the part starts in it, in elements."""
    target: int
    """The target's tensor, as an index into the schedule's targets."""
    target_start: int
    """Where the part starts in it, in elements."""
    start: int
    """Where its bytes start in the parcel."""
    nbytes: int
    """Its bytes in the parcel."""


@value
class Parcel:
    """What is sent at once."""

    boxes: tuple[PackedBox, ...]
    nbytes: int


def parcels(schedule: Schedule, way: Way, most: int = PARCEL) -> Iterator[Parcel]:
    """The parcels of a way, in their order."""
    boxes: list[PackedBox] = []
    filled = 0
    columns = (way.forms, way.source_tensors, way.source_starts, way.target_tensors, way.target_starts)
    for form_index, source, source_start, target, target_start in zip(*(column.tolist() for column in columns), strict=True):
        form = schedule.forms[form_index]
        for sizes, nbytes, from_start, to_start in _parts(form, form.sizes, form.nbytes, most):
            if boxes and (filled + nbytes > most or nbytes >= ALONE or boxes[-1].nbytes >= ALONE):
                yield Parcel(tuple(boxes), filled)
                boxes, filled = [], 0
            boxes.append(PackedBox(form, sizes, source, source_start + from_start, target, target_start + to_start, filled, nbytes))
            filled += nbytes
    if boxes:
        yield Parcel(tuple(boxes), filled)


def _parts(form: BoxForm, sizes: tuple[int, ...], nbytes: int, most: int, axis: int = 0) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """Parts of a box of at most `most` bytes: sizes, bytes, and where each starts in the box in the source and in the target. The plan has
    cut boxes that a recipe computes already, where blocks end."""
    if nbytes <= most or axis == len(sizes) or form.derived:
        yield sizes, nbytes, 0, 0
        return
    row = nbytes // sizes[axis]
    step = max(1, most // row)
    for start in range(0, sizes[axis], step):
        count = min(step, sizes[axis] - start)
        part = (*sizes[:axis], count, *sizes[axis + 1 :])
        for inner, inner_nbytes, from_start, to_start in _parts(form, part, count * row, most, axis + 1):
            yield inner, inner_nbytes, from_start + start * form.source_strides[axis], to_start + start * form.target_strides[axis]


class Exchange:
    """A rank's schedule, carried out as often as wanted."""

    def __init__(self, transport: Transport, members: Members, schedule: Schedule, *, verify: bool = False, most: int = PARCEL) -> None:
        """verify: whether targets compare the BLAKE3 digest of each way's bytes with that of the source. most: bytes of a parcel."""
        self._transport, self._members, self._schedule, self._verify, self._most = transport, members, schedule, verify, most
        self._ways = sorted(schedule.ways, key=members.turn)
        self._buffers: list[torch.Tensor] = []

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Outcome:
        """Send what the schedule takes from these tensors, by name."""
        outcome, digests = Outcome(), []
        line = _Line(self._transport, self._buffers, outcome)
        for way in self._ways:
            peer, digest = self._members.target(way.target_rank), _digest() if self._verify else None
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
                line.begin(self._transport.send, peer, packed, is_buffer=buffer is not None)
                outcome.nbytes += parcel.nbytes
            digests.append((peer, digest))
        line.end()
        for peer, digest in digests:
            if digest is not None:
                outcome.attempt(peer, partial(self._transport.tell, peer, {"digest": digest.hexdigest()}))
        return outcome

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> Outcome:
        """Receive what the schedule brings, into contiguous tensors by name."""
        outcome, digests = Outcome(), []
        line = _Line(self._transport, self._buffers, outcome)
        for way in self._ways:
            digest = _digest() if self._verify else None
            for parcel in parcels(self._schedule, way, self._most):
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
            box, wire = self._source(packed, tensors), torch_type(packed.form.wire)
            out = buffer[packed.start : packed.start + packed.nbytes]
            if packed.start % packed.form.wire.itemsize:
                out.copy_(on_wire(box, packed.form).reshape(-1).view(buffer.dtype))
            else:
                out.view(wire).view(packed.sizes).copy_(on_wire(box, packed.form))

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


class _Line:
    """Parcels under way, in their order: at most two in buffers, and some more that lie where they belong."""

    def __init__(self, transport: Transport, buffers: list[torch.Tensor], outcome: Outcome) -> None:
        self._transport, self._buffers, self._outcome = transport, buffers, outcome
        self._under_way: deque[tuple[int, Pending, Callable[[], None] | None, int]] = deque()
        self._turn = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A buffer that nothing uses: the other one's parcel may still be under way."""
        import torch

        self._turn = (self._turn + 1) % _BUFFERS
        while any(buffer == self._turn for *_, buffer in self._under_way):
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
        self._outcome.attempt(peer, lambda: self._under_way.append((peer, operation(peer, tensor), then, buffer)))

    def end(self) -> None:
        """Wait for all parcels."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        peer, pending, then, _ = self._under_way.popleft()
        self._outcome.attempt(peer, pending.wait)
        if then is not None and peer not in self._outcome.lost:
            try:
                then()
            except Exception as error:
                self._outcome.failures.append(reason(error))


def _digest() -> Any:
    from blake3 import blake3

    return blake3()


def _add(digest: Any, tensor: torch.Tensor) -> None:
    if digest is not None:
        digest.update(tensor.cpu().numpy().data)
