"""Whether the files of a checkpoint are from one save, by what they hold: the optimizer's step counts, and files with the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

import numpy as np

from reshard.errors import MixedSaves
from reshard.geometry.quantities import grouped
from reshard.geometry.sections import Columns
from reshard.index.index import Index, StoredFile, Tensor
from reshard.storage.files import Files, read_range, side_by_side

# A file of another step is recognized by this many counts that agree among themselves. More than `_MOST_COUNTS` of a file are not read.
_FEWEST_COUNTS, _MOST_COUNTS = 3, 16
# Files that are compared with a file of another step.
_COMPARED = 16
# A zip ends with its directory, which holds the checksums of its last members. torch writes a checksum of all members as the last one.
_TAIL = 4096
# Two files count as copies if this many blocks, spread evenly, are equal.
_BLOCKS, _BLOCK = 64, 1 << 16
# Of files with equal ends: the tensors that are looked at, and the elements of each.
_TENSORS, _ELEMENTS = 64, 1024


# ---- step counts ----


def check_steps(files: Files, index: Index) -> None:
    """Raises CheckpointError if the optimizer's step counts show that files are from different steps of the run.

    Reads one count of each file, and more only if they differ: a parameter that got no gradients counts fewer steps than others. Counts of
    different parameters are compared only if each file's agree among themselves, and the two files hold parts of the same tensors.
    """
    rows = _rows_of_counts(index)
    first = dict(zip(rows, side_by_side(files, lambda of_file: _count(files, *of_file[0]), rows.values()), strict=True))
    if len(set(first.values())) < 2:
        return
    by_tensor: dict[int, str] = {}
    for path, count in first.items():
        other = by_tensor.setdefault(id(rows[path][0][0]), path)
        if first[other] != count:
            _refuse_steps(rows[path][0][0], other, path)
    usual = Counter(first.values()).most_common(1)[0][0]
    uniform = [path for path, count in first.items() if count == usual and _is_uniform(files, rows[path])][:_COMPARED]
    for path, count in first.items():
        if count != usual and _is_uniform(files, rows[path]):
            for other in uniform:
                if any(len(_rows(t, path)) and len(_rows(t, other)) for t in index.tensors if t.kind != "step" and len(t.shards) > 1):
                    _refuse_steps(rows[path][0][0], other, path)


def _rows_of_counts(index: Index) -> dict[str, list[tuple[Tensor, int]]]:
    """By file, some of the step counts that it holds: each as a tensor and a row of its shards."""
    rows: dict[str, list[tuple[Tensor, int]]] = {}
    # Parameters of one flat buffer share their counts.
    seen: Counter[int] = Counter()
    for tensor in index.tensors:
        if tensor.kind == "step" and not tensor.shape and seen[id(tensor.shards)] < _MOST_COUNTS:
            seen[id(tensor.shards)] += 1
            for row, file in enumerate(tensor.shards.files.tolist()):
                of_file = rows.setdefault(tensor.shards.paths[file], [])
                if len(of_file) < _MOST_COUNTS:
                    of_file.append((tensor, row))
    # A single count of a single parameter is never compared, so it is not read. A universal checkpoint has a file for each.
    return {path: counts for path, counts in rows.items() if len(counts) >= _FEWEST_COUNTS or len(counts[0][0].shards) > 1}


def _is_uniform(files: Files, rows: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether a file holds enough step counts, and all are equal."""
    if len({id(tensor) for tensor, _ in rows}) < _FEWEST_COUNTS:
        return False
    expected = _count(files, *rows[0])
    return all(_count(files, *row) == expected for row in rows[1:])


def _count(files: Files, tensor: Tensor, row: int) -> bytes:
    extent = tensor.shards.extent(row)
    return read_range(files, extent.path, extent.byte_offset, extent.dtype.itemsize)


def _refuse_steps(tensor: Tensor, path: str, other: str) -> None:
    raise MixedSaves(
        f"{path} and {other} are from different steps of the run",
        where=tensor.name,
        why="Their optimizers have counted different numbers of steps, so their weights are from different moments",
        do="Keep the files of one save only",
    )


# ---- copied files ----


