"""Strips: blocks are read, digested and written in parts that stay in the processor's cache, and nothing else about them changes."""

import os
import sys

import numpy as np
import pytest
from helpers import made_checkpoints as worlds
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import reshard.engine.transfer
from reshard.engine.casts import cast
from reshard.engine.compare import PairDigests
from reshard.engine.transfer import STRIP_BYTES, Pieces, Worker, slabs, strips
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32
from reshard.geometry.sections import distinct
from reshard.plans.digests import CURRENT
from reshard.storage import system_calls
from reshard.storage.files import LocalFiles
from reshard.storage.staging import Staging
from reshard.storage.system_calls import read_runs_at

SHAPE = (6, 1100, 512)  # of bfloat16: 6.8 MB, and a line of the first axis is more than a strip


@pytest.fixture(params=[1, 2], ids=["whole", "halves"])
def stored(request, tmp_path):
    values = worlds.array(SHAPE, BF16, seed=1)
    parts = Box.whole(SHAPE).split(axis=2, parts=request.param)
    return values, worlds.store(tmp_path, "w", values, BF16, parts), LocalFiles(tmp_path)


@pytest.mark.parametrize("box", [Box.whole(SHAPE), Box((1, 0, 0), (1, 1000, 512)), Box((0, 990, 0), (6, 10, 512))], ids=str)
def test_strips_follow_each_other_and_fit_into_the_cache(box):
    class Side:
        itemsize = 2

        def within(self, slab, axis):
            return reshard.engine.transfer.SlabPieces(None, ())

    boxes = [strip.box for strip, _ in strips(box, Side())]
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    assert np.array_equal(np.concatenate([numbers[part.index].reshape(-1) for part in boxes]), numbers[box.index].reshape(-1))
    assert max(part.volume for part in boxes) * 2 <= STRIP_BYTES


def test_a_scalar_is_one_slab():
    assert list(slabs(Box((), ()), 8)) == [(Box((), ()), 0)]


def test_the_digest_of_strips_is_that_of_the_block(stored):
    values, tensor, files = stored
    box = Box.whole(SHAPE)
    assert Worker(files, 2).digest(Pieces(tensor), box, CURRENT.new()) == CURRENT.block(memoryview(values.tobytes()))


def test_a_strip_is_read_into_the_memory_that_is_given(stored):
    values, tensor, files = stored
    wide = np.zeros((6, 1100, 2, 512), np.uint16)  # every other row belongs to another tensor
    for strip, (pieces,) in strips(Box.whole(SHAPE), Pieces(tensor)):
        part = wide[:, :, 1][strip.box.index]
        Worker(files, 2).read(pieces, strip, part.reshape(strip.sizes) if part.flags.c_contiguous else part[0])
    assert np.array_equal(wide[:, :, 1], values) and not wide[:, :, 0].any()


@pytest.mark.parametrize("differing", [None, 0, 1, 2])
def test_one_hash_serves_both_sides_until_they_differ(differing):
    left = [np.full(4, number, np.uint8) for number in range(3)]
    right = [part + (number == differing) for number, part in enumerate(left)]
    digests = PairDigests([True, True])
    for a, b in zip(left, right, strict=True):
        digests.add(a, b, is_equal=np.array_equal(a, b))
    assert digests.result() == tuple(CURRENT.block(memoryview(b"".join(map(bytes, side)))) for side in (left, right))


def test_no_write_is_longer_than_a_quarter_of_a_mebibyte(tmp_path, monkeypatch):
    written, real = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: (written.append((at, len(data))), real(descriptor, data, at))[1])
    data = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5, np.uint8)
    staging = Staging(tmp_path / "out")
    with staging.locked("plan", str):
        staging.prepare({"file": len(data) + 7}, resume=False)
        staging.write("file", 7, data.data)
        assert staging.read("file", 7, len(data)) == data.tobytes()
        staging.abandon()
    sizes = [size for at, size in written if at >= 7]  # the lock file is written at 0
    assert max(sizes) == 1 << 18 and sum(sizes) == len(data)


def test_the_disk_begins_while_a_file_is_being_written(tmp_path, monkeypatch):
    begun, line = [], 1 << 20
    monkeypatch.setattr(reshard.storage.staging, "begin_sync", lambda descriptor, start, stop: begun.append((start, stop)))
    data = np.zeros(20 * line, np.uint8)
    staging = Staging(tmp_path / "out")
    with staging.locked("plan", str):
        staging.prepare({"file": len(data)}, resume=False)
        for at in (0, 10, 1, 11, 2, 12):  # two threads in turn
            staging.write("file", at * line, data[:line].data)
        staging.write_runs("file", [at * line for at in range(13, 19)], data[: 6 * line].data)
        staging.abandon()
    assert begun == [(0, 12 * line), (2 * line, 19 * line)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sync_file_range")
def test_linux_takes_the_call_that_begins_a_sync(tmp_path):
    call = system_calls._sync_file_range()
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 20)
        assert call(file.fileno(), 1 << 16, 1 << 18, system_calls._SYNC_FILE_RANGE_WRITE) == 0
        assert call(file.fileno(), 1 << 16, 1 << 18, 1 << 7) == -1  # no such flag
    system_calls.begin_sync(-1, 0, 1)  # what comes of it is not asked


def test_runs_that_a_call_did_not_fill_are_read_again(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    real, calls = os.preadv, []

    def interrupted(descriptor, buffers, at):
        calls.append(at)
        return real(descriptor, [buffers[0][:3]] if len(calls) in (2, 5) else buffers, at)

    monkeypatch.setattr(os, "preadv", interrupted)
    buffer = bytearray(80)
    LocalFiles(tmp_path).read_runs("file", [900, 100, 500, 0], memoryview(buffer))
    assert bytes(buffer) == b"".join(content[at : at + 20] for at in (900, 100, 500, 0))
    with open(tmp_path / "file", "rb") as file:
        calls[:] = [0] * 9
        assert read_runs_at(file.fileno(), [0, 995], memoryview(buffer)) == 1


def test_a_cast_fills_the_array_that_is_given():
    words, out = worlds.array((3, 5), F32, seed=3), np.zeros((3, 5), np.uint16)
    result = cast(words, F32, BF16, out)
    assert result.base is out or result is out
    assert np.array_equal(out, cast(words, F32, BF16))


@given(arrays.arrays(np.int64, arrays.array_shapes(min_dims=1, max_dims=2, min_side=0), elements=st.integers(-3, 3)))
def test_distinct_values_are_those_of_numpy(values):
    assert np.array_equal(distinct(values), np.unique(values))
