"""The index of the ranks' files of an FSDP run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.processes import in_processes
from reshard.adapter.rank_files import RankFiles, check_progress, run_files, with_notes_on_missing_ranks
from reshard.adapter.save_folders import step_of
from reshard.adapter.state_dicts import SavedOptimizer, decoded, model_part, optimizer_part, parameter_shapes, read_optimizer
from reshard.canonical.optimizer_state import GROUPS, state_kind
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.containers import recognised_files, torch_zip
from reshard.containers.distributed_tensors import LocalTensor
from reshard.errors import CheckpointError
from reshard.geometry.value import value
from reshard.index.index import Index, Kind, RunFacts
from reshard.storage.files import Files

Parse = Callable[[IndexBuilder, int, str], Sequence[tuple[Any, LocalTensor]]]
"""(builder, rank, path) -> the tensors of the rank's file by key. Adds the file's objects to the builder."""
KindAndName = Callable[[Any], tuple[Kind, str]]
"""The key of a tensor -> its kind and name in the index."""
# What the names of unnamed state start with, as `state_kind` gives them.
_UNNAMED = "optim.state."


@value
class ModelFile:
    """The content of one rank's file with the model."""

    tensors: list[tuple[str, LocalTensor]]
    """The rank's parts of the model's tensors, by name."""
    objects: list[str]
    """The names of everything else in the file."""
    has_optimizer: bool
    """Whether the file also holds the optimizer's state dict."""


def read(files: Files, hints: Hints) -> Index:
    """The index of the ranks' files in a folder.

    Raises: CheckpointError if a part of a tensor is missing with a rank's file, or if the files are from different saves.
    """
    run = run_files(files)
    check_progress(files, run.others)
    builder = IndexBuilder("fsdp", files)
    builder.add_files(run.paths())
    first_model: ModelFile | None = None
    first_optimizer: SavedOptimizer | None = None
    if run.model:
        first_model = read_model_file(files, *run.model.first_item)
        add_weights(builder, list(run.model.paths.items()), first_model)
    optimizer_files = run.optimizer or (run.model if first_model and first_model.has_optimizer else None)
    if optimizer_files:
        first_optimizer = read_optimizer_file(files, *optimizer_files.first_item)
        add_optimizer(builder, optimizer_files, first_optimizer, first_model)
    ranks = run.rank_count(builder.mesh.ranks if builder.mesh else 1)
    builder.add_objects(run.other_paths)
    index = builder.build(
        RunFacts(
            producer=_producer(builder, first_model, first_optimizer),
            step=step_of(files.root),
            parallel=builder.parallel(ranks),
            config=hints.config,
        )
    )
    return with_notes_on_missing_ranks(index, run, ranks)


def read_model_file(files: Files, rank: int, path: str) -> ModelFile:
    """The content of the model's file of a rank. Raises CheckpointError if it holds no model, or another rank's part."""
    root = torch_zip.read(files, path, locate=False)
    model, other_keys = model_part(root)
    if model is None:
        raise CheckpointError("it holds no dict of tensors", where=path, do="Give the files that hold the model's state dict")
    tensors, others = decoded(model, path)
    _check_rank((local for _, local in tensors), rank, path)
    return ModelFile(tensors, [*(key for key in other_keys if key not in OPTIMIZER_ROOTS), *others], optimizer_part(root) is not None)


def read_optimizer_file(files: Files, rank: int, path: str) -> SavedOptimizer:
    """The content of the optimizer's file of a rank. Raises CheckpointError if it holds no optimizer state, or another rank's part."""
    optimizer = read_optimizer(files, path)
    _check_rank((local for *_, local in optimizer.tensors), rank, path)
    return optimizer


def add_weights(builder: IndexBuilder, ranks: Sequence[tuple[int, str]], first: ModelFile) -> None:
    """Add the weights of all ranks, given as (rank, path). `first` is the content of the first rank's file."""

    def parse(into: IndexBuilder, rank: int, path: str) -> list[tuple[str, LocalTensor]]:
        model = first if path == ranks[0][1] else read_model_file(into.files, rank, path)
        into.add_objects(model.objects)
        return model.tensors

    add_ranks(builder, ranks, parse, lambda name: ("weight", name))


def add_ranks(builder: IndexBuilder, ranks: Sequence[tuple[int, str]], parse: Parse, kind_and_name: KindAndName) -> None:
    """Add the tensors of all ranks, given as (rank, path). kind_and_name: what the key of an entry stands for."""

    def add(into: IndexBuilder, rank: int, path: str, entries: Sequence[tuple[Any, LocalTensor]]) -> None:
        for key, local in entries:
            into.add(*kind_and_name(key), local, path, rank)

    def in_full(some: Sequence[tuple[int, str]]) -> IndexBuilder:
        part = IndexBuilder("fsdp", builder.files)
        for rank, path in some:
            add(part, rank, path, parse(part, rank, path))
        return part

    def parsed(rank: int, path: str) -> Sequence[tuple[Any, LocalTensor]]:
        entries = parse(builder, rank, path)
        add(builder, rank, path, entries)
        return entries

    recognised, left = recognised_files.read_ranks(builder.files, ranks, parsed)
    for alike in recognised:
        builder.add_alike(alike, kind_and_name)
    for part in in_processes(left, in_full) if left else ():
        builder.join(part)


