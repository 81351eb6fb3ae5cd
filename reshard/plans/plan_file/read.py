"""Reading a plan file: a plan that can be run, after everything in it has been checked.

No path leaves the source or the target, no piece leaves its tensor or its file, and the source's files are those that were planned.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from reshard.canonical.content import Content, Drop
from reshard.errors import CheckpointError
from reshard.geometry.dtypes import BF16, DType, from_torch
from reshard.geometry.functions import FUNCTIONS
from reshard.geometry.parallel import Parallel
from reshard.geometry.sections import Columns
from reshard.geometry.stored import StoredTensor
from reshard.index.index import Constant, EncodedPart, Encoding, Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Located, PieceTable, Shards
from reshard.models.quantized import Component
from reshard.plans.alike_files import LazyFraming
from reshard.plans.digests import is_digest
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.placed import Literal, PlacedTensor
from reshard.plans.plan import Plan, PlanDigests, Route
from reshard.plans.plan_file.columns import ColumnsFile
from reshard.plans.plan_file.write import KIND, VERSION
from reshard.plans.target import Target
from reshard.storage.files import Files, inside
from reshard.storage.own_files import WORK_FOLDER

_MOST_AXES = 64
_BYTES = from_torch("uint8", where=KIND)


def read_plan(path: str | os.PathLike[str], source: Files) -> Plan:
    """The plan in a plan file, for the source that it was made for.

    Raises: CheckpointError if the file is damaged or names what lies outside of source or target, or the source has changed since.
    UnsupportedError if another version of reshard wrote it.
    """
    return _checked(ColumnsFile.at(path, KIND, VERSION), source)


def plan_of_content(content: bytes, source: Files) -> Plan:
    """The plan in the content of a plan file. Raises: as `read_plan` does."""
    return _checked(ColumnsFile("plan", content, KIND, VERSION), source)


def _checked(file: ColumnsFile, source: Files) -> Plan:
    try:
        return _plan(file, source)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
        # The checks below name what is likely to be wrong. A forged file with a right digest can be wrong anywhere.
        raise file.damaged(f"it does not describe a plan ({type(error).__name__}: {error})") from None


def _plan(file: ColumnsFile, source: Files) -> Plan:
    about = file.value("plan")
    files = _source_files(file, source)
    dtypes = [_dtype(file, *names) for names in file.value("dtypes")]
    sizes = {each.path: each.nbytes for each in files}
    sources = _tensors(file, "source", dtypes, sizes)
    layout = _layout(file, about)
    targets = _tensors(file, "target", dtypes, {each.path: each.nbytes for each in layout.files})
    routes = _routes(file, sources, targets)
    target = about["target"]
    constants = _constants(file, {each.path: each.nbytes for each in layout.files})
    stored = tuple(StoredFile(each.path, each.nbytes) for each in layout.files)
    recorded = _texts(file, about["recorded"])
    if not all(map(is_digest, recorded.values())):
        raise file.damaged("the recorded digests are not digests")
    return Plan(
        source=Index(_text(file, about["source"]["format"]), (), files, RunFacts(step=_optional(file, about["source"]["step"], int))),
        source_files=source,
        content=Content(
            tensors={},
            drops=tuple(
                Drop(_text(file, name), _text(file, kind), int(size), _text(file, why)) for name, kind, size, why in about["drops"]
            ),
            model=None,
            recorded=lambda: recorded,
        ),
        target=Target(layout.format, layout.parallel, options={"engine_version": _optional(file, target["engine_version"], str)}),
        layout=layout,
        target_index=Index(layout.format, tuple(targets), stored, RunFacts(), constants=constants),
        routes=routes,
        digests=_digests(file, about),
    )


def _digests(file: ColumnsFile, about: Mapping[str, Any]) -> PlanDigests:
    identity, request = about["identity"], about["request"]
    if not re.fullmatch("[0-9a-f]{64}", identity) or not is_digest(request):
        raise file.damaged("its identity is not a digest")
    return PlanDigests(identity, request)


def _source_files(file: ColumnsFile, source: Files) -> tuple[StoredFile, ...]:
    """The files of the source. Raises CheckpointError if one has another length or stamp than it was planned with."""
    files = []
    for path, nbytes, stamp in file.value("source.files"):
        inside(_text(file, path), where=file.path)
        found = source.size(path)
        if found is None or found != nbytes or source.stamp(path) != stamp:
            was = (
                "is missing"
                if found is None
                else f"has {found:,} bytes, {nbytes:,} were planned"
                if found != nbytes
                else "was written since"
            )
            raise CheckpointError(
                f"the source is not the one that {file.path} was made for: the file {was}",
                where=path,
                why="The plan says which bytes of this file go where",
                do="Give the directory that was planned, or plan it again",
            )
        files.append(StoredFile(path, _size(file, nbytes)))
    return tuple(files)


def _tensors(file: ColumnsFile, side: str, dtypes: Sequence[DType], sizes: Mapping[str, int]) -> list[Tensor]:
    """Some tensors with their pieces. sizes: the length of each file that a piece may lie in."""
    names, paths = file.value(f"{side}.names"), tuple(file.value(f"{side}.paths"))
    own_dtypes, axes, pieces = (file.integers(f"{side}.{name}") for name in ("dtypes", "axes", "pieces"))
    if not len(names) == len(own_dtypes) == len(axes) == len(pieces) or any(path not in sizes for path in paths):
        raise file.damaged(f"the tensors of the {side} are not described completely")
    if axes.size and axes.max() > _MOST_AXES:
        raise file.damaged(f"a tensor of the {side} has {axes.max()} axes")
    shapes, at = file.integers(f"{side}.shapes").tolist(), 0
    tables = {ndim: _Table(file, side, ndim, paths, dtypes, sizes) for ndim in sorted(set(axes.tolist()))}
    tensors, starts = [], dict.fromkeys(tables, 0)
    for name, number, ndim, count in zip(names, own_dtypes.tolist(), axes.tolist(), pieces.tolist(), strict=True):
        shape = tuple(shapes[at : at + ndim])
        if len(shape) != ndim or math.prod(shape) >= 1 << 60:
            raise file.damaged(f"a tensor of the {side} has the shape {shape}")
        at, start = at + ndim, starts[ndim]
        starts[ndim] += count
        tensors.append(Tensor(_name(file, name), dtypes[number], shape, "weight", Shards(tables[ndim].table, start, start + count)))
    for ndim, table in tables.items():
        table.check([tensor for tensor in tensors if len(tensor.shape) == ndim])
    if at != len(shapes):
        raise file.damaged(f"the shapes of the {side} do not belong to its tensors")
    return tensors


class _Table:
    """The pieces with one number of axes."""

    def __init__(
        self, file: ColumnsFile, side: str, ndim: int, paths: tuple[str, ...], dtypes: Sequence[DType], sizes: Mapping[str, int]
    ) -> None:
        def column(name: str) -> Columns:
            return file.integers(f"{side}.{ndim}.{name}")

        self._file, self._side = file, side
        files, starts, numbers = column("files"), column("starts"), column("dtypes")
        count = len(files)
        boxes, lengths, strides = (column(name).reshape(count, ndim) for name in ("offsets", "sizes", "strides"))
        primary = column("primary").astype(np.bool_)
        if not count == len(starts) == len(numbers) == len(primary):
            raise file.damaged(f"the pieces of the {side} are not described completely")
        if count and (files.max() >= len(paths) or numbers.max() >= len(dtypes)):
            raise file.damaged(f"a piece of the {side} lies in a file, or has an element type, that is not listed")
        self.dtypes = np.empty(count, np.object_)
        self.dtypes[:] = [dtypes[number] for number in numbers.tolist()]
        itemsizes = np.array([dtype.itemsize for dtype in dtypes], np.int64)[numbers] if count else np.zeros(0, np.int64)
        ends = np.array([sizes[path] for path in paths], np.float64)[files] if count else np.zeros(0)
        # As floating-point numbers, which do not overflow; a piece ends before 2^53 or beyond every file.
        last = ((lengths - 1).astype(np.float64) * strides).sum(axis=1)
        filled = (lengths > 0).all(axis=1)
        if (filled & (starts + (last + 1) * itemsizes > ends)).any():
            raise file.damaged(f"a piece of the {side} reaches beyond its file")
        located = Located(paths, files, starts, strides, self.dtypes)
        self.table = PieceTable(paths, boxes, lengths, files, starts, located, primary=primary)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises CheckpointError unless the pieces of these tensors are all rows, and each lies in its tensor with its element type."""
        counts = [len(tensor.shards) for tensor in tensors]
        if sum(counts) != len(self.table):
            raise self._file.damaged(f"the pieces of the {self._side} do not belong to its tensors")
        shapes = np.array([tensor.shape for tensor in tensors], np.int64).reshape(len(tensors), self.table.sizes.shape[1])
        if (self.table.offsets + self.table.sizes > np.repeat(shapes, counts, axis=0)).any():
            raise self._file.damaged(f"a piece of the {self._side} reaches beyond its tensor")


