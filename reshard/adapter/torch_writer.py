"""A torch.save file, laid out: its tensors are described one by one, then its root object."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.containers import pickle_writer, torch_frame
from reshard.containers.pickle_writer import Call
from reshard.containers.torch_frame import Plain
from reshard.geometry.dtypes import DType
from reshard.geometry.sections import StoredTensor, whole
from reshard.index.index import Tensor
from reshard.plans.layout import PlacedTensor, TargetFile


class TorchFile:
    """A torch.save file that is being described. Its root refers to the tensors by what `tensor` and `whole` return."""

    def __init__(self, path: str, ranks: Mapping[str, int] | None = None) -> None:
        self._path, self._ranks = path, ranks or {}
        self._tensors = torch_frame.Tensors()
        self._stored: list[StoredTensor] = []

    def tensor(self, stored: StoredTensor) -> Call:
        """Add a tensor. Returns what stands for it in the root."""
        self._stored.append(stored)
        return self._tensors.add(Plain(stored.dtype, stored.shape))

    def whole(self, key: str, tensor: Tensor, dtype: DType | None = None) -> Call:
        """Add a canonical tensor as it is, by its key among the tensors to be written. Returns what stands for it in the root."""
        return self.tensor(whole(key, dtype or tensor.dtype, tensor.shape))

    def close(self, root: object) -> TargetFile:
        """The finished file. Every tensor that was added has to occur in `root`."""
        name = self._path.rpartition("/")[2].removesuffix(".pt")
        frame = torch_frame.frame(name, pickle_writer.dumps(root), self._tensors.storages)
        placed = tuple(PlacedTensor(stored, at) for stored, at in zip(self._stored, frame.storages, strict=True))
        return TargetFile(self._path, frame.nbytes, frame.literals, placed, self._ranks, frame.checksums)
