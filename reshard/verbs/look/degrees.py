"""The verb `degrees`: at which parallel sizes a model can be served, and what each GPU holds then. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack, cast

from reshard.adapter import registry
from reshard.adapter.model_files import find_model_files
from reshard.adapter.serving_format import ServingFormat
from reshard.adapter.serving_format.learned import read_layout
from reshard.canonical.content import Selection, check_against_model
from reshard.canonical.dequantization import quantized_names, with_values
from reshard.canonical.globs import check_globs, matches
from reshard.errors import RequestError
from reshard.geometry.dtypes import BF16, DType, from_user
from reshard.geometry.meshes import Parallel
from reshard.models.model import Model
from reshard.models.quantization import check_has_settings, without_quantization
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import ModelOptions, PathLike, Weights, checked_keywords, take
from reshard.opening.models import is_bare, model_at, model_of
from reshard.opening.open import opened
from reshard.plans.layout import Target
from reshard.requests.planning import check_nothing_unanswered
from reshard.requests.request import dtype_named, kept_globs
from reshard.serving.capacity import DegreeReport, GpuMemory, degree_report
from reshard.serving.learned.fit import check_config, check_engine, learned_degree_report
from reshard.serving.weights import model_dtype
from reshard.storage.tar import open_base
from reshard.training.parameter_counts import parameters
from reshard.verbs.look.keywords import DegreeOptions

_RESERVED = 3
"""Percent of a GPU's memory that is kept for activations and CUDA graphs unless the caller says how much. vLLM 0.32 measures them when it
starts (v1/worker/gpu_worker.py, determine_available_memory); what is left is the KV cache."""


@checked_keywords
def degrees(
    source: Checkpoint | PathLike,
    *,
    to: str | None = None,
    tp: Sequence[int] = (1, 2, 4, 8),
    pp: Sequence[int] = (1,),
    ep: bool = False,
    **options: Unpack[DegreeOptions],
) -> DegreeReport:
    """What each rank of a serving engine would hold at every tp x pp, or why the engine would refuse these sizes.

    source: a checkpoint, a config.json, its folder, or the name of a known model (models/known_models.json).
    to: the format of the serving engine; None: vLLM's.
    ep: the tensor-parallel ranks share whole experts.

    Raises: RequestError if the format is not a serving engine's, or the engine does not serve the model.
    """
    to = to or registry.usual_engine()
    engine, memory = _engine(to), _memory(options)
    parallels = [Parallel(each_tp, each_pp, each_tp if ep else 1) for each_pp in pp for each_tp in tp]
    if (path := options.get("layout")) is not None:
        return _by_layout(source, to, os.fspath(path), parallels, options)
    version, dtype = options.get("engine_version"), dtype_named(options.get("dtype"))
    target = Target(
        to,
        dtype=dtype,
        keep_dtype=kept_globs(options.get("keep_dtype", ()), dtype),
        options={"engine_version": version} if version is not None else {},
    )
    dequantize = options.get("dequantize", False)
    if not isinstance(source, Checkpoint) and is_bare(source):
        _refuse_for_bare(options)
        model, dtypes = _declared_model(model_at(source, options.get("architecture")), target, dequantize)
        notes: tuple[str, ...] = ()
    else:
        checkpoint = opened(source, **take({**options}, ModelOptions))
        model, dtypes = _stored_model(checkpoint, target, options.get("weights"), dequantize)
        notes = checkpoint.model_files.notes
    report = degree_report(
        model,
        dtypes,
        lambda parallel: engine.engine_rules(model, replace(target, parallel=parallel)),
        parallels,
        cache_dtype=dtype_named(options.get("kv_dtype"), "`kv_dtype=`") or _cache_dtype(model, dtypes),
        memory=memory,
    )
    plain = Model(model.architecture, without_quantization(model.config))
    return replace(report, assumptions=(*report.assumptions, *notes), parameters=parameters(plain))


def _by_layout(source: Checkpoint | PathLike, to: str, path: str, parallels: Sequence[Parallel], options: DegreeOptions) -> DegreeReport:
    """The sizes that a learned layout covers. Raises RequestError for options that say something about the KV cache or the weights."""
    layout = read_layout(path)
    unused = sorted(name for name, value in options.items() if name not in ("layout", "engine_version") and value)
    if unused:
        raise RequestError(f"`{unused[0]}=` does not apply with `layout=`", why="A layout says only what ranks hold", do="Leave it out")
    check_engine(layout, to, options.get("engine_version"))
    files = source.model_files if isinstance(source, Checkpoint) else find_model_files(open_base(source))
    check_config(layout, files.config)
    return learned_degree_report(layout, str((files.config or {}).get("model_type")), parallels)


def _engine(to: str) -> ServingFormat:
    """The serving engine's format of that name. Raises RequestError, listing the serving engines, if it is another kind of format."""
    engine = registry.target(to)
    if not isinstance(engine, ServingFormat):
        raise RequestError(
            f"`to={to}`: no serving engine loads it rank by rank", do=f"Those that do are {', '.join(registry.serving_formats())}"
        )
    return engine


