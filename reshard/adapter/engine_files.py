"""Files of serving engines: per rank a safetensors file, or several parts of it, that hold its state dict under the engine's names.

writing: stored tensors of a rank -> framed files          reading: headers of a rank's files, matched with what the rank must hold
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.safetensors_writer import framed
from reshard.canonical.content import Content, check_against_model
from reshard.containers import safetensors
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.parallel import Parallel
from reshard.geometry.stored import StoredTensor
from reshard.index.index import Index, RunFacts
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.plans.layout import PlacedTensor, TargetFile, index_of
from reshard.serving.rules import EngineRules, check_degrees, rank_tensors, shared_copies, weights_without_slot
from reshard.storage.files import Files

_LAYER = r"\.\d+\."

Headers = dict[str, tuple[TargetFile, safetensors.TensorEntry]]


def served_model(model: Model | None, config: Mapping[str, object] | None, engine: str) -> Model:
    """The model, if there is one. Raises RequestError that says why there is none, and what to do."""
    if model is not None:
        return model
    if config is None:
        raise RequestError(
            "no config.json says which model this is",
            why=f"{engine}'s files hold each rank's slices, which only the model's head counts explain",
            do="Give the directory of the model's config with --model DIR",
        )
    if method := unknown_quantization(config):
        raise RequestError(
            f"the weights are quantised ({method}) in a way that is not known here",
            why="How packed weights and their scales split over ranks is not guessed",
            do=f"A conversion to hf, which {engine} loads as well, keeps them as they are",
        )
    raise RequestError(
        f"the architecture {config.get('model_type')!r} is not declared",
        why="How its weights split over ranks is not known, and is not guessed",
        do="`reshard architectures --start CKPT > my.yaml` begins a declaration of it, which --architecture my.yaml takes. "
        "A conversion to hf needs none",
    )


def check_demands(model: Model, demands: Iterable[tuple[str, object]], engine: str) -> None:
    """Raises RequestError if the model's class does as if the config said something else than it does."""
    for key, value in demands:
        if (said := model.setting(key)) != value:
            raise RequestError(
                f"{engine}'s class for a {model.architecture.model_type} model works as if {key} were {json.dumps(value)}, the config says "
                f"{json.dumps(said)}",
                why="It would refuse the weights, or serve unset or other ones",
                do="Serve it with another engine",
            )


def check_content(content: Content, model: Model, rules: EngineRules) -> None:
    """Raises RequestError or CheckpointError unless the weights for which the engine has a place, and they alone, are all there."""
    if content.states:
        raise RequestError(f"{rules.name} loads weights, no optimizer state", do="Leave out --optimizer")
    homeless = weights_without_slot(model, rules)
    if held := [name for name in homeless if name in content.tensors]:
        globs = dict.fromkeys(f"--exclude '{re.sub(_LAYER, '.*.', name, count=1)}'" for name in held)
        raise RequestError(
            f"{rules.name}'s class for a {model.architecture.model_type} model has no place for it"
            + (f", nor for {len(held) - 1} more" if len(held) > 1 else ""),
            where=held[0],
            why="It would leave it out without a word, and answer otherwise than the model",
            do=f"Leave it out on purpose with {' '.join(globs)}, or serve the model with an engine that has a place",
        )
    check_against_model(content, partial=False, strict=True, optional=homeless)


def completed(companions: ModelFiles, settings: Iterable[tuple[str, object]], engine: str) -> tuple[ModelFiles, list[str]]:
    """The config with what the engine needs it to say, and what to tell about it."""
    config = companions.config or {}
    absent = {key: value for key, value in settings if key not in config}
    if not absent:
        return companions, []
    told = ", ".join(f"{key}: {value}" for key, value in absent.items())
    return replace(companions, config={**config, **absent}, derived=True), [f"config.json says {told} now, as {engine} needs it"]


def about_left_out(left_out: Mapping[str, str], content: Content) -> list[str]:
    """How to compare the result with its source where layers were left out."""
    layers = sorted({name.split(".")[2] for name in left_out if name in content.tensors}, key=int)
    globs = " ".join(f"--exclude 'model.layers.{layer}.*'" for layer in layers)
    return [f"`reshard verify {globs}` compares all but the layers that were left out"] if layers else []


def framed_parts(stem: str, stored: tuple[StoredTensor, ...], most: int | None, ranks: Mapping[str, int]) -> Iterator[TargetFile]:
    """A rank's files, numbered; a new one starts where the next tensor would pass `most` bytes, as engines' own writers do."""
    for part, run in enumerate(_in_parts(stored, most)):
        yield framed(f"{stem}-part-{part}.safetensors", run, ranks)


def _in_parts(stored: tuple[StoredTensor, ...], most: int | None) -> Iterator[list[StoredTensor]]:
    run: list[StoredTensor] = []
    size = 0
    for tensor in stored:
        if most is not None and run and size + tensor.nbytes > most:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    yield run


def read_headers(files: Files, paths: list[str]) -> Headers:
    """What one rank's files hold. Raises CheckpointError if two of them hold the same name."""
    found: Headers = {}
    for path in paths:
        header = safetensors.read_header(files, path)
        file = TargetFile(path, header.nbytes, (), ())
        for entry in header.entries:
            if entry.name in found:
                raise CheckpointError(f"two parts hold it: {found[entry.name][0].path} and {path}", where=entry.name)
            found[entry.name] = (file, entry)
    return found


