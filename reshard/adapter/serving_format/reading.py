"""The index of a serving engine's checkpoint: the headers of every rank's files, matched with the tensors that the rules expect there."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.serving_format import learned
from reshard.adapter.serving_format.engine import Headers, RankHeaders, ServingEngine, StageRank
from reshard.containers import safetensors
from reshard.errors import CheckpointError, IncompleteError, ReshardError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import grouped
from reshard.geometry.sections import Sections, StoredTensor
from reshard.index.index import Index, RunFacts, about_left_out
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.plans.layout import PlacedTensor, TargetFile
from reshard.plans.layout_index import index_of
from reshard.serving.legality import check_degrees, require_model
from reshard.serving.ranks import placeholder_dtypes, rank_tensors
from reshard.serving.weights import left_out_by_class, scale_aliases
from reshard.storage.files import Files


def read(serving_format: ServingEngine, files: Files, hints: Hints) -> Index:
    """The index of all ranks' files.

    Raises: CheckpointError if a rank does not hold exactly what the engine's rules expect, RequestError if the model is not known or the
    engine does not serve it at the stored sizes.
    """
    config, layout = serving_format.stored_config(files, hints), learned.stored_layout(files, hints)
    model, stated, left_out = None, None, dict[str, str]()
    stages: tuple[int, ...] = ()
    if layout is None:
        can_learn = serving_format.tracer is not None
        model = require_model(find_model(config, hints.architecture), config, serving_format.engine, can_learn=can_learn)
        stated = serving_format.stored_sizes(files)
    paths = _paths_by_rank(serving_format, files, stated)
    parallel = stated or Parallel(tp=1 + max(tp for _, tp in paths), pp=1 + max(pp for pp, _ in paths))
    _check_complete(serving_format, paths, parallel)
    headers = {rank: _headers(files, paths[rank]) for rank in _ranks(parallel)}
    if layout:
        parallel = learned.stored_sizes(layout, parallel, {name: entry.shape for name, (_, entry) in headers[0, 0].items()})
        version: str | None = f"=={layout.engine_version}"
        shapes = dict(layout.source_shapes)
        placed = _placed(headers, partial(layout.rank_tensors, parallel, dtypes={}), {})
    else:
        assert model is not None
        if head := model.architecture.head:  # whose bias no class tells
            of_head = {name: entry.shape for name, (_, entry) in headers[0, 0].items() if name.startswith(f"{head.module}.")}
            model = find_model(config, hints.architecture, of_head) or model
        if stated is None:
            parallel = _with_stored_experts(parallel, model, headers)
        rules, version = serving_format.stored_rules(model, parallel, headers)
        left_out = left_out_by_class(model, rules.left_out)
        shapes = {weight.name: weight.shape for weight in model.weights.values() if weight.name not in left_out}
        expected = partial(rank_tensors, model, placeholder_dtypes(model, rules), rules)
        try:
            check_degrees(model, rules, parallel)
            aliases = scale_aliases(model, rules)
            placed = _placed(headers, partial(expected, parallel), grouped(aliases, aliases.__getitem__))
        except ReshardError:
            if stated is None:
                legal = partial(check_degrees, model, rules)
                _check_complete(serving_format, paths, _written_for(headers[0, 0], expected, legal, parallel))
            raise
        stages = rules.layers_per_stage(model.dimensions["layers"], parallel.pp) if parallel.pp > 1 else ()
    sizes = {size: getattr(parallel, size) for size in serving_format.sizes if size != "ep" or parallel.ep > 1}
    notes = tuple(about_left_out(left_out))
    about: dict[str, Any] = {"config": config, "notes": notes, "left_out": left_out}
    facts = RunFacts(serving_format.producer, version, parallel=sizes, layers_of_stages=stages, **about)
    stored_files = {file.path: file for rank_headers in headers.values() for file, _ in rank_headers.values()}
    return index_of(serving_format.name, iter(placed), shapes, files=tuple(stored_files.values()), facts=facts)


def _ranks(parallel: Parallel) -> Iterator[StageRank]:
    """All ranks, stage by stage."""
    return ((pp_rank, tp_rank) for pp_rank in range(parallel.pp) for tp_rank in range(parallel.tp))


def _paths_by_rank(serving_format: ServingEngine, files: Files, stated: Parallel | None) -> dict[StageRank, list[str]]:
    """Rank -> its files. stated: the parallel sizes that a file of the checkpoint states; None if no file does.

    Raises: CheckpointError if there are no files of ranks, or files with and without a pipeline stage in their names.
    """
    paths: dict[StageRank, list[str]] = {}
    numberings = set()
    for path in files.list():
        if match := serving_format.file_pattern.fullmatch(path):
            numbers = {group: int(number) for group, number in match.groupdict().items() if number}
            numberings.add(tuple(numbers))
            rank = _rank(numbers, stated)
            paths.setdefault(rank, []).append(path)
    if not paths:
        raise IncompleteError(
            f"no file here is called {' or '.join(glob for glob in serving_format.owns if '*' in glob)}",
            where=files.root,
            do="Give another `format=`",
        )
    if len(numberings) > 1:
        raise CheckpointError(
            "the directory holds files of a run with pipeline stages and files of a run without",
            where=files.root,
            do="Remove the files of one of the two runs",
        )
    return paths


def _rank(numbers: Mapping[str, int], stated: Parallel | None) -> StageRank:
    """The rank that a file name's numbers mean. Without a stated tp, a single number is the rank of a run with one stage."""
    if "rank" not in numbers:
        return numbers["pp"], numbers["tp"]
    return divmod(numbers["rank"], stated.tp) if stated else (0, numbers["rank"])


