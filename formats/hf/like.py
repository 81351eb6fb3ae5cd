"""The layout of another folder: its names, fusions, shapes, element types and files, of which only headers are read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.canonical.content import Content
from reshard.canonical.name_variants import Names
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.stored import StoredTensor, whole
from reshard.index.index import Tensor
from reshard.storage.files import LocalFiles

from . import read as reading

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Reference:
    """The folder that was named, and what its headers say."""

    folder: str
    paths: tuple[str, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors to be stored; the same by file, where the reference's files are called as a writer calls them; notes."""

    tensors: tuple[StoredTensor, ...]
    files: Mapping[str, list[StoredTensor]] | None
    notes: tuple[str, ...]


def reference(folder: str) -> Reference:
    """What the headers in a folder say. Raises CheckpointError if they, or their index, contradict themselves."""
    found = reading.read(LocalFiles(folder), headers=True)
    return Reference(folder, found.paths, found.tensors)


@dataclass(slots=True)
class _Mismatch:
    """What cannot be as it is in the reference."""

    absent: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    homeless: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    def check(self, folder: str, *, is_declared: bool) -> None:
        """Raises RequestError, naming everything, if there is anything."""
        groups = {
            "it has, and the source has not": self.absent,
            "have other shapes": self.shapes,
            "have element types that cannot be cast": self.dtypes,
            "it has no place for": self.homeless,
            "it has more than once": self.twice,
        }
        found = [f"{len(names)} that {what}: {_some(names)}" for what, names in groups.items() if names]
        if not found:
            return
        hints = {
            "Name the model with --model DIR, as other names and fusions are known of declared architectures only": not is_declared,
            "Leave out with --exclude what it has no place for": bool(self.homeless and not self.absent),
        }
        raise RequestError(
            "the source does not fit this folder's layout. Tensors " + "; tensors ".join(found),
            where=f"--like {folder}",
            why="What is written would load as another model, or not at all",
            do=next((hint for hint, fits in hints.items() if fits), "Name a folder of the same model, or leave out --like"),
        )


def match(content: Content, wanted: Reference) -> Matched:
    """The content as the reference has it.

    What the reference has beside it and nobody needs, such as rotary frequencies, or a tied head, is left out with a note.
    Raises: RequestError for everything else that does not fit, all at once.
    """
    names = Names(content.model) if content.model else None
    mismatch, left_out = _Mismatch(), dict[str, str]()
    files: dict[str, list[StoredTensor]] = {path: [] for path in wanted.paths}
    for tensor in wanted.tensors:
        if reason := _unneeded(tensor.name, content, names):
            left_out[tensor.name] = reason
        elif stored := _stored(tensor, content, names, mismatch):
            files[tensor.shards.path(0)].append(stored)
    tensors = tuple(stored for held in files.values() for stored in held)
    _check_places(content, tensors, mismatch)
    mismatch.check(wanted.folder, is_declared=names is not None)
    return Matched(tensors, files if all(map(_OURS.fullmatch, files)) and all(files.values()) else None, tuple(_notes(tensors, left_out)))


def _unneeded(name: str, content: Content, names: Names | None) -> str | None:
    """Why a tensor of the reference is not written; None if it is needed."""
    if names is None or content.model is None or name in content.weights:
        return None
    if dropped := names.unneeded(name):
        return content.model.reason_to_drop(dropped)
    array, (head, embedding) = names.array(name), content.model.architecture.tied
    tied = content.model.is_tied and array is not None and array.names == (head,) and embedding in content.weights
    return f"it is tied to {embedding}, which stands for it" if tied else None


def _stored(wanted: Tensor, content: Content, names: Names | None, mismatch: _Mismatch) -> StoredTensor | None:
    """The tensor as the reference has it; None if that cannot be, which is noted."""
    own = content.weights.get(wanted.name)
    array = names.array(wanted.name) if names and own is None else None
    members = (wanted.name,) if own is not None else array.names if array is not None else ()
    if not members or not all(name in content.weights for name in members):
        mismatch.absent.append(wanted.name)
        return None
    shape = own.shape if own is not None else _shape(array)
    if shape != wanted.shape:
        mismatch.shapes.append(f"{wanted.name} ({list(wanted.shape)} there, {list(shape)} here)")
        return None
    if kinds := {content.weights[name].dtype for name in members if not _casts(content.weights[name].dtype, wanted.dtype)}:
        mismatch.dtypes.append(f"{wanted.name} ({wanted.dtype} there, {', '.join(map(str, kinds))} here)")
        return None
    return whole(wanted.name, wanted.dtype, shape) if array is None else array.stored(wanted.name, wanted.dtype)


def _shape(array: Mosaic | None) -> tuple[int, ...]:
    assert array is not None
    return array.shape


def _casts(own: DType, wanted: DType) -> bool:
    return own == wanted or (own.floating and wanted.floating)


def _check_places(content: Content, tensors: tuple[StoredTensor, ...], mismatch: _Mismatch) -> None:
    """Every weight has to have one place, and one element type in it."""
    held, kinds = Counter[str](), dict[str, set[DType]]()
    for stored in tensors:
        for section in stored.sections:
            held[section.name] += section.box.volume
            kinds.setdefault(section.name, set()).add(stored.dtype)
    refused = mismatch.shapes or mismatch.dtypes  # their own weights have no place, for a reason that is told already
    for name, tensor in content.weights.items():
        elements = math.prod(tensor.shape)
        if held[name] > elements:
            mismatch.twice.append(name)
        elif (held[name] < elements or name not in kinds) and not refused:
            mismatch.homeless.append(name if not held[name] else f"{name} (a part of it)")
        elif len(kinds.get(name, ())) > 1:
            mismatch.dtypes.append(f"{name} ({' and '.join(sorted(map(str, kinds[name])))} there, in parts)")


def _notes(tensors: tuple[StoredTensor, ...], left_out: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    notes = [f"not written, though the folder of --like has it: {_some(held)}; {reason}" for reason, held in by_reason.items()]
    other = [stored for stored in tensors if {section.name for section in stored.sections} != {stored.name}]
    if other:
        held = len({section.name for section in other[0].sections})
        notes.append(
            f"{len(other)} tensors are named or fused as in the folder of --like, such as {other[0].name}, which holds {held} weights"
        )
    return notes


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
