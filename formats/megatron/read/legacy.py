"""Legacy checkpoints (--ckpt-format torch): a torch.save file of every model-parallel rank, read into an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import Collector
from reshard.canonical.optimizer_state import is_plain
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import Index, RunFacts, StoredFile
from reshard.storage.files import Files

from ..layout.arguments import NotUnderstoodError, size
from ..layout.names import Place, place_of
from ..layout.save_folders import rank_folders, unread_optimizers
from ..layout.stages import first_layers
from ..layout.tensors import BUFFERS, HEAD, TABLE, MegatronModel, MegatronTensor, Tensors
from .nemo import nemo_args
from .optimizer import Optimizers, Parameter
from .ranks import Rank, Topology, coordinates, rank_of, read_rank, topology_of
from .run_model import asked_for, begin, check_model
from .tensor_boxes import array_of, fits, misfit

_DISTRIBUTED = "distrib_optim.pt"
# In which order q, k and v lie, by the checkpoint's version (megatron/legacy, fix_query_key_value_ordering).
_QKV = {0.0: "parts", 1.0: "elements"}


def read(files: Files, folder: str, hints: Hints) -> Index:
    """The index of the ranks' files in a folder; under Hugging Face names, or of a model that is not declared as it is stored."""
    ranks, topology = _ranks(files, folder)
    _check_one_save(ranks)
    try:
        return _with_unread(_of_model(files, ranks, topology, hints), unread_optimizers(files, folder))
    except NotUnderstoodError as error:
        return _as_stored(files, ranks, topology, error)


def _with_unread(index: Index, unread: Sequence[str]) -> Index:
    if not unread:
        return index
    others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    note = f"the optimizer's state in {unread[0]}{others} is left out: its form is not known"
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _as_stored(files: Files, ranks: Sequence[Rank], topology: Topology, error: NotUnderstoodError) -> Index:
    """Every rank's tensors, each for itself."""
    collector = Collector()
    for number, rank in enumerate(ranks):
        for chunk, tensors in enumerate(rank.chunks):
            for name, stored in tensors.items():
                local = LocalTensor(stored.dtype, stored.shape, ((Box.whole(stored.shape), stored),))
                collector.add("weight", f"{rank.folder}{f'model{chunk}.' if topology.vp > 1 else ''}{name}", local, rank.path, number)
    stored_files = tuple(StoredFile(rank.path, files.size(rank.path) or 0) for rank in ranks)
    facts = _facts(ranks[0], topology, unanswered=asked_for(error))
    return Index("megatron", tuple(collector.tensors(files)), stored_files, facts, objects=ranks[0].objects)


def _facts(first: Rank, topology: Topology, **other: Any) -> RunFacts:
    plain = {key: value for key, value in first.plain.items() if is_plain(value)}
    plain["args"] = {key: value for key, value in first.args.items() if is_plain(value)}
    version = f"legacy, checkpoint version {first.version:g}"
    return RunFacts("Megatron-LM", version, first.iteration, topology.facts(), state=plain, **other)


def _of_model(files: Files, ranks: Sequence[Rank], topology: Topology, hints: Hints) -> Index:
    first = ranks[0]
    placed = [{name: place_of(name) for name in chunk} for rank in ranks for chunk in rank.chunks]
    building = begin(
        first.args,
        hints,
        _vocabulary_rows(ranks, topology),
        first.path,
        qkv=_QKV.get(first.version, "groups") if _is_old(first) else "groups",
    )
    model = building.model
    check_model(model.model, first.args, first.path)
    starts = _starts(ranks, model)
    objects: dict[str, None] = {}
    optimizers, own_files = Optimizers(building), [rank.path for rank in ranks]
    chunks = iter(placed)
    for number, rank in enumerate(ranks):
        objects.update(dict.fromkeys(rank.objects))
        parameters: list[Parameter] = []
        for chunk, tensors in enumerate(rank.chunks):
            places = next(chunks)
            for name, stored in tensors.items():
                place = places[name]
                _check_stage(place, model, rank, chunk, topology, name)
                array = _array(model, place, stored, starts[rank.pp, chunk], rank, topology, f"{name} in {rank.path}")
                building.add("weight", array, stored, rank.path, number)
                if place.name not in BUFFERS:
                    is_shared = _is_shared(place, places.values(), model, rank, topology)
                    is_end = place.layer is None and place.name in (TABLE, HEAD)
                    parameters.append(Parameter(name, chunk, array, stored, place.is_expert, is_end, is_shared))
        if flat := _distributed(files, rank):
            own_files.append(flat)
            buffers = torch_zip.read(files, flat, locate=False)
            optimizers.read_distributed(rank.optimizer, buffers, parameters, _bucket_sizes(rank, parameters), flat, number)
        else:
            optimizers.read_plain(rank.optimizer, parameters, rank.path, number)
    stored_files = tuple(StoredFile(path, files.size(path) or 0) for path in own_files)
    facts = _facts(first, topology, config=building.config, unanswered=building.asks, notes=tuple(optimizers.notes))
    return Index("megatron", building.tensors(files), stored_files, facts, objects=tuple(objects), param_groups=optimizers.param_groups)


