"""The files of torch.distributed.checkpoint, written: entries one after the other, and the .metadata that says where they are.

As torch 2.13 writes and pickles them; torch 2.4 and later read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.containers import pickle_writer, torch_frame, torch_pickle
from reshard.containers.pickle_writer import Call, Instance, Name
from reshard.geometry.dtypes import DType
from reshard.geometry.stored import StoredTensor
from reshard.plans.layout import PlacedTensor, TargetFile

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry: its flat name, where it lies, and of a tensor its element type, its box and the shape of the whole."""

    fqn: str
    file: str
    start: int
    nbytes: int
    dtype: DType | None = None
    offsets: Shape = ()
    sizes: Shape = ()
    shape: Shape = ()


@dataclass(slots=True)
class DcpFile:
    """A file of entries, as far as it is laid out. path: in the folder of the .metadata."""

    path: str
    nbytes: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    placed: list[PlacedTensor] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def add_tensor(self, fqn: str, stored: StoredTensor, offsets: Shape, shape: Shape) -> None:
        """A part of a tensor of that shape, which lies in it from `offsets` on."""
        pickle, storages = torch_pickle.tensor_pickle(torch_pickle.Plain(stored.dtype, stored.shape))
        frame = torch_frame.frame("archive", pickle, storages, start=self.nbytes)
        self.placed.append(PlacedTensor(stored, frame.storages[0]))
        self._close(frame, Entry(fqn, self.path, self.nbytes, frame.nbytes - self.nbytes, stored.dtype, offsets, stored.shape, shape))

    def add_object(self, fqn: str, value: object) -> None:
        frame = torch_frame.frame("archive", pickle_writer.dumps(value), (), start=self.nbytes)
        self._close(frame, Entry(fqn, self.path, self.nbytes, frame.nbytes - self.nbytes))

    def close(self, ranks: Mapping[str, int] | None = None, *, folder: str = "") -> TargetFile:
        """The file, in a folder of the target that ends in a slash."""
        return TargetFile(folder + self.path, self.nbytes, tuple(self.literals), tuple(self.placed), ranks or {})

    def _close(self, frame: torch_frame.TorchFrame, entry: Entry) -> None:
        self.literals.extend(frame.literals)
        self.entries.append(entry)
        self.nbytes = frame.nbytes


def written_metadata(files: Sequence[DcpFile], planner: Mapping[str, tuple[str | int, ...]] | None = None) -> bytes:
    """The .metadata of the entries. planner: the path of keys of every flat name, for those that load a state dict by it."""
    listed: dict[str, Any] = {}
    chunks: dict[str, list[Instance]] = {}
    storage: dict[Any, Any] = {}
    for entry in (entry for file in files for entry in file.entries):
        info = Instance(_STORAGE_INFO, {"relative_path": entry.file, "offset": entry.start, "length": entry.nbytes})
        index: dict[str, Any] = {"fqn": entry.fqn}
        if entry.dtype is None:
            listed[entry.fqn] = Instance(_class("BytesStorageMetadata"), {})
        else:
            held = chunks.setdefault(entry.fqn, [])
            if not held:
                listed[entry.fqn] = _tensor_metadata(entry.dtype, entry.shape, held)
            index |= {"offset": _size(entry.offsets), "index": len(held)}
            held.append(Instance(_class("ChunkStorageMetadata"), {"offsets": _size(entry.offsets), "sizes": _size(entry.sizes)}))
        storage[Instance(_class("MetadataIndex"), index)] = info
    order = {entry.fqn: planner[entry.fqn] for file in files for entry in file.entries} if planner is not None else None
    state = {"state_dict_metadata": listed, "planner_data": order, "storage_data": storage, "storage_meta": None, "version": "1.0.0"}
    return pickle_writer.dumps(Instance(_class("Metadata"), state))


def _tensor_metadata(dtype: DType, shape: Shape, chunks: list[Instance]) -> Instance:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    # dtype, layout, whether it wants gradients, memory format, whether it is pinned.
    state = (Name("torch", dtype.torch), layout, False, Call(_class("_MEM_FORMAT_ENCODING"), (0,)), False)
    return Instance(
        _class("TensorStorageMetadata"),
        {"properties": Instance(_class("TensorProperties"), state), "size": _size(shape), "chunks": chunks},
    )


def _class(name: str) -> Name:
    return Name("torch.distributed.checkpoint.metadata", name)


def _size(values: Shape) -> Call:
    return Call(Name("torch", "Size"), (values,))


_STORAGE_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