def _memory(options: DegreeOptions) -> GpuMemory | None:
    """A GPU's memory, if the caller gave it."""
    nbytes, reserve = cast(int | None, options.get("gpu_memory")), cast(int | None, options.get("reserve"))  # texts have been read
    longest = options.get("max_model_len")
    utilization = options.get("gpu_memory_utilization")
    if nbytes is None:
        if longest or reserve is not None or utilization is not None:
            raise RequestError("how much fits depends on the memory of a GPU, which is not given", do="Add `gpu_memory=`, such as 80GiB")
        return None
    if nbytes < 1:
        raise RequestError(f"`gpu_memory={nbytes}`: a GPU has some memory", do="Give its size, such as 80GiB")
    reserve = nbytes * _RESERVED // 100 if reserve is None else reserve
    return GpuMemory(nbytes, 0.9 if utilization is None else utilization, reserve, longest)


def _refuse_for_bare(options: DegreeOptions) -> None:
    """Raises RequestError for an option that is about stored weights."""
    for name in ("weights", "model", "vocab_size"):
        if options.get(name) is not None:
            raise RequestError(
                f"`{name}=` does not apply to a directory with nothing but a config.json",
                why="It is about the weights of a checkpoint",
                do="Leave it out",
            )


def _stored_model(source: Checkpoint, target: Target, weights: Weights | None, dequantize: bool) -> tuple[Model, dict[str, DType]]:
    """A checkpoint's model, and the element type of each of its weights as a conversion would store it."""
    check_nothing_unanswered(source)
    config, content = source.model_files.config, source.content(Selection(weights, drop_unknown=True))
    check_has_settings(model_of(config, source.architecture).config, source.index.element_types)
    check_against_model(content, partial=False, strict=True, optional=content.not_needed)
    check_globs("`keep_dtype=`", target.keep_dtype, content.weights)
    kept_for = quantized_names(content, config)
    if dequantize:
        content, kept_for = with_values(content, config), frozenset()
    assert content.model is not None
    target = replace(target, dtype_kept_for=kept_for)
    return content.model, content.implied_dtypes | {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}


def _declared_model(model: Model, target: Target, dequantize: bool) -> tuple[Model, dict[str, DType]]:
    """A model without stored weights, and the element type of each weight, which follows from --dtype or the config."""
    named = model.config.get("dtype") or model.config.get("torch_dtype")
    dtype = target.dtype or from_user(str(named))
    if dtype is None:
        raise RequestError(f"the config does not say of which element type the weights are, but {named!r}", do="Say it with `dtype=bf16`")
    check_globs("`keep_dtype=`", target.keep_dtype, model.weights)
    uncast = from_user(str(named)) or dtype
    stored = {
        w.name: w.component_dtype or (uncast if w.form or matches(w.name, target.keep_dtype) else dtype) for w in model.weights.values()
    }
    if not dequantize:
        return model, stored
    plain = Model(model.architecture, without_quantization(model.config))
    quantized = {name for name in plain.weights if name not in stored or model.weights[name].form}
    return plain, {name: (target.dtype or BF16) if name in quantized else stored[name] for name in plain.weights}


def _cache_dtype(model: Model, dtypes: Mapping[str, DType]) -> DType:
    """The element type of the KV cache unless told: that of the model. Weights in 8 bits do not change it: vLLM 0.32 (--kv-cache-dtype
    auto) and SGLang take the type of the config then."""
    dtype = model_dtype(model, dtypes)
    return dtype if dtype.itemsize > 1 else from_user(str(model.config.get("dtype") or model.config.get("torch_dtype"))) or BF16