def _distributed(files: Files, rank: Rank) -> str | None:
    """The file with the distributed optimizer's buffers, if the rank has one."""
    path = rank.folder + _DISTRIBUTED
    return path if files.size(path) is not None else None


def _bucket_sizes(rank: Rank, parameters: Sequence[Parameter]) -> list[int | None]:
    """The bucket sizes that a rank may have had (distributed_data_parallel.py): stages after the first have none."""
    data_parallel = size(rank.args, "data_parallel_size") * size(rank.args, "context_parallel_size")
    said = rank.args.get("ddp_bucket_size")
    if type(count := rank.args.get("ddp_num_buckets")) is int and count > 0:
        said = sum(parameter.elements for parameter in parameters) // count
    known = [None, said if isinstance(said, int) else max(40_000_000, 1_000_000 * data_parallel)]
    return known[:1] if rank.pp else known


def _check_stage(place: Place, model: MegatronModel, rank: Rank, chunk: int, topology: Topology, name: str) -> None:
    """Raises CheckpointError for what only the first or the last chunk of the model has, in another one: folders have changed places."""
    if place.layer is not None or model.extra_layers:
        return
    is_first, is_last = (rank.pp, chunk) == (0, 0), (rank.pp, chunk) == (topology.pp - 1, topology.vp - 1)
    if not (is_first if place.name.startswith("embedding.") else is_last):
        raise CheckpointError(
            f"{name} is in stage {rank.pp}{f', chunk {chunk}' if topology.vp > 1 else ''}",
            where=rank.path,
            why="Only the first stage has embeddings, only the last one what follows the layers: stages' folders have changed places",
            do="Copy all ranks' folders again from where the checkpoint was written",
        )


def _is_shared(place: Place, chunk: Iterable[Place], model: MegatronModel, rank: Rank, topology: Topology) -> bool:
    """Whether other stages have this table, too (language_module.py, setup_embeddings_and_output_layer)."""
    if topology.pp == 1 or place.layer is not None or not (model.model.is_tied or model.extra_layers):
        return False
    names = {each.name for each in chunk if each.layer is None}
    if rank.pp == 0:
        return place.name == TABLE and HEAD not in names
    return place.name == (TABLE if model.extra_layers else HEAD)


def _ranks(files: Files, folder: str) -> tuple[list[Rank], Topology]:
    folders = rank_folders(files, folder)
    if not folders:
        raise CheckpointError("there is no folder of a rank with weights here, such as mp_rank_00", where=f"{files.root}/{folder}")
    root, args = read_rank(files, folders[0])
    args = args or nemo_args(files, folder)
    topology = topology_of(args, folders, files.root)
    ranks = []
    writers: dict[str, int] = {}
    for found in folders:
        own = args
        if found is not folders[0]:
            root, own = read_rank(files, found)
        if type(writer := own.get("rank")) is int:
            writers[found.weights] = writer
        ranks.append(rank_of(found, root, args, coordinates(found, topology)))
    ranks.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    _check_writers(ranks, writers, topology)
    return ranks, replace(topology, vp=max(len(rank.chunks) for rank in ranks))


def _check_writers(ranks: Sequence[Rank], writers: Mapping[str, int], topology: Topology) -> None:
    """Every file says which rank of the run wrote it, and tensor-parallel ranks are numbered first.

    Raises: CheckpointError if a file is a copy of another one, or lies in another rank's folder.
    """
    seen: dict[int, str] = {}
    for rank in ranks:
        writer = writers.get(rank.path)
        if writer is None:
            continue
        if writer in seen or writer % topology.tp != rank.tp:
            raise CheckpointError(
                f"it was written by rank {writer} of the run" + (f", as was {seen[writer]}" if writer in seen else ""),
                where=rank.path,
                why=f"The folder is that of tensor-parallel rank {rank.tp} of {topology.tp}: files have changed places",
                do="Copy all ranks' folders again from where the checkpoint was written",
            )
        seen[writer] = rank.path