def _encoding(codes: Tensor, scales: Tensor, block_shape: tuple[int | None, ...]) -> Encoding:
    """The encoding of a tensor of elements with scales."""
    axes = tuple(range(len(codes.shape)))
    scale_axes = axes if len(scales.shape) == len(axes) and scales.elements > 1 else ()
    parts = (
        EncodedPart(codes, Component("", "codes"), (1,) * len(axes), axes),
        EncodedPart(scales, Component("", "scale", block_shape), block_shape, scale_axes),
    )
    return Encoding("", parts, BF16)


def _routes(file: ColumnsFile, sources: list[Tensor], targets: list[Tensor]) -> tuple[Route, ...]:
    scaled, blocks, count = file.integers("scaling.routes").tolist(), file.value("scaling.blocks"), len(targets)
    if len(sources) != count + len(scaled) or len(blocks) != len(scaled):
        raise file.damaged("the source has another number of tensors than the target")
    encodings: dict[int, Encoding] = {}
    for i, shape, scales in zip(scaled, blocks, sources[count:], strict=True):
        if len(shape) != len(sources[i].shape) or not all(size is None or _size(file, size) for size in shape):
            raise file.damaged(f"{sources[i].name} has scales for blocks of {shape}")
        encodings[i] = _encoding(sources[i], scales, tuple(shape))
    routes = []
    for i, (source, target) in enumerate(zip(sources[:count], targets, strict=True)):
        if source.name != target.name or source.shape != target.shape:
            raise file.damaged(f"{source.name} of the source goes to {target.name} of the target, which has another name or shape")
        scaled_source = (
            Tensor(source.name, source.dtype, source.shape, "weight", source.shards, encoding=encodings[i]) if i in encodings else source
        )
        routes.append(Route(scaled_source, target))
    return tuple(routes)


