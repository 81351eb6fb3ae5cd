"""Arrays instead of files: what a rank would load, or a tensor as the model knows it, read when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.boxes import blocks
from reshard.dtypes import DType
from reshard.engine.transfer import Worker
from reshard.engine.values import Values
from reshard.errors import RequestError
from reshard.files import Files
from reshard.index import Tensor
from reshard.stored import Section, StoredTensor

_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2",
          "U8": "u1", "BOOL": "?", "C64": "c8", "C128": "c16"}  # fmt: skip


class LazyTensor:
    """A tensor whose bytes are read when it is asked for them; each call reads anew, and only what this tensor holds."""

    def __init__(self, stored: StoredTensor, sources: Mapping[str, Tensor], files: Files) -> None:
        self._stored, self._sources, self._files = stored, sources, files

    @property
    def name(self) -> str:
        return self._stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    @property
    def dtype(self) -> DType:
        return self._stored.dtype

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def words(self) -> npt.NDArray[Any]:
        """The elements' bits as unsigned words, row-major: every element type has these, bfloat16 included."""
        fill = self._stored.fill * self.dtype.itemsize if len(self._stored.fill) == 1 else self._stored.fill
        flat = np.frombuffer(bytearray(fill) * (self.nbytes // self.dtype.itemsize), self.dtype.word)
        for section in self._stored.sections:
            self._read(section, flat)
        return flat.reshape(self.shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The values. Raises RequestError for a type that numpy does not have; `torch` and `words` take those."""
        if self.dtype.name not in _NUMPY:
            raise RequestError(f"numpy has no {self.dtype}", where=self.name, do="Use .torch(), or .words() for the bits")
        return self.words().view("<" + _NUMPY[self.dtype.name])

    def torch(self) -> Any:
        """The values as a torch tensor of its own memory."""
        import torch

        flat = torch.from_numpy(self.words().reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, self.dtype.torch)).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def _read(self, section: Section, flat: npt.NDArray[Any]) -> None:
        source = self._sources[section.name]
        values, worker = Values(source, self.dtype), Worker(self._files, max(source.dtype.itemsize, 4 if source.scaling else 1))
        into = np.lib.stride_tricks.as_strided(
            flat[section.start :], section.box.sizes, tuple(stride * self.dtype.itemsize for stride in section.strides)
        )
        for box in blocks(section.box.sizes):
            into[box.index] = values.read(worker, box.shifted(section.box.offsets))


class View(Mapping[str, LazyTensor]):
    """What one rank holds, by the names in its file. Nothing is read until a tensor is asked for its values."""

    def __init__(self, stored: Mapping[str, StoredTensor], sources: Mapping[str, Tensor], files: Files) -> None:
        self._stored, self._sources, self._files = stored, sources, files

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self._stored[name], self._sources, self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        return f"View({len(self)} tensors, {sum(stored.nbytes for stored in self._stored.values()):,} bytes)"
