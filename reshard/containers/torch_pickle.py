"""The pickle inside a torch.save file to be written: a state dict whose tensors are only described.

torch pickles its own objects (meshes, placements, dtypes), so the installed version can read the result. Tensors are written here: they
become calls of torch's rebuild functions, as torch.Tensor.__reduce_ex__ makes them (torch/_tensor.py).

`state_dict_pickle` imports torch; `Tensors` and `tensor_pickle` do not.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.containers import pickle_writer
from reshard.containers.pickle_writer import Call, Name, PersistentId
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A row-major tensor in a storage of its own. Two Plain objects are never equal: each is one tensor."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        total = self.dtype.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Distributed:
    """A DTensor."""

    local: Plain
    """The part that the rank holds."""
    shape: tuple[int, ...]
    """The global shape."""
    spec: Any
    """The torch DTensorSpec: the mesh and the placements, from which the rank's part follows."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that a persistent id names."""

    storage: Any
    """Its class in torch."""
    key: str
    """Its name in the file."""
    count: int
    """The number of its elements; of its bytes if the class has no element type."""


class _Pickler(pickle.Pickler):
    """Protocol 2, as torch.save writes it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Plain | bytes] = []
        """Element i is the content of the storage with the key i: the tensor that fills it, or its bytes."""

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
        if type(value) is torch.Tensor:  # the map of ranks of a mesh
            rank_map = Plain(_RANK_MAP_DTYPE, tuple(value.shape))
            return self._tensor(rank_map, value.to(torch.int32).contiguous().numpy().tobytes())
        return NotImplemented

    def _tensor(self, value: Plain, content: Plain | bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import torch

        key = str(len(self.storages))
        self.storages.append(content)
        view: tuple[Any, ...] = (0, value.shape, row_major(value.shape), False, OrderedDict())
        if not value.dtype.has_storage_class:
            storage = _Storage(torch.storage.UntypedStorage, key, value.nbytes)
            return torch._utils._rebuild_tensor_v3, (storage, *view, getattr(torch, value.dtype.torch))
        storage = _Storage(getattr(torch, value.dtype.storage), key, value.nbytes // value.dtype.itemsize)
        return torch._utils._rebuild_tensor_v2, (storage, *view)

    def _distributed(self, value: Distributed) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import torch
        from torch.distributed.tensor import DTensor

        dtype, cpu = getattr(torch, value.local.dtype.torch), torch.device("cpu")
        outer = (DTensor, dtype, tuple(value.shape), row_major(value.shape), 0, torch.strided, cpu, False)
        state = (None, {"_local_tensor": value.local, "_spec": value.spec})
        return torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_wrapper_subclass, DTensor, outer, state)


_RANK_MAP_DTYPE = DType("I32", 4, "int32", "IntStorage", False)


class Tensors:
    """The tensors of a pickle that is made without torch."""

    def __init__(self) -> None:
        self.storages: list[Plain | bytes] = []
        """Element i is the tensor that fills the storage with the key i."""

    def add(self, tensor: Plain) -> Call:
        """The call that makes the tensor when it is unpickled. The tensor gets the next storage."""
        key, dtype = str(len(self.storages)), tensor.dtype
        self.storages.append(tensor)
        view = (0, tensor.shape, row_major(tensor.shape), False, Call(Name("collections", "OrderedDict")))
        if dtype.has_storage_class:
            storage = PersistentId(("storage", Name("torch", dtype.storage), key, "cpu", tensor.nbytes // dtype.itemsize))
            return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, *view))
        storage = PersistentId(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.nbytes))
        return Call(Name("torch._utils", "_rebuild_tensor_v3"), (storage, *view, Name("torch", dtype.torch)))


def tensor_pickle(tensor: Plain) -> tuple[bytes, list[Plain | bytes]]:
    """The pickle of one tensor, and its storages, as `state_dict_pickle` returns them. Does not import torch."""
    tensors = Tensors()
    return pickle_writer.dumps(tensors.add(tensor)), tensors.storages


def state_dict_pickle(root: object) -> tuple[bytes, list[Plain | bytes]]:
    """The pickle of a state dict, and its storages. Element i of the list is the content of the storage with the key i: the Plain object
    that fills it, or its bytes.

    Each Plain object gets a storage of its own. One that occurs twice in `root` becomes one tensor with two names.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(root)
    return file.getvalue(), pickler.storages
