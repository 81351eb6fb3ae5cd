"""Export: single tensors, or slices of them, as a .safetensors or .npy file that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from reshard.containers.safetensors import frame
from reshard.engine.casts import numpy_type
from reshard.engine.views import LazyTensor
from reshard.errors import RequestError, TargetError
from reshard.geometry.dtypes import is_in_safetensors
from reshard.opening.keywords import PathLike
from reshard.storage.output_file import OutputFile

SUFFIXES = (".safetensors", ".npy")


def export(tensors: Sequence[LazyTensor], path: PathLike, *, overwrite: bool = False, progress: Callable[[int], None] | None = None) -> int:
    """Write tensors to a file, in blocks, and return its length in bytes. The suffix says how: .safetensors, or .npy for one tensor.

    bfloat16 and the 8-bit floats stand in .npy files as raw words, because numpy has no such types: `array.view(ml_dtypes.bfloat16)`.

    Raises: RequestError for another suffix, several tensors in a .npy file, or a type that the form lacks; TargetError if the file exists.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise RequestError(f"{target.name}: the suffix names no form that can be written", do=f"Use one of {', '.join(SUFFIXES)}")
    if target.suffix == ".npy" and len(tensors) != 1:
        raise RequestError(f"a .npy file holds one tensor, and {len(tensors)} were chosen", do="Use .safetensors, or name one tensor")
    if target.is_file() and not overwrite:
        raise TargetError("the file exists", where=str(target), do="Use `overwrite=True`, or another name")
    output = OutputFile.at(path)
    header, ordered = _npy(tensors[0]) if target.suffix == ".npy" else _safetensors(tensors)
    with output.writing() as file:
        nbytes = file.write(header)
        for words in _words(ordered):
            nbytes += file.write(words)
            if progress:
                progress(len(words))
    return nbytes


def _words(tensors: Sequence[LazyTensor]) -> Iterator[memoryview]:
    return (part.words().reshape(-1).view(np.uint8).data for tensor in tensors for part in tensor.parts())


def _safetensors(tensors: Sequence[LazyTensor]) -> tuple[bytes, Sequence[LazyTensor]]:
    for tensor in tensors:
        if not is_in_safetensors(tensor.dtype):
            raise RequestError(f"safetensors files have no element type {tensor.dtype}", where=tensor.name, do="Use .npy")
    # Tensors with wider elements first, so that each is aligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    return frame([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered], {}).header, ordered


def _npy(tensor: LazyTensor) -> tuple[bytes, Sequence[LazyTensor]]:
    stream = BytesIO()
    descr = np.lib.format.dtype_to_descr(numpy_type(tensor.dtype))
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": tensor.shape})
    return stream.getvalue(), (tensor,)