def _check_complete(serving_format: ServingEngine, paths: Mapping[StageRank, list[str]], parallel: Parallel) -> None:
    """Raises CheckpointError, naming the file, if a rank has none."""
    missing = next((rank for rank in _ranks(parallel) if rank not in paths), None)
    if missing is not None:
        pp_rank, tp_rank = missing
        raise IncompleteError(
            f"the file of rank {tp_rank}" + (f" of stage {pp_rank}" if parallel.pp > 1 else "") + " is not there",
            where=serving_format.file_name(parallel, pp_rank, tp_rank, 0),
            why=f"The checkpoint was written for {parallel}",
            do="Copy it from where the checkpoint was written",
        )


def _written_for(
    held: Headers,
    expected: Callable[[Parallel, int, int], tuple[StoredTensor, ...]],
    check: Callable[[Parallel], None],
    parallel: Parallel,
) -> Parallel:
    """The sizes for which the files were written, if the files of the last ranks are lost; `parallel` if none fit.

    held: what the first rank's files hold. expected: the tensors of a rank at sizes that `check` allows. parallel: the sizes by the names
    of the files that are there.
    """
    shapes = {name: entry.shape for name, (_, entry) in held.items()}
    for tp in range(parallel.tp + 1, _MOST_RANKS + 1):
        written = replace(parallel, tp=tp)
        with suppress(ReshardError):
            check(written)
            if {tensor.name: tensor.shape for tensor in expected(written, 0, 0)} == shapes:
                return written
    return parallel


def _headers(files: Files, paths: list[str]) -> Headers:
    """What one rank's files hold. Raises CheckpointError if two of them hold the same name."""
    headers: Headers = {}
    for path in paths:
        header = safetensors.read_header(files, path)
        file = TargetFile(path, header.nbytes, (), ())
        for entry in header.entries:
            if entry.name in headers:
                raise CheckpointError(f"two files of the rank hold it: {headers[entry.name][0].path} and {path}", where=entry.name)
            headers[entry.name] = (file, entry)
    return headers


