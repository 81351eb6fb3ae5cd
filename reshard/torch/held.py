"""HeldFiles: the checkpoint that `dcp.save` would write of a state dict, without its files.

    write items of all ranks -> __{rank}_0.distcp and .metadata, laid out    what the format's reader reads: framing, and the .metadata
                                                          bytes of tensors   taken from this rank's memory when they are read

The layout is that of the format that torch itself writes (adapter/dcp_writer.py), so a state dict in memory is opened, planned and proven
as its checkpoint would be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.adapter.dcp_writer import DcpEntry, DcpFile, written_metadata
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.save_folders import step_of
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Shape
from reshard.geometry.dtypes import from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.sections import whole
from reshard.geometry.value import value
from reshard.index.coverage import check_index
from reshard.index.index import Index, RunFacts
from reshard.live.memory.index import format_of_framework
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.gather import describe, read
from reshard.opening.steps import classify, note_counts, settle
from reshard.storage.files import VirtualFiles

_METADATA = ".metadata"


@value
class HeldItem:
    """What one rank writes of a state dict: a box of a tensor, or an object."""

    fqn: str
    """The flat name."""
    dtype: str = ""
    """The element type as torch writes it, such as "torch.bfloat16"; empty for an object."""
    shape: Shape = ()
    """The shape of the whole tensor."""
    offsets: Shape = ()
    """Where the box starts."""
    sizes: Shape = ()
    """Its sizes."""


@value
class HeldState:
    """A state dict as all ranks of a save hold it. It is the same on every rank."""

    token: str
    """Of this save alone."""
    ranks: tuple[tuple[HeldItem, ...], ...]
    """What each rank writes; no box is there twice."""
    paths: Mapping[str, tuple[str | int, ...]] | None
    """Flat name -> the keys on the way to the value; None: the planner did not flatten the state dict."""


def path_of(rank: int) -> str:
    """The file that stands for the memory of a rank, as torch names the file that the rank would write."""
    return f"__{rank}_0.distcp"


class HeldFiles(VirtualFiles):
    """The files of a state dict. Bytes of tensors can be read if this rank holds them.

    rank: this rank. tensor: the tensor of its item of that number. objects: the content of the objects, as torch.save writes it; others
    are left out.
    """

    def __init__(self, state: HeldState, rank: int, tensor: Callable[[int], torch.Tensor], objects: Mapping[str, bytes]) -> None:
        super().__init__(f"/the memory of {plural(len(state.ranks), 'rank')}")
        self._token, self._own, self._tensor = state.token, path_of(rank), tensor
        files = [_laid_out(number, items, objects) for number, items in enumerate(state.ranks)]
        for file in files:
            self.add(file.path, file.nbytes, file.literals)
        metadata = written_metadata(files, state.paths)
        self.add(_METADATA, len(metadata), [(0, metadata)])
        numbers = (number for number, item in enumerate(state.ranks[rank]) if item.dtype)
        self._places = [
            (placed.byte_offset, placed.tensor.nbytes, number) for placed, number in zip(files[rank].placed, numbers, strict=True)
        ]
        self._starts = [start for start, _, _ in self._places]
        self._last: tuple[int, memoryview] | None = None

    def stamp(self, path: str) -> str:
        return self._token

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer, from this rank's memory where the range lies in one of its tensors."""
        at = bisect_right(self._starts, byte_offset) - 1
        if path == self._own and at >= 0:
            start, nbytes, number = self._places[at]
            if byte_offset + len(buffer) <= start + nbytes:
                buffer[:] = self._content(number)[byte_offset - start : byte_offset - start + len(buffer)]
                return
        super().read_into(path, byte_offset, buffer)

    def _content(self, number: int) -> memoryview:
        """The bytes of one of this rank's tensors. The last one is kept: a tensor that is not contiguous on the CPU is copied once."""
        if self._last is None or self._last[0] != number:
            self._last = None
            flat = self._tensor(number).detach().cpu().contiguous().reshape(-1)
            self._last = number, flat.view(torch.uint8).numpy().data
        return self._last[1]


def _laid_out(rank: int, items: Sequence[HeldItem], objects: Mapping[str, bytes]) -> DcpFile:
    """The file that a rank would write."""
    file = DcpFile(path_of(rank))
    for item in items:
        if item.dtype:
            dtype = from_torch(item.dtype, where=item.fqn)
            file.add_tensor(item.fqn, whole(item.fqn, dtype, item.sizes), item.offsets, item.shape)
        elif (content := objects.get(item.fqn)) is not None:
            file.literals.append((file.nbytes, content))
            file.entries.append(DcpEntry(item.fqn, file.path, file.nbytes, len(content)))
            file.nbytes += len(content)
    return file


def opened(files: HeldFiles, target: str, step: int | None, options: Mapping[str, Any]) -> Checkpoint:
    """A state dict in memory as an opened checkpoint. target: where it will be written; its name may tell the step. options: keywords of
    `open`, such as `model`.

    Raises: CheckpointError if a tensor is not whole, RequestError if the config does not fit.
    """
    checkpoint = Checkpoint(
        files.root,
        files,
        Index(format_of_framework("torch").name, (), (), RunFacts()),
        ModelFiles(files, "", None),
        "held by ranks",
        options=options,
    )
    checkpoint = settle(read(describe(checkpoint)))
    try:
        check_index(checkpoint.index)
    except CheckpointError as error:
        raise CheckpointError(
            error.what, where=error.where, why="No rank of the save has the rest", do="Save the whole state dict of the model"
        ) from None
    facts = replace(checkpoint.index.facts, step=step_of(target) if step is None else step)
    return classify(note_counts(replace(checkpoint, index=replace(checkpoint.index, facts=facts))))
