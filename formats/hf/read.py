"""The tensors in a folder's files of weights, and its index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.save_folders import notes_on_optimizer
from reshard.containers import safetensors
from reshard.errors import CheckpointError, IncompleteError
from reshard.geometry.boxes import row_major
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns, distinct
from reshard.geometry.value import value
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Located, PieceTable, Shards
from reshard.storage.files import Files

from .files import OPTIMIZERS, SAFETENSORS, files_to_read

# Keys under which trainers keep the model's state dict in a pickle.
_ROOTS = ("state_dict", "model", "module")


@value
class StoredWeights:
    """What a folder holds."""

    paths: tuple[str, ...]
    """The files that were read."""
    tensors: tuple[Tensor, ...]
    """Their tensors."""
    headers: Mapping[str, str | None]
    """The entries of their `__metadata__`; None where two files disagree."""
    objects: tuple[str, ...]
    """The names of everything in them that is not a tensor."""
    notes: tuple[str, ...]
    """Sentences for a reader: what is not read, or not in the index."""


def read(files: Files, hints: Hints) -> Index:
    """The index of a folder, with the optimizer beside the weights if there is one."""
    return read_folder(files, hints, OPTIMIZERS)


def read_folder(files: Files, hints: Hints, optimizers: Sequence[str] = ()) -> Index:
    """The index of a folder. optimizers: the names of files that hold the optimizer of its weights."""
    weights = stored_weights(files)
    builder = IndexBuilder("hf", files)
    for tensor in weights.tensors:
        builder.add_tensor(tensor)
    builder.add_objects(weights.objects)
    builder.add_notes(weights.notes)
    builder.add_files(weights.paths)
    optimizer = next((path for path in files.list() if path in optimizers), None)
    left = [path for path in OPTIMIZERS if path != optimizer and files.size(path)]
    builder.add_notes(f"{path} lies beside the weights; it is not read here" for path in left)
    builder.add_notes(notes_on_optimizer(files))
    if weights.tensors and optimizer:
        from .optimizer import add_optimizer

        add_optimizer(builder, files, optimizer, weights.tensors, hints)
    producer = "safetensors" if weights.paths[0].endswith(SAFETENSORS) else "torch.save"
    return builder.build(RunFacts(producer=producer, config=hints.config, headers=weights.headers))


def stored_weights(files: Files, *, headers_only: bool = False) -> StoredWeights:
    """What a folder holds.

    headers_only: the data of a safetensors file is not needed, so the file may end anywhere after its header.
    Raises: CheckpointError if the files and their index contradict each other.
    """
    to_read = files_to_read(files)
    tensors: dict[str, Tensor] = {}
    copies: list[Tensor] = []
    objects: list[str] = []
    headers: dict[str, str | None] = {}
    not_indexed: list[str] = []
    for path in to_read.paths:
        tensors_of_file, objects_of_file, header = file_content(files, path, headers_only=headers_only)
        objects.extend(objects_of_file)
        said = {key: text for key, text in header.items() if (key, text) != ("format", "pt")}  # which each file of torch says
        headers |= {key: text if headers.get(key, text) == text else None for key, text in said.items()}
        for tensor in tensors_of_file:
            indexed = to_read.weight_map.get(tensor.name)
            if indexed is None:
                not_indexed.append(tensor.name)
            elif indexed != path:
                copies.append(tensor)
                continue
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"two files hold it: {other.shards.path(0)} and {path}",
                    where=tensor.name,
                    why="No index says which one counts, and loaders take whichever comes last",
                    do="Remove the file that does not belong to this model",
                )
    if len(tensors) - len(not_indexed) < len(to_read.weight_map):
        absent = [name for name in to_read.weight_map if name not in tensors]
        raise IncompleteError(
            f"the index places it in {to_read.weight_map[absent[0]]}, which does not hold it"
            + (f" (nor {len(absent) - 1} others)" if len(absent) > 1 else ""),
            where=absent[0],
            why="The index and the files are from different saves, or a file was replaced",
            do="Get the index and the files from the same save",
        )
    notes = to_read.notes
    if not_indexed and to_read.weight_map:
        notes += (f"{len(not_indexed)} tensors are in the files but not in the index, such as {not_indexed[0]}; they are read",)
    if copies:
        notes += (_note_on_copies(tensors, copies),)
    stored = _with_copies(tensors, copies) if copies else tensors.values()
    return StoredWeights(to_read.paths, tuple(stored), headers, tuple(objects), notes)


def _note_on_copies(tensors: Mapping[str, Tensor], copies: Sequence[Tensor]) -> str:
    copy = copies[0]
    indexed = tensors[copy.name].shards.path(0)
    return (
        f"stored in two files: {plural(len(copies), 'tensor')}, such as {copy.name} in {indexed} and {copy.shards.path(0)}. The index has "
        f"{indexed}; transformers and vLLM keep the copy that they load last. A conversion compares the copies"
    )


def _with_copies(tensors: Mapping[str, Tensor], copies: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors, with their copies in files that the index does not name as replicas.

    Raises: CheckpointError if a copy has another element type or shape.
    """
    of_name: dict[str, list[Tensor]] = {}
    for copy in copies:
        of_name.setdefault(copy.name, []).append(copy)
    for name, tensor in tensors.items():
        of_tensor = of_name.get(name, [])
        for copy in of_tensor:
            if (copy.dtype, copy.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{tensor.shards.path(0)} has it as {tensor.dtype} {list(tensor.shape)}, {copy.shards.path(0)} as {copy.dtype} "
                    f"{list(copy.shape)}",
                    where=name,
                    why="The index names the first file, and transformers and vLLM keep the copy that they load last",
                    do="Remove the file that does not belong to this model",
                )
        yield replace(tensor, shards=tensor.shards.with_copies([copy.shards for copy in of_tensor])) if of_tensor else tensor


