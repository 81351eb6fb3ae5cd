"""vLLM sharded_state: each rank's state dict as the engine itself holds it, right after loading, before kernels repack it.

    config.json, tokenizer files
    model-rank-{tp}-part-{n}.safetensors          one pipeline stage; any number of parts, in any order
    model-pp-{pp}-tp-{tp}-part-{n}.safetensors    several stages; layer numbers stay global

q, k, v are one tensor `qkv_proj` [q rows of this rank; k; v], gate and up one `gate_up_proj`; the vocabulary is padded by zero rows to a
multiple of 64; a tied table is stored once per stage, as `lm_head.weight` where the stage has the head. The keys that the loader demands
differ by engine version: VERSIONS. Measured on vLLM 0.32.0 (every key and bit against real ranks, fixtures/vllm); older versions
from their source: model_loader/sharded_state_loader.py, distributed/utils.py, model_executor/layers/attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.adapter import Hints
from reshard.architecture import Model, find_model
from reshard.canonical import Canonical, check_against_model
from reshard.containers import safetensors
from reshard.dtypes import DType, from_safetensors
from reshard.errors import CheckpointError, RequestError
from reshard.files import Files
from reshard.index import Index, RunFacts
from reshard.layout import EngineRules, Fusion, Layout, PerLayerConstant, Placed, TargetFile, check_degrees, index_of, rank_tensors
from reshard.model_files import ModelFiles
from reshard.parallel import Parallel
from reshard.plans import Target
from reshard.stored import StoredTensor

_F32 = from_safetensors("F32", where="vllm")
_ONE = b"\x00\x00\x80\x3f"
_SCALES = tuple(PerLayerConstant("attention.o", f"attn.{name}", _F32, _ONE) for name in ("_k_scale", "_q_scale", "_v_scale", "_prob_scale"))


@dataclass(frozen=True, slots=True)
class Version:
    """What changed in the keys or files with one release: attention scales became buffers, stages got their own file names."""

    since: tuple[int, ...]
    constants: tuple[PerLayerConstant, ...]
    has_stages: bool


VERSIONS = (
    Version((0, 8, 5), (), has_stages=False),
    Version((0, 14), _SCALES, has_stages=False),
    Version((0, 32), _SCALES, has_stages=True),
)
NEWEST = "0.32.0"

_FILE = re.compile(r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-[^/]*\.safetensors")


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: equal, and what is left over one each to the stages before the last (vLLM, distributed/utils.py)."""
    base, rest = divmod(layers, pp)
    counts = [base] * pp
    for i in range(2, rest + 2):
        counts[-i] += 1
    return tuple(counts)


