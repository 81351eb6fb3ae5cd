"""The pickle inside a torch.save file to be written: a state dict whose tensors are only described.

torch itself pickles its own objects (meshes, placements, dtypes), so that the result is what the installed version reads; only the
tensors are ours: they become calls of torch's rebuild functions, as torch.Tensor.__reduce_ex__ makes them (torch/_tensor.py).
torch is imported when the first pickle is made.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.containers import pickle_writer
from reshard.containers.pickle_writer import Call, Name, Reference
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A row-major tensor of its own; its bytes are laid out by others."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        total = self.dtype.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Distributed:
    """A DTensor: the rank's own part, the global shape, and the spec (a torch DTensorSpec) that says which part it is."""

    local: Plain
    shape: tuple[int, ...]
    spec: Any


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a persistent id names: `storage` is torch's class of it, count its elements (bytes, if the class has no type)."""

    storage: Any
    key: str
    count: int


class _Pickler(pickle.Pickler):
    """Protocol 2, as torch.save writes. Notes the storages in the order of their keys: the tensor that fills one, or its bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Plain | bytes] = []

    def persistent_id(self, value: object) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.storage, value.key, "cpu", value.count
        return None

    def reducer_override(self, value: object) -> Any:
        import torch

        if isinstance(value, Plain):
            return self._tensor(value, value)
        if isinstance(value, Distributed):
            return self._distributed(value)
        if type(value) is torch.Tensor:  # a mesh's map of ranks
            known = Plain(_DTYPE_OF_MAP, tuple(value.shape))
            return self._tensor(known, value.to(torch.int32).contiguous().numpy().tobytes())
        return NotImplemented

    def _tensor(self, value: Plain, content: Plain | bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import torch

        key = str(len(self.storages))
        self.storages.append(content)
        place: tuple[Any, ...] = (0, value.shape, row_major(value.shape), False, OrderedDict())
        if not value.dtype.has_storage_class:
            storage = _Storage(torch.storage.UntypedStorage, key, value.nbytes)
            return torch._utils._rebuild_tensor_v3, (storage, *place, getattr(torch, value.dtype.torch))
        storage = _Storage(getattr(torch, value.dtype.storage), key, value.nbytes // value.dtype.itemsize)
        return torch._utils._rebuild_tensor_v2, (storage, *place)

    def _distributed(self, value: Distributed) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import torch
        from torch.distributed.tensor import DTensor

        dtype, cpu = getattr(torch, value.local.dtype.torch), torch.device("cpu")
        outer = (DTensor, dtype, tuple(value.shape), row_major(value.shape), 0, torch.strided, cpu, False)
        state = (None, {"_local_tensor": value.local, "_spec": value.spec})
        return torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_wrapper_subclass, DTensor, outer, state)


_DTYPE_OF_MAP = DType("I32", 4, "int32", "IntStorage", False)


class Tensors:
    """The tensors of a pickle that is made without torch: what to write for each; and what fills the storages, in their keys' order."""

    def __init__(self) -> None:
        self.storages: list[Plain | bytes] = []

    def add(self, tensor: Plain) -> Call:
        """The call that makes the tensor when it is unpickled."""
        key, dtype = str(len(self.storages)), tensor.dtype
        self.storages.append(tensor)
        place = (0, tensor.shape, row_major(tensor.shape), False, Call(Name("collections", "OrderedDict")))
        if dtype.has_storage_class:
            storage = Reference(("storage", Name("torch", dtype.storage), key, "cpu", tensor.nbytes // dtype.itemsize))
            return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, *place))
        storage = Reference(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.nbytes))
        return Call(Name("torch._utils", "_rebuild_tensor_v3"), (storage, *place, Name("torch", dtype.torch)))


def tensor_pickle(tensor: Plain) -> tuple[bytes, list[Plain | bytes]]:
    """As `dumps` of one tensor alone; made without torch."""
    tensors = Tensors()
    return pickle_writer.dumps(tensors.add(tensor)), tensors.storages


def dumps(root: object) -> tuple[bytes, list[Plain | bytes]]:
    """The pickle of a state dict, and its storages by key: the Plain object whose elements fill one, or the bytes themselves.

    Every Plain of `root` is a tensor of its own, so it has to be there once.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(root)
    return file.getvalue(), pickler.storages