def file_content(files: Files, path: str, *, headers_only: bool = False) -> tuple[list[Tensor], list[str], Mapping[str, str]]:
    """The tensors of a file, the names of everything else in it, and the texts in its header by key."""
    return _safetensors_content(files, path, headers_only) if path.endswith(SAFETENSORS) else (*_pickle_content(files, path), {})


def _safetensors_content(files: Files, path: str, headers_only: bool) -> tuple[list[Tensor], list[str], Mapping[str, str]]:
    header = safetensors.read_header(files, path, header_only=headers_only)
    if "DCP_SHARDING_INFO" in header.metadata and len(files.list()) > 1 and re.match(r"shard-", path):
        raise CheckpointError("it is one rank's part of a distributed save, not a Hugging Face checkpoint", where=path)
    tensors = list(_whole_tensors(header, path))
    return [*tensors, *_twins(tensors, header.metadata)], [], header.metadata


def _twins(tensors: Sequence[Tensor], texts: Mapping[str, str]) -> Iterator[Tensor]:
    """The tensors that share the memory of a stored one: safetensors' save_model leaves them out, and its header names the stored one."""
    stored = {tensor.name: tensor for tensor in tensors} if texts.keys() - {"format"} else {}
    return (replace(stored[of], name=name) for name, of in texts.items() if of in stored and name not in stored)


def _whole_tensors(header: safetensors.Header, path: str) -> Iterator[Tensor]:
    """The tensors of a header. Those with the same number of axes are windows on one table."""
    axes = np.array([len(form.shape) for form in header.forms], np.int64)[header.form_numbers]
    tables, rows = {}, np.empty(len(axes), np.int64)
    for ndim in distinct(axes).tolist():
        alike = np.flatnonzero(axes == ndim)
        tables[ndim], rows[alike] = _table(header, alike, path, ndim), np.arange(len(alike))
    forms = [(form.dtype, form.shape, tables[len(form.shape)]) for form in header.forms]
    for name, number, row in zip(header.names, header.form_numbers.tolist(), rows.tolist(), strict=True):
        dtype, shape, table = forms[number]
        yield Tensor(name, dtype, shape, "weight", Shards(table, row, row + 1))


def _table(header: safetensors.Header, alike: Columns, path: str, ndim: int) -> PieceTable:
    """Whole tensors with `ndim` axes, which lie row-major in a file. alike: [n], their numbers in the header."""
    # Forms with another number of axes are not among them.
    shapes = [form.shape if len(form.shape) == ndim else (0,) * ndim for form in header.forms]
    numbers, byte_offsets = header.form_numbers[alike], header.byte_offsets[alike]
    sizes = np.array(shapes, np.int64).reshape(len(shapes), ndim)[numbers]
    strides = np.array(list(map(row_major, shapes)), np.int64).reshape(len(shapes), ndim)[numbers]
    dtypes = np.empty(len(shapes), np.object_)
    dtypes[:] = [form.dtype for form in header.forms]
    files = np.zeros(len(alike), np.int32)
    located = Located((path,), files, byte_offsets, strides, dtypes[numbers])
    return PieceTable((path,), np.zeros_like(sizes), sizes, files, byte_offsets, located)


def _pickle_content(files: Files, path: str) -> tuple[list[Tensor], list[str]]:
    from reshard.adapter.state_dicts import decoded
    from reshard.containers import torch_zip

    state_dict, objects = torch_zip.read(files, path), list[str]()
    if not isinstance(state_dict, Mapping):
        raise CheckpointError("it does not hold a dict of tensors", where=path, do="Give the file that holds the model's state dict")
    root = next((key for key in _ROOTS if isinstance(state_dict.get(key), Mapping)), None)
    if root is not None:
        objects.extend(str(key) for key in state_dict if key != root)
        state_dict = state_dict[root]
    tensors, others = decoded(state_dict, path)
    builder = IndexBuilder("hf", files)
    for name, local in tensors:
        builder.add("weight", name, local, path)
    return list(builder.tensors()), objects + others
