"""The tensors in the pickle of a torch.save file to be written. They are only described; torch is not needed.

They become calls of torch's rebuild functions, as torch.Tensor.__reduce_ex__ makes them (torch/_tensor.py).
"""

from __future__ import annotations

from reshard.containers import pickle_writer
from reshard.containers.pickle_writer import Call, Name, PersistentId
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value


@value(eq=False)
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


class Tensors:
    """The tensors of a pickle."""

    def __init__(self) -> None:
        self.storages: list[Plain | bytes] = []
        """Element i is the content of the storage with the key i: the tensor that fills it, or its bytes."""

    def add(self, tensor: Plain, content: bytes | None = None) -> Call:
        """The call that makes the tensor when it is unpickled. The tensor gets the next storage.

        content: the bytes of the tensor if the pickle's file holds them anyway; None: the tensor is filled later.
        """
        key, dtype = str(len(self.storages)), tensor.dtype
        self.storages.append(tensor if content is None else content)
        view = (0, tensor.shape, row_major(tensor.shape), False, Call(Name("collections", "OrderedDict")))
        if dtype.has_storage_class:
            storage = PersistentId(("storage", Name("torch", dtype.storage), key, "cpu", tensor.nbytes // dtype.itemsize))
            return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, *view))
        storage = PersistentId(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.nbytes))
        return Call(Name("torch._utils", "_rebuild_tensor_v3"), (storage, *view, Name("torch", dtype.torch)))


def tensor_pickle(tensor: Plain) -> tuple[bytes, list[Plain | bytes]]:
    """The pickle of one tensor, and its storages (`Tensors.storages`)."""
    tensors = Tensors()
    return pickle_writer.dumps(tensors.add(tensor)), tensors.storages
