"""Encoded ranges: readable at any offset, by many threads at once; refused if damaged, cut short or larger than their limit."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from reshard.errors import CheckpointError
from reshard.storage import decoded_ranges
from reshard.storage.files import LocalFiles, read_range

DATA = np.random.default_rng(0).integers(0, 4, 3_000_000, dtype=np.uint8).tobytes()
ZSTD = "stream.zstd/1"


@pytest.fixture
def encoded(tmp_path):
    """A function that writes one file, with the encoded range after 100 other bytes, and returns its tree and the length of the range."""

    def made(data=DATA, layers=1):
        for _ in range(layers):
            data = zstandard.ZstdCompressor(write_content_size=False).compress(data)
        (tmp_path / "file").write_bytes(b"x" * 100 + data + b"y" * 100)
        return LocalFiles(tmp_path), len(data)

    return made


@pytest.mark.parametrize("layers", [1, 2])
def test_every_offset_can_be_read(encoded, layers):
    files, nbytes = encoded(layers=layers)
    path = files.decoded("file", 100, nbytes, (ZSTD,) * layers, limit=len(DATA))
    assert files.size(path) == len(DATA)
    assert read_range(files, path, 2_000_000, 50) == DATA[2_000_000:2_000_050]
    assert read_range(files, path, 0, len(DATA)) == DATA


def test_many_threads_can_read_more_ranges_than_are_kept_decoded(tmp_path):
    content, places = b"", []
    for i in range(40):
        part = zstandard.compress(bytes([i]) * 1000)
        places.append((len(content), len(part)))
        content += part
    (tmp_path / "file").write_bytes(content)
    files = LocalFiles(tmp_path)
    paths = [files.decoded("file", start, nbytes, (ZSTD,), limit=1000) for start, nbytes in places]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda turn: read_range(files, paths[turn % 40], turn % 900, 100), range(4000)))
    assert found == [bytes([turn % 40]) * 100 for turn in range(4000)]


@pytest.mark.parametrize("change", [lambda raw: raw[:-20], lambda raw: b"\xff" * 20 + raw[20:]], ids=["short", "damaged"])
def test_a_range_that_cannot_be_decoded_is_refused(encoded, tmp_path, change):
    files, nbytes = encoded()
    raw = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(raw[:100] + change(raw[100 : 100 + nbytes]))
    size = (tmp_path / "file").stat().st_size - 100
    path = files.decoded("file", 100, size, (ZSTD,), limit=len(DATA))
    with pytest.raises(CheckpointError, match=r"decompressed|too early"):
        read_range(files, path, 0, 1)


def test_a_range_that_decodes_to_more_than_its_limit_is_refused(encoded):
    files, nbytes = encoded(bytes(200_000_000))
    assert nbytes < 100_000
    with pytest.raises(CheckpointError, match="more than 1,000 bytes"):
        read_range(files, files.decoded("file", 100, nbytes, (ZSTD,), limit=1000), 0, 1)


def test_reading_beyond_the_end_is_refused(encoded):
    files, nbytes = encoded()
    with pytest.raises(CheckpointError, match="are needed"):
        read_range(files, files.decoded("file", 100, nbytes, (ZSTD,), limit=len(DATA)), len(DATA) - 5, 10)


def test_unknown_codecs_are_refused():
    with pytest.raises(CheckpointError, match=r"stream\.lz4"):
        decoded_ranges.check_known([ZSTD, "stream.lz4"], where="w")
