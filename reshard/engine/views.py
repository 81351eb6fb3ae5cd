"""Arrays instead of files: what a rank would load, or a tensor as the model knows it, read when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.transfer import Block, Worker
from reshard.engine.values import Values
from reshard.errors import RequestError
from reshard.geometry.boxes import blocks
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.stored import StoredTensor
from reshard.index.index import Tensor
from reshard.storage.files import Files

_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2",
          "U8": "u1", "BOOL": "?", "C64": "c8", "C128": "c16"}  # fmt: skip
# Between these a cast keeps the meaning; the narrower ones need scales.
_CAST = {"F64", "F32", "F16", "BF16"}


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
        for start, strides, block in self._blocks(self.dtype):
            in_bytes = tuple(stride * self.dtype.itemsize for stride in strides)
            np.lib.stride_tricks.as_strided(flat[start:], block.shape, in_bytes)[...] = block
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

    def read_into(self, target: Any) -> None:
        """Read the values into a torch tensor of this shape, on any device, cast to its element type: a block at a time, so no second copy
        of it is made (of one that is not contiguous, one is).

        Raises: RequestError if the shape is another, or the element types are not those of floats of 16 to 64 bits.
        """
        import torch

        dtype = from_torch(str(target.dtype), where=self.name)
        if tuple(target.shape) != self.shape:
            raise RequestError(f"it is {list(self.shape)}, what it is to be read into {list(target.shape)}", where=self.name)
        if not self.fits(dtype):
            raise RequestError(f"it is {self.dtype}, what it is to be read into {dtype}", where=self.name)
        if not target.is_contiguous():
            whole = torch.empty(self.shape, dtype=target.dtype)
            self.read_into(whole)
            target.copy_(whole)
            return
        flat = target.detach().view(-1)
        if self._stored.filled:
            element = (self._stored.fill * dtype.itemsize)[: dtype.itemsize]
            flat.copy_(torch.frombuffer(bytearray(element), dtype=target.dtype).to(flat.device).expand(flat.shape))
        for start, strides, block in self._blocks(dtype):
            values = torch.from_numpy(block.reshape(-1).view(np.uint8)).view(target.dtype).view(block.shape)
            flat.as_strided(block.shape, strides, flat.storage_offset() + start).copy_(values)

    def fits(self, dtype: DType) -> bool:
        """Whether `read_into` takes a tensor of that element type."""
        return dtype == self.dtype or ({dtype.name, self.dtype.name} <= _CAST and not any(self._stored.fill))

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def _blocks(self, dtype: DType) -> Iterator[tuple[int, tuple[int, ...], Block]]:
        """All that is read, a block at a time: the element of this tensor that it starts at, its strides there, its words. They are good
        until the next."""
        workers: dict[int, Worker] = {}
        for section in self._stored.sections:
            source = self._sources[section.name]
            values, size = Values(source, dtype), max(each.itemsize for each in source.dtypes)
            worker = workers.get(size) or workers.setdefault(size, Worker(self._files, size))
            for box in blocks(section.box.sizes):
                start = section.start + sum(offset * stride for offset, stride in zip(box.offsets, section.strides, strict=True))
                yield start, section.strides, values.read(worker, box.shifted(section.box.offsets))


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