def check_copied_files(files: Files, index: Index) -> None:
    """Raises CheckpointError if a file is a copy of another one, and the two should hold different parts of a tensor.

    Reads the end of each file that holds parts of tensors; more only of files of equal length whose ends are equal. Replicas may be equal,
    and so may parts that are constant, such as norms of ones.
    """
    for first, *others in _files_with_equal_ends(files, index):
        tensors = _varied_tensors(files, index, first)
        for path in others:
            split = next((tensor for tensor in tensors if _hold_different_parts(tensor, first, path)), None)
            if split and _are_copies(files, first, path):
                raise MixedSaves(
                    f"it has the same bytes as {first}, and they should hold different parts of {split.name}",
                    where=path,
                    why="A file was copied over that of another rank: one part of the weights is there twice, and another one is lost",
                    do="Copy both files again from where the checkpoint was written",
                )


def _files_with_equal_ends(files: Files, index: Index) -> list[list[str]]:
    """The files with parts of at least two tensors that lie in several files, grouped by length and last bytes; groups of at least two."""
    # Tensors that are cut in the same way lie in the same files, which are listed once.
    patterns = Counter((t.shards.paths, frozenset(t.shards.files.tolist())) for t in index.tensors if len(t.shards) > 1)
    tensors_of: Counter[str] = Counter()
    for (paths, numbers), count in patterns.items():
        if len(numbers) > 1:
            tensors_of.update({paths[number]: count for number in numbers})
    by_size = grouped([file for file in index.files if file.nbytes and tensors_of[file.path] > 1], attrgetter("nbytes"))
    compared = [file for of_size in by_size.values() if len(of_size) > 1 for file in of_size]

    def last_bytes(file: StoredFile) -> tuple[str, bytes]:
        return file.path, read_range(files, file.path, max(0, file.nbytes - _TAIL), min(file.nbytes, _TAIL))

    tails = dict(side_by_side(files, last_bytes, compared))
    sizes = {file.path: file.nbytes for file in compared}
    groups = grouped(sizes, lambda path: (sizes[path], tails[path]))
    # Files of zeros were never written. Whoever reads their tensors says so.
    return [
        group for (_, tail), group in groups.items() if len(group) > 1 and (any(tail) or any(read_range(files, group[0], 0, len(tail))))
    ]


def _varied_tensors(files: Files, index: Index, path: str) -> list[Tensor]:
    """Some tensors in several pieces whose first elements in a file are not all equal."""
    pieces = ((t, rows) for t in index.tensors if t.kind != "step" and len(t.shards) > 1 and len(rows := _rows(t, path)))
    return [tensor for tensor, rows in islice(pieces, _TENSORS) if not _is_constant(files, tensor, int(rows[0]))]


def _is_constant(files: Files, tensor: Tensor, row: int) -> bool:
    """Whether the first elements of a piece, as they lie in the file, are equal."""
    piece = tensor.shards.piece(row)
    elements = min(piece.box.volume, _ELEMENTS)
    words = read_range(files, piece.extent.path, piece.extent.byte_offset, elements * tensor.dtype.itemsize)
    return words == words[: tensor.dtype.itemsize] * elements


def _hold_different_parts(tensor: Tensor, path: str, other: str) -> bool:
    """Whether two files hold pieces of a tensor, and these are not replicas."""
    boxes, other_boxes = ({tensor.shards.box(int(row)) for row in _rows(tensor, file)} for file in (path, other))
    return bool(boxes and other_boxes) and boxes != other_boxes


def _rows(tensor: Tensor, path: str) -> Columns:
    """The rows of a tensor's pieces in a file, without empty ones."""
    shards = tensor.shards
    if path not in shards.paths:
        return np.zeros(0, np.int64)
    return np.flatnonzero((shards.files == shards.paths.index(path)) & (shards.sizes > 0).all(axis=1))


def _are_copies(files: Files, path: str, other: str) -> bool:
    """Whether two files of equal length are equal in blocks that are spread evenly over them."""
    nbytes = files.size(path) or 0
    block = min(nbytes, _BLOCK)
    starts = np.unique(np.linspace(0, nbytes - block, _BLOCKS, dtype=np.int64)).tolist()
    return all(read_range(files, path, start, block) == read_range(files, other, start, block) for start in starts)