def add_optimizer(builder: IndexBuilder, rank_files: RankFiles, first: SavedOptimizer, first_model: ModelFile | None) -> None:
    """Add the optimizer's state of all ranks, and its param groups. `first` is the content of the first rank's file."""
    names, notes = parameter_names(first, first_model)
    builder.add_notes(notes)
    builder.param_groups = first.param_groups(names)
    add_states(builder, rank_files, names, first)
    if any(name.startswith(_UNNAMED) for name in builder.objects):
        builder.add_notes(
            ["the optimizer's state is left out: each rank holds its run of flat parameters, and no file tells which parameters they are"]
        )


def add_states(builder: IndexBuilder, rank_files: RankFiles, names: Mapping[Any, str], first: SavedOptimizer) -> None:
    """Add the optimizer's state of all ranks under the parameters' names. `first` is the content of the first rank's file."""

    def parse(into: IndexBuilder, rank: int, path: str) -> list[tuple[tuple[Any, str], LocalTensor]]:
        optimizer = first if path == rank_files.first else _of_same_run(into.files, rank, path, first, rank_files.first)
        unnamed = [state for state in optimizer.tensors if _is_unnamed(state[0], state[2], names)]
        into.add_objects(f"{_UNNAMED}{parameter}.{kind}" for parameter, kind, _ in unnamed)
        return [((parameter, kind), local) for parameter, kind, local in optimizer.tensors if not _is_unnamed(parameter, local, names)]

    def kind_and_name(key: tuple[Any, str]) -> tuple[Kind, str]:
        parameter, kind = key
        return state_kind(names.get(parameter), parameter, kind)

    add_ranks(builder, list(rank_files.paths.items()), parse, kind_and_name)


def parameter_names(optimizer: SavedOptimizer, model: ModelFile | None) -> tuple[Mapping[Any, str], list[str]]:
    """The names of the parameters that an optimizer lists, and notes on how they are known.

    If the names do not follow from all tensors of the model, the tensors that are whole on every rank are taken for buffers, which no
    optimizer numbers. Parameters that FSDP ignores (`ignored_modules`) are whole as well, so all tensors are tried first.
    """
    tensors = model.tensors if model else []
    parameters = parameter_shapes(tensors)
    names, notes = optimizer.names(list(parameters.items()))
    whole = {name for name, local in tensors if local.distribution is None and local.rank is None}
    sharded = [(name, shape) for name, shape in parameters.items() if name not in whole]
    if not names and len(sharded) < len(parameters):
        names_of_sharded, notes_of_sharded = optimizer.names(sharded)
        if names_of_sharded:
            return names_of_sharded, notes_of_sharded
    return names, notes


def _of_same_run(files: Files, rank: int, path: str, first: SavedOptimizer, first_path: str) -> SavedOptimizer:
    """The content of a rank's file. Raises CheckpointError if its param groups list other parameters than those of the first rank."""
    optimizer = read_optimizer_file(files, rank, path)
    if optimizer.numbers() != first.numbers():
        raise CheckpointError(
            f"its param groups list other parameters than those in {first_path}",
            where=path,
            why="The files are from different runs",
            do="Keep the files of one save only",
        )
    return optimizer


def _is_unnamed(parameter: Any, local: LocalTensor, names: Mapping[Any, str]) -> bool:
    """Whether it is FSDP1's raw state: a run of elements, not a tensor."""
    return parameter not in names and parameter != GROUPS and bool(local.shape) and local.distribution is None and local.rank is None


def _check_rank(tensors: Iterable[LocalTensor], rank: int, path: str) -> None:
    """Raises CheckpointError if a rank that the tensors record is not the rank in the file's name."""
    for local in tensors:
        if local.rank is not None and local.rank != rank:
            raise CheckpointError(
                f"the file says it is rank {local.rank}'s, its name says rank {rank}",
                where=path,
                why="The file was renamed, or copied over another one: then one part is there twice, and another one is lost",
                do="Give every file the name of its own rank",
            )


def _producer(builder: IndexBuilder, model: ModelFile | None, optimizer: SavedOptimizer | None) -> str:
    """The class of the run's tensors. Only DTensors have a mesh; ShardedTensors tell their rank, and plain tensors do not."""
    if builder.mesh:
        return "FSDP (DTensor)"
    tensors = [local for _, local in model.tensors] if model else []
    tensors += [local for *_, local in optimizer.tensors] if optimizer else []
    return "FSDP1 (ShardedTensor)" if any(local.rank is not None for local in tensors) else "torch.save"
