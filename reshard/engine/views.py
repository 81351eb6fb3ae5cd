"""Views: the tensors of a rank or of a model as arrays that are read on demand, without writing files."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.canonical.globs import check_globs, matches
from reshard.engine.casts import numpy_type
from reshard.engine.origins.reader import reader
from reshard.engine.transfer import Block, Worker, strips
from reshard.errors import RequestError, UnsupportedError, choices
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.packages import package
from reshard.geometry.quantities import plural
from reshard.geometry.sections import StoredTensor, sliced
from reshard.geometry.value import Drawn
from reshard.index.index import Tensor
from reshard.storage.files import Files

# `read_into` casts between these types only. Narrower floats need scales.
_CAST = {"F64", "F32", "F16", "BF16"}


class _Part(NamedTuple):
    """A strip of a stored tensor."""

    start: int
    """The element of the stored tensor at which it starts."""
    sizes: tuple[int, ...]
    """Its sizes."""
    strides: tuple[int, ...]
    """The distance between neighbours in the stored tensor along each axis, in elements."""
    read: Callable[..., Block]
    """Reads its elements: into the array that is given, or into a buffer that the next part overwrites."""


class LazyTensor:
    """A stored tensor whose bytes are read on demand. Each call reads them again, and only those of this tensor.

    All methods that read raise CheckpointError if a file cannot be read or replicas differ.
    """

    def __init__(self, stored: StoredTensor, sources: Mapping[str, Tensor], files: Files) -> None:
        self._stored, self._sources, self._files = stored, sources, files

    @property
    def name(self) -> str:
        """The name under which a file of the target would hold it."""
        return self._stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return self._stored.shape

    @property
    def dtype(self) -> DType:
        """The element type of the stored tensor."""
        return self._stored.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the stored tensor."""
        return self._stored.nbytes

    def words(self) -> npt.NDArray[Any]:
        """The bits of the elements as unsigned words, row-major. This works for every element type, including bfloat16."""
        fill = self._stored.fill * self.dtype.itemsize if len(self._stored.fill) == 1 else self._stored.fill
        flat = np.frombuffer(bytearray(fill) * (self.nbytes // self.dtype.itemsize), self.dtype.word)
        self._read_into_words(flat)
        return flat.reshape(self.shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a numpy array. bfloat16 and the 8-bit floats, which numpy lacks, are types of the package ml_dtypes."""
        return self.words().view(numpy_type(self.dtype))

    def __getitem__(self, key: Any) -> LazyTensor:
        """A slice, such as `tensor[0:4, :8]` or `tensor[3]`, whose bytes are read on demand: those of the slice alone.

        Raises: IndexError for an index outside of the tensor or a slice with a step, UnsupportedError for an interleaved tensor of a rank.
        """
        box, shape = _box_of(key, self.shape)
        part = sliced(self._stored, box, shape)
        if part is None:
            raise UnsupportedError("its rows are interleaved, so a slice of it cannot be read alone", where=self.name, do="Read it whole")
        return LazyTensor(part, self._sources, self._files)

    def parts(self) -> Iterator[LazyTensor]:
        """The tensor in consecutive parts of at most 2 million elements, in row-major order."""
        return (self[box.index[:-1]] for box in blocks(self.shape))

    def torch(self) -> Any:
        """The values as a torch tensor with memory of its own. Raises RequestError if torch is not installed."""
        torch = package("torch", ".torch()", "Install it with `pip install 'reshard[torch]'`, or use .numpy()")
        flat = torch.from_numpy(self.words().reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, self.dtype.torch)).reshape(self.shape)

    def read_into(self, target: Any) -> None:
        """Read the values into a torch tensor of the same shape, on any device, and cast them to its element type.

        The values are read block by block, so no second copy of the tensor is made, except if `target` is not contiguous.

        Raises: RequestError if the shapes differ, or the element types differ and are not both floats of 16 to 64 bits.
        """
        import torch

        dtype = from_torch(str(target.dtype), where=self.name).of(self.dtype.function)
        if tuple(target.shape) != self.shape:
            raise RequestError(f"its shape is {list(self.shape)}, that of the target tensor {list(target.shape)}", where=self.name)
        if not self.fits(dtype):
            raise RequestError(f"its element type is {self.dtype}, that of the target tensor {dtype}", where=self.name)
        if not target.is_contiguous():
            whole = torch.empty(self.shape, dtype=target.dtype)
            self.read_into(whole)
            target.copy_(whole)
            return
        flat = target.detach().view(-1)
        if self._stored.filled:
            element = (self._stored.fill * dtype.itemsize)[: dtype.itemsize]
            flat.copy_(torch.frombuffer(bytearray(element), dtype=target.dtype).to(flat.device).expand(flat.shape))
        if flat.device.type == "cpu":
            self._read_into_words(flat.view(torch.uint8).numpy().view(dtype.word), dtype)
            return
        for part in self._parts(dtype):
            values = torch.from_numpy(part.read().reshape(-1).view(np.uint8)).view(target.dtype).view(part.sizes)
            flat.as_strided(part.sizes, part.strides, flat.storage_offset() + part.start).copy_(values)

    def fits(self, dtype: DType) -> bool:
        """Whether `read_into` can read into a tensor of that element type."""
        return dtype == self.dtype or ({dtype.name, self.dtype.name} <= _CAST and not any(self._stored.fill))

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def _read_into_words(self, flat: Block, dtype: DType | None = None) -> None:
        """Read the values into an array of the words of all elements. Elements that no file holds stay as they are."""
        dtype = dtype or self.dtype
        for part in self._parts(dtype):
            in_bytes = tuple(stride * dtype.itemsize for stride in part.strides)
            part.read(np.ndarray(part.sizes, dtype.word, flat.data, part.start * dtype.itemsize, in_bytes))

    def _parts(self, dtype: DType) -> Iterator[_Part]:
        """The elements that are read from files, strip by strip."""
        workers: dict[int, Worker] = {}
        for section in self._stored.sections:
            source = self._sources[section.name]
            values = reader(source, dtype)
            worker = workers.get(values.itemsize) or workers.setdefault(values.itemsize, Worker(self._files, values.itemsize))
            for block in blocks(section.box.sizes):
                for strip, (pieces,) in strips(block.shifted(section.box.offsets), values):
                    offsets = strip.box.relative_to(section.box.offsets).offsets
                    start = section.start + sum(offset * stride for offset, stride in zip(offsets, section.strides, strict=True))
                    yield _Part(start, strip.sizes, section.strides[strip.axis :] or (1,), partial(values.read, worker, pieces, strip))


def _box_of(key: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The box that an index of numpy's kind means, and its shape without the axes that have a single index."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        raise IndexError(f"{len(keys)} indices for a tensor of {plural(len(shape), 'axis', 'axes')}")
    keys += [slice(None)] * (len(shape) - len(keys))
    spans, kept = [], []
    for index, size in zip(keys, shape, strict=True):
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step != 1:
                raise IndexError(f"a slice with the step {step} is not read alone: read it without a step, and index the array")
            spans.append((start, max(stop, start)))
            kept.append(max(stop - start, 0))
        else:
            number = operator.index(index)
            if not -size <= number < size:
                raise IndexError(f"index {number} of an axis of size {size}")
            spans.append((number % size, number % size + 1))
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans)), tuple(kept)


class NoSuchTensorError(KeyError):
    """A view has no tensor of that name."""

    def __init__(self, name: object, names: Collection[str]) -> None:
        super().__init__(name)
        self._names = names

    def __str__(self) -> str:
        # Written when it is shown: `get` raises and catches this error, too.
        return f"no tensor is called {self.args[0]!r}. {choices(str(self.args[0]), self._names, most=3)}."


class View(Mapping[str, LazyTensor], Drawn):
    """Tensors by name, which are read on demand: those of one rank of a target, or those of a whole model."""

    def __init__(self, stored: Mapping[str, StoredTensor], sources: Mapping[str, Tensor], files: Files) -> None:
        self._stored, self._sources, self._files = stored, sources, files

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._stored:
            raise NoSuchTensorError(name, self._stored)
        return LazyTensor(self._stored[name], self._sources, self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def matching(self, *globs: str) -> View:
        """The tensors whose names match one of the globs. Raises RequestError if a glob matches no name."""
        check_globs("tensors", globs, self._stored)
        return View({name: stored for name, stored in self._stored.items() if matches(name, globs)}, self._sources, self._files)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per tensor: name, dtype, shape, elements, bytes. RequestError if it is not installed."""
        from reshard.geometry.table import Table

        rows = [(tensor.name, tensor.dtype.name, tensor.shape, math.prod(tensor.shape), tensor.nbytes) for tensor in self._stored.values()]
        return Table(("name", "dtype", "shape", "elements", "bytes"), tuple(rows)).to_pandas()

    def __repr__(self) -> str:
        return f"View({plural(len(self), 'tensor')}, {plural(sum(stored.nbytes for stored in self._stored.values()), 'byte')})"
