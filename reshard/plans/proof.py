"""Proof: what is certain about a plan before a byte is read.

Every target byte has exactly one origin. Every source weight is used, or named as dropped. `compose` also proves that a round trip is the
identity: it composes the plan with the index that the target's own reader makes from the planned headers.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from reshard.canonical.content import tensors_by_key
from reshard.canonical.optimizer_state import is_master_key
from reshard.errors import ReshardError
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns, Pattern, first_overlap
from reshard.geometry.value import value
from reshard.index.coverage import check_all_covered, check_coverage
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.plans.layout import PlacedTensor, TargetFile
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route
from reshard.storage.trees import root_in


class ProofFailed(ReshardError):
    """The plan would lose or invent bytes. This is always a defect of reshard, not of the input."""

    id = "not-proven"


def prove(plan: Plan) -> None:
    """Raises ProofFailed unless every target byte has exactly one origin and every source weight arrives or is named as dropped.

    For a plan of one rank only the first part is checked, because the other ranks hold the other weights.
    """
    proven: dict[tuple[int, int], Pattern] = {}  # the patterns stay alive, so that no two of them have one id
    forms: set[int] = set()
    for file in plan.layout.files:
        if file.form:
            # Files of one form have their framing and their tensors at the same places.
            if id(file.form) in forms:
                continue
            forms.add(id(file.form))
        _file_is_tiled(file)
        for item in file.tensors:
            # Stored tensors of one kind share their pattern, which is proven once.
            pattern = item.tensor.sections.pattern
            form = id(pattern), math.prod(item.tensor.shape)
            if form not in proven:
                _sections_are_disjoint(file, item)
                proven[form] = pattern
    if plan.target.only_rank:
        return
    check_all_covered(route.target for route in plan.routes)
    written = {route.source.name for route in plan.routes}
    routed = written | plan.layout.aliases.keys() | set(plan.layout.inlined_scalars) | plan.layout.left_out.keys()
    if lost := sorted(name for name in plan.content.tensors if name not in routed):
        raise ProofFailed("the plan neither writes this weight nor names it as dropped", where=lost[0])
    _every_leaf_is_used(plan)


def _every_leaf_is_used(plan: Plan) -> None:
    """Raises ProofFailed unless the stored tensors of the source are those that the plan reads or names as left out, one by one.

    A tensor may be read under another name, with the same pieces; or in part, or with replicas, under its own.
    """
    content, prefix = plan.content, plan.content.selection.strip_prefix
    # Of a weight that is its own master, which has another name, the weight is taken: it comes first.
    read = {_pieces(leaf): leaf for tensor in [*content.tensors.values()][::-1] for leaf in tensor.leaves}
    stored = {_pieces(tensor): tensor for tensor in plan.source.tensors}
    others = {_key(read[pieces], prefix): read[pieces].name for pieces in read.keys() - stored.keys()}
    unread = {_key(stored[pieces], prefix): stored[pieces].name for pieces in stored.keys() - read.keys()}
    if invented := others.keys() - unread.keys() - {_key(tensor, prefix) for tensor in plan.source.tensors if others}:
        raise ProofFailed("the plan reads this tensor, which the source does not have", where=min(map(others.__getitem__, invented)))
    left = Counter(name.removeprefix(prefix) for name in (*(drop.name for drop in content.drops), *content.tied))
    aliases = content.model.aliases if content.model else {}
    for key in sorted(unread.keys() - others.keys()):
        if left[key[0]] < 1 and key[0] not in aliases:
            raise ProofFailed("the plan neither reads this tensor nor names it as left out", where=unread[key])
        left[key[0]] -= 1


def _pieces(tensor: Tensor) -> tuple[int, int, int]:
    """Which pieces a tensor has: a window on a table."""
    shards = tensor.shards
    return id(shards.table), shards.start, shards.stop


def _key(tensor: Tensor, prefix: str) -> tuple[str, str, str]:
    """A stored tensor by its name, its kind, and the tree that its first file lies in. prefix: is removed from the name."""
    return tensor.name.removeprefix(prefix), tensor.kind, root_in(tensor.shards.path(0)) if len(tensor.shards) else ""


def _file_is_tiled(file: TargetFile) -> None:
    """Raises ProofFailed unless literals and tensors follow each other from the first byte to the last, without hole or overlap."""
    ranges = [(offset, offset + len(data), "framing") for offset, data in file.literals]
    ranges += [(item.byte_offset, item.byte_offset + item.tensor.nbytes, item.tensor.name) for item in file.tensors]
    end = 0
    for start, stop, name in sorted(ranges):
        if start != end:
            raise ProofFailed(f"bytes {end:,}..{start:,} have {'no' if start > end else 'two'} origins", where=f"{file.path}, {name}")
        end = stop
    if end != file.nbytes:
        raise ProofFailed(f"planned bytes end at {end:,}, the file at {file.nbytes:,}", where=file.path)


def _sections_are_disjoint(file: TargetFile, item: PlacedTensor) -> None:
    """Raises ProofFailed unless the sections of a stored tensor are disjoint and lie inside it. Its other elements are fill."""
    sections = item.tensor.sections
    if overlap := first_overlap(sections.pattern, math.prod(item.tensor.shape)):
        first, second = (sections[row] for row in overlap)
        where = f"{file.path}, {item.tensor.name}"
        if first == second:
            raise ProofFailed(f"{first.name} {first.box} reaches beyond the stored tensor", where=where)
        raise ProofFailed(f"{first.name} {first.box} and {second.name} {second.box} claim the same bytes", where=where)


@value
class RoundTrip:
    """The result of composing a plan with the way back."""

    tensors: int
    """The number of tensors of the plan."""
    boxes: int
    """The number of boxes that were compared."""
    nbytes: int
    """The bytes of these boxes."""
    losses: tuple[str, ...]
    """A sentence for each box or tensor that is lost or changed; empty if the round trip is the identity."""
    left: tuple[str, ...] = ()
    """Sentences about what is left out besides weights: optimizer state, buffers, another copy of a weight."""

    @property
    def lossless(self) -> bool:
        """Whether everything that the source holds comes back."""
        return not (self.losses or self.left)

    def __repr__(self) -> str:
        sizes = f"{plural(self.tensors, 'tensor')}, {plural(self.boxes, 'box', 'boxes')}, {plural(self.nbytes, 'byte')}"
        return f"RoundTrip({sizes}, {plural(len(self.losses), 'loss', 'losses')})"


def compose(plan: Plan, read_back: Index) -> RoundTrip:
    """The round trip of a plan. read_back: the index that a reader of the target's format makes from the planned headers.

    The round trip is the identity if the reader reads every box of every tensor from the bytes to which the plan writes it: at the same
    byte offset, with the same strides and element type. A weight that the plan leaves out is a loss.

    Raises: CheckpointError if the tensors that are read back have a hole.
    """
    back = tensors_by_key(read_back)
    losses: list[str] = []
    boxes = nbytes = 0
    for route in plan.routes:
        if route.is_cast and not widens(route):
            losses.append(f"{route.name}: a cast from {route.source.dtype} to {route.target.dtype} does not come back bit by bit")
        returned = back.pop(route.name, None)
        if returned is None:
            losses.append(f"{route.name}: it is written, but the reader does not find it")
            continue
        if (returned.dtype, returned.shape) != (route.target.dtype, route.target.shape):
            losses.append(f"{route.name}: written as {route.target.dtype} {route.target.shape}, read as {returned.dtype} {returned.shape}")
            continue
        check_coverage(returned)
        volumes = returned.shards.sizes.prod(axis=1)
        boxes += int((volumes > 0).sum())
        nbytes += int(volumes.sum()) * returned.dtype.itemsize
        losses.extend(
            f"{route.name} {returned.shards.box(row)}: it is read from other bytes than it is written to"
            for row in np.flatnonzero(volumes != _matched(route.target, returned)).tolist()
        )
    written = {route.name: route.target for route in plan.routes}
    for alias, stored in plan.layout.aliases.items():
        if is_master_key(alias) and alias not in back:
            continue  # the weight is its own full-precision copy
        returned = back.pop(alias, None)
        if returned is None or (returned.shards.sizes.prod(axis=1) != _matched(written[stored], returned)).any():
            losses.append(f"{alias}: the reader does not find it in the bytes of {stored}, under which it is stored")
    constants = {(constant.path, constant.byte_offset) for constant in plan.target_index.constants}
    for name, returned in back.items():
        if not all((piece.extent.path, piece.extent.byte_offset) in constants for piece in returned.pieces()):
            losses.append(f"{name}: the reader finds it, but the plan does not write it")
    left = Counter[tuple[str, str]]()
    for drop in plan.drops:
        if drop.is_of_model and drop.name not in written and drop.name not in plan.layout.aliases:
            losses.append(f"{drop.name}: it is left out: {drop.reason}")
        else:
            left[drop.kind, drop.reason] += 1
    notes = (f"{count:,} {kind}: {reason}" for (kind, reason), count in left.items())
    return RoundTrip(len(plan.routes), boxes, nbytes, tuple(losses), tuple(notes))


def widens(route: Route) -> bool:
    """Whether the cast of a route keeps every value, so that the cast back gives the same bits."""
    if route.target.dtype.function != route.source.dtype.function:
        return False
    return not route.source.is_computed and (route.source.dtype.name, route.target.dtype.name) in _EXACT


_EXACT = {
    ("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F16", "F64"), ("F32", "F64"),
    ("F8_E4M3", "BF16"), ("F8_E4M3", "F16"), ("F8_E4M3", "F32"), ("F8_E5M2", "BF16"), ("F8_E5M2", "F16"), ("F8_E5M2", "F32"),
}  # fmt: skip


# Pairs of a written and a returned box that are compared at once.
_MOST_PAIRS = 1 << 20


def _matched(written: Tensor, returned: Tensor) -> Columns:
    """[n]: for each returned piece, how many of its elements are read from exactly the bytes to which the plan writes them."""
    numbers: dict[str, int] = {}
    ours, theirs = _Places.of(written.shards, numbers), _Places.of(returned.shards, numbers)
    matched = np.zeros(len(theirs.files), np.int64)
    if not len(ours.files):
        return matched
    block = max(1, _MOST_PAIRS // len(ours.files))
    for first in range(0, len(matched), block):
        rows = slice(first, first + block)
        meets = (theirs.starts[rows, None] < ours.stops).all(axis=2) & (ours.starts < theirs.stops[rows, None]).all(axis=2)
        i, j = np.nonzero(meets & (theirs.files[rows, None] == ours.files))
        i += first
        starts = np.maximum(theirs.starts[i], ours.starts[j])
        sizes = np.minimum(theirs.stops[i], ours.stops[j]) - starts
        # The stride of an axis of one element is never used.
        same_strides = ((theirs.steps[i] == ours.steps[j]) | (sizes <= 1)).all(axis=1)
        same = same_strides & (theirs.byte_offsets(i, starts) == ours.byte_offsets(j, starts))
        # A box that is shared in part, or by an empty piece, has no elements.
        np.add.at(matched, i, np.where(same & (sizes > 0).all(axis=1), sizes.prod(axis=1), 0))
    return matched


@value(eq=False)
class _Places:
    """Where the pieces of a tensor lie, as columns."""

    starts: Columns
    """[n, ndim]: where each box starts."""
    stops: Columns
    """[n, ndim]: where it ends."""
    files: npt.NDArray[np.int64]
    """[n]: the number of its file."""
    firsts: Columns
    """[n]: the byte at which its first element starts."""
    steps: Columns
    """[n, ndim]: the bytes from one element to the next along each axis."""

    @classmethod
    def of(cls, shards: Shards, numbers: dict[str, int]) -> _Places:
        """The places of some pieces. numbers: path -> its number, which grows."""
        located = shards.located()
        if isinstance(located.dtype, DType):
            itemsizes = np.full(len(shards), located.dtype.itemsize, np.int64)
        else:
            itemsizes = np.array([dtype.itemsize for dtype in located.dtype], np.int64)
        used, which = np.unique(located.files, return_inverse=True)
        files = np.array([numbers.setdefault(located.paths[file], len(numbers)) for file in used.tolist()], np.int64)
        starts = shards.offsets
        return cls(starts, starts + shards.sizes, files[which], located.byte_offsets, located.strides * itemsizes[:, None])

    def byte_offsets(self, rows: npt.NDArray[np.intp], elements: Columns) -> Columns:
        """The bytes at which elements of these rows start. elements: [k, ndim], their coordinates in the tensor."""
        offsets: Columns = self.firsts[rows] + ((elements - self.starts[rows]) * self.steps[rows]).sum(axis=1)
        return offsets
