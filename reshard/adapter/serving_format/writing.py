"""The layout of a serving engine's checkpoint: what every rank holds, framed as safetensors files, with the config beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from reshard.adapter.format import MAX_SHARD_SIZE
from reshard.adapter.model_files import CONFIG, ModelFiles
from reshard.adapter.serving_format.engine import ServingEngine
from reshard.canonical.content import Content, check_against_model
from reshard.canonical.globs import any_layer
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.sections import StoredTensor
from reshard.models.engine_rules import EngineRules
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.models.stored_forms import or_dequantize
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile, framed
from reshard.serving.legality import check_degrees, check_stages, require_model
from reshard.serving.ranks import rank_tensors
from reshard.serving.weights import (
    layers_not_served,
    left_out_by_class,
    not_stored_by_engines,
    scale_aliases,
    stored_dtypes,
    weights_without_slot,
    zero_biases,
)

# The limit with which vLLM's and SGLang's own programs save (examples/.../save_sharded_state.py): 5 GiB.
_MAX_SHARD_BYTES = 5 << 30


def lay_out(serving_format: ServingEngine, content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of all ranks, and the small files beside them.

    Raises: RequestError or CheckpointError if the engine does not serve the content at the target's sizes.
    """
    _check_method(serving_format, companions.config)
    model = require_model(content.model, companions.config, serving_format.engine, can_learn=serving_format.tracer is not None)
    rules = serving_format.engine_rules(model, target)
    _check_dtype(target, model, rules)
    _check_content(content, model, rules)
    check_degrees(model, rules, target.parallel)
    check_stages(model, target.parallel.pp)
    dtypes = content.implied_dtypes | {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}
    stored = stored_dtypes(model, rules, dtypes)
    engine_config = serving_format.engine_config(model, target.parallel, dtypes)
    companions, class_notes = companions.completed(model)
    needed = {key: value for key, value in rules.config_defaults if not companions.states(key)}
    needed |= serving_format.keys_for_ranks(companions.config or {}, content.tensors)
    companions, config_notes = companions.with_keys(needed, f"since {rules.engine} needs it")
    sidecars = companions.sidecars(stored.values())
    if engine_config is not None:
        config = Sidecar(CONFIG, (json.dumps(engine_config, indent=4) + "\n").encode())
        sidecars = (*(sidecar for sidecar in sidecars if sidecar.path != CONFIG), config)
    besides = {name: reason for name in content.besides_model if (reason := model.reason_not_served(name))}
    left_out = layers_not_served(model) | left_out_by_class(model, rules.left_out) | besides
    return Layout(
        serving_format.name,
        tuple(rank_files(serving_format, target, lambda tp, pp: rank_tensors(model, stored, rules, target.parallel, tp, pp))),
        sidecars,
        target.parallel,
        (
            *serving_format.notes(model, target),
            *rules.notes,
            *class_notes,
            *config_notes,
            *_about_left_out(left_out, content),
            *_about_zeros(model, rules),
            *about_values(stored),
        ),
        aliases=scale_aliases(model, rules),
        left_out=left_out | not_stored_by_engines(model, rules),
    )


def _check_method(serving_format: ServingEngine, config: Mapping[str, Any] | None) -> None:
    """Raises UnsupportedError if the weights are quantized by a method that the engine no longer knows, or never did."""
    release = serving_format.release if config and unknown_quantization(config) else None
    if config and release and (method := release.refused_method(config)):
        raise UnsupportedError(
            f"the weights are quantized ({method}), and {release.engine} has no such method",
            why="It would refuse them in a Hugging Face folder as well, unless a plugin adds the method",
            do=or_dequantize(method, "Serve the model that it was quantized from, or install the plugin"),
        )


def _check_dtype(target: Target, model: Model, rules: EngineRules) -> None:
    """Raises RequestError if the weights are cast to a type of 8 bits: engines take such weights with scales only."""
    if target.dtype is not None and target.dtype.itemsize == 1 and not model.quantization:
        raise RequestError(
            f"`dtype=`: a cast to {target.dtype} does not make scales, and {rules.engine} needs a scale for each FP8 weight",
            why="Values beyond the range of the type would be lost",
            do="Quantize with the engine's own tool, such as llm-compressor, and convert its result",
        )