def _layout(file: ColumnsFile, about: Mapping[str, Any]) -> Layout:
    target, listed = about["target"], file.value("target.files")
    counts, starts, lengths = file.integers("target.stored"), file.integers("target.stored.starts"), file.integers("target.stored.nbytes")
    if len(counts) != len(listed) or counts.sum() != len(starts) or len(starts) != len(lengths):
        raise file.damaged("the files of the target are not described completely")
    files, row = [], 0
    for i, ((path, nbytes, ranks), count) in enumerate(zip(listed, counts.tolist(), strict=True)):
        rows = slice(row, row + count)
        row += count
        if (starts[rows] + lengths[rows] > _size(file, nbytes)).any():
            raise file.damaged(f"a tensor reaches beyond the file {path!r}")
        framing = _framing(file, i, nbytes)
        held = {_text(file, axis): _size(file, rank) for axis, rank in ranks.items()}
        files.append(TargetFile(_target_path(file, path), nbytes, framing, _StoredRanges(starts[rows], lengths[rows]), held))
    sidecars = tuple(Sidecar(_target_path(file, path), file.raw(f"sidecar.{i}")) for i, path in enumerate(file.value("sidecars")))
    paths = [each.path for each in files] + [each.path for each in sidecars]
    if len(set(paths)) != len(paths):
        raise file.damaged("the target has two files of one name")
    return Layout(
        format=_text(file, target["format"]),
        files=tuple(files),
        sidecars=sidecars,
        parallel=Parallel(**{axis: _size(file, target[axis]) for axis in ("tp", "pp", "ep", "dp")}),
        notes=tuple(_text(file, note) for note in about["notes"]),
        aliases=_texts(file, about["aliases"]),
    )