_RULES = EngineRules(
    name="vLLM",
    fusions=(Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"), Fusion(("mlp.gate", "mlp.up"), "gate_up_proj")),
    constants=(),
    vocabulary_multiple=64,
    partition=partition,
)


class Vllm:
    name = "vllm"
    summary = "vLLM sharded_state: pre-sharded for tensor and pipeline parallel ranks"
    owns = ("model-rank-*-part-*.safetensors", "model-pp-*-tp-*-part-*.safetensors")

    def detect(self, files: Files) -> str | None:
        return next((path for path in files.list() if _FILE.fullmatch(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        model = _model(find_model(hints.config), hints.config)
        ranks = _ranks(files)
        parallel = _degrees(ranks, files)
        headers = {rank: _headers(files, paths) for rank, paths in ranks.items()}
        rules = replace(_RULES, partition=lambda layers, pp: _stored_partition(headers, layers, pp), constants=_stored_constants(headers))
        check_degrees(model, rules, parallel)
        placed: list[tuple[TargetFile, Placed]] = []
        for (pp_rank, tp_rank), found in headers.items():
            expected = rank_tensors(model, _AnyDtype(), rules, parallel, tp_rank, pp_rank)
            placed.extend(_matched(expected, found, f"stage {pp_rank}, rank {tp_rank}" if parallel.pp > 1 else f"rank {tp_rank}"))
        shapes = {weight.name: weight.shape for weight in model.weights.values()}
        target_files = tuple({file.path: file for found in headers.values() for file, _ in found.values()}.values())
        stored_scales = "0.14 or newer" if rules.constants else "before 0.14"
        facts = RunFacts("vLLM sharded_state", stored_scales, parallel={"tp": parallel.tp, "pp": parallel.pp}, config=hints.config)
        return index_of(self.name, iter(placed), shapes, files=target_files, facts=facts)

    def lay_out(self, content: Canonical, target: Target, companions: ModelFiles) -> Layout:
        model = _model(content.model, companions.config)
        check_against_model(content, partial=False, strict=True)
        version, notes = _version(target.engine_version, target.parallel)
        if content.states:
            raise RequestError("vLLM loads weights, no optimizer state", do="Leave out --optimizer")
        target.parallel.allow("tp", "pp", "ep", what="vLLM, where each rank serves its own part")
        if target.parallel.ep > 1:
            raise RequestError(f"--ep {target.parallel.ep}: a {model.architecture.model_type} model has no experts", do="Leave out --ep")
        rules = replace(_RULES, constants=version.constants)
        check_degrees(model, rules, target.parallel)
        dtypes = {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}
        files: list[TargetFile] = []
        for pp_rank in range(target.parallel.pp):
            for tp_rank in range(target.parallel.tp):
                if not target.wants({"tp": tp_rank, "pp": pp_rank}):
                    continue
                stored = rank_tensors(model, dtypes, rules, target.parallel, tp_rank, pp_rank)
                files.extend(_framed(stored, target, tp_rank, pp_rank))
        return Layout(self.name, tuple(files), companions.sidecars(dtypes.values()), target.parallel, tuple(notes))


# Whose state dict was compared with real ranks'.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def _model(model: Model | None, config: Mapping[str, object] | None) -> Model:
    if model is not None and model.architecture.model_type in _MODEL_TYPES:
        return model
    if model is not None:
        raise RequestError(
            f"how vLLM fuses and splits a {model.architecture.model_type} model is not known here",
            why="Only what was compared with what its ranks hold is laid out",
            do=f"Known are {', '.join(_MODEL_TYPES)}. A conversion to hf, which vLLM loads as well, works for every model",
        )
    if config is None:
        raise RequestError(
            "no config.json says which model this is",
            why="vLLM's files hold each rank's slices, which only the model's head counts explain",
            do="Give the directory of the model's config with --model DIR",
        )
    raise RequestError(
        f"the architecture {config.get('model_type')!r} is not declared",
        why="How its weights split over ranks is not known, and is not guessed",
        do=f"Known are {', '.join(_MODEL_TYPES)}. A conversion to hf needs no declaration",
    )


def _version(asked: str | None, parallel: Parallel) -> tuple[Version, list[str]]:
    """The row that holds for an engine version, and what to tell about it."""
    text = asked or NEWEST
    if not re.fullmatch(r"v?\d+(\.\d+)*([a-z+.-].*)?", text):
        raise RequestError(f"--engine-version {text}: a version such as {NEWEST} is expected")
    numbers = tuple(int(word) for word in re.match(r"v?([\d.]+)", text)[1].strip(".").split("."))  # type: ignore[index]
    fitting = [version for version in VERSIONS if version.since <= numbers]
    if not fitting:
        raise RequestError(f"--engine-version {text}: the oldest vLLM whose files are known is {'.'.join(map(str, VERSIONS[0].since))}")
    if parallel.pp > 1 and not fitting[-1].has_stages:
        first = next(version for version in VERSIONS if version.has_stages)
        raise RequestError(
            f"--pp {parallel.pp}: vLLM {text} cannot load pre-sharded stages",
            why="Its file names know no stage, so the stages' files would be taken for each other",
            do=f"Use --pp 1, or vLLM {'.'.join(map(str, first.since))} or newer",
        )
    newest = tuple(map(int, NEWEST.split(".")))
    return fitting[-1], [f"vLLM {text} is newer than the newest one measured, {NEWEST}"] if numbers > newest else []


def _framed(stored: tuple[StoredTensor, ...], target: Target, tp_rank: int, pp_rank: int) -> Iterator[TargetFile]:
    stem = f"model-pp-{pp_rank}-tp-{tp_rank}" if target.parallel.pp > 1 else f"model-rank-{tp_rank}"
    for part, run in enumerate(_parts(stored, target.max_shard_bytes)):
        # Wide elements first keeps every tensor aligned to its element size.
        ordered = sorted(run, key=lambda s: -s.dtype.itemsize)
        frame = safetensors.frame(((s.name, s.dtype, s.shape) for s in ordered), {"format": "pt"})
        placed = tuple(Placed(s, entry.byte_offset) for s, entry in zip(ordered, frame.entries, strict=True))
        path = f"{stem}-part-{part}.safetensors"
        yield TargetFile(path, frame.nbytes, ((0, frame.header),), placed, {"pp": pp_rank, "tp": tp_rank})


def _parts(stored: tuple[StoredTensor, ...], most: int | None) -> Iterator[list[StoredTensor]]:
    """A new part starts where the next tensor would pass `most` bytes, as vLLM's own writer does."""
    run: list[StoredTensor] = []
    size = 0
    for tensor in stored:
        if most is not None and run and size + tensor.nbytes > most:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    yield run


_Headers = dict[str, tuple[TargetFile, safetensors.Entry]]


def _ranks(files: Files) -> dict[tuple[int, int], list[str]]:
    """(pp rank, tp rank) -> its files."""
    found: dict[tuple[int, int], list[str]] = {}
    for path in files.list():
        if match := _FILE.fullmatch(path):
            rank = (0, int(match["rank"])) if match["rank"] else (int(match["pp"]), int(match["tp"]))
            found.setdefault(rank, []).append(path)
    return dict(sorted(found.items()))


def _degrees(ranks: Mapping[tuple[int, int], list[str]], files: Files) -> Parallel:
    """The parallel sizes, from the numbers in the file names. Raises CheckpointError if a rank between the first and last is missing."""
    if not ranks:
        raise CheckpointError("no file here is called model-rank-*-part-*.safetensors", where=files.root, do="Give another --format")
    staged = {path.startswith("model-pp-") for paths in ranks.values() for path in paths}
    if len(staged) > 1:
        raise CheckpointError(
            "files of a run with stages and of one without lie together", where=files.root, do="Remove those of one of the two"
        )
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


def _headers(files: Files, paths: list[str]) -> _Headers:
    found: _Headers = {}
    for path in paths:
        header = safetensors.read_header(files, path)
        file = TargetFile(path, header.nbytes, (), ())
        for entry in header.entries:
            if entry.name in found:
                raise CheckpointError(f"two parts hold it: {found[entry.name][0].path} and {path}", where=entry.name)
            found[entry.name] = (file, entry)
    return found


def _stored_partition(headers: Mapping[tuple[int, int], _Headers], layers: int, pp: int) -> tuple[int, ...]:
    """The layers that each stage's keys name: whoever wrote the files may have set a partition of their own."""
    held: list[set[int]] = [set() for _ in range(pp)]
    for (pp_rank, _), found in headers.items():
        held[pp_rank].update(int(match[1]) for name in found if (match := re.match(r"model\.layers\.(\d+)\.", name)))
    counts = tuple(len(layer_set) for layer_set in held)
    if [layer for layer_set in held for layer in sorted(layer_set)] != list(range(layers)):
        raise CheckpointError(
            f"the stages hold {', '.join(map(str, counts))} layers, which are not the model's {layers} in order",
            why="Files of another model or another split are among them, or the config is another model's",
        )
    return counts


def _stored_constants(headers: Mapping[tuple[int, int], _Headers]) -> tuple[PerLayerConstant, ...]:
    """The constants of the engine version that the files were written for, as their keys tell."""
    return _SCALES if any(name.endswith("._k_scale") for found in headers.values() for name in found) else ()


class _AnyDtype(Mapping[str, DType]):
    """The element type of every weight, as far as a layout of shapes is concerned."""

    def __getitem__(self, name: str) -> DType:
        return _F32

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _matched(expected: tuple[StoredTensor, ...], found: _Headers, rank: str) -> Iterator[tuple[TargetFile, Placed]]:
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
        yield file, Placed(replace(stored, dtype=entry.dtype), entry.byte_offset)
    if surplus:
        name, (file, _) = next(iter(surplus.items()))
        raise CheckpointError(
            f"{rank} holds it, the engine knows no such key" + (f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""),
            where=f"{name} in {file.path}",
            why="The engine would refuse to start",
            do="Remove files of other conversions from the folder, or check the config",
        )


FORMAT = Vllm()