def paths_by_rank(files: Files, pattern: re.Pattern[str]) -> dict[tuple[int, int], list[str]]:
    """(pp rank, tp rank) -> its files. pattern: of their names, with the group `rank`, or with `pp` and `tp`."""
    found: dict[tuple[int, int], list[str]] = {}
    for path in files.list():
        if match := pattern.fullmatch(path):
            numbers = match.groupdict()
            rank = (0, int(numbers["rank"])) if numbers["rank"] else (int(numbers["pp"]), int(numbers["tp"]))
            found.setdefault(rank, []).append(path)
    return dict(sorted(found.items()))


def degrees_of(ranks: Mapping[tuple[int, int], list[str]], files: Files) -> Parallel:
    """The parallel sizes that ranks are numbered up to. Raises CheckpointError if there are none, or one before the last is missing."""
    if not ranks:
        raise CheckpointError("no file here is called model-rank-*-part-*.safetensors", where=files.root, do="Give another --format")
    parallel = Parallel(tp=1 + max(tp for _, tp in ranks), pp=1 + max(pp for pp, _ in ranks))
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tp):
            if (pp_rank, tp_rank) not in ranks:
                raise CheckpointError(
                    f"the file of rank {tp_rank}" + (f" of stage {pp_rank}" if parallel.pp > 1 else "") + " is not there",
                    where=files.root,
                    why=f"The other files are numbered up to {parallel}",
                    do="Copy it from where the checkpoint was written",
                )
    return parallel


def with_stored_experts(parallel: Parallel, model: Model, ranks: Iterable[Headers]) -> Parallel:
    """The sizes, with over how many ranks whole experts are shared, as the first axis of the stacked ones tells."""
    stacks = (entry.shape[0] for found in ranks for name, (_, entry) in found.items() if name.endswith("w2_weight") and entry.shape)
    held = next(stacks, None)
    shared = held is not None and held < model.dimensions.get("experts", 0)
    return replace(parallel, ep=parallel.tp if shared else 1)


def index_of_ranks(
    format_name: str, model: Model, rules: EngineRules, parallel: Parallel, ranks: Mapping[tuple[int, int], Headers], facts: RunFacts
) -> Index:
    """The index of the files of all ranks, (pp rank, tp rank) -> headers.

    Raises: CheckpointError if a rank does not hold just what the engine's rules say, RequestError for sizes that they do not allow.
    """
    check_degrees(model, rules, parallel)
    also = {kept: name for name, kept in shared_copies(model, rules).items()}
    placed: list[tuple[TargetFile, PlacedTensor]] = []
    for (pp_rank, tp_rank), found in ranks.items():
        expected = rank_tensors(model, ANY_DTYPE, rules, parallel, tp_rank, pp_rank)
        for file, item in _matched(expected, found, f"stage {pp_rank}, rank {tp_rank}" if parallel.pp > 1 else f"rank {tp_rank}"):
            placed.append((file, item))
            placed.extend((file, copy) for copy in _standing_for(item, also))
    shapes = {weight.name: weight.shape for weight in model.weights.values()}
    files = tuple({file.path: file for found in ranks.values() for file, _ in found.values()}.values())
    return index_of(format_name, iter(placed), shapes, files=files, facts=facts)


class _AnyDtype(Mapping[str, DType]):
    """The element type of every weight, as far as a layout of shapes is concerned."""

    def __getitem__(self, name: str) -> DType:
        return F32

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_DTYPE: Mapping[str, DType] = _AnyDtype()


def _matched(expected: tuple[StoredTensor, ...], found: Headers, rank: str) -> Iterator[tuple[TargetFile, PlacedTensor]]:
    """Each expected tensor where the file has it. Raises CheckpointError for one that is missing, of another shape, or not expected."""
    surplus = dict(found)
    for stored in expected:
        if stored.name not in surplus:
            raise CheckpointError(
                f"{rank} does not hold it",
                where=stored.name,
                why="The engine would refuse to start",
                do="Convert again, with all parts of this rank's file in place",
            )
        file, entry = surplus.pop(stored.name)
        if entry.shape != stored.shape:
            raise CheckpointError(
                f"{rank} holds it as {list(entry.shape)}, {list(stored.shape)} is expected",
                where=f"{stored.name} in {file.path}",
                why="The files are for another number of ranks than there are, or the config is another model's",
                do="Check that all ranks' files are there, and the config",
            )
        yield file, PlacedTensor(_as_found(stored, entry.dtype), entry.byte_offset)
    if surplus:
        name, (file, _) = next(iter(surplus.items()))
        raise CheckpointError(
            f"{rank} holds it, the engine knows no such key" + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            where=f"{name} in {file.path}",
            why="The engine would refuse to start",
            do="Remove files of other conversions from the folder, or check the config",
        )


def _standing_for(item: PlacedTensor, also: Mapping[str, str]) -> Iterator[PlacedTensor]:
    """A tensor under the names of those that it stands for as well."""
    sections = tuple(replace(section, name=also[section.name]) for section in item.tensor.sections if section.name in also)
    if sections:
        yield replace(item, tensor=replace(item.tensor, sections=sections))


def _as_found(stored: StoredTensor, dtype: DType) -> StoredTensor:
    """The tensor in the element type that the file has; a constant keeps its value."""
    if stored.sections or stored.dtype == dtype or not stored.filled or len(stored.fill) == 1:
        return replace(stored, dtype=dtype)
    return replace(stored, dtype=dtype, fill=dtype.encoded(*struct.unpack("<f", stored.fill)))
