"""The safetensors container against the safetensors library: what one writes, the other reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors as library
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from reshard.containers import safetensors
from reshard.errors import CheckpointError, RequestError
from reshard.geometry import dtypes
from reshard.geometry.dtypes import DType
from reshard.storage.files import LocalFiles, VirtualFiles

ALL = [dtypes.from_torch(dtype.torch, where="") for dtype in dtypes._TABLE]
DTYPES = [dtype for dtype in ALL if dtypes.is_in_safetensors(dtype)]
# The fnuz types have a safetensors name, which torch's binding does not write.
WRITTEN = [dtype for dtype in DTYPES if dtype.name not in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
tensor_lists = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=6).map(
    lambda tensors: [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
)
free_text = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=3)


def header_of(frame: safetensors.Frame) -> safetensors.Header:
    files = VirtualFiles("planned")
    files.add("x", frame.nbytes, ((0, frame.header),))
    return safetensors.read_header(files, "x")


@given(tensor_lists, free_text)
def test_a_frame_reads_back_as_it_was_framed(tensors: list[tuple[str, DType, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    frame = safetensors.frame(tensors, metadata)
    header = header_of(frame)
    assert sorted(header.entries, key=lambda entry: entry.name) == sorted(frame.entries, key=lambda entry: entry.name)
    assert [(entry.name, entry.dtype, entry.shape) for entry in frame.entries] == tensors
    assert (header.metadata, header.nbytes) == (metadata, frame.nbytes)


@given(tensor_lists)
def test_tensors_start_at_a_multiple_of_8_and_touch(tensors: list[tuple[str, DType, tuple[int, ...]]]) -> None:
    frame = safetensors.frame(tensors, {})
    stops = [len(frame.header), *(entry.byte_offset + entry.nbytes for entry in frame.entries)]
    assert len(frame.header) % 8 == 0
    assert [entry.byte_offset for entry in frame.entries] == stops[:-1] and stops[-1] == frame.nbytes


@settings(max_examples=50)
@given(st.dictionaries(names, st.tuples(st.sampled_from(WRITTEN), shapes), max_size=5), free_text)
def test_the_library_reads_what_we_frame(tensors: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    frame = safetensors.frame([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata)
    data = np.random.default_rng(0).bytes(frame.nbytes - len(frame.header))
    read = dict(library.deserialize(frame.header + data))
    assert read.keys() == tensors.keys()
    for entry in frame.entries:
        theirs = read[entry.name]
        assert (theirs["dtype"], tuple(theirs["shape"])) == (entry.dtype.name, entry.shape)
        assert bytes(theirs["data"]) == (frame.header + data)[entry.byte_offset :][: entry.nbytes]


@settings(max_examples=50)
@given(st.dictionaries(names, st.tuples(st.sampled_from(WRITTEN), shapes), max_size=5), free_text)
def test_we_read_what_the_library_writes(tensors: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    made = {name: torch.ones(shape).to(getattr(torch, dtype.torch)) for name, (dtype, shape) in tensors.items()}
    data = save(made, metadata or None)
    files = VirtualFiles("memory")
    files.add("x", len(data), ((0, data),))
    header = safetensors.read_header(files, "x")
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.entries} == tensors
    assert header.metadata == metadata
    for entry in header.entries:
        ours = data[entry.byte_offset :][: entry.nbytes]
        assert ours == made[entry.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_file_of_the_library_is_read_in_the_order_of_its_bytes(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(3), "a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "x.safetensors")
    header = safetensors.read_header(LocalFiles(tmp_path), "x.safetensors")
    assert [entry.name for entry in header.entries] == ["a", "b"]


def test_an_unpadded_header_is_legal(tmp_path: Path) -> None:
    """torch's consolidation writes them (2.13): the data starts at an odd byte."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    text += b" " * (1 - len(text) % 2)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert safetensors.read_header(LocalFiles(tmp_path), "x").entries[0].byte_offset % 2 == 1