def _check_content(content: Content, model: Model, rules: EngineRules) -> None:
    """Raises RequestError or CheckpointError unless the content is exactly the weights that the engine has a slot for."""
    if content.states:
        raise RequestError(f"{rules.engine} loads weights, no optimizer state", do="Leave out `optimizer=True`")
    without_slot = weights_without_slot(model, rules)
    if names := [name for name in without_slot if name in content.tensors]:
        globs = dict.fromkeys(f"`exclude=` '{any_layer(name)}'" for name in names)
        raise RequestError(
            f"{rules.engine}'s class for a {model.architecture.model_type} model has no slot for it"
            + (f", nor for {len(names) - 1} more" if len(names) > 1 else ""),
            where=names[0],
            why="It would ignore the weight without a message and give other answers than the model",
            do=f"Leave it out on purpose with {' '.join(globs)}, or serve the model with an engine that has a slot for it",
        )
    optional = {*without_slot, *left_out_by_class(model, rules.left_out), *not_stored_by_engines(model, rules)}
    check_against_model(content, partial=False, strict=True, optional=optional)
    scales = (name for name, weight in model.weights.items() if weight.is_cache_scale and name not in content.tensors)
    if (missing := next(scales, None)) is not None:
        raise UnsupportedError(
            "the checkpoint has no such scale, although its KV cache is quantized",
            where=missing,
            why=f"{rules.engine} loads such a checkpoint with the scale 1, but its files of ranks need a value",
            do="Serve its Hugging Face folder (`to=hf`), or add `dequantize=True`",
        )


def _about_left_out(left_out: Mapping[str, str], content: Content) -> tuple[str, ...]:
    """A note that says how to compare the result with its source where weights are left out."""
    left = [name for name in left_out if name in content.tensors]
    if not left:
        return ()
    kept = _modules_of(content.tensors.keys() - left)
    modules = (sorted(_modules_of([name]) - kept, key=len) for name in left)
    globs = dict.fromkeys(f"{outer[0]}.*" if outer else name for outer, name in zip(modules, left, strict=True))
    excluded = " ".join(f"`exclude=` '{glob}'" for glob in globs)
    return (f"weights are left out; `reshard verify {excluded}` compares all others with the source",)


def _modules_of(names: Iterable[str]) -> set[str]:
    """The modules that contain weights, such as a.b and a for the name a.b.weight."""
    modules: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in modules:
            modules.add(name)
    return modules


def _about_zeros(model: Model, rules: EngineRules) -> Iterator[str]:
    """A note about biases that the engine's class has and the model lacks."""
    if names := zero_biases(model, rules):
        lacking = plural(len(names), "bias", "biases")
        yield f"zeros are written for {lacking} that {rules.engine}'s class has and the model lacks, such as {names[0]}"


def about_values(stored: Mapping[str, DType]) -> Iterator[str]:
    """A note about weights in whose place the engine stores a function of them."""
    if computed := {name: dtype for name, dtype in stored.items() if dtype.function}:
        name, dtype = next(iter(computed.items()))
        yield (
            f"of {plural(len(computed), 'weight')} such as {name} the engine stores {dtype.function}, so that the weight itself does not "
            "come back from these files; `reshard verify` computes the same"
        )


def rank_files(
    serving_format: ServingEngine, target: Target, tensors_of: Callable[[int, int], tuple[StoredTensor, ...]]
) -> Iterator[TargetFile]:
    """The files of every rank that the target asks for. All ranks of a stage start a new file at the same tensor, before a file of one of
    them exceeds the limit: the parts of one number hold the same tensors, so that they can be written without the others.

    tensors_of: the tensors of a rank, by tp_rank and pp_rank.
    """
    parallel, limit = target.parallel, target.max_shard_size
    if limit is None and MAX_SHARD_SIZE in serving_format.options:
        limit = _MAX_SHARD_BYTES
    for pp_rank in range(parallel.pp):
        stage: dict[int, tuple[Mapping[str, int], tuple[StoredTensor, ...]]] = {}
        for tp_rank in range(parallel.tp):
            ranks: Mapping[str, int] = {axis: rank for axis, rank in (("pp", pp_rank), ("tp", tp_rank)) if axis in serving_format.sizes}
            if target.wants(ranks):
                stage[tp_rank] = ranks, tensors_of(tp_rank, pp_rank)
        starts = _starts([tensors for _, tensors in stage.values()], limit)
        for tp_rank, (ranks, tensors) in stage.items():
            parts = [tensors[start:stop] for start, stop in pairwise((*starts, max(len(tensors), starts[-1])))]
            for number, part in enumerate(part for part in parts if part or len(parts) == 1):
                yield framed(serving_format.file_name(parallel, pp_rank, tp_rank, number), part, ranks)


def _starts(ranks: Sequence[tuple[StoredTensor, ...]], max_nbytes: int | None) -> list[int]:
    """The numbers of the tensors with which the files of these ranks start: no file of several tensors has more than `max_nbytes`."""
    starts, nbytes = [0], [0] * len(ranks)
    for i, tensors in enumerate(zip_longest(*ranks)):
        sizes = [tensor.nbytes if tensor else 0 for tensor in tensors]
        grown = [before + size for before, size in zip(nbytes, sizes, strict=True)]
        if max_nbytes is not None and i > starts[-1] and max(grown) > max_nbytes:
            starts.append(i)
            grown = sizes
        nbytes = grown
    return starts
