"""Reading whole checkpoints block by block: the fingerprint of one, and the differences of two, whatever their layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import is_master_key
from reshard.engine.casts import Overflow, about_beyond, cast, values_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.recorded import BlockDigests, mismatch, tensor_digest
from reshard.engine.transfer import Block, bytes_of
from reshard.engine.walk import BlockPlace, Read, walk
from reshard.errors import DifferenceFound, ReshardError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, are_same_bytes
from reshard.geometry.functions import INVERTIBLE
from reshard.geometry.quantities import plural
from reshard.geometry.value import Tabular, mutable, value
from reshard.index.index import Constant, Index, Tensor
from reshard.plans.digests import CURRENT
from reshard.storage.claims import SourceChecks
from reshard.storage.files import Files, read_range

if TYPE_CHECKING:
    from reshard.geometry.table import Table


@value(eq=False)
class Side:
    """One checkpoint of a comparison."""

    files: Files
    """The files of the checkpoint."""
    index: Index
    """Its index."""
    content: Content
    """The tensors that are compared."""

    def __repr__(self) -> str:
        return f"Side({self.files.root!r}, {plural(len(self.content.tensors), 'tensor')})"


@value
class Difference:
    """A tensor that differs."""

    name: str
    """The tensor, or the file."""
    kind: str
    """How it differs: "missing", "extra", "shape", "dtype", "values", "size", "recorded": it is not what reshard wrote, or "version": a
    server's version is that of other weights."""
    detail: str
    """A sentence for the user."""


@mutable
class Comparison(Tabular):
    """The result of comparing two checkpoints, or one with the manifest that reshard wrote beside it."""

    JSON = "equal tensors bytes=nbytes differences notes source_checks"

    tensors: int = 0
    """The number of tensors that both have."""
    nbytes: int = 0
    """The bytes that were compared."""
    differences: list[Difference] = field(default_factory=list)
    """The differences; empty if both hold the same weights."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what was not compared."""
    source_checks: SourceChecks = SourceChecks()
    """What of both was compared with the checksums that their files hold."""

    def blame(self, error: ReshardError, files: Files) -> None:
        """Make a difference of an error that ended the comparison. files: those that were read."""
        self.differences.append(Difference(error.where or files.root, "values", error.what))

    def end(self, reading: Reading, *sides: Side) -> None:
        """Note what was checked. Raises CheckpointError if a file of a side was written meanwhile."""
        for side in sides:
            reading.check_unchanged(side.files, side.index)
        self.source_checks = reading.checks
        self.notes.extend(self.source_checks.notes())

    @property
    def equal(self) -> bool | None:
        """Whether there is no difference; of a live server None, if not everything could be compared."""
        return not self.differences

    def __bool__(self) -> bool:
        """Raises TypeError: whether there is a comparison is not whether the checkpoints are equal."""
        raise TypeError(f"the truth of a {type(self).__name__} is ambiguous; ask .equal, or call .raise_if_different()")

    def raise_if_different(self) -> None:
        """Raises DifferenceFound, with the first difference and the number of all."""
        if self.differences:
            first = self.differences[0]
            more = f" and {plural(len(self.differences) - 1, 'other difference')}" if len(self.differences) > 1 else ""
            raise DifferenceFound(first.detail + more, where=first.name)

    def table(self) -> Table:
        """A row for each difference: its kind, the tensor, and a sentence."""
        from reshard.geometry.table import Table

        return Table(("kind", "name", "detail"), tuple((row.kind, row.name, row.detail) for row in self.differences))

    def __repr__(self) -> str:
        result = "equal" if self.equal else plural(len(self.differences), "difference")
        return f"{type(self).__name__}({result}, {plural(self.tensors, 'tensor')}, {plural(self.nbytes, 'byte')})"


def check_recorded(side: Side, digests: BlockDigests) -> None:
    """Compare digests with those that reshard recorded when it wrote the checkpoint. digests: by CURRENT.

    Raises: DifferenceFound, naming the files that have changed, if a tensor differs. A tensor without a recorded digest is not compared.
    """
    recorded = side.content.recorded()
    if different := _not_as_recorded(side, recorded, digests):
        raise mismatch(DifferenceFound, side.files, different, len(recorded), side.content.deltas)


