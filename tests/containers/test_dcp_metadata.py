"""The .metadata of DCP, written by torch's own classes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.containers import dcp_metadata
from reshard.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Row = tuple[tuple[int, ...], tuple[int, ...], str, int, int]


def written(tensors: dict[str, tuple[tuple[int, ...], list[Row]]], objects: dict[str, Row] | None = None, **more: Any) -> bytes:
    """The .metadata of tensors given as shape and rows (offsets, sizes, path, entry offset, entry length)."""
    items: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for fqn, (shape, rows) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in rows]
        items[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(shape), chunks)
        for number, (offsets, _, *place) in enumerate(rows):
            places[MetadataIndex(fqn, torch.Size(offsets), number)] = _StorageInfo(*place)
    for fqn, (_, _, *place) in (objects or {}).items():
        items[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = _StorageInfo(*place)
    return pickle.dumps(Metadata(items, storage_data=places, **more))


def parsed(data: bytes) -> dcp_metadata.DcpMetadata:
    return dcp_metadata.parse(data, where=".metadata")


def rows_of(metadata: dcp_metadata.DcpMetadata, fqn: str) -> Iterator[Row]:
    chunks = metadata.tensors[fqn].chunks
    for row in range(len(chunks)):
        offsets, sizes = tuple(chunks.offsets[row].tolist()), tuple(chunks.sizes[row].tolist())
        yield offsets, sizes, metadata.paths[chunks.files[row]], int(chunks.entry_offsets[row]), int(chunks.entry_nbytes[row])


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Row]]:
    """A tensor cut into a grid of chunks, in any order, in any files."""
    cuts = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=3))
    starts = [[sum(parts[:number]) for number in range(len(parts))] for parts in cuts]
    boxes = list(zip(product(*starts), product(*cuts), strict=True))
    paths = draw(st.lists(st.sampled_from(["__0_0.distcp", "__1_0.distcp", "sub/x"]), min_size=len(boxes), max_size=len(boxes)))
    rows = [(*box, path, 1600 * number, 1600) for number, (box, path) in enumerate(zip(boxes, paths, strict=True))]
    return tuple(map(sum, cuts)), draw(st.permutations(rows))


def by_box(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[:3])


@settings(max_examples=50)
@given(st.dictionaries(st.text(min_size=1, max_size=5), grids(), max_size=4))
def test_every_chunk_comes_back_sorted_with_its_place(tensors: dict[str, tuple[tuple[int, ...], list[Row]]]) -> None:
    metadata = parsed(written(tensors))
    assert metadata.tensors.keys() == tensors.keys()
    for fqn, (shape, rows) in tensors.items():
        item = metadata.tensors[fqn]
        assert (item.shape, item.dtype.name, item.transforms) == (shape, "BF16", ())
        assert list(rows_of(metadata, fqn)) == by_box(rows)
        assert item.chunks.offsets.shape == (len(rows), len(shape))


@given(grids(), st.integers(0, 3))
def test_parts_merge_into_the_whole(grid: tuple[tuple[int, ...], list[Row]], replicas: int) -> None:
    """Without collectives every rank lists the whole tensor, but only its own chunks; what several hold, all list."""
    shape, rows = grid
    of_rank = [(*row[:2], f"__{rank}_0.distcp", *row[3:]) for row in rows[:1] for rank in range(10, 10 + replicas)]
    parts = [written({"w": (shape, [row])}, planner_data={"w": ("w",)}) for row in rows + of_rank]
    merged = dcp_metadata.merge([parsed(part) for part in parts])
    found = list(rows_of(merged, "w"))
    assert sorted(found) == sorted(rows + of_rank) and [row[:2] for row in found] == sorted(row[:2] for row in found)
    assert merged.planner == {"w": ("w",)}


def test_merging_one_part_changes_nothing() -> None:
    metadata = parsed(written({"w": ((4,), [((0,), (4,), "a", 0, 9)])}, {"o": ((), (), "b", 9, 3)}))
    merged = dcp_metadata.merge([metadata])
    assert list(rows_of(merged, "w")) == list(rows_of(metadata, "w"))
    assert (merged.objects, merged.paths, merged.planner) == (metadata.objects, metadata.paths, None)


def test_of_an_object_in_several_parts_the_first_counts() -> None:
    parts = [parsed(written({}, {"step": ((), (), f"__{rank}_0.distcp", 0, 9)})) for rank in (0, 1)]
    assert dcp_metadata.merge(parts).objects["step"].path == "__0_0.distcp"


@pytest.mark.parametrize("other", [((5,), [((0,), (5,), "b", 0, 9)]), ((4, 1), [((0, 0), (4, 1), "b", 0, 9)])])
def test_parts_that_disagree_are_of_different_saves(other: tuple[tuple[int, ...], list[Row]]) -> None:
    parts = [parsed(written({"w": tensor})) for tensor in (((4,), [((0,), (4,), "a", 0, 9)]), other)]
    with pytest.raises(CheckpointError, match=r"w: .*\(4,\).*different saves"):
        dcp_metadata.merge(parts)


def test_a_tensor_of_one_part_is_no_object_of_another() -> None:
    parts = [parsed(written({"w": ((4,), [((0,), (4,), "a", 0, 9)])})), parsed(written({}, {"w": ((), (), "b", 0, 9)}))]
    with pytest.raises(CheckpointError, match="w: "):
        dcp_metadata.merge(parts)


def test_empty_chunks_share_an_entry() -> None:
    """FSDP2 with more ranks than rows: two ranks hold nothing of dimension 0, at the offset where it ends."""
    rows: list[Row] = [((0, 0), (1, 8), "a", 0, 9), ((1, 0), (0, 8), "b", 0, 9), ((1, 0), (0, 8), "c", 0, 9)]
    metadata = parsed(written({"w": ((1, 8), rows)}))
    assert [row[:2] for row in rows_of(metadata, "w")] == [((0, 0), (1, 8)), ((1, 0), (0, 8))]


def test_a_chunk_with_elements_wins_over_an_empty_one_at_its_offsets() -> None:
    boxes: list[Row] = [((0,), (0,), "a", 0, 9), ((0,), (4,), "a", 0, 9), ((0,), (0,), "a", 0, 9)]
    assert [row[1] for row in rows_of(parsed(written({"w": ((4,), boxes)})), "w")] == [(4,)]


def test_transforms_are_told() -> None:
    data = written({}, {})
    metadata: Metadata = pickle.loads(data)
    metadata.state_dict_metadata = {"o": BytesStorageMetadata()}
    metadata.storage_data = {MetadataIndex("o"): _StorageInfo("a", 0, 9, ["b", "stream.zstd/1"])}
    assert parsed(pickle.dumps(metadata)).objects["o"].transforms == ("b", "stream.zstd/1")


def test_metadata_of_older_torch_is_read() -> None:
    """No storage_meta, no version, no planner_data; properties as attributes."""
    metadata: Metadata = pickle.loads(written({"w": ((4,), [((0,), (4,), "a", 0, 9)])}))
    for name in ("storage_meta", "version", "planner_data"):
        vars(metadata).pop(name, None)
    for protocol in (2, 4, 5):
        read = parsed(pickle.dumps(metadata, protocol))
        assert (read.version, read.planner, read.tensors["w"].shape) == (None, None, (4,))


def test_a_real_save_is_read(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3, 4), "n": torch.tensor(1)}, "optim": {"groups": [{"lr": 0.1}], "step": 3}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = parsed((tmp_path / ".metadata").read_bytes())
    assert {fqn: item.shape for fqn, item in metadata.tensors.items()} == {"model.w": (3, 4), "model.n": ()}
    assert metadata.planner is not None and metadata.planner["model.w"] == ("model", "w")
    places = [*metadata.objects.values()]
    nbytes = sum(item.entry_nbytes for item in places) + sum(int(item.chunks.entry_nbytes.sum()) for item in metadata.tensors.values())
    assert nbytes == math.fsum((tmp_path / path).stat().st_size for path in metadata.paths)
