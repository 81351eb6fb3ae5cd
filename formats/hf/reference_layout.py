"""The layout of another folder: its names, fusions, shapes, element types and files. Only its headers are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field

from reshard.adapter.model_files import FileNames
from reshard.canonical.content import Content
from reshard.canonical.name_variants import Names
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, can_cast
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import StoredTensor, whole
from reshard.geometry.value import mutable, value
from reshard.index.index import Tensor
from reshard.storage.files import LocalFiles

from .read import stored_weights

_MOST_NAMED = 8


@value
class TargetFolder:
    """The weights that a folder will hold."""

    tensors: tuple[StoredTensor, ...]
    """The tensors to store."""
    files: Mapping[str, list[StoredTensor]] | None
    """Path -> the tensors of that file; None: to be divided by size."""
    notes: tuple[str, ...]
    """Sentences on tensors of the reference that are left out, and on tensors that are renamed or fused."""
    named: FileNames | None = None
    """How its files are called; None: as the model's config says."""


@mutable
class _Mismatch:
    """Everything that does not fit the reference, by kind."""

    absent: list[str] = field(default_factory=list)
    """Tensors of the reference that the source does not have."""
    shapes: list[str] = field(default_factory=list)
    """Tensors that have another shape in the source, with both shapes."""
    dtypes: list[str] = field(default_factory=list)
    """Tensors that cannot be cast to the reference's element type, with both types."""
    without_place: list[str] = field(default_factory=list)
    """Weights of the source that no tensor of the reference holds."""
    repeated: list[str] = field(default_factory=list)
    """Weights of the source that several tensors of the reference hold."""

    def check(self, folder: str, *, is_declared: bool) -> None:
        """Raises RequestError, naming everything that does not fit. is_declared: the model is known."""
        groups = {
            "not in the source": self.absent,
            "another shape": self.shapes,
            "an element type that cannot be cast": self.dtypes,
            "no place for": self.without_place,
            "several places for": self.repeated,
        }
        faults = [f"{fault}: {len(names)} ({_some(names)})" for fault, names in groups.items() if names]
        if not faults:
            return
        remedy = "Name a folder of the same model, or leave out `like=`"
        if not is_declared:
            remedy = "Name the model with `model=DIR`: other names and fusions are known only for declared architectures"
        elif self.without_place and not self.absent:
            remedy = "Leave out with `exclude=` the weights that it has no place for"
        raise RequestError(
            f"the source's tensors do not fit this folder's layout: {'; '.join(faults)}",
            where=f"`like={folder}`",
            why="The result would load as another model, or not at all",
            do=remedy,
        )


def laid_out_like(content: Content, folder: str) -> TargetFolder:
    """The content in the layout of the folder that --like names.

    Tensors of the folder that no model needs, such as rotary frequencies or a tied head, are left out with a note.
    Raises: RequestError for everything else that does not fit, all at once; CheckpointError if the folder contradicts itself.
    """
    reference = stored_weights(LocalFiles(folder), headers_only=True)
    names = Names(content.model) if content.model else None
    mismatch, left_out = _Mismatch(), dict[str, str]()
    files: dict[str, list[StoredTensor]] = {path: [] for path in reference.paths}
    for tensor in reference.tensors:
        if reason := _reason_to_leave_out(tensor.name, content, names):
            left_out[tensor.name] = reason
        elif stored := _stored_as(tensor, content, names, mismatch):
            files[tensor.shards.path(0)].append(stored)
    tensors = tuple(stored for stored_in_file in files.values() for stored in stored_in_file)
    _check_places(content, tensors, mismatch)
    mismatch.check(folder, is_declared=names is not None)
    named = FileNames.written(files)
    kept = files if named and all(files.values()) else None
    return TargetFolder(tensors, kept, (*_left_out_notes(left_out), *_variant_notes(tensors)), named)


def _reason_to_leave_out(name: str, content: Content, names: Names | None) -> str | None:
    """Why a tensor of the reference is not written; None if it is needed."""
    if names is None or content.model is None or name in content.weights:
        return None
    if dropped := names.unneeded(name):
        return content.model.reason_to_drop(dropped)
    array, (head, embedding) = names.array(name), content.model.architecture.tied
    is_tied = content.model.is_tied and array is not None and array.names == (head,) and embedding in content.weights
    return f"it is tied to {embedding}, which stands for it" if is_tied else None


def _stored_as(wanted: Tensor, content: Content, names: Names | None, mismatch: _Mismatch) -> StoredTensor | None:
    """The tensor as the reference stores it. If the source cannot give it: None, and the reason is added to `mismatch`."""
    if weight := content.weights.get(wanted.name):
        return _checked(wanted, whole(wanted.name, wanted.dtype, weight.shape), content, mismatch)
    array: Mosaic | None = names.array(wanted.name) if names else None
    if array is None or not array.names or not all(name in content.weights for name in array.names):
        mismatch.absent.append(wanted.name)
        return None
    return _checked(wanted, array.stored(wanted.name, wanted.dtype), content, mismatch)


def _checked(wanted: Tensor, stored: StoredTensor, content: Content, mismatch: _Mismatch) -> StoredTensor | None:
    """The stored tensor if it has the wanted shape, and its weights can be cast to its type."""
    if stored.shape != wanted.shape:
        mismatch.shapes.append(f"{wanted.name} ({list(wanted.shape)} there, {list(stored.shape)} here)")
        return None
    dtypes = {content.weights[section.name].dtype for section in stored.sections}
    if uncastable := [dtype for dtype in dtypes if not can_cast(dtype, wanted.dtype)]:
        mismatch.dtypes.append(f"{wanted.name} ({wanted.dtype} there, {', '.join(map(str, uncastable))} here)")
        return None
    return stored


def _check_places(content: Content, tensors: tuple[StoredTensor, ...], mismatch: _Mismatch) -> None:
    """Add to `mismatch` the weights that have no place, several places, or places of several element types."""
    placed, dtypes = Counter[str](), dict[str, set[DType]]()
    for stored in tensors:
        for section in stored.sections:
            placed[section.name] += section.box.volume
            dtypes.setdefault(section.name, set()).add(stored.dtype)
    # The weights of a refused tensor have no place either, and the reason for it is already there.
    has_refused = bool(mismatch.shapes or mismatch.dtypes)
    for name, tensor in content.weights.items():
        elements = math.prod(tensor.shape)
        if placed[name] > elements:
            mismatch.repeated.append(name)
        elif (placed[name] < elements or name not in dtypes) and not has_refused:
            mismatch.without_place.append(f"{name} (a part of it)" if placed[name] else name)
        elif len(dtypes.get(name, ())) > 1:
            mismatch.dtypes.append(f"{name} ({' and '.join(sorted(map(str, dtypes[name])))} there, in parts)")


def _left_out_notes(left_out: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"not written, though the folder of `like=` has it: {_some(names)}; {reason}" for reason, names in by_reason.items()]


def _variant_notes(tensors: Sequence[StoredTensor]) -> list[str]:
    variants = [stored for stored in tensors if {section.name for section in stored.sections} != {stored.name}]
    if not variants:
        return []
    members = len({section.name for section in variants[0].sections})
    return [
        f"{len(variants)} tensors are named or fused as in the folder of `like=`, such as {variants[0].name}, which holds {members} weights"
    ]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
