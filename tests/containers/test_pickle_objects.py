"""A large .metadata whose objects are read in columns gives what loading it as a whole gives, also after any byte has changed."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.containers import dcp_metadata, pickle_objects
from reshard.containers.inert_pickle import load
from reshard.errors import CheckpointError


@pytest.fixture(autouse=True)
def _small_pickles_are_read_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_objects, "SMALLEST", 0)
    monkeypatch.setattr(pickle_objects, "_SHARE", 0.2)


def written(*, chunks: int, shared: bool = True, axes: tuple[int, ...] = (1, 2, 3), rows: int = 5, scale: int = 1) -> bytes:
    """A .metadata of one tensor for each number of axes, cut along the first. shared: equal texts and sizes are the same objects, as in a
    save of one process; otherwise they are pickled again and again, as after a gather."""
    items: dict[str, Any] = {"step": BytesStorageMetadata()}
    places = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 1000)}

    def text(value: str) -> str:
        return value if shared else (value + " ")[:-1]

    for ndim in axes:
        fqn, rest = f"layer.{ndim}", (7,) * (ndim - 1)
        listed = []
        for number in range(chunks):
            offsets, sizes = torch.Size((number * rows, *(0,) * (ndim - 1))), torch.Size((rows, *rest))
            listed.append(ChunkStorageMetadata(offsets, sizes))
            index = MetadataIndex(text(fqn), offsets if shared else torch.Size(tuple(offsets)), number)
            places[index] = _StorageInfo(text(f"__{number % 7}_0.distcp"), 4096 + number * 1600 * scale, 1600)
        items[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size((chunks * rows, *rest)), listed)
    return pickle.dumps(Metadata(items, {fqn: (fqn,) for fqn in items}, places))


def content(metadata: dcp_metadata.DcpMetadata) -> object:
    """All that a metadata says, in a form that does not depend on the numbering of the files."""
    tensors = {
        fqn: (
            item.dtype.name, item.shape, item.transforms, item.chunks.offsets.tolist(), item.chunks.sizes.tolist(),
            item.chunks.entry_offsets.tolist(), item.chunks.entry_nbytes.tolist(), [metadata.paths[i] for i in item.chunks.files],
        )
        for fqn, item in metadata.tensors.items()
    }  # fmt: skip
    return tensors, metadata.objects, sorted(metadata.paths), metadata.planner, metadata.version


def as_a_whole(data: bytes) -> object:
    try:
        return content(dcp_metadata._metadata(load(data, where="x"), pickle_objects.ObjectTable.empty(), "x"))
    except CheckpointError as error:
        return str(error)


def in_columns(data: bytes) -> object:
    """None: the columns cannot tell, so `parse` loads the pickle as a whole."""
    try:
        root, objects = pickle_objects.load_objects(lambda: data, "ChunkStorageMetadata", ("MetadataIndex", "_StorageInfo"), where="x")
        return content(dcp_metadata._metadata(root, objects, "x"))
    except (pickle_objects.NotColumnsError, CheckpointError):
        return None


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 300},
        {"chunks": 300, "shared": False},
        {"chunks": 1500, "axes": (2,)},  # frames and batches of the pickle
        {"chunks": 300, "rows": 1 << 20, "scale": 1 << 34},  # numbers of 4 bytes and more
        {"chunks": 300, "axes": (4, 1)},
        pytest.param({"chunks": 70_000, "axes": (1,), "shared": False}, marks=pytest.mark.slow),  # several blocks
    ],
)
def test_columns_say_what_the_values_say(options: dict[str, Any]) -> None:
    data = written(**options)
    found = in_columns(data)
    assert found is not None and found == as_a_whole(data)


@pytest.mark.parametrize(("chunks", "times"), [(5000, 1), (1, 2)])
def test_a_pickle_is_read_again_only_if_it_is_loaded_as_a_whole(chunks: int, times: int) -> None:
    """So its bytes need not be kept while its columns are made."""
    data, calls = written(chunks=chunks, axes=(2,)), []
    found = dcp_metadata.read(lambda: calls.append(1) or data, where="x")  # type: ignore[func-returns-value]
    assert content(found) == as_a_whole(data) and len(calls) == times


def test_most_objects_are_in_the_columns() -> None:
    data = written(chunks=5000, axes=(2,))
    root, objects = pickle_objects.load_objects(lambda: data, "ChunkStorageMetadata", ("MetadataIndex", "_StorageInfo"), where="x")
    listed = root.get("state_dict_metadata")["layer.2"].get("chunks")
    runs = [item for item in listed if isinstance(item, pickle_objects.Run)]
    assert sum(run.count for run in runs) > 4950 and len(listed) < 80
    first = np.arange(runs[0].first, runs[0].first + runs[0].count)
    assert objects.sizes(first, "sizes")[1][:, :2].tolist() == [[5, 7]] * len(first)


@pytest.mark.parametrize("shared", [True, False])
def test_a_changed_byte_changes_the_columns_as_it_changes_the_values(shared: bool) -> None:
    data = written(chunks=120, shared=shared, axes=(2,))
    dice, told = random.Random(0), 0
    for _ in range(700):
        at = dice.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ dice.randrange(1, 256)]) + data[at + 1 :]
        found = in_columns(changed)
        told += isinstance(found, tuple)
        assert found is None or found == as_a_whole(changed), at
    assert told > 20  # a changed offset of an entry is still a metadata


def test_bytes_after_the_end_are_left_to_the_whole() -> None:
    assert in_columns(written(chunks=300) + b"more") is None
