"""The layout of a DCP checkpoint: every rank's rows of every tensor, as FSDP2 cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.adapter.dcp_keys import KeyPath, fqn_of
from reshard.adapter.dcp_writer import DcpFile, written_metadata
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import is_state_key, kind_path, parameter_and_kind
from reshard.geometry.dtypes import DType
from reshard.geometry.sections import part, step_count
from reshard.index.index import ParamGroup
from reshard.plans.layout import Layout, Sidecar, Target, row_shard

METADATA, DATA = ".metadata", ".distcp"


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of --dp ranks, and the .metadata."""
    target.parallel.allow("dp", what="a DCP checkpoint, which any number of ranks can load")
    dtypes = {key: target.dtype_of(tensor) for key, tensor in content.tensors.items()}
    ranks = target.parallel.dp
    rank_files = list(_rank_files(content, dtypes, ranks, target.max_shard_size))
    files = tuple(file.close({"dp": rank} if ranks > 1 else {}) for rank, file in rank_files)
    planner = {fqn_of(path): path for path in _key_paths(content)}
    metadata = Sidecar(METADATA, written_metadata([file for _, file in rank_files], planner))
    # torch writes .metadata last as well: if it is there, everything is.
    return Layout("dcp", files, (*companions.sidecars(dtypes.values()), metadata), target.parallel)


def _rank_files(content: Content, dtypes: Mapping[str, DType], ranks: int, max_nbytes: int | None) -> Iterator[tuple[int, DcpFile]]:
    """(rank, file) for each file. Only the first rank's file holds objects and scalars.

    A file that would grow beyond `max_nbytes` is followed by another.
    """
    groups = content.param_groups() if content.states else ()
    for rank in range(ranks):
        number, file = 0, DcpFile(f"__{rank}_0{DATA}")
        for path, value in _group_objects(groups) if rank == 0 else ():
            file.add_object(fqn_of(path), value)
        for key, tensor in content.tensors.items():
            box = row_shard(tensor.shape, ranks, rank)
            if box is None:
                continue
            if max_nbytes and file.entries and file.nbytes + box.volume * dtypes[key].itemsize > max_nbytes:
                yield rank, file
                number += 1
                file = DcpFile(f"__{rank}_{number}{DATA}")
            fqn = fqn_of(_tensor_path(key, bool(content.states)))
            file.add_tensor(fqn, part(fqn, key, dtypes[key], tensor.shape, box), box.offsets, tensor.shape)
        for path, steps in _step_counts(content) if rank == 0 else ():
            file.add_tensor(fqn_of(path), step_count(fqn_of(path), steps), (), ())
        yield rank, file


def _key_paths(content: Content) -> Iterator[KeyPath]:
    """The keys on the way to every value in the state dict."""
    yield from (_tensor_path(key, bool(content.states)) for key in content.tensors)
    yield from (path for path, _ in _step_counts(content))
    yield from (path for path, _ in _group_objects(content.param_groups() if content.states else ()))


def _tensor_path(key: str, has_optimizer: bool) -> KeyPath:
    """Where a tensor is in the state dict: that of the model alone, or {"model": ..., "optim": ...} as get_state_dict returns it."""
    if not has_optimizer:
        return (key,)
    if is_state_key(key):
        parameter, kind = parameter_and_kind(key)
        return ("optim", "state", parameter, *kind_path(kind))
    return ("model", key)


def _step_counts(content: Content) -> Iterator[tuple[KeyPath, int]]:
    """The step count of every parameter, which torch's optimizers need, if the source keeps one count for all parameters."""
    yield from ((("optim", "state", name, "step"), steps) for name, steps in content.step_counts.items())


def _group_objects(groups: tuple[ParamGroup, ...]) -> Iterator[tuple[KeyPath, object]]:
    """The settings of the param groups, each an entry of its own."""
    for number, group in enumerate(groups):
        yield ("optim", "param_groups", number, "params"), list(group.names)
        yield from ((("optim", "param_groups", number, name), value) for name, value in group.settings.items())
