"""A folder of torch.distributed.checkpoint, read: its metadata, its files, and where exactly the bytes of an entry lie.

    .metadata                for each box of each tensor, the entry (a byte range of a file) that holds it
    __{rank}.metadata        the same for one rank, if the checkpoint was saved without collectives
    __{rank}_{i}.distcp      entries end to end, each a torch.save zip of one tensor or object

An entry's own zip directory tells where its tensor's bytes lie. It is read when that piece is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reshard.containers import dcp_metadata, torch_zip
from reshard.containers.dcp_metadata import BytesItem, DcpMetadata, TensorItem
from reshard.containers.torch_zip import Locations, class_of_array
from reshard.errors import CheckpointError, IncompleteError, MissingFile, TruncatedFile, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, unread
from reshard.geometry.extents import Extent
from reshard.index.index import StoredFile
from reshard.index.shards import PieceTable, Shards
from reshard.storage.decoded_ranges import check_known
from reshard.storage.files import Files, inside, read_range, read_whole, side_by_side

if TYPE_CHECKING:
    from reshard.containers.packed_states import PackedState

_METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_METADATA_LIMIT = 4 << 30
# What the names begin with in an optimizer's state dict.
_BARE = ("state.", "param_groups.")
# Most bytes of an entry that are not elements: the framing of torch.save, about 1.5 kB, and padding.
_FRAMING = 1 << 16
# Of a plain tensor: 1,063 to 1,626 bytes by torch 2.2 to 2.13 (fixtures/dcp, fixtures/torch_versions), 2,089 by a class around one.
_LEAST_FRAMING, _USUAL_FRAMING = 900, 1700
_OBJECT_LIMIT = 1 << 28


class KeyedFolder(Protocol):
    """Tensors under keys, in boxes: a folder of torch.distributed.checkpoint, or what ranks hold in memory."""

    prefix: str
    """What the paths of its files start with."""
    metadata: DcpMetadata
    """The tensors and objects by key."""
    files: tuple[StoredFile, ...]
    """What holds them."""

    def shards(self, item: TensorItem) -> Shards:
        """The boxes of a tensor, and where they lie."""


class DcpFolder:
    """A folder with its metadata.

    Raises: CheckpointError if the metadata contradicts itself, or a file that it names is missing or too short.
    """

    def __init__(self, files: Files, prefix: str) -> None:
        self._tree = files
        self.prefix = prefix
        """What the paths of its files start with: empty, or a folder with a slash at its end."""
        self.metadata = _under_its_root(_metadata(files, prefix))
        """The content of .metadata, or of the ranks' metadata files merged."""
        self.paths = tuple(inside(prefix + path, where=prefix + _METADATA) for path in self.metadata.paths)
        """The data files, in the order in which the metadata numbers them."""
        self.files = tuple(_checked_files(files, prefix, self.metadata, self.paths))
        """The data files with their sizes."""
        # Neighbouring blocks need the same entry.
        self._locate = lru_cache(maxsize=4096)(lambda path, start, nbytes: torch_zip.entry_tensor(files, path, start, nbytes))

    def shards(self, item: TensorItem) -> Shards:
        """The stored boxes of a tensor. Raises CheckpointError if its entries went through an unknown transform."""
        check_known(item.transforms, where=item.fqn)
        chunks = item.chunks
        return Shards(PieceTable(self.paths, chunks.offsets, chunks.sizes, chunks.files, chunks.entry_offsets, self._extent(item)))

    def parts(self, item: TensorItem) -> dict[str, tuple[DType, tuple[int, ...], Shards]]:
        """The stored tensors of an item, by what follows its name: "" for a tensor; ".codes" and others for a state in 8 or 4 bits. Each
        with its element type, its shape and its pieces. An item whose entries hold instances of a class that is not read has the element
        type of `unread`, and no pieces.

        The metadata says of these what the class shows. Only an entry that does not have the length of a plain tensor is looked at.
        """
        chunks = item.chunks
        framing = chunks.entry_nbytes - chunks.sizes.prod(axis=1) * item.dtype.itemsize
        odd = np.flatnonzero((framing < _LEAST_FRAMING) | (framing > _USUAL_FRAMING))
        with suppress(CheckpointError):
            if len(odd) and not item.transforms:
                from reshard.containers.packed_states import PackedState  # few checkpoints have such entries

                first = self._entry(item, int(odd[0]))
                if (packed := PackedState.of(first)) and (parts := self._packed_parts(item, packed)):
                    return parts
                if class_name := class_of_array(first):
                    return {"": (unread(class_name), item.shape, Shards.of(()))}
        return {"": (item.dtype, item.shape, self.shards(item))}

    def _entry(self, item: TensorItem, row: int) -> Any:
        """What the entry of a box holds."""
        chunks = item.chunks
        start, nbytes = int(chunks.entry_offsets[row]), int(chunks.entry_nbytes[row])
        return torch_zip.read(self._tree, self.paths[chunks.files[row]], start=start, nbytes=nbytes)

    def _packed_parts(self, item: TensorItem, first: PackedState) -> dict[str, tuple[DType, tuple[int, ...], Shards]] | None:
        """The stored tensors of a state in 8 or 4 bits, one of whose entries is `first`; None if its boxes are not runs of blocks."""
        chunks, layout = item.chunks, first.layout(item.shape)
        rows = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in zip(chunks.offsets.tolist(), chunks.sizes.tolist(), strict=True)]
        boxes = [first.boxes(box, item.shape) for box in rows]
        if layout is None or None in boxes:
            return None

        def extent(part: str, i: int) -> Extent:
            packed = first.of(self._entry(item, i))
            stored = packed.stored.get(part) if packed else None
            if packed is None or stored is None or packed.shape != rows[i].sizes or packed.block != first.block:
                raise CheckpointError(f"one of its entries is no {first.class_name} of blocks of {first.block}", where=item.fqn)
            return Extent(stored.path, Locations(self._tree).of(stored), stored.strides, stored.dtype)

        def shards(part: str) -> Shards:
            offsets = np.array([held[part].offsets for held in boxes if held], np.int64)
            sizes = np.array([held[part].sizes for held in boxes if held], np.int64)
            return Shards(PieceTable(self.paths, offsets, sizes, chunks.files, chunks.entry_offsets, partial(extent, part)))

        return {f".{part}": (*of_part, shards(part)) for part, of_part in layout.items()}

    def value(self, item: BytesItem | TensorItem) -> Any:
        """The object in an entry, as the inert unpickler reads it; of a tensor of one element, the number."""
        if isinstance(item, TensorItem):
            extent = self.shards(item).extent(0)
            return item.dtype.number(read_range(self._tree, extent.path, extent.byte_offset, item.dtype.itemsize))
        path, start, nbytes = inside(self.prefix + item.path, where=item.fqn), item.entry_offset, item.entry_nbytes
        if item.transforms:
            check_known(item.transforms, where=item.fqn)
            path, start = self._tree.decoded(path, start, nbytes, item.transforms, limit=_OBJECT_LIMIT), 0
            nbytes = self._tree.size(path) or 0
        return torch_zip.read(self._tree, path, start=start, nbytes=nbytes)

    def values(self, items: Iterable[BytesItem | TensorItem]) -> Iterator[Any]:
        """The objects and numbers in several entries, in order."""
        return side_by_side(self._tree, self.value, items)

    def settings(self, items: Iterable[BytesItem | TensorItem]) -> Iterator[Any]:
        """The settings of param groups in several entries, in order: tensors of one element are numbers."""
        return (torch_zip.as_setting(self._tree, value) for value in self.values(items))

    def _extent(self, item: TensorItem) -> Callable[[int], Extent]:
        """A function from the row of a box to where its bytes lie. It checks the entry against the metadata."""

        def extent(i: int) -> Extent:
            chunks = item.chunks
            path, sizes = self.paths[chunks.files[i]], tuple(chunks.sizes[i].tolist())
            start, nbytes = int(chunks.entry_offsets[i]), int(chunks.entry_nbytes[i])
            if item.transforms:
                limit = math.prod(sizes) * item.dtype.itemsize + _FRAMING
                path = self._tree.decoded(path, start, nbytes, item.transforms, limit=limit)
                start, nbytes = 0, self._tree.size(path) or 0
            try:
                stored = self._locate(path, start, nbytes)
            except UnsupportedError as error:
                error.where = f"{item.fqn} in {error.where}"
                raise
            if stored.shape != sizes or stored.dtype != item.dtype:
                raise CheckpointError(
                    f"the entry holds {stored.dtype} {list(stored.shape)}, {_METADATA} says {item.dtype} {list(sizes)}",
                    where=f"{item.fqn} in {path}",
                    why="The files are from different saves",
                    do="Copy all files of one save again",
                )
            return Extent(path, stored.byte_offset, stored.strides, stored.dtype)

        return extent


