"""The index of the items' files of all ranks, checked against the metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.adapter.dcp_keys import KeyPath, fqn_of
from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.save_folders import step_of
from reshard.adapter.state_dicts import SavedOptimizer, parameter_shapes, part_of, stored_entry
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import state_kind
from reshard.canonical.tensor_classes import MODEL_ROOTS
from reshard.containers import safetensors, torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.errors import CheckpointError, IncompleteError
from reshard.geometry.boxes import Box, Shape
from reshard.index.index import Index, Kind, RunFacts
from reshard.storage.files import Files, missing

from .files import METADATA, SAFETENSORS, TORCH, ItemFile, numbered_items
from .metadata import DescribedItem, RankBoxes, read_metadata

_DEEPEST = 32


Held = list[tuple[KeyPath, LocalTensor]]
"""A rank's parts of an item's tensors, by their paths in the item."""


def read(files: Files, hints: Hints) -> Index:
    """The index of all items.

    Raises: CheckpointError if a file is missing, or a file and the metadata contradict each other.
    """
    numbered = numbered_items(files)
    of_files = 1 + max((max(item_files) for item_files in numbered.values()), default=-1)
    version, ranks, described = read_metadata(files) or (None, of_files, {})
    items = {name: DescribedItem(item_files, {}) for name, item_files in numbered.items()} | described
    builder = IndexBuilder("torch-checkpointing", files)
    parameters: dict[str, Shape] = {}
    main = next((root for root in MODEL_ROOTS if root in items), None)
    for name in sorted(items, key=lambda name: name in OPTIMIZER_ROOTS):
        parameters |= add_item(builder, name, items[name], ranks, parameters, is_model=name == main)
    builder.add_files(file.path for item in items.values() for file in item.files.values())
    facts = RunFacts(
        producer="torch_checkpointing",
        version=version,
        step=step_of(files.root),
        parallel=builder.parallel(ranks),
        config=hints.config,
        roots=tuple(name for name in items if name != main and name not in OPTIMIZER_ROOTS),
    )
    return builder.build(facts)


def add_item(
    builder: IndexBuilder, name: str, item: DescribedItem, ranks: int, parameters: Mapping[str, Shape], *, is_model: bool
) -> Mapping[str, Shape]:
    """Add the tensors of an item on all ranks. Returns the shapes of the item's parameters if it is the main model, else nothing.

    parameters: those of the main model, which an optimizer's numbers count; empty if it has not been added.
    """
    shapes: Mapping[str, Shape] = {}
    names: Mapping[Any, str] = {}
    for rank in range(ranks):
        if rank not in item.files:
            ending = next((file.path[file.path.rindex(".") :] for file in item.files.values() if "." in file.path), ".pt")
            raise missing(builder.files, f"{name}_{rank}{ending}")
        file = item.files[rank]
        root, held = read_rank_item(builder, name, file, item.tensors.get(rank, {}))
        if rank == 0 and is_model:
            shapes = parameter_shapes((fqn_of(path), local) for path, local in held)
        if rank == 0 and name in OPTIMIZER_ROOTS:
            names = add_param_groups(builder, root, held, parameters)
        for path, local in held:
            builder.add(*_kind_and_name(name, path, names, is_model=is_model), local, file.path, rank)
    return shapes


def read_rank_item(builder: IndexBuilder, item: str, file: ItemFile, described: Mapping[KeyPath, RankBoxes]) -> tuple[Any, Held]:
    """The object in an item's file on one rank, if it is read, and the tensors. Adds the names of everything else.

    described: what the metadata says that the rank holds.
    Raises: CheckpointError if the file is missing, or contradicts the metadata.
    """
    files, root = builder.files, None
    if files.size(file.path) is None:
        raise missing(files, file.path)
    if file.serialization == TORCH:
        root = torch_zip.read(files, file.path, locate=False)
        values = dict(_leaves(root))
    elif file.serialization == SAFETENSORS:
        # By their paths in the item, as far as the metadata knows them; others by their dotted names.
        paths = {fqn_of(path): path for path in described}
        entries = safetensors.read_header(files, file.path).entries
        values = {paths.get(entry.name, (entry.name,)): stored_entry(file.path, entry) for entry in entries}
    else:
        builder.add_objects([file.path])
        return root, []
    if absent := [path for path in described if path not in values]:
        raise IncompleteError(
            f"it does not hold its part of {item} {fqn_of(absent[0])}, which {METADATA} places there",
            where=file.path,
            why="The files are from different saves",
            do="Copy all files of one save again",
        )
    decoder, held = Decoder(file.path), list[tuple[KeyPath, LocalTensor]]()
    for path, value in values.items():
        local = decoder.decode(fqn_of(path), value)
        if local is None:
            builder.add_objects([fqn_of((item, *path))])
        else:
            is_described = path in described and not local.dtype.is_unread
            held.append((path, _agreed(local, described[path], path, file.path) if is_described else local))
    return root, held


def add_param_groups(builder: IndexBuilder, root: Any, held: Held, parameters: Mapping[str, Shape]) -> Mapping[Any, str]:
    """Add the optimizer's param groups, from the object in its file. Returns the names of the parameters that it numbers."""
    groups, state = (root.get(key) if isinstance(root, Mapping) else None for key in ("param_groups", "state"))
    state_dict = {"param_groups": groups if isinstance(groups, list) else [], "state": state if isinstance(state, Mapping) else {}}
    tensors = [(path[1], str(path[2]), local) for path, local in held if len(path) == 3 and path[0] == "state"]
    return SavedOptimizer(state_dict, tensors).add_groups(builder, parameters)