def _not_as_recorded(side: Side, recorded: Mapping[str, str], digests: BlockDigests) -> list[Tensor]:
    """The tensors whose digests are not the recorded ones."""
    tensors = side.content.tensors
    return [
        tensors[name]
        for name, expected in recorded.items()
        if name in digests and CURRENT.text(tensor_digest(name, tensors[name], digests[name])) != expected
    ]


def compare(
    left: Side,
    right: Side,
    result: Comparison,
    *,
    with_cast: bool = False,
    held_as: Mapping[str, DType] = MappingProxyType({}),
    effort: Effort = NO_LIMITS,
) -> None:
    """Compare every element of every tensor, including replicas and constants, with the checksums of the files, too, and fill `result`.

    with_cast: if element types differ, cast the left values to the right type, as torch does, and compare the bits. Where one side holds
    the values of a function of the weights, they are computed of the other side. held_as: tensors that one side holds in an element type of
    its own on purpose; the other side's values are cast to it.

    Raises: CheckpointError if a file cannot be read or was written meanwhile, or replicas of one side differ; WrongChecksum. RequestError
    if the memory of `effort` is too small.
    """
    pairs, reading = list(comparable(left, right, result, with_cast=with_cast, held_as=held_as)), Reading(checks=effort.source_checksums)
    result.differences.extend(difference for side in (left, right) for difference in wrong_constants(side.files, side.index.constants))
    result.nbytes += sum(tensor.nbytes for _, tensor in pairs)
    recorded = left.content.recorded(), right.content.recorded()
    digests: tuple[BlockDigests, BlockDigests] = {}, {}
    different: dict[str, dict[int, Box]] = {}

    def measure(place: BlockPlace, read: Read) -> tuple[Box | None, tuple[bytes | None, bytes | None], int]:
        pair = pairs[place[0]]
        dtypes, name = [tensor.dtype for tensor in pair], pair[0].name
        common, *others = (held_as[name],) if name in held_as else _common_types(*dtypes, widest=is_master_key(name))
        digests_of_block, element, beyond = PairDigests([name in of_side for of_side in recorded]), None, 0
        for box, stored in read:
            values_beyond()
            a, b = (cast(values, dtype, common) for values, dtype in zip(stored, dtypes, strict=True))
            beyond += values_beyond()
            is_equal = _equal(a, b) or any(
                _equal(*(cast(values, dtype, other) for values, dtype in zip(stored, dtypes, strict=True))) for other in others
            )
            digests_of_block.add(*stored, is_equal=is_equal and a is stored[0] and b is stored[1])
            if not is_equal and element is None:
                element = _first_difference(a, b, box)
        return element, digests_of_block.result(), beyond

    overflow = Overflow()
    for (i, j, _), (element, hashed, beyond) in walk(pairs, (left.files, right.files), lambda: measure, effort=effort, reading=reading):
        name = pairs[i][0].name
        if beyond:
            overflow[name, pairs[i][1].dtype] += beyond
        if element is not None:
            different.setdefault(name, {})[j] = element
        for of_side, digest in zip(digests, hashed, strict=True):
            if digest is not None:
                of_side.setdefault(name, {})[j] = digest
    if overflow:
        result.notes.append(about_beyond(overflow))
    for name, elements in sorted(different.items()):
        first = elements[min(elements)]
        result.differences.append(Difference(name, "values", f"the values differ, first at element {list(first.offsets)}"))
    for side, of_side, expected in zip((left, right), digests, recorded, strict=True):
        if changed := _not_as_recorded(side, expected, of_side):
            error = mismatch(DifferenceFound, side.files, changed, len(expected.keys() & of_side.keys()), side.content.deltas)
            result.differences += [
                Difference(tensor.name, "recorded", f"{side.files.root} does not match {side.content.recorded_in}") for tensor in changed
            ]
            result.notes.append(str(error))
    result.end(reading, left, right)