def _metadata(files: Files, folder: str) -> DcpMetadata:
    if files.size(folder + _METADATA) is not None:
        return _read(files, folder + _METADATA)
    # Saved without collectives: each rank wrote its own.
    parts = [path for path in files.list(folder) if _RANK_METADATA.fullmatch(path.removeprefix(folder))]
    if not parts:
        raise IncompleteError(
            f"there is no {_METADATA}",
            where=f"{files.root}/{folder}",
            why="It says where every tensor lies. torch writes it last, so the save was not finished, or a copy skipped files that start "
            "with a dot",
            do="Copy it from where the checkpoint was written, or take an earlier checkpoint",
        )
    return dcp_metadata.merge([_read(files, path) for path in parts])


def _under_its_root(metadata: DcpMetadata) -> DcpMetadata:
    """The metadata of an optimizer's state dict that was saved without a key around it, as Composer does, with the key "optim"."""
    names = (*metadata.tensors, *metadata.objects)
    if not names or any(not name.startswith(_BARE) for name in names) or not any(name.startswith(_BARE[1]) for name in names):
        return metadata
    planner = metadata.planner or {}
    return replace(metadata, planner={name: ("optim", *planner.get(name, (name,))) for name in names})


def _read(files: Files, path: str) -> DcpMetadata:
    return dcp_metadata.read(lambda: read_whole(files, path, limit=_METADATA_LIMIT), where=path)