def _leaves(value: Any, path: KeyPath = (), visited: set[int] | None = None) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of nested dicts and lists, by path. A container that occurs twice is visited once."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    visited = set() if visited is None else visited
    if pairs is None or len(path) > _DEEPEST:
        yield path, value
    elif id(value) not in visited:
        visited.add(id(value))
        for key, inner in pairs:
            yield from _leaves(inner, (*path, key if type(key) is int else str(key)), visited)


def _kind_and_name(item: str, path: KeyPath, names: Mapping[Any, str], *, is_model: bool) -> tuple[Kind, str]:
    """What a tensor of an item is to the run, and its name in the model."""
    if item in OPTIMIZER_ROOTS and path[:1] == ("state",) and len(path) > 2:
        name = path[1] if isinstance(path[1], str) else names.get(path[1])
        return state_kind(name, path[1], fqn_of(path[2:]))
    if is_model and path:
        return "weight", fqn_of(path)
    return "state" if item in OPTIMIZER_ROOTS else "weight", fqn_of((item, *path))


def _agreed(local: LocalTensor, described: RankBoxes, path: KeyPath, file: str) -> LocalTensor:
    """The tensor with the boxes that the metadata describes. Raises CheckpointError if the file's tensor contradicts them."""
    stored = local.shards[0][1] if local.shards else None
    fits = local.dtype == described.dtype and stored is not None
    if local.distribution is not None:
        fits = fits and (local.shape, local.shards[0][0]) == (described.shape, described.boxes[0][0])
    elif stored is not None:
        held = Box.whole(stored.shape)
        fits = fits and len(stored.shape) == len(described.shape) and all(held.contains(inside) for _, inside in described.boxes)
        fits = fits and (described.distribution is None or stored.shape == described.boxes[0][0].sizes)
    if not fits or stored is None:
        raise CheckpointError(
            f"the file holds {local.dtype} {list(stored.shape) if stored else []}, {METADATA} says {described.dtype} "
            f"{described.boxes[0][0] if described.boxes else 'nothing'} of {list(described.shape)}",
            where=f"{fqn_of(path)} in {file}",
            why="The files are from different saves",
            do="Copy all files of one save again",
        )
    shards = tuple((box, part_of(stored, inside)) for box, inside in described.boxes)
    return LocalTensor(described.dtype, described.shape, shards, described.distribution)