def _framing(file: ColumnsFile, number: int, nbytes: int) -> LazyFraming:
    """The framing of a file, which is decoded when the file is written."""
    starts, lengths = file.integers(f"framing.{number}.starts"), file.integers(f"framing.{number}.nbytes")
    if len(starts) != len(lengths) or (starts + lengths > nbytes).any() or lengths.sum() != file.length(f"framing.{number}"):
        raise file.damaged(f"the framing of file {number} is not described completely")
    places = tuple(zip(starts.tolist(), lengths.tolist(), strict=True))

    def make() -> list[Literal]:
        content, at, literals = file.raw(f"framing.{number}"), 0, []
        for start, length in places:
            literals.append((start, content[at : at + length]))
            at += length
        return literals

    return LazyFraming(places, make)


class _StoredRanges(Sequence[PlacedTensor]):
    """The stored tensors of a file as the ranges of bytes that they fill."""

    def __init__(self, starts: Columns, lengths: Columns) -> None:
        self._starts, self._lengths = starts, lengths

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> PlacedTensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlacedTensor]: ...

    def __getitem__(self, index: int | slice) -> PlacedTensor | Sequence[PlacedTensor]:
        if isinstance(index, slice):
            return _StoredRanges(self._starts[index], self._lengths[index])
        return PlacedTensor(StoredTensor("", _BYTES, (int(self._lengths[index]),)), int(self._starts[index]))


def _constants(file: ColumnsFile, sizes: Mapping[str, int]) -> tuple[Constant, ...]:
    found = []
    starts, lengths = file.integers("constants.starts").tolist(), file.integers("constants.nbytes").tolist()
    for (path, expected), start, nbytes in zip(file.value("constants"), starts, lengths, strict=True):
        content = bytes.fromhex(expected)
        if path not in sizes or start + nbytes > sizes[path] or not content or nbytes % len(content):
            raise file.damaged("a constant of the target does not fit into its file")
        found.append(Constant("", path, start, nbytes, content))
    return tuple(found)


def _target_path(file: ColumnsFile, path: object) -> str:
    """A path in the target. Raises CheckpointError if it leaves the target, or lies in the work folder."""
    found = inside(_text(file, path), where=file.path)
    parts = found.split("/")
    if parts[0] == WORK_FOLDER or any(part in ("", ".") for part in parts):
        raise file.damaged(f"the target cannot have a file {found!r}")
    return found


def _dtype(file: ColumnsFile, name: object, function: object) -> DType:
    dtype = from_torch(_text(file, name), where=file.path)
    if function not in ("", *FUNCTIONS):
        raise file.damaged(f"the function {function!r} is unknown")
    return dtype.of(str(function))


def _text(file: ColumnsFile, value: object) -> str:
    if not isinstance(value, str):
        raise file.damaged(f"{str(value)[:100]!r} stands where text is expected")
    value.encode("utf-8", "surrogateescape")  # Names of files may hold bytes that are not UTF-8. What else UTF-8 lacks raises UnicodeError.
    return value


def _name(file: ColumnsFile, value: object) -> str:
    """The name of a tensor, which is hashed as UTF-8."""
    name = _text(file, value)
    name.encode()
    return name


def _texts(file: ColumnsFile, value: Mapping[Any, Any]) -> dict[str, str]:
    return {_name(file, key): _name(file, each) for key, each in value.items()}


def _size(file: ColumnsFile, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise file.damaged(f"{str(value)[:100]!r} stands where a size is expected")
    return value


def _optional(file: ColumnsFile, value: object, kind: Callable[..., Any]) -> Any:
    if value is not None and type(value) is not kind:
        raise file.damaged(f"{str(value)[:100]!r} is of another type than expected")
    return value