class PairDigests:
    """The digests of a block on both sides. Equal bytes have equal digests, so there is one hash until a strip differs.

    wanted: for each side, whether its digest is wanted.
    """

    def __init__(self, wanted: Sequence[bool]) -> None:
        self._wanted = wanted
        self._left = self._right = CURRENT.new() if any(wanted) else None

    def add(self, left: Block, right: Block, *, is_equal: bool) -> None:
        """Add a strip. is_equal: whether both sides have the same bytes."""
        if self._left is None or self._right is None:
            return
        if not is_equal and self._right is self._left:
            self._right = self._left.copy()
        self._left.update(bytes_of(left))
        if self._right is not self._left and self._wanted[1]:
            self._right.update(bytes_of(right))

    def result(self) -> tuple[bytes | None, bytes | None]:
        """The digests of the strips; None for a side whose digest is not wanted."""
        left, right = (
            running.digest() if running is not None and is_wanted else None
            for running, is_wanted in zip((self._left, self._right), self._wanted, strict=True)
        )
        return left, right


def comparable(
    left: Side, right: Side, result: Comparison, *, with_cast: bool, held_as: Collection[str] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of tensors whose values can be compared. The other tensors are added to the result as differences.

    held_as: the names of tensors whose element types differ on purpose.
    """
    a, b = left.content.tensors, right.content.tensors
    for name in sorted(a.keys() - b.keys()):
        result.differences.append(Difference(name, "missing", f"it is in {left.files.root}, but not in {right.files.root}"))
    for name in sorted(b.keys() - a.keys()):
        result.differences.append(Difference(name, "extra", f"it is in {right.files.root}, but not in {left.files.root}"))
    for name in [name for name in a if name in b]:
        x, y = a[name], b[name]
        result.tensors += 1
        if x.shape != y.shape:
            result.differences.append(Difference(name, "shape", f"its shape is {list(x.shape)} on the left, {list(y.shape)} on the right"))
        elif {x.dtype.function, y.dtype.function} - {"", *INVERTIBLE} and x.dtype.function != y.dtype.function and _both_floating(x, y):
            yield x, y  # the function's type follows from the function, not from the weight
        elif not are_same_bytes(x.dtype.of(y.dtype.function), y.dtype) and not (
            name in held_as or ((with_cast or is_master_key(name)) and _both_floating(x, y))
        ):
            hint = " (`cast=True` compares the values after a cast)" if _both_floating(x, y) else ""
            result.differences.append(Difference(name, "dtype", f"it is {x.dtype} on the left, {y.dtype} on the right{hint}"))
        else:
            yield x, y


def _common_types(left: DType, right: DType, *, widest: bool) -> tuple[DType, ...]:
    """The type in which two tensors are compared: the right one's; with `widest` the wider one. If the left one alone holds the values of a
    function, which are computed of the other one, it is the left one's. If the function is invertible, either may have been computed of the
    other: then they are equal if the weights are, or the function's values."""
    if widest and left.itemsize > right.itemsize:
        return (left,)
    if left.function != right.function and {left.function, right.function} & {*INVERTIBLE}:
        return right.of(""), left if left.function else right
    return (left if left.function and not right.function else right,)


def _both_floating(left: Tensor, right: Tensor) -> bool:
    return left.dtype.floating and right.dtype.floating


def wrong_constants(files: Files, constants: Iterable[Constant]) -> Iterator[Difference]:
    """A difference for each constant (padding rows, scales that must be 1) whose bytes are not those that the format prescribes."""
    step = 1 << 20
    for constant in constants:
        if constant.is_unset:
            continue
        for start in range(0, constant.nbytes, step):
            size = min(step, constant.nbytes - start)
            stored = read_range(files, constant.path, constant.byte_offset + start, size)
            if stored != (constant.expected * (size // len(constant.expected) + 1))[:size]:
                detail = f"padding or a constant scale in {constant.path} has other bytes than the format prescribes"
                yield Difference(constant.name, "values", detail)
                break


def _equal(a: Block, b: Block) -> bool:
    """Whether two row-major arrays have the same bytes. As 8-byte words they are compared fastest."""
    if a.nbytes % 8 == 0:
        a, b = (block.reshape(-1).view(np.uint64) for block in (a, b))
    return np.array_equal(a, b)


def _first_difference(a: Block, b: Block, box: Box) -> Box:
    """The box of the first element that differs, in the coordinates of the tensor. box: the box of the elements."""
    at = np.argwhere(np.asarray(a != b))[0]
    return Box(tuple(int(i) + start for i, start in zip(at, box.offsets, strict=True)), (1,) * len(box.sizes))
