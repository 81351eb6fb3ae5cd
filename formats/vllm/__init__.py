"""vLLM sharded_state: each rank's state dict as the engine itself holds it, right after loading, before kernels repack it.

    config.json, tokenizer files
    model-rank-{tp}-part-{n}.safetensors          one pipeline stage; any number of parts, in any order
    model-pp-{pp}-tp-{tp}-part-{n}.safetensors    several stages; layer numbers stay global

q, k, v are one tensor `qkv_proj` [q rows of this rank; k; v], gate and up one `gate_up_proj`, a layer's experts two, `w13_weight`
[experts, gate above up, in] and `w2_weight`; the vocabulary is padded by zero rows to a multiple of 64; a tied table is stored once per
stage. What else a model's class does, and what changed between versions: rules.py. Measured on vLLM 0.32.0 (every key and bit against
real ranks, fixtures/vllm); the loader: model_loader/sharded_state_loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.adapter import Hints
from reshard.architecture import Model
from reshard.canonical import Canonical, check_against_model
from reshard.engine_files import (
    AnyDtype,
    Headers,
    about_left_out,
    completed,
    framed,
    in_parts,
    matched,
    read_headers,
    served_model,
    standing_for,
)
from reshard.engines import EngineRules, check_degrees, rank_tensors, shared_copies, stored_dtypes, unserved
from reshard.errors import CheckpointError, RequestError
from reshard.files import Files
from reshard.index import Index, RunFacts
from reshard.layout import Layout, Placed, TargetFile, index_of
from reshard.model_files import ModelFiles
from reshard.parallel import Parallel
from reshard.plans import Target
from reshard.stored import StoredTensor

from .rules import NEWEST, VersionRules, all_rules, first_with_stages, is_known, numbers_of, rules_for, with_partition, without_expert_maps

_FILE = re.compile(r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-[^/]*\.safetensors")


class Vllm:
    name = "vllm"
    summary = "vLLM sharded_state: pre-sharded for tensor, pipeline and expert parallel ranks"
    owns = ("model-rank-*-part-*.safetensors", "model-pp-*-tp-*-part-*.safetensors")

    def detect(self, files: Files) -> str | None:
        return next((path for path in files.list() if _FILE.fullmatch(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        model = served_model(hints.model, hints.config, "vLLM")
        ranks = _ranks(files)
        parallel = _degrees(ranks, files)
        headers = {rank: read_headers(files, paths) for rank, paths in ranks.items()}
        version = _stored_version(model, headers, parallel)
        rules, parallel = version.engine, replace(parallel, ep=_stored_ep(model, headers, parallel))
        check_degrees(model, rules, parallel)
        also = {kept: name for name, kept in shared_copies(model, rules).items()}
        placed: list[tuple[TargetFile, Placed]] = []
        for (pp_rank, tp_rank), found in headers.items():
            expected = rank_tensors(model, AnyDtype(), rules, parallel, tp_rank, pp_rank)
            rank = f"stage {pp_rank}, rank {tp_rank}" if parallel.pp > 1 else f"rank {tp_rank}"
            for file, item in matched(expected, found, rank):
                placed.append((file, item))
                placed.extend((file, copy) for copy in standing_for(item, also))
        shapes = {weight.name: weight.shape for weight in model.weights.values()}
        target_files = tuple({file.path: file for found in headers.values() for file, _ in found.values()}.values())
        sizes = {"tp": parallel.tp, "pp": parallel.pp, **({"ep": parallel.ep} if parallel.ep > 1 else {})}
        facts = RunFacts("vLLM sharded_state", f"{'.'.join(map(str, version.since))} or newer", parallel=sizes, config=hints.config)
        return index_of(self.name, iter(placed), shapes, files=target_files, facts=facts)

    def lay_out(self, content: Canonical, target: Target, companions: ModelFiles) -> Layout:
        model = served_model(content.model, companions.config, "vLLM")
        check_against_model(content, partial=False, strict=True)
        version, notes = _version(model, target)
        companions, added = completed(companions, version.settings, "vLLM")
        rules = version.engine
        _check_router(model, version)
        if content.states:
            raise RequestError("vLLM loads weights, no optimizer state", do="Leave out --optimizer")
        target.parallel.allow("tp", "pp", "ep", what="vLLM, where each rank serves its own part")
        check_degrees(model, rules, target.parallel)
        dtypes = stored_dtypes(model, rules, {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()})
        files: list[TargetFile] = []
        left_out = unserved(model)
        for pp_rank in range(target.parallel.pp):
            for tp_rank in range(target.parallel.tp):
                if not target.wants({"tp": tp_rank, "pp": pp_rank}):
                    continue
                stored = rank_tensors(model, dtypes, rules, target.parallel, tp_rank, pp_rank)
                files.extend(_framed(stored, target, tp_rank, pp_rank))
        return Layout(
            self.name,
            tuple(files),
            companions.sidecars(dtypes.values()),
            target.parallel,
            tuple(notes + added + about_left_out(left_out, content)),
            copies=shared_copies(model, rules),
            left_out=left_out,
        )

    def engine_rules(self, model: Model, target: Target) -> EngineRules:
        """How the engine splits a model; what `reshard plan` computes with."""
        return _version(model, target)[0].engine


def _version(model: Model, target: Target) -> tuple[VersionRules, list[str]]:
    """The rules that hold for the engine version that is asked for, and what to tell about it."""
    text = target.engine_version or NEWEST
    found = rules_for(model, text)
    if target.parallel.pp > 1 and not found.has_stages:
        raise RequestError(
            f"--pp {target.parallel.pp}: vLLM {text} cannot load pre-sharded stages",
            why="Its file names know no stage, so the stages' files would be taken for each other",
            do=f"Use --pp 1, or vLLM {first_with_stages()} or newer",
        )
    if target.parallel.ep > 1 and found.maps_experts:
        raise RequestError(
            f"--ep {target.parallel.ep}: vLLM {text} wants a map of experts in every rank's file, which is not written here",
            do=f"Use vLLM {without_expert_maps()} or newer, or leave out --ep",
        )
    notes = []
    if numbers_of(text) > numbers_of(NEWEST):
        notes.append(f"vLLM {text} is newer than the newest one measured, {NEWEST}")
    if not is_known(model.architecture.family):
        notes.append(f"vLLM's own class for {model.architecture.model_type} was not compared; it may call or fuse tensors otherwise")
    return found, notes


def _check_router(model: Model, version: VersionRules) -> None:
    """Raises RequestError if the engine would take the router for a quantised layer, and its weight for quantised elements."""
    quantization = model.quantization
    routers = [weight.name for weight in model.weights.values() if weight.role == "router"]
    if version.quantizes_router and quantization and routers and quantization.scales_of(routers[0]):
        raise RequestError(
            "the config does not say that it is not quantised",
            where=routers[0],
            why="vLLM would build a quantised router and cast the weight into it, without a word",
            do="Name the routers in quantization_config, under modules_to_not_convert or ignore",
        )


def _framed(stored: tuple[StoredTensor, ...], target: Target, tp_rank: int, pp_rank: int) -> Iterator[TargetFile]:
    stem = f"model-pp-{pp_rank}-tp-{tp_rank}" if target.parallel.pp > 1 else f"model-rank-{tp_rank}"
    for part, run in enumerate(in_parts(stored, target.max_shard_bytes)):
        yield framed(f"{stem}-part-{part}.safetensors", run, {"format": "pt"}, {"pp": pp_rank, "tp": tp_rank})


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


def _stored_version(model: Model, headers: Mapping[tuple[int, int], Headers], parallel: Parallel) -> VersionRules:
    """The rules of the newest version that has the keys which the first rank has; of none has, those that come closest.

    Whoever wrote the files may have dealt the layers in a way of their own.
    """
    counts = _stored_partition(headers, model.dimensions["layers"], parallel.pp)
    candidates = [replace(each, engine=with_partition(each.engine, counts)) for each in reversed(all_rules(model))]

    def unlike(candidate: VersionRules) -> int:
        expected = rank_tensors(model, AnyDtype(), candidate.engine, replace(parallel, tp=1), 0, 0)
        return len({stored.name for stored in expected} ^ set(headers[0, 0]))

    return min(candidates, key=unlike)


def _stored_ep(model: Model, headers: Mapping[tuple[int, int], Headers], parallel: Parallel) -> int:
    """Over how many ranks whole experts are shared, as the first axis of the stacked ones tells."""
    stacks = (
        entry.shape[0] for found in headers.values() for name, (_, entry) in found.items() if name.endswith("w2_weight") and entry.shape
    )
    held = next(stacks, None)
    return parallel.tp if held is not None and held < model.dimensions.get("experts", 0) else 1


def _stored_partition(headers: Mapping[tuple[int, int], Headers], layers: int, pp: int) -> tuple[int, ...]:
    """The layers that each stage's keys name."""
    held: list[set[int]] = [set() for _ in range(pp)]
    for (pp_rank, _), found in headers.items():
        held[pp_rank].update(int(match[1]) for name in found if (match := re.search(r"\.(?:layers|h)\.(\d+)\.", name)))
    counts = tuple(len(layer_set) for layer_set in held)
    if [layer for layer_set in held for layer in sorted(layer_set)] != list(range(layers)):
        raise CheckpointError(
            f"the stages hold {', '.join(map(str, counts))} layers, which are not the model's {layers} in order",
            why="Files of another model or another split are among them, or the config is another model's",
        )
    return counts


FORMAT = Vllm()