def _checked_files(files: Files, folder: str, metadata: DcpMetadata, paths: tuple[str, ...]) -> Iterator[StoredFile]:
    """The files that the metadata names. Raises CheckpointError if a file is missing, or ends before its last entry."""
    ends = np.zeros(len(paths), np.int64)
    for item in metadata.tensors.values():
        chunks = item.chunks
        np.maximum.at(ends, chunks.files, chunks.entry_offsets + chunks.entry_nbytes)
    needed, numbers = ends.tolist(), {path: number for number, path in enumerate(metadata.paths)}
    for value in metadata.objects.values():
        number = numbers[value.path]
        needed[number] = max(needed[number], value.entry_offset + value.entry_nbytes)
    for number, (path, nbytes) in enumerate(zip(paths, needed, strict=True)):
        size = files.size(path)
        if size is None or size < nbytes:
            names = [name for name, item in metadata.tensors.items() if (item.chunks.files == number).any()]
            content = f"it holds parts of {len(names)} tensors, such as {names[0]}" if names else "it holds no tensor"
            error = MissingFile if size is None else TruncatedFile
            raise error(
                "the file is not there" if size is None else f"the file has {size:,} bytes, its entries end at {nbytes:,}",
                where=path,
                why=f"{folder + _METADATA} names it, and {content}",
                do="Copy that file from where the checkpoint was written",
            )
        yield StoredFile(path, size)
