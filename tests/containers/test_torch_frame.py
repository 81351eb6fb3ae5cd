"""Files of torch.save that we lay out: torch, zipfile and our own reader see the same in them, beyond 4 GiB too."""

import zipfile
from collections import OrderedDict

import pytest
import torch

from reshard.containers import pickle_writer, torch_frame, torch_zip
from reshard.containers.torch_frame import Plain, Tensors
from reshard.geometry.dtypes import from_torch
from reshard.storage.files import LocalFiles


def write(path, root, filling):
    """The file of an OrderedDict of tensors, sparse, with the bytes of `filling` at the start of every storage."""
    tensors = Tensors()
    pickle = pickle_writer.dumps(OrderedDict((name, tensors.add(plain)) for name, plain in root.items()))
    storages = tensors.storages
    frame = torch_frame.frame(path.stem, pickle, storages)
    with open(path, "wb") as file:
        file.truncate(frame.nbytes)
        for offset, data in frame.literals:
            file.seek(offset)
            file.write(data)
        for place, storage in zip(frame.storages, storages, strict=True):
            file.seek(place)
            file.write(filling[: storage.nbytes])
    return frame


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "uint16", "complex64", "complex128"])
def test_torch_reads_every_element_type(dtype, tmp_path):
    kind = from_torch(dtype, where="")
    shapes = OrderedDict(matrix=(2, 3), vector=(5,), scalar=(), empty=(0, 4))
    root = OrderedDict((name, Plain(kind, shape)) for name, shape in shapes.items())
    write(tmp_path / "x.pt", root, bytes([0, 1] * 100))
    for found in (torch.load(tmp_path / "x.pt", weights_only=True), torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)):
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
        assert all(tensor.dtype == getattr(torch, dtype) for tensor in found.values())
        assert found["vector"].view(torch.uint8).tolist() == ([0, 1] * 100)[: 5 * kind.itemsize]


def test_payloads_are_aligned_as_torch_aligns_them(tmp_path):
    frame = write(tmp_path / "x.pt", {str(n): Plain(from_torch("uint8", where=""), (n,)) for n in (1, 63, 64, 65)}, b"x" * 100)
    assert all(place % 64 == 0 for place in frame.storages)


def test_beyond_four_gibibytes(tmp_path):
    half = from_torch("bfloat16", where="")
    large = Plain(half, (1 << 20, 2500))
    frame = write(tmp_path / "x.pt", OrderedDict(large=large, behind=Plain(half, (3,)), last=Plain(half, (1 << 20, 2500))), b"abcdef")
    assert frame.nbytes > 9 << 30
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert sizes["x/data/0"] == large.nbytes and sizes["x/data/1"] == 6
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert found["behind"].view(torch.uint8).tolist() == list(b"abcdef") and found["last"][0, :1].view(torch.uint8).tolist() == list(b"ab")
    read = torch_zip.read(LocalFiles(tmp_path), "x.pt")
    assert [read[name].byte_offset for name in ("large", "behind", "last")] == list(frame.storages)
