"""The engine against numpy: any source sharding to any target sharding, block by block, each byte once."""

import math

import numpy as np
import pytest
import torch
from helpers import made_checkpoints as worlds
from helpers.random_shardings import dtypes, partitions, shapes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard.engine.pool
import reshard.engine.transfer
import reshard.geometry.boxes
from reshard.canonical.content import Content
from reshard.engine.casts import cast
from reshard.engine.compare import Comparison, Side, compare
from reshard.engine.pool import Effort
from reshard.engine.recorded import fingerprint_of
from reshard.engine.transfer import Pieces, Worker, strips
from reshard.engine.walk import block_digests
from reshard.errors import CheckpointError
from reshard.geometry import dtypes as dtype_table
from reshard.geometry.boxes import blocks
from reshard.storage.files import LocalFiles, read_each_run

SETTINGS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 elements in strips of 8 bytes, so that small tensors have many."""
    monkeypatch.setattr(reshard.engine.transfer, "STRIP_BYTES", 8)
    for module in (reshard.geometry.boxes, reshard.engine.pool, reshard.engine.transfer):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 16)


class Recorder:
    """LocalFiles that note what is read, and a target that notes what is written."""

    def __init__(self, root, target):
        self._files, self.target = LocalFiles(root), target
        self.root, self.reads, self.writes = str(root), [], []

    def read_into(self, path, byte_offset, buffer):
        self.reads.append((path, byte_offset, len(buffer)))
        self._files.read_into(path, byte_offset, buffer)

    def read_runs(self, path, byte_offsets, buffer):
        read_each_run(self, path, byte_offsets, buffer)

    def write_runs(self, path, byte_offsets, buffer):
        length = len(buffer) // len(byte_offsets)
        for i, byte_offset in enumerate(byte_offsets):
            self.write(path, byte_offset, buffer[i * length : (i + 1) * length])

    def write(self, path, byte_offset, buffer):
        self.writes.append((path, byte_offset, len(buffer)))
        with open(self.target / path, "r+b") as file:
            file.seek(byte_offset)
            file.write(bytes(buffer))


def emptied(root):
    for path in root.iterdir():
        path.write_bytes(b"\xaa" * path.stat().st_size)


@SETTINGS
@given(st.data(), shapes(), dtypes(), st.booleans(), st.booleans())
def test_any_sharding_becomes_any_other(small_blocks, tmp_path_factory, data, shape, dtype, source_transposed, target_transposed):
    root = tmp_path_factory.mktemp("world")
    values = worlds.array(shape, dtype, seed=1)
    cuts = data.draw(partitions(shape)), data.draw(partitions(shape))
    source = worlds.store(root / "a", "w", values, dtype, cuts[0], transposed=source_transposed)
    target = worlds.store(root / "b", "w", values, dtype, cuts[1], transposed=target_transposed)
    emptied(root / "b")
    recorder = Recorder(root / "a", root / "b")
    worker = Worker(recorder, dtype.itemsize, recorder)
    for box in blocks(shape):
        assert np.array_equal(worker.gather(Pieces(source), box), values[box.index])
        for strip, (read, written) in strips(box, Pieces(source), Pieces(target)):
            worker.write(worker.read(read, strip), written, strip)
    assert np.array_equal(worlds.assembled(root / "b", target), values)
    written = [byte for _, start, size in recorder.writes for byte in range(start, start + size)]
    assert sum(size for *_, size in recorder.writes) == values.nbytes, "each target byte is written once"
    assert len({(path, start) for path, start, _ in recorder.writes}) == len(recorder.writes)
    assert len(written) == values.nbytes
    # What lies between the pieces belongs to nobody and stays as it was.
    kept = sum((root / "b" / name).read_bytes().count(b"\xaa") for name in ("w-0.bin", "w-1.bin"))
    assert kept >= 5 * (len(cuts[1]) + 2) - 5


@SETTINGS
@given(st.data(), shapes(min_dims=1), dtypes())
def test_row_major_pieces_are_read_once_and_not_beyond(small_blocks, tmp_path_factory, data, shape, dtype):
    root = tmp_path_factory.mktemp("world")
    values = worlds.array(shape, dtype, seed=2)
    # Cut along the first axis only: every block meets whole rows, so no byte may be read that is not wanted.
    rows = [box for box in data.draw(partitions((shape[0],))) if box.volume]
    boxes = [reshard.geometry.boxes.Box((box.offsets[0], *(0,) * (len(shape) - 1)), (box.sizes[0], *shape[1:])) for box in rows]
    source = worlds.store(root, "w", values, dtype, boxes)
    recorder = Recorder(root, root)
    worker = Worker(recorder, dtype.itemsize)
    for box in blocks(shape):
        worker.gather(Pieces(source), box)
    ranges = [(path, byte) for path, start, size in recorder.reads for byte in range(start, start + size)]
    assert len(ranges) == len(set(ranges)) == values.nbytes


@SETTINGS
@given(st.data(), shapes(min_dims=1), dtypes())
def test_a_replica_that_differs_in_one_bit_is_named(small_blocks, tmp_path_factory, data, shape, dtype):
    root = tmp_path_factory.mktemp("world")
    values = worlds.array(shape, dtype, seed=3)
    boxes = [box for box in data.draw(partitions(shape)) if box.volume]
    copied = data.draw(st.sampled_from(boxes))
    source = worlds.store(root, "w", values, dtype, [*boxes, copied], files=len(boxes) + 1)
    Worker(LocalFiles(root), dtype.itemsize)
    element = tuple(data.draw(st.integers(a, b - 1)) for a, b in zip(copied.offsets, copied.stops, strict=True))
    piece = source.shards.piece(len(boxes))
    at = piece.byte_offset_of(reshard.geometry.boxes.Box(element, (1,) * len(shape)))
    path = root / piece.extent.path
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    worker = Worker(LocalFiles(root), dtype.itemsize)
    with pytest.raises(CheckpointError, match="two copies") as caught:
        for box in blocks(shape):
            worker.gather(Pieces(source), box)
    assert str(list(element)) in str(caught.value) and piece.extent.path in str(caught.value)


@SETTINGS
@given(st.data(), shapes(), dtypes())
def test_the_fingerprint_does_not_know_the_layout(small_blocks, tmp_path_factory, data, shape, dtype):
    values = worlds.array(shape, dtype, seed=4)
    prints = []
    for workers in (1, 3):
        root = tmp_path_factory.mktemp("world")
        tensor = worlds.store(root, "w", values, dtype, data.draw(partitions(shape)), transposed=data.draw(st.booleans()))
        digests = block_digests(LocalFiles(root), {"w": tensor}, Effort(workers))
        prints.append(fingerprint_of({"w": tensor}, digests).root)
    assert prints[0] == prints[1]


@SETTINGS
@given(st.data(), shapes(min_dims=1), dtypes())
def test_compare_finds_any_single_bit(small_blocks, tmp_path_factory, data, shape, dtype):
    values = worlds.array(shape, dtype, seed=5)
    other = values.copy()
    element = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    flipped = bytearray(other[element].tobytes())
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    other[element] = np.frombuffer(bytes(flipped), other.dtype)[0]
    sides = []
    for each in (values, other):
        root = tmp_path_factory.mktemp("world")
        tensor = worlds.store(root, "w", each, dtype, data.draw(partitions(shape)))
        sides.append(Side(LocalFiles(root), worlds.index(root, [tensor]), Content({"w": tensor}, (), None)))
    result = Comparison()
    compare(sides[0], sides[1], result, effort=Effort(2))
    assert [difference.kind for difference in result.differences] == ["values"]
    assert str(list(element)) in result.differences[0].detail


FLOATS = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]


@pytest.mark.distinct
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_a_cast_is_torchs_cast_for_every_kind_of_bits(source, target):
    a, b = (dtype_table.from_safetensors(name, where="test") for name in (source, target))
    patterns = np.arange(1 << 16, dtype=np.uint16) if a.itemsize <= 2 else None
    if a.itemsize == 1:
        words = patterns[:256].astype(np.uint8)
    elif a.itemsize == 2:
        words = patterns
    else:
        random = np.random.default_rng(0).integers(0, 256, (4096, a.itemsize), dtype=np.uint8).reshape(-1).view(a.word)
        edges = np.array([0.0, -0.0, 1.0, 65504.0, 65520.0, 448.0, 464.0, 465.0, 57344.0, 1e-8, 1e-45, np.inf, -np.inf, np.nan])
        words = np.concatenate([random, edges.astype(f"<f{a.itemsize}").view(a.word)])
    values = torch.from_numpy(words.view(np.uint8).copy()).view(getattr(torch, a.torch))
    expected, is_nan = values.to(getattr(torch, b.torch)).view(torch.uint8).numpy().view(b.word), torch.isnan(values.float()).numpy()
    result = cast(words.copy(), a, b)
    assert np.array_equal(result[~is_nan], expected[~is_nan])
    assert a == b or len(set(result[is_nan].tolist())) <= 1, "all NaNs become the quiet NaN"


def test_memory_is_blocks_not_tensors(small_blocks):
    worker = Worker(LocalFiles("."), itemsize=4)
    assert worker._block.nbytes == worker._scratch.nbytes == 16 * 4
    assert math.prod((3, 5)) < 16