def _is_old(rank: Rank) -> bool:
    """Whether the names are those of GPT models before Megatron-Core, whose fused rows changed their order."""
    return any("query_key_value" in name for chunk in rank.chunks for name in chunk)


def _check_one_save(ranks: Sequence[Rank]) -> None:
    first = ranks[0]
    for rank in ranks:
        if rank.iteration != first.iteration or rank.version != first.version:
            raise CheckpointError(
                f"it is of iteration {rank.iteration}, {first.path} of iteration {first.iteration}",
                where=rank.path,
                why="Files of several saves lie in one folder; together they are no model that ever was",
                do="Keep the folders of one save only",
            )
        if len(rank.chunks) != len(first.chunks):
            raise CheckpointError(
                f"it holds {len(rank.chunks)} chunks of the model, {first.path} {len(first.chunks)}",
                where=rank.path,
                why="All stages of a run have as many",
                do="Keep the folders of one save only",
            )


def _vocabulary_rows(ranks: Sequence[Rank], topology: Topology) -> int | None:
    """How many rows the table has with its padding: the ranks hold equal parts."""
    for rank in ranks:
        for chunk in rank.chunks:
            for name, stored in chunk.items():
                if place_of(name).name == TABLE and stored.shape:
                    return stored.shape[0] * topology.tp
    return None


def _starts(ranks: Sequence[Rank], model: MegatronModel) -> dict[tuple[int, int], int]:
    """(stage, chunk) -> the number of its first layer."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            layers = {place.layer for name in chunk if (place := place_of(name)).layer is not None and not place.extra}
            if layers and max(layers) + 1 != len(layers):
                raise CheckpointError(
                    f"it holds the layers {sorted(layers)}, which are not all from 0 on",
                    where=rank.path,
                    why="Each chunk numbers its own layers",
                    do="Copy the file again",
                )
            if counts.setdefault((rank.pp, number), len(layers)) != len(layers):
                raise CheckpointError(
                    f"it holds {len(layers)} layers, another rank of its stage {counts[rank.pp, number]}",
                    where=rank.path,
                    do="Keep the folders of one save only",
                )
    return first_layers(counts, model.layers, ranks[0].path)


def _array(model: MegatronModel, place: Place, stored: AnyTensor, start: int, rank: Rank, topology: Topology, where: str) -> Mosaic:
    """The array that a stored tensor is.

    Raises: CheckpointError if the model has none of that name, or of another shape.
    """
    if place.layer is None:
        known = model.ends
    else:
        layer = model.layers + place.layer if place.extra else start + place.layer
        etp = topology.etp, rank.tp % topology.etp
        experts = model.experts // topology.ep
        if place.name in ("mlp.experts.weight1", "mlp.experts.weight2"):
            own = range(rank.ep * experts, (rank.ep + 1) * experts)
            array = model.grouped(layer, own, place.name.rpartition(".")[2], *etp)
            if fits(array, stored.shape):
                return array
            raise misfit(stored.shape, array, where)
        if place.expert is not None:
            if place.expert >= experts:
                raise CheckpointError(
                    f"it is expert {place.expert} of its rank, which has {experts}",
                    where=where,
                    why=f"The model has {model.experts} experts on {topology.ep} ranks",
                )
            known = model.expert(layer, rank.ep * experts + place.expert)
            return array_of(known_tensor(known, place, where), stored.shape, *etp, where)
        known = {**model.layer(layer), **(model.extra(place.layer) if place.extra else {})}
    return array_of(known_tensor(known, place, where), stored.shape, topology.tp, rank.tp, where)


def known_tensor(known: Tensors, place: Place, where: str) -> MegatronTensor:
    """The model's tensor of that name. Raises CheckpointError if it has none."""
    if place.name in known:
        return known[place.name]
    raise CheckpointError(
        "the model that the run's settings describe has no such tensor"
        + ("" if place.layer is None else f" in {'an extra layer' if place.extra else 'that layer'}"),
        where=where,
        why=f"There it has {', '.join(list(known)[:6])} and the like; what is not known would be lost",
        do="Give the config of the model with --model DIR",
    )
