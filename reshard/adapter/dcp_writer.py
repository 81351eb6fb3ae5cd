"""The files of torch.distributed.checkpoint, laid out: entries end to end, and the .metadata that says where they are.

The framing is that of torch 2.13; torch 2.4 and later read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from reshard.containers import pickle_writer, torch_frame
from reshard.containers.pickle_writer import Call, Instance, Name
from reshard.geometry.boxes import Shape
from reshard.geometry.dtypes import DType
from reshard.geometry.sections import StoredTensor
from reshard.geometry.value import mutable, value
from reshard.plans.layout import PlacedTensor, TargetFile
from reshard.storage.checksums import StoredChecksum


@value
class DcpEntry:
    """An entry: a box of a tensor, or an object, in a file."""

    fqn: str
    """The flat name: the keys on the way to the value in the state dict, joined by dots."""
    path: str
    """The file, relative to the folder of the .metadata."""
    byte_offset: int
    """Where the entry starts in the file."""
    nbytes: int
    """The entry's length, framing included."""
    stored: StoredTensor | None = None
    """The tensor that it holds; None for an object."""
    offsets: Shape = ()
    """Where the tensor starts in the whole one, in elements per axis."""
    global_shape: Shape = ()
    """The shape of the whole tensor."""


@mutable
class DcpFile:
    """A file of entries that is being laid out."""

    path: str
    """The file, relative to the folder of the .metadata."""
    nbytes: int = 0
    """The length so far."""
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    """The framing so far: (byte offset, bytes)."""
    placed: list[PlacedTensor] = field(default_factory=list)
    """The tensors so far, with their byte offsets."""
    checksums: list[StoredChecksum] = field(default_factory=list)
    """The checksums in the framing so far."""
    entries: list[DcpEntry] = field(default_factory=list)
    """The entries so far, for the metadata."""

    def add_tensor(self, fqn: str, stored: StoredTensor, offsets: Shape, shape: Shape) -> None:
        """Add the box of a tensor of the global shape `shape` that starts at `offsets` and holds `stored`."""
        pickle, storages = torch_frame.tensor_pickle(torch_frame.Plain(stored.dtype, stored.shape))
        frame = torch_frame.frame("archive", pickle, storages, start=self.nbytes)
        self.placed.append(PlacedTensor(stored, frame.storages[0]))
        self._append(frame, fqn, stored, offsets, shape)

    def add_object(self, fqn: str, value: object) -> None:
        """Add an object that is not a tensor."""
        self._append(torch_frame.frame("archive", pickle_writer.dumps(value), (), start=self.nbytes), fqn)

    def close(self, ranks: Mapping[str, int] | None = None, *, folder: str = "") -> TargetFile:
        """The finished file. folder: the folder of the .metadata in the target, with a slash at its end. ranks: see TargetFile."""
        literals, placed, checksums = tuple(self.literals), tuple(self.placed), tuple(self.checksums)
        return TargetFile(folder + self.path, self.nbytes, literals, placed, ranks or {}, checksums)

    def _append(self, frame: torch_frame.TorchFrame, fqn: str, *tensor: Any) -> None:
        self.literals.extend(frame.literals)
        self.checksums.extend(frame.checksums)
        self.entries.append(DcpEntry(fqn, self.path, self.nbytes, frame.nbytes - self.nbytes, *tensor))
        self.nbytes = frame.nbytes


def written_metadata(files: Sequence[DcpFile], planner: Mapping[str, tuple[str | int, ...]] | None = None) -> bytes:
    """The content of the .metadata for these files.

    planner: flat name -> keys on the way to the value. Loaders that rebuild a nested state dict need it. None: no such data is written.
    """
    state_dict_metadata: dict[str, Any] = {}
    chunks_by_fqn: dict[str, list[Instance]] = {}
    storage: dict[Any, Any] = {}
    for entry in (entry for file in files for entry in file.entries):
        info = Instance(_STORAGE_INFO, {"relative_path": entry.path, "offset": entry.byte_offset, "length": entry.nbytes})
        index: dict[str, Any] = {"fqn": entry.fqn}
        if entry.stored is None:
            state_dict_metadata[entry.fqn] = Instance(_class("BytesStorageMetadata"), {})
        else:
            chunks = chunks_by_fqn.setdefault(entry.fqn, [])
            if not chunks:
                state_dict_metadata[entry.fqn] = _tensor_metadata(entry.stored.dtype, entry.global_shape, chunks)
            index |= {"offset": _size(entry.offsets), "index": len(chunks)}
            chunks.append(Instance(_class("ChunkStorageMetadata"), {"offsets": _size(entry.offsets), "sizes": _size(entry.stored.shape)}))
        storage[Instance(_class("MetadataIndex"), index)] = info
    state = {
        "state_dict_metadata": state_dict_metadata,
        "planner_data": None if planner is None else {entry.fqn: planner[entry.fqn] for file in files for entry in file.entries},
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return pickle_writer.dumps(Instance(_class("Metadata"), state))


def _tensor_metadata(dtype: DType, shape: Shape, chunks: list[Instance]) -> Instance:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    # dtype, layout, requires_grad, memory format, pin_memory.
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