def test_empty_tensors_may_share_an_offset() -> None:
    header = header_of(safetensors.frame([(name, DTYPES[0], (0, 2)) for name in "abc"], {}))
    assert len({entry.byte_offset for entry in header.entries}) == 1


def test_a_type_without_a_safetensors_name_is_refused_by_tensor() -> None:
    (complex128,) = [dtype for dtype in ALL if dtype not in DTYPES]
    with pytest.raises(RequestError, match=r"w: .*C128"):
        safetensors.frame([("w", complex128, (2,))], {})


def test_one_file_has_no_two_tensors_of_one_name() -> None:
    with pytest.raises(ValueError, match="'a'"):
        safetensors.frame([("a", DTYPES[0], ()), ("a", DTYPES[0], ())], {})


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_library_refuses_we_refuse(data: st.DataObject) -> None:
    """Flip bytes of a small file's header: what we accept, the library accepts, and it sees the same tensors."""
    frame = safetensors.frame([("a", DTYPES[1], (2, 3)), ("b", DTYPES[3], (4,))], {"format": "pt"})
    raw = bytearray(frame.header + bytes(frame.nbytes - len(frame.header)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(frame.header) - 1))] = data.draw(st.sampled_from(b'0123456789[]{}",:- \\eE.ab\x00\xff'))
    files = VirtualFiles("memory")
    files.add("x", len(raw), ((0, bytes(raw)),))
    try:
        header = safetensors.read_header(files, "x")
    except CheckpointError:
        return
    theirs = dict(library.deserialize(bytes(raw)))
    assert {entry.name: list(entry.shape) for entry in header.entries} == {name: facts["shape"] for name, facts in theirs.items()}


@pytest.mark.parametrize("claim", ['"dtype":"F32[2]","shape":""', '"dtype":"F32","shape":[true]', '"dtype":"F32","shape":[2.0]'])
def test_a_form_that_is_known_is_not_taken_for_another(tmp_path, claim):
    """The element type and the shape are checked once for all tensors that have both in common."""
    header = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},'
    header += f'"c":{{{claim},"data_offsets":[12,20]}}}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(20))
    with pytest.raises(CheckpointError, match=r"element type|shape is"):
        safetensors.read_header(LocalFiles(tmp_path), "x.safetensors")


_A, _B = '"dtype":"F32","shape":[2],"data_offsets":[0,8]', '"dtype":"F32","shape":[1],"data_offsets":[8,12]'


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        (f'{{"a":{{{_A}}},"a":{{{_B}}}}}', "a"),
        (f'{{"a":{{{_A},"dtype":"I32"}},"b":{{{_B}}}}}', "dtype"),
        (f'{{"a":{{{_A},"shape":[1,2]}},"b":{{{_B}}}}}', "shape"),
        (f'{{"a":{{{_A},"\\u0064type":"I32"}},"b":{{{_B}}}}}', "dtype"),
        (f'{{"__metadata__":{{"format":"pt","format":"tf"}},"a":{{{_A}}},"b":{{{_B}}}}}', "format"),
        (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{{{_A}}},"b":{{{_B}}}}}', "__metadata__"),
        (f'{{"a":{{{_A},"more":1,"more":2}},"b":{{{_B}}}}}', "more"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, header, twice):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(12))
    with pytest.raises(CheckpointError, match=f"names '{twice}' twice"):
        safetensors.read_header(LocalFiles(tmp_path), "x.safetensors")


def test_names_and_metadata_may_hold_quotes_and_further_keys(tmp_path):
    """What the number of strings does not explain is looked at closely, and taken."""
    header = json.dumps({"__metadata__": {'"': "\\"}, 'a"': {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": {"x": "y"}}})
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    found = safetensors.read_header(LocalFiles(tmp_path), "x.safetensors")
    assert (found.names, found.metadata) == (('a"',), {'"': "\\"})
