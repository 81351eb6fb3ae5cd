"""Files that lie: each is refused with a paragraph that names the file, what is wrong, and the numbers; and nothing ran."""

from __future__ import annotations

import copy
import copyreg
import os
import pickle
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import lies

from reshard.containers import dcp_metadata, inert_pickle, safetensors, torch_zip
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry import dtypes
from reshard.storage.files import LocalFiles

HEADER = lies.HONEST_HEADER
DATA = len(lies.safetensors(data=b""))  # where the honest file's tensors start


def refused(read: Callable[[], object], *parts: str) -> str:
    """The message with which `read` refuses, which holds all `parts`."""
    with pytest.raises(CheckpointError) as caught:
        read()
    message = str(caught.value)
    for part in parts:
        assert part in message
    return message


def reading(tmp_path: Path, data: bytes, reader: Callable[..., object], **options: Any) -> Callable[[], object]:
    (tmp_path / "lie.bin").write_bytes(data)
    return lambda: reader(LocalFiles(tmp_path), "lie.bin", **options)


# ---------------------------------------------------------------- safetensors

SAFETENSORS = {
    "empty file": (b"", ["0 bytes", "10"]),
    "only a length": (struct.pack("<Q", 2), ["8 bytes", "10"]),
    "header longer than the file": (lies.safetensors(claimed=5000), ["5,000 bytes", f"the file has {DATA + 32}", "cut short"]),
    "header longer than allowed": (lies.safetensors(claimed=1 << 40), ["1,099,511,627,776", "100,000,000"]),
    "header of nothing": (lies.safetensors(claimed=0), ["claims 0 bytes"]),
    "a zip": (lies.torch_file(), ["not a safetensors file", "a zip file"]),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS pointer"]),
    "a web page": (b"<!DOCTYPE html><html>nothing here</html>", ["web page"]),
    "zeros": (bytes(4096), ["zeros"]),
    "not UTF-8": (lies.safetensors(b'{"\xff":1}'), ["UTF-8", "byte 10", "0xff"]),
    "not JSON": (lies.safetensors(b'{"a":'), ["JSON"]),
    "a list": (lies.safetensors(b"[1,2]"), ["a JSON list"]),
    "nested without end": (lies.safetensors(b'{"a":' + b"[" * 200_000), ["JSON"]),
    "a number without end": (lies.safetensors(b'{"a":' + b"9" * 10_000 + b"}"), ["JSON"]),
    "twice the same name": (
        lies.safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b""),
        ["'a' twice"],
    ),
    "twice the same field": (
        lies.safetensors(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b""),
        ["'dtype' twice"],
    ),
    "a name that is no text": (lies.safetensors(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b""), ["Unicode"]),
    "an entry that is a number": (lies.safetensors(HEADER | {"b": 7}), ["lie.bin: b", "is 7"]),
    "an entry without a shape": (lies.safetensors(HEADER | {"b": {"dtype": "F32", "data_offsets": [24, 32]}}), ["lie.bin: b", "shape"]),
    "metadata of numbers": (lies.safetensors(HEADER | {"__metadata__": {"a": 1}}), ["__metadata__", "strings"]),
    "metadata that is a list": (lies.safetensors(HEADER | {"__metadata__": []}), ["__metadata__"]),
    "unknown dtype": (lies.safetensors_entry(dtype="F7"), ["lie.bin: b", "'F7'", "BF16"]),
    "dtype narrower than a byte": (lies.safetensors_entry(dtype="F4"), ["lie.bin: b", "'F4'"]),
    "dtype that is a list": (lies.safetensors_entry(dtype=[]), ["lie.bin: b"]),
    "negative size": (lies.safetensors_entry(shape=[-4]), ["lie.bin: b", "[-4]"]),
    "true as a size": (lies.safetensors_entry(shape=[True, 4]), ["lie.bin: b", "[true, 4]"]),
    "size with a fraction": (lies.safetensors_entry(shape=[4.0]), ["lie.bin: b", "[4.0]"]),
    "shape that is a number": (lies.safetensors_entry(shape=4), ["lie.bin: b", "the shape is 4"]),
    "size that is a string": (lies.safetensors_entry(shape=["4"]), ["lie.bin: b"]),
    "sizes whose product wraps around": (lies.safetensors_entry(shape=[1 << 32, 1 << 32, 4]), ["lie.bin: b", "8 bytes", "more than any"]),
    "shape larger than its bytes": (lies.safetensors_entry(shape=[5]), ["lie.bin: b", "24..32", "8 bytes", "needs 10"]),
    "three offsets": (lies.safetensors_entry(data_offsets=[24, 28, 32]), ["lie.bin: b", "two non-negative integers"]),
    "offsets backwards": (lies.safetensors_entry(data_offsets=[32, 24]), ["lie.bin: b", "32..24"]),
    "negative offset": (lies.safetensors_entry(data_offsets=[-8, 0]), ["lie.bin: b", "[-8, 0]"]),
    "overlap": (lies.safetensors_entry(data_offsets=[20, 28]), ["lie.bin: b", f"byte {DATA + 20} ", f"ends at {DATA + 24}", "overlap"]),
    "same bytes twice": (lies.safetensors_entry(data_offsets=[0, 8]), ["overlap"]),
    "hole": (lies.safetensors_entry(data_offsets=[28, 36]), ["lie.bin: b", f"byte {DATA + 28} ", f"ends at {DATA + 24}", "a hole"]),
    "hole before the first": (
        lies.safetensors({"b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"ab"),
        ["b", "the header", "hole"],
    ),
    "cut": (
        lies.safetensors(data=bytes(30)),
        ["lie.bin: b", f"{DATA + 24}..{DATA + 32}", f"the file ends at {DATA + 30}", "1 of 2", "Copy the file again"],
    ),
    "cut deeper": (lies.safetensors(data=bytes(3)), ["lie.bin: a", "2 of 2"]),
    "more than its tensors": (
        lies.safetensors(data=bytes(40)),
        [f"end at byte {DATA + 32}", f"has {DATA + 40}", "8 bytes belong to no tensor"],
    ),
}


def test_the_honest_safetensors_file_is_read(tmp_path: Path) -> None:
    header = reading(tmp_path, lies.safetensors(), safetensors.read_header)()
    assert [entry.name for entry in header.entries] == ["a", "b"]


@pytest.mark.distinct
@pytest.mark.parametrize("lie", SAFETENSORS)
def test_safetensors_that_lie_are_refused_with_numbers(tmp_path: Path, lie: str) -> None:
    data, parts = SAFETENSORS[lie]
    refused(reading(tmp_path, data, safetensors.read_header), "lie.bin", *parts)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    refused(lambda: safetensors.read_header(LocalFiles(tmp_path), "a.safetensors"), "a.safetensors", "not there")
    refused(lambda: torch_zip.read(LocalFiles(tmp_path), "a.pt"), "a.pt", "not there")


# ---------------------------------------------------------------- pickles

GADGETS = list(lies.gadgets(Path("sentinel")))


@pytest.mark.distinct
@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("door", ["pickle", "torch file", "metadata", "old container"])
def test_nothing_runs(tmp_path: Path, gadget: str, door: str) -> None:
    sentinel = tmp_path / "ran"
    code = lies.gadgets(sentinel)[gadget]
    old = b"".join([torch_zip._OLD_MAGIC, *(pickle.dumps(part, 2) for part in (1001, {"little_endian": True}))])
    doors: dict[str, Callable[[], object]] = {
        "pickle": lambda: inert_pickle.load(code, where="lie"),
        "torch file": reading(tmp_path, lies.archive({"archive/data.pkl": code}), torch_zip.read),
        "metadata": lambda: dcp_metadata.parse(code, where="lie"),
        "old container": reading(tmp_path, old + code + pickle.dumps([], 2), torch_zip.read),
    }
    try:
        doors[door]()
    except CheckpointError as error:
        assert "lie" in str(error)
    assert not sentinel.exists()


@pytest.mark.parametrize("gadget", ["os.system by __reduce__", "os.system at protocol 4", "subprocess", "eval", "exec"])
def test_the_gadgets_are_real(tmp_path: Path, gadget: str) -> None:
    """pickle.load runs them: the tests above would notice."""
    sentinel = tmp_path / "ran"
    pickle.loads(lies.gadgets(sentinel)[gadget])
    assert sentinel.exists()


def test_no_module_of_the_file_is_imported() -> None:
    assert "this" not in sys.modules
    stand_in = inert_pickle.load(lies.running(lies.call(lies.name("this", "s"), lies.value(1))), where="lie")
    assert stand_in.class_name == "this.s" and stand_in.args == (1,)
    assert "this" not in sys.modules


def test_a_function_of_the_machine_becomes_a_stand_in_by_its_name(tmp_path: Path) -> None:
    stand_in = inert_pickle.load(lies.gadgets(tmp_path / "ran")["subprocess"], where="lie")
    assert repr(stand_in) == "<inert subprocess.check_call>"


@pytest.mark.parametrize("poison", lies.poisons())
def test_a_pickle_cannot_change_what_the_reader_hands_it(poison: str) -> None:
    before = [copy.copy(dtypes.from_torch(dtype.torch, where="")) for dtype in dtypes._TABLE]
    refused(lambda: inert_pickle.load(lies.poisons()[poison], where="lie.pt"), "lie.pt", "cannot be read")
    assert [dtypes.from_torch(dtype.torch, where="") for dtype in dtypes._TABLE] == before
    assert inert_pickle.load(lies.running(lies.size(1, 2)), where="") == (1, 2)


def test_a_tensor_cannot_be_sent_to_another_file_after_it_was_checked(tmp_path: Path) -> None:
    """BUILD writes the fields of a slotted frozen dataclass past all checks, unless it is sealed."""
    state = lies.value(["../../etc/passwd", 0, None, (1,), (1,), "0"])
    refused(reading(tmp_path, lies.torch_file(lies.tensor() + state + b"b"), torch_zip.read), "lie.bin", "LocatedTensor")


BOMBS = {
    "memo number": "numbers an object 2,147,483,647",
    "memo number in text": "numbers an object 2,000,000,000",
    "long string": "does not end within",
    "bytes of a number": "bytes are made from int",
    "bytearray of a number": "bytes are made from int",
    "a list copied often": "over and over",
    "range": "not iterable",
}


@pytest.mark.parametrize("bomb", lies.bombs())
def test_short_pickles_get_little_memory(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(lambda: inert_pickle.load(lies.bombs()[bomb], where="lie.pt"), "lie.pt", "cannot be read", BOMBS[bomb])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_an_extension_code_does_not_reach_an_object_of_this_process() -> None:
    """The one way around find_class: once the standard unpickler has resolved a code, the C unpickler finds it in a cache."""
    copyreg.add_extension("os", "getpid", 200)
    try:
        assert pickle.loads(b"\x80\x02\x82\xc8.") is os.getpid
        refused(lambda: inert_pickle.load(b"\x80\x02\x82\xc8)R.", where="lie.pt"), "lie.pt", "extension code")
    finally:
        copyreg.remove_extension("os", "getpid", 200)
        copyreg.clear_extension_cache()


@pytest.mark.distinct
@pytest.mark.parametrize("damage", lies.damaged())
def test_damaged_pickles_are_one_paragraph(damage: str) -> None:
    refused(lambda: inert_pickle.load(lies.damaged()[damage], where="lie.pt"), "lie.pt: ", "cannot be read", "bytes")


@pytest.mark.parametrize("length", range(0, 600, 7))
def test_a_pickle_cut_anywhere_is_refused(length: int) -> None:
    data = lies.dcp_metadata()
    assert len(data) > 600
    refused(lambda: dcp_metadata.parse(data[:length], where=".metadata"), ".metadata")


# ---------------------------------------------------------------- torch.save

_big = {"offset": 0xFFFFFFFF}

TORCH = {
    "empty file": (b"", ["an empty file"]),
    "garbage": (b"\x13\x37" * 100, ["not a torch.save file", "13 37"]),
    "a safetensors file": (lies.safetensors(), ["a safetensors file"]),
    "a tar archive": (bytes(257).replace(b"\0", b"x") + b"ustar" + bytes(300), ["a tar archive"]),
    "a plain pickle": (pickle.dumps({"a": 1}), ["a plain pickle"]),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS pointer"]),
    "cut": (lies.torch_file()[:-30], ["starts as a zip", "cut short"]),
    "more after its end": (lies.torch_file() + b"more", ["cut short"]),
    "another zip": (lies.archive({"word/document.xml": b"<x/>"}), ["not torch.save's", "no data.pkl"]),
    "two pickles": (lies.archive({"a/data.pkl": b"N.", "b/data.pkl": b"N."}), ["2 members called data.pkl"]),
    "a TorchScript archive": (lies.archive({"a/data.pkl": b"N.", "a/constants.pkl": b"N."}), ["TorchScript"]),
    "compressed": (lies.torch_file(central={"method": 8}), ["'archive/data/0'", "deflate"]),
    "compressed by something": (lies.torch_file(central={"method": 77}), ["77"]),
    "encrypted": (lies.torch_file(central={"flags": 0x0809}), ["'archive/data/0'", "encrypted"]),
    "two members of one name": (lies.torch_file(twice="archive/data/0"), ["two members", "'archive/data/0'"]),
    "two sizes": (lies.torch_file(central={"stored": 20}), ["20 bytes for 24"]),
    "a member beyond the directory": (lies.torch_file(central={"stored": 4000, "size": 4000}), ["'archive/data/0'", "4,000 bytes"]),
    "a member in the directory": (lies.torch_file(central={"stored": 120, "size": 120}), ["'archive/data/0'"]),
    "a local header elsewhere": (lies.torch_file(central={"offset": 1}), ["'archive/data/0'", "byte 1,"]),
    "a local header far out": (lies.torch_file(central={"offset": 1 << 31}), ["'archive/data/0'", "2,147,483,648"]),
    "a local header of another member": (lies.torch_file(central={"offset": 0}), ["'archive/data/0'", "byte 0,"]),
    "a local extra field without end": (lies.torch_file(local={"extra_length": 0xFFFF}), ["'archive/data/0'", "payloads end"]),
    "another local name": (lies.torch_file(local={"name": "archive/data/1"}), ["'archive/data/0'"]),
    "another local name length": (lies.torch_file(local={"name_length": 3}), ["'archive/data/0'"]),
    "64-bit size without its field": (lies.torch_file(central=_big), ["'archive/data/0'", "64-bit"]),
    "64-bit size in a short field": (lies.torch_file(central=_big | {"extra": b"\1\0\x04\0abcd"}), ["64-bit"]),
    "64-bit field without end": (lies.torch_file(central=_big | {"extra": b"\1\0\xff\0" + bytes(8)}), ["64-bit"]),
    "64-bit offset out of the file": (
        lies.torch_file(central=_big | {"extra": struct.pack("<HHQ", 1, 8, 1 << 60)}),
        ["'archive/data/0'", "1,152,921,504,606,846,976"],
    ),
    "fewer members": (lies.torch_file(end={"count": 3}, end64={"count": 3}), ["more than its 3 members"]),
    "more members": (lies.torch_file(end={"count": 5}, end64={"count": 5}), ["5 members", "number 4"]),
    "many members": (lies.torch_file(end={"count": 0xFFFF}, end64={"count": 1 << 40}), ["1,099,511,627,776 members"]),
    "two directories": (lies.torch_file(end={"offset": 0}), ["disagree"]),
    "a directory elsewhere": (lies.torch_file(end={"offset": 4}, end64={"offset": 4}), ["must end at"]),
    "a directory far out": (lies.torch_file(end={"offset": 0xFFFFFFFF}, end64={"offset": 1 << 62}), ["must end at"]),
    "a 64-bit end record elsewhere": (lies.torch_file(end64={"at": 7}), ["locator says 7"]),
    "a 64-bit end record far out": (lies.torch_file(end64={"at": 1 << 63}), ["locator says 9,223,372,036,854,775,808"]),
    "a directory in a payload": (lies.second_directory(), ["64-bit end record should lie at"]),
    "bytes in the other order": (lies.archive({"a/data.pkl": b"N.", "a/byteorder": b"big"}), ["byte order", "'big'"]),
    "a storage that is not there": (lies.torch_file(lies.tensor(where=lies.storage("7"))), ["'7'", "no member archive/data/7"]),
    "a storage in another folder": (lies.torch_file(lies.tensor(where=lies.storage("../version"))), ["'../version'"]),
    "a storage larger than its member": (lies.torch_file(lies.tensor(where=lies.storage(count=7))), ["'0'", "7 x F32", "28 bytes", "24"]),
    "a storage of a negative count": (lies.torch_file(lies.tensor(where=lies.storage(count=-1))), ["storage", "-1"]),
    "a storage of no known type": (lies.torch_file(lies.tensor(where=lies.storage(kind="QUInt9Storage"))), ["QUInt9Storage"]),
    "a storage that is a number": (lies.torch_file(lies.tensor(where=lies.value(5))), ["storage is 5"]),
    "a persistent id that is a number": (lies.torch_file(lies.value(5) + b"Q"), ["refers to tensor data by 5"]),
    "a size beyond the storage": (lies.torch_file(lies.tensor(size=(3, 3))), ["(3, 3)", "36 bytes", "'0' has 24"]),
    "an offset beyond the storage": (lies.torch_file(lies.tensor(offset=1)), ["offset 1", "28 bytes", "24"]),
    "strides beyond the storage": (lies.torch_file(lies.tensor(stride=(4, 1))), ["(4, 1)", "28 bytes", "24"]),
    "a negative offset": (lies.torch_file(lies.tensor(offset=-1)), ["offset -1"]),
    "a negative stride": (lies.torch_file(lies.tensor(stride=(-3, 1))), ["(-3, 1)"]),
    "a negative size": (lies.torch_file(lies.tensor(size=(-2, 3))), ["(-2, 3)"]),
    "true as a size": (lies.torch_file(lies.tensor(size=(True, 3))), ["(True, 3)"]),
    "a size without end": (lies.torch_file(lies.tensor(size=(10**30, 3))), ["claims offset 0"]),
    "one element shown everywhere": (lies.torch_file(lies.tensor(size=(1 << 40, 1 << 40), stride=(0, 0))), ["more than any memory"]),
    "more strides than sizes": (lies.torch_file(lies.tensor(stride=(3, 1, 1))), ["(3, 1, 1)"]),
    "a size that is a word": (lies.torch_file(lies.tensor(size="ab")), ["'ab'"]),
    "too few arguments": (lies.torch_file(lies.call(lies.name("torch._utils", "_rebuild_tensor_v2"), lies.storage())), ["cannot be read"]),
}


def test_the_honest_torch_file_is_read(tmp_path: Path) -> None:
    tensor = reading(tmp_path, lies.torch_file(), torch_zip.read)()
    assert (tmp_path / "lie.bin").read_bytes()[tensor.byte_offset :][:24] == lies.TENSOR_BYTES
    assert (tensor.shape, tensor.strides, tensor.dtype.name) == ((2, 3), (3, 1), "F32")


def test_a_file_with_64_bit_fields_is_read(tmp_path: Path) -> None:
    """As torch writes them beyond 4 GB: the same file, with the numbers moved to the extra field."""
    honest = lies.torch_file()
    offset = honest.index(b"archive/data/0") - 30
    data = lies.torch_file(
        central={
            "size": 0xFFFFFFFF,
            "stored": 0xFFFFFFFF,
            "offset": 0xFFFFFFFF,
            "extra": b"XX\2\0ab" + struct.pack("<HHQQQ", 1, 24, 24, 24, offset),
        },
        end={"count": 0xFFFF, "size": 0xFFFFFFFF, "offset": 0xFFFFFFFF},
    )
    tensor = reading(tmp_path, data, torch_zip.read)()
    assert data[tensor.byte_offset :][:24] == lies.TENSOR_BYTES


@pytest.mark.distinct
@pytest.mark.parametrize("lie", TORCH)
def test_torch_files_that_lie_are_refused_with_numbers(tmp_path: Path, lie: str) -> None:
    data, parts = TORCH[lie]
    refused(reading(tmp_path, data, torch_zip.read), "lie.bin", *parts)


@pytest.mark.parametrize("lie", TORCH)
def test_a_lying_entry_cannot_reach_out_of_its_range(tmp_path: Path, lie: str) -> None:
    """The same lies inside of a DCP file, between two honest entries."""
    data, _ = TORCH[lie]
    around = lies.torch_file()
    read = reading(tmp_path, around + data + around, torch_zip.entry_tensor, start=len(around), nbytes=len(data))
    refused(read, "lie.bin")


OLD = {
    "another protocol": (lies.old_file(protocol=1002), ["protocol 1002", "1001"]),
    "the other byte order": (lies.old_file(system={"little_endian": False}), ["byte order is big"]),
    "no byte order": (lies.old_file(system={}), ["byte order"]),
    "keys that are no list": (lies.old_file(keys={"0": 1}), ["list of storage keys"]),
    "a key that is a number": (lies.old_file(keys=[0]), ["list of storage keys"]),
    "a key that no tensor names": (lies.old_file(keys=["7", "0"]), ["'7'", "no tensor"]),
    "a storage that is not listed": (lies.old_file(keys=[]), ["'0'", "not in the file"]),
    "more elements than the file has": (lies.old_file(count=7), ["'0'", "7 elements", "the file ends at"]),
    "elements without end": (lies.old_file(count=(1 << 63) - 1), ["'0'", "9,223,372,036,854,775,807 elements"]),
    "a negative count": (lies.old_file(count=-6), ["'0'", "-6 elements"]),
    "fewer elements than its tensors": (lies.old_file(count=5), ["'0'", "6 x F32", "24 bytes", "20"]),
    "cut before the storages": (lies.old_file(data=b"1234567"), ["'0'", "should start at"]),
    "cut in a storage": (lies.old_file()[:-1], ["'0'", "6 elements"]),
    "cut in its pickles": (lies.old_file()[:100], ["pickles do not end"]),
    "no pickle in the middle": (lies.old_file()[:14] + b"\xff" * 100, ["not a torch.save file"]),
    "a view beyond its storage": (lies.old_file(code=lies.tensor(where=lies.old_storage(view=("v", 2, 5)))), ["'0'", "28 of 24"]),
    "a view that is a number": (lies.old_file(code=lies.tensor(where=lies.old_storage(view=5))), ["'0'", "view"]),
}


def test_the_honest_old_file_is_read(tmp_path: Path) -> None:
    tensor = reading(tmp_path, lies.old_file(), torch_zip.read)()
    assert (tmp_path / "lie.bin").read_bytes()[tensor.byte_offset :] == lies.TENSOR_BYTES


def test_a_view_in_an_old_file_starts_where_it_says(tmp_path: Path) -> None:
    code = lies.tensor(where=lies.old_storage(count=3, view=("v", 2, 3)), size=(3,), stride=(1,))
    tensor = reading(tmp_path, lies.old_file(code=code), torch_zip.read)()
    assert (tmp_path / "lie.bin").read_bytes()[tensor.byte_offset :] == lies.TENSOR_BYTES[8:]


@pytest.mark.distinct
@pytest.mark.parametrize("lie", OLD)
def test_old_files_that_lie_are_refused_with_numbers(tmp_path: Path, lie: str) -> None:
    data, parts = OLD[lie]
    refused(reading(tmp_path, data, torch_zip.read), "lie.bin", *parts)


def test_an_entry_of_something_else_than_one_tensor_is_refused(tmp_path: Path) -> None:
    data = lies.torch_file(lies.value({"a": 1}))
    refused(reading(tmp_path, data, torch_zip.entry_tensor, start=0, nbytes=len(data)), "one tensor", "a dict")


def test_an_entry_of_values_to_be_conjugated_is_refused(tmp_path: Path) -> None:
    data = lies.torch_file(lies.tensor(more=lies.value({"conj": True})))
    read = reading(tmp_path, data, torch_zip.entry_tensor, start=0, nbytes=len(data))
    with pytest.raises(UnsupportedError, match=r"torch\.Tensor \('conj'\)"):
        read()


def test_an_entry_beyond_the_file_names_both_ends(tmp_path: Path) -> None:
    data = lies.torch_file()
    read = reading(tmp_path, data, torch_zip.entry_tensor, start=100, nbytes=len(data))
    refused(read, "lie.bin", f"{100 + len(data):,}", f"{len(data):,}", "cut short")


@pytest.mark.parametrize("share", range(0, 100, 3))
def test_a_torch_file_cut_anywhere_is_refused(tmp_path: Path, share: int) -> None:
    data = lies.torch_file()
    refused(reading(tmp_path, data[: len(data) * share // 100], torch_zip.read), "lie.bin")


# ---------------------------------------------------------------- DCP metadata

METADATA = {
    "no metadata": (pickle.dumps({"a": 1}), ["not the metadata", "a dict"]),
    "metadata of another kind": (lies.running(lies.name("a", "B") + b")\x81"), ["a.B"]),
    "a chunk without a place": (lies.dcp_metadata(entries=[lies.entry()]), ["w", "offsets (2, 0)", "sizes (2, 6)", "in no file"]),
    "a place without a chunk": (lies.dcp_metadata(chunks=[lies.chunk((0, 0), (2, 6))]), ["w", "offsets (2, 0)", "no such chunk"]),
    "a place for another tensor": (
        lies.dcp_metadata(entries=[lies.entry(), lies.entry(offsets=(2, 0)), lies.entry("v", (0,))]),
        ["v", "offsets (0,)"],
    ),
    "an object for a tensor": (
        lies.dcp_metadata(entries=[lies.entry(), lies.entry(offsets=(2, 0)), lies.entry(offsets=None)]),
        ["no such object"],
    ),
    "two places for a chunk": (lies.dcp_metadata(entries=[lies.entry(), lies.entry(start=9)]), ["w", "two entries", "(0, 0)"]),
    "two sizes for a chunk": (
        lies.dcp_metadata(chunks=[lies.chunk((0, 0), (2, 6)), lies.chunk((0, 0), (4, 6))]),
        ["w", "(0, 0)", "(2, 6)", "(4, 6)"],
    ),
    "a chunk outside": (lies.dcp_metadata(shape=(3, 6)), ["w", "offsets (2, 0)", "sizes (2, 6)", "shape (3, 6)"]),
    "a chunk of another rank": (lies.dcp_metadata(shape=(4, 6, 1)), ["w", "3 axes"]),
    "a chunk of a negative size": (lies.dcp_metadata(chunks=[lies.chunk((0, 0), (-2, 6))]), ["w", "(-2, 6)"]),
    "a chunk at true": (lies.dcp_metadata(chunks=[lies.chunk((False, 0), (2, 6))]), ["w", "a chunk is", "(False, 0)"]),
    "a chunk at a list": (lies.dcp_metadata(chunks=[lies.chunk(([], 0), (2, 6))]), ["w"]),
    "a chunk that is a number": (lies.dcp_metadata(chunks=[lies.value(3)]), ["w", "a chunk is 3"]),
    "a chunk too far": (lies.dcp_metadata(chunks=[lies.chunk((10**30, 0), (2, 6))]), ["w"]),
    "a size with a fraction": (lies.dcp_metadata(shape=(4.0, 6)), ["w", "size"]),
    "a path that climbs": (lies.dcp_metadata(entries=[lies.entry(path="../secret")]), ["w", "'../secret'", "outside"]),
    "a path at the root": (lies.dcp_metadata(entries=[lies.entry(path="/etc/passwd")]), ["w", "'/etc/passwd'", "outside"]),
    "a path that is a number": (lies.dcp_metadata(entries=[lies.entry(path=5)]), ["w", "of 5"]),
    "a negative start": (lies.dcp_metadata(entries=[lies.entry(start=-1)]), ["w", "-1"]),
    "a negative length": (lies.dcp_metadata(entries=[lies.entry(nbytes=-1)]), ["w", "-1"]),
    "a length without end": (lies.dcp_metadata(entries=[lies.entry(nbytes=1 << 63)]), ["w", "9223372036854775808"]),
    "a name that is a number": (lies.dcp_metadata(entries=[lies.entry(fqn=5)]), ["5"]),
    "an unknown dtype": (lies.dcp_metadata(dtype=lies.name("torch", "quint8")), ["w", "'quint8'"]),
    "no dtype": (lies.dcp_metadata(dtype=b"N"), ["w", "element type"]),
    "two transforms": (
        lies.dcp_metadata(entries=[lies.entry(), lies.entry(offsets=(2, 0), transform_descriptors=["stream.zstd/1"])]),
        ["w", "stream.zstd/1"],
    ),
    "a transform that is a number": (lies.dcp_metadata(entries=[lies.entry(transform_descriptors=[1])]), ["w", "not names"]),
    "a planner's path of objects": (lies.dcp_metadata(planner={"w": [{}]}), ["'w'", "planner"]),
}


def test_the_honest_metadata_is_read() -> None:
    metadata = dcp_metadata.parse(lies.dcp_metadata(planner={"w": ("w", 3)}), where=".metadata")
    assert metadata.paths == ("__1_0.distcp", "__0_0.distcp") and metadata.planner == {"w": ("w", 3)}
    assert metadata.tensors["w"].chunks.offsets.tolist() == [[0, 0], [2, 0]]


@pytest.mark.distinct
@pytest.mark.parametrize("lie", METADATA)
def test_metadata_that_lies_is_refused_with_tensor_and_offsets(lie: str) -> None:
    data, parts = METADATA[lie]
    refused(lambda: dcp_metadata.parse(data, where="step-7/.metadata"), "step-7/.metadata", *parts)