# Ranks of one stage for which the files of fewer ranks may have been written.
_MOST_RANKS = 64
# Packed experts have no w2_weight, but w2_weight_packed, for example.
_OF_EXPERTS = re.compile(r"\bw2_weight[^.]*$")


def _with_stored_experts(parallel: Parallel, model: Model, headers: RankHeaders) -> Parallel:
    """The sizes with the expert-parallel size, which follows from the first axis of a rank's stacked experts, [experts, ...]."""
    entries = (entry for rank in headers.values() for name, (_, entry) in rank.items() if _OF_EXPERTS.search(name) and entry.shape)
    first = next(entries, None)
    is_distributed = first is not None and first.shape[0] < model.dimensions.get("experts", 0)
    return replace(parallel, ep=parallel.tp if is_distributed else 1)


def _placed(
    headers: RankHeaders, expected: Callable[[int, int], tuple[StoredTensor, ...]], aliases: Mapping[str, list[str]]
) -> list[tuple[TargetFile, PlacedTensor]]:
    """The tensors of all ranks where the files have them. expected: the tensors of a rank, by tp_rank and pp_rank.

    Raises: CheckpointError if a rank does not hold exactly what is expected.
    """
    placed: list[tuple[TargetFile, PlacedTensor]] = []
    has_stages = max(pp_rank for pp_rank, _ in headers) > 0
    for (pp_rank, tp_rank), rank_headers in headers.items():
        rank = f"stage {pp_rank}, rank {tp_rank}" if has_stages else f"rank {tp_rank}"
        for file, item in _matched(expected(tp_rank, pp_rank), rank_headers, rank):
            placed.append((file, item))
            # Again, under the names of aliases: canonical tensors with the same values that are not stored.
            named = item.tensor.sections if aliases else ()
            names = [(section, aliases[section.name]) for section in named if section.name in aliases]
            for number in range(max((len(twins) for _, twins in names), default=0)):
                sections = [replace(section, name=twins[number]) for section, twins in names if number < len(twins)]
                placed.append((file, replace(item, tensor=replace(item.tensor, sections=Sections.of(sections)))))
    return placed


def _matched(expected: tuple[StoredTensor, ...], headers: Headers, rank: str) -> Iterator[tuple[TargetFile, PlacedTensor]]:
    """Each expected tensor where the file has it. Raises CheckpointError for a missing tensor, another shape or a surplus tensor."""
    surplus = dict(headers)
    for tensor in expected:
        if tensor.name not in surplus:
            raise IncompleteError(
                f"{rank} does not hold it",
                where=tensor.name,
                why="The engine would refuse to start",
                do="Convert again, and keep all files of this rank",
            )
        file, entry = surplus.pop(tensor.name)
        if entry.shape != tensor.shape:
            raise CheckpointError(
                f"{rank} holds it as {list(entry.shape)}, {list(tensor.shape)} is expected",
                where=f"{tensor.name} in {file.path}",
                why="The files were written for another number of ranks, or the config is another model's",
                do="Check that the files of all ranks are there, and check the config",
            )
        yield file, PlacedTensor(_with_stored_dtype(tensor, entry.dtype), entry.byte_offset)
    if surplus:
        name, (file, _) = next(iter(surplus.items()))
        raise CheckpointError(
            f"{rank} holds it, the engine knows no such key" + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            where=f"{name} in {file.path}",
            why="The engine would refuse to start",
            do="Remove the files of other conversions from the directory, or check the config",
        )


def _with_stored_dtype(tensor: StoredTensor, dtype: DType) -> StoredTensor:
    """The tensor in the element type that the file has; a constant keeps its value."""
    if tensor.sections or tensor.dtype == dtype or not tensor.filled or len(tensor.fill) == 1:
        return replace(tensor, dtype=dtype.of(tensor.dtype.function))
    return replace(tensor, dtype=dtype, fill=dtype.encoded(*struct.unpack("<f", tensor.fill)))
