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
from collections.abc import Mapping
from dataclasses import replace

from reshard.adapter.engine_files import (
    ANY_DTYPE,
    Headers,
    about_left_out,
    check_content,
    check_demands,
    completed,
    degrees_of,
    framed_parts,
    index_of_ranks,
    paths_by_rank,
    read_headers,
    served_model,
    with_stored_experts,
)
from reshard.adapter.format import Hints
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.option import ENGINE_VERSION, MAX_SHARD_SIZE
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.content import Content
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.parallel import Parallel
from reshard.index.index import Index, RunFacts
from reshard.models.model import Model
from reshard.plans.layout import Layout, TargetFile
from reshard.plans.target import Target
from reshard.serving.rules import EngineRules, check_degrees, layers_not_served, rank_tensors, shared_copies, stored_dtypes
from reshard.serving.versions import about_version
from reshard.storage.files import Files

from .rules import NEWEST, VersionRules, all_rules, as_text, first_with_stages, is_known, rules_for, with_partition, without_expert_maps

_FILE = re.compile(r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-[^/]*\.safetensors")


class Vllm(ServingFormat):
    name = "vllm"
    summary = "vLLM sharded_state: pre-sharded for tensor, pipeline and expert parallel ranks"
    owns = ("model-rank-*-part-*.safetensors", "model-pp-*-tp-*-part-*.safetensors")
    options = (ENGINE_VERSION, MAX_SHARD_SIZE)

    def detect(self, files: Files) -> str | None:
        return next((path for path in files.list() if _FILE.fullmatch(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        model = served_model(hints.model, hints.config, "vLLM")
        ranks = paths_by_rank(files, _FILE)
        if len({path.startswith("model-pp-") for paths in ranks.values() for path in paths}) > 1:
            raise CheckpointError(
                "files of a run with stages and of one without lie together", where=files.root, do="Remove those of one of the two"
            )
        parallel = degrees_of(ranks, files)
        headers = {rank: read_headers(files, paths) for rank, paths in ranks.items()}
        version, versions = _stored_version(model, headers, parallel)
        parallel = with_stored_experts(parallel, model, headers.values())
        sizes = {"tp": parallel.tp, "pp": parallel.pp, **({"ep": parallel.ep} if parallel.ep > 1 else {})}
        facts = RunFacts("vLLM sharded_state", versions, parallel=sizes, config=hints.config)
        return index_of_ranks(self.name, model, version.engine, parallel, headers, facts)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        model = served_model(content.model, companions.config, "vLLM")
        version, notes = _version(model, target)
        companions, added = completed(companions, version.settings, "vLLM")
        rules = version.engine
        check_content(content, model, rules)
        _check_router(model, version)
        target.parallel.allow("tp", "pp", "ep", what="vLLM, where each rank serves its own part")
        check_degrees(model, rules, target.parallel)
        dtypes = stored_dtypes(model, rules, {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()})
        files: list[TargetFile] = []
        left_out = layers_not_served(model)
        for pp_rank in range(target.parallel.pp):
            for tp_rank in range(target.parallel.tp):
                if not target.wants({"tp": tp_rank, "pp": pp_rank}):
                    continue
                stored = rank_tensors(model, dtypes, rules, target.parallel, tp_rank, pp_rank)
                stem = f"model-pp-{pp_rank}-tp-{tp_rank}" if target.parallel.pp > 1 else f"model-rank-{tp_rank}"
                files.extend(framed_parts(stem, stored, target.max_shard_size, {"pp": pp_rank, "tp": tp_rank}))
        return Layout(
            self.name,
            tuple(files),
            companions.sidecars(dtypes.values()),
            target.parallel,
            tuple(notes + added + about_left_out(left_out, content)),
            aliases=shared_copies(model, rules),
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
    check_demands(model, found.demands, "vLLM")
    return found, about_version("vLLM", text, NEWEST, model, is_known=is_known(model.architecture.family))


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


def _stored_version(model: Model, headers: Mapping[tuple[int, int], Headers], parallel: Parallel) -> tuple[VersionRules, str]:
    """The rules of the newest version that has the keys which the first rank has (of none has, those that come closest), and the range of
    versions that have the same, as a version specifier: >=0.8.5,<0.14.

    Whoever wrote the files may have dealt the layers in a way of their own.
    """
    counts = _stored_partition(headers, model, parallel.pp)
    known = [replace(each, engine=with_partition(each.engine, counts)) for each in all_rules(model)]

    def unlike(candidate: VersionRules) -> int:
        expected = rank_tensors(model, ANY_DTYPE, candidate.engine, replace(parallel, tp=1), 0, 0)
        return len({stored.name for stored in expected} ^ set(headers[0, 0]))

    differences = [unlike(each) for each in known]
    fits = [difference == min(differences) for difference in differences]
    newest = max(i for i, fit in enumerate(fits) if fit)
    oldest = next(i for i in range(newest, -1, -1) if i == 0 or not fits[i - 1])
    before = "".join(f",<{as_text(later.since)}" for later in known[newest + 1 : newest + 2])
    return known[newest], f">={as_text(known[oldest].since)}{before}"


def _stored_partition(headers: Mapping[tuple[int, int], Headers], model: Model, pp: int) -> tuple[int, ...]:
    """The layers that each stage's keys name: the number after `layers`, `h`, or the word before the number in the model's own names."""
    layers = model.dimensions["layers"]
    words = {"layers", "h", *re.findall(r"(\w+)\.\{layer\}", " ".join(weight.name for weight in model.architecture.weights))}
    number = re.compile(rf"\.(?:{'|'.join(sorted(words))})\.(\d+)\.")
    held: list[set[int]] = [set() for _ in range(pp)]
    for (pp_rank, _), found in headers.items():
        held[pp_rank].update(int(match[1]) for name in found if (match := number.search(name)))
    counts = tuple(len(layer_set) for layer_set in held)
    if [layer for layer_set in held for layer in sorted(layer_set)] != list(range(layers)):
        raise CheckpointError(
            f"the stages hold {', '.join(map(str, counts))} layers, which are not the model's {layers} in order",
            why="Files of another model or another split are among them, or the config is another model's",
        )
    return counts


FORMAT = Vllm()
