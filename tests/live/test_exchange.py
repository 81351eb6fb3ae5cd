"""Exchange and stream between ranks on gloo: any boxes arrive as numpy puts them, in parcels of any size, and each byte is counted."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from live.memory_transport import MemoryTransport

from reshard.engine.casts import cast
from reshard.errors import RequestError
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import BF16, F32
from reshard.live.plan.schedule import BoxForm, HeldTensor, Schedule, Way
from reshard.live.wire.exchange import Exchange, Members
from reshard.live.wire.parcels import parcels
from reshard.live.wire.staging import Staged, places
from reshard.live.wire.stream import StreamWriter, receive_stream
from reshard.live.wire.transport import TorchDistributed


def pair():
    return MemoryTransport.joined(2)


def as_convert(tensor, source, target):
    """The values in the type of the target, computed on arrays."""
    words = cast(tensor.contiguous().view(torch.uint8).numpy().view(source.word), source, target)
    return torch.from_numpy(words.view(np.uint8)).view(getattr(torch, target.torch)).view(tensor.shape)


@st.composite
def boxes(draw):
    """A box of an array and where it goes: sizes, source's start and steps, the target's start; both arrays have three axes."""
    sizes = draw(st.tuples(*[st.integers(1, 5)] * 3))
    return sizes, draw(st.tuples(*[st.integers(0, 3)] * 3)), draw(st.tuples(*[st.integers(0, 3)] * 3))


# Types on both sides, with functions of the weight that one side holds: Megatron's norms minus one, -exp(A_log) of state-space models.
TYPES = [(BF16, BF16), (F32, F32), (F32, BF16), (BF16, F32), (BF16, F32.of("-exp")), (F32, F32.of("-exp"))]
TYPES += [(F32.of("x-1"), BF16), (BF16.of("x-1"), BF16), (BF16.of("x-1"), F32), (F32, BF16.of("x-1")), (BF16.of("x-1"), BF16.of("x-1"))]


@settings(max_examples=300, deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=6), st.integers(1, 200), st.sampled_from(TYPES), st.booleans())
def test_boxes_arrive_where_numpy_puts_them(found, most, types, changes):
    source_type, target_type = types
    shape = (8, 8, 8)
    strides, forms, rows = row_major(shape), [], []
    tensors = {f"s{i}": torch.randn(shape).to(getattr(torch, source_type.torch)) for i in range(len(found))}
    expected = {}
    for i, (sizes, a, b) in enumerate(found):
        forms.append(BoxForm(sizes, strides, strides, source_type, target_type))
        rows.append((i, i, sum(x * y for x, y in zip(a, strides, strict=True)), i, sum(x * y for x, y in zip(b, strides, strict=True))))
        whole = torch.zeros(shape, dtype=getattr(torch, target_type.torch))
        at, to = (tuple(slice(x, x + size) for x, size in zip(start, sizes, strict=True)) for start in (a, b))
        whole[to] = as_convert(tensors[f"s{i}"], source_type, target_type)[at]
        expected[f"t{i}"] = whole
    held = tuple(HeldTensor(f"s{i}", source_type, shape, strides) for i in range(len(found)))
    targets = tuple(HeldTensor(f"t{i}", target_type, shape, strides) for i in range(len(found)))
    schedule = Schedule(0, held, targets, tuple(forms), (Way(0, 0, *np.array(rows, np.int64).T),))
    schedule = Schedule.from_bytes(schedule.to_bytes())
    source, target = pair()
    staged = Staged(targets, {})
    sender, receiver = (Exchange(each, Members(1, 1), schedule, verify=True, changes=changes, most=most) for each in (source, target))
    if changes:
        before = {name: torch.where(torch.rand(shape) < 0.1, torch.ones_like(tensor), tensor) for name, tensor in tensors.items()}
        assert not sender.send(before).failures and not receiver.receive(staged).failures
        sender.keep(before)
        source.nbytes_sent = target.nbytes_received = 0
    sent, received = sender.send(tensors), receiver.receive(staged)
    assert not sent.failures and not received.failures
    assert source.nbytes_sent == target.nbytes_received == sent.nbytes == received.nbytes
    assert changes or sent.nbytes == schedule.nbytes
    assert all(torch.equal(staged[name], tensor) for name, tensor in expected.items())


@given(st.lists(st.tuples(*[st.integers(1, 6)] * 2), min_size=1, max_size=5), st.integers(1, 40))
def test_parcels_are_at_most_so_many_bytes_and_leave_nothing_out(sizes, most):
    forms = tuple(BoxForm(each, row_major(each), row_major(each), BF16, BF16) for each in sizes)
    held = tuple(HeldTensor(str(i), BF16, each, row_major(each)) for i, each in enumerate(sizes))
    numbers = np.arange(len(sizes))
    zeros = np.zeros(len(sizes), np.int64)
    way = Way(0, 0, numbers, numbers, zeros, numbers, zeros)
    found = list(parcels(Schedule(0, held, held, forms, (way,)), way, most))
    # A single element may be more than a parcel of one byte.
    assert all(parcel.nbytes <= max(most, 2) and sum(box.nbytes for box in parcel.boxes) == parcel.nbytes for parcel in found)
    elements = [(box.source, box.source_start + offset) for parcel in found for box in parcel.boxes for offset in _offsets(box)]
    assert elements == [(i, offset) for i, each in enumerate(sizes) for offset in range(math.prod(each))]


def _offsets(box):
    return [sum(x * y for x, y in zip(at, box.form.source_strides, strict=True)) for at in np.ndindex(*box.sizes)]


def test_every_rank_has_one_partner_in_a_turn():
    for sources, targets in ((4, 2), (2, 5), (3, 3), (1, 4)):
        members, empty = Members(sources, targets), np.zeros(0, np.int64)
        ways = [Way(s, t, *[empty] * 5) for s in range(sources) for t in range(targets)]
        for turn in range(max(sources, targets)):
            now = [way for way in ways if members.turn(way) == turn]
            assert len({way.source_rank for way in now}) == len({way.target_rank for way in now}) == len(now)


def staging():
    tensors = (HeldTensor("a", BF16, (4, 3), (3, 1)), HeldTensor("b", F32, (5,), (1,)))
    return tensors, Staged(tensors, {"b": 1.0})


def test_a_stream_fills_runs_of_the_staging():
    tensors, staged = staging()
    offsets, nbytes = places(tensors)
    assert offsets == {"a": 0, "b": 64} and nbytes == len(staged.buffer) == 128 and staged["b"].tolist() == [1.0] * 5
    source, target = pair()
    whole = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    writer = StreamWriter(source, 1, verify=True)
    writer.write([(0, 6, 2, 12)], whole[::2].reshape(-1).view(torch.uint8).numpy())
    writer.write([(6, 6, 1, 0), (18, 6, 1, 0)], whole[1::2].contiguous().view(torch.uint8).numpy().tobytes())
    writer.end()
    assert receive_stream(target, 0, staged.buffer, expected=24, verify=True) == writer.nbytes == 24
    assert torch.equal(staged["a"], whole) and staged["b"].tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "runs, expected, what",
    [
        ([(0, 6, 1, 0)], 7, "6 bytes arrived, and 7 were announced"),
        ([(125, 6, 1, 0)], 6, "lie outside the staging of 128 bytes"),
        ([(-2, 6, 1, 0)], 6, "lie outside"),
        ([(0, 3, 2, 126)], 6, "lie outside"),
        ([(0, 3, 2, 1)], 6, "lie outside"),
    ],
)
def test_a_stream_that_is_not_whole_or_not_inside_is_refused(runs, expected, what):
    _, staged = staging()
    source, target = pair()
    writer = StreamWriter(source, 1)
    writer.write(runs, bytes(6))
    writer.end()
    with pytest.raises(RequestError, match=what):
        receive_stream(target, 0, staged.buffer, expected=expected)


def test_a_stream_with_another_digest_or_given_up_is_refused():
    _, staged = staging()
    source, target = pair()
    writer = StreamWriter(source, 1, verify=True)
    writer.write([(0, 6, 1, 0)], bytes(6))
    source._mail[0, 1][2][3] = 1
    writer.end()
    with pytest.raises(RequestError, match="digest"):
        receive_stream(target, 0, staged.buffer, expected=6, verify=True)
    writer.give_up()
    with pytest.raises(RequestError, match="gave up"):
        receive_stream(target, 0, staged.buffer, expected=6)


def test_a_stream_of_changes_changes_what_the_staging_holds():
    _, staged = staging()
    source, target = pair()
    before = torch.arange(12, dtype=torch.bfloat16)
    after = before.clone()
    after[[1, 4]] = 40
    runs = [[(0, 6, 2, 12)], [(6, 6, 2, 12)]]
    for new, held, sent in ((before, None, 2 * (8 + 12)), (after, before, 2 * (8 + 4 + 4)), (after, after, 2 * 8)):
        writer = StreamWriter(source, 1, verify=True, changes=True)
        for first, part in enumerate(runs):
            rows = [None if each is None else each.view(4, 3)[first::2].reshape(-1).view(torch.uint8).numpy() for each in (new, held)]
            writer.write(part, *rows)
        writer.end()
        assert receive_stream(target, 0, staged.buffer, expected=24, verify=True, changes=True) == 24
        assert torch.equal(staged["a"], new.view(4, 3)) and writer.nbytes == sent and staged["b"].tolist() == [1.0] * 5


@pytest.mark.parametrize("part, place, value, what", [
    (2, 0, 7, "claims 7 changes"),
    (2, 7, 0xFF, "claims -72"),
    (3, 0, 2, "do not hold 1 changes"),
    (3, 4, 6, "lies outside its parcel"),
    (1, 0, 120, "lie outside the staging"),
])  # fmt: skip
def test_changes_that_lie_are_refused(part, place, value, what):
    """The mail of a message: head, runs, number of changes, changes."""
    _, staged = staging()
    source, target = pair()
    writer = StreamWriter(source, 1, changes=True)
    writer.write([(0, 12, 1, 0)], bytes([1, *bytes(11)]), bytes(12))
    source._mail[0, 1][part].view(torch.uint8)[place] = value
    with pytest.raises(RequestError, match=what):
        receive_stream(target, 0, staged.buffer, expected=12, changes=True)
    assert not staged["a"].any()


def test_messages_travel_on_gloo():
    store = dist.HashStore()
    alone = TorchDistributed.join(store, 0, 1, seconds=10)
    assert (alone.rank, alone.size, alone.device) == (0, 1, "cpu")
    with pytest.raises(RequestError, match="Use gloo or nccl"):
        TorchDistributed.join(store, 0, 1, backend="mpi")
    alone.close()
    alone.close()
