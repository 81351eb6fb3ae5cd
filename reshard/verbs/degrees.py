"""What one asks before anything runs: `estimate`, what training needs, and `degrees`, at which sizes a model can be served.

Both read a config, or a checkpoint's metadata; no weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, find_model_files
from reshard.canonical.content import Selection, check_against_model
from reshard.canonical.dequantization import dequantized, quantized_names, without_quantization
from reshard.errors import RequestError
from reshard.geometry.dtypes import BF16, F8, F32, DType, from_user
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.models.architecture import Architecture
from reshard.models.declared.reader import named_architecture
from reshard.models.lookup import find_model, known_model_types
from reshard.models.model import Model
from reshard.plans.target import Target
from reshard.serving import capacity
from reshard.serving.capacity import DegreeReport, Memory
from reshard.storage.tar import open_tree
from reshard.verbs.checkpoint import Checkpoint, Weights, check_answers, dtype_named, open

PathLike = str | os.PathLike[str]


def degrees(
    source: Checkpoint | PathLike,
    *,
    to: str,
    tp: Sequence[int] = (1, 2, 4, 8),
    pp: Sequence[int] = (1,),
    ep: bool = False,
    gpu_memory: int | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.9,
    reserve: int = 0,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    keep_dtype: tuple[str, ...] = (),
    weights: Weights = None,
    dequantize: bool = False,
    engine_version: str | None = None,
    model: PathLike | None = None,
    vocab_size: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> DegreeReport:
    """What each rank of a serving engine would hold at every tp x pp, or why it would not serve the model so.

    source: a checkpoint, or a folder with nothing but the model's config.json, which then says the element type. ep: the tensor-parallel
    ranks share whole experts. gpu_memory: bytes of one GPU; the engine takes that part of it, of which `reserve` bytes are neither for
    weights nor for the cache. With max_model_len the sequences of that length that fit at once are counted. dtype, keep_dtype, weights,
    dequantize, engine_version: as for a conversion.

    Raises: RequestError if the format is no serving engine's, or the engine does not serve the model.
    """
    engine = registry.writer(to)
    if not hasattr(engine, "engine_rules"):
        able = (name for name, found in registry.formats().items() if hasattr(found, "engine_rules"))
        raise RequestError(f"--to {to}: no serving engine loads it rank by rank", do=f"Those that do are {', '.join(able)}")
    if gpu_memory is None and (max_model_len or reserve):
        raise RequestError("how much fits depends on the memory of a GPU, which is not said", do="Say it with --gpu-memory, such as 80GiB")
    asked = Target(to, ONE_RANK, dtype_named(dtype), keep_dtype, engine_version)
    if _is_bare(source):
        described, dtypes = _declared_model(find_described(source, architecture), asked, dequantize)
    else:
        opened = _opened(source, model=model, vocab_size=vocab_size, architecture=architecture)
        described, dtypes = _stored_model(opened, asked, weights, dequantize)
    memory = None if gpu_memory is None else Memory(gpu_memory, gpu_memory_utilization, reserve, max_model_len)
    return capacity.degrees(
        described,
        dtypes,
        lambda parallel: engine.engine_rules(described, replace(asked, parallel=parallel)),
        [Parallel(each_tp, each_pp, each_tp if ep else 1) for each_pp in pp for each_tp in tp],
        cache_dtype=dtype_named(kv_dtype, "--kv-dtype"),
        memory=memory,
    )


def _is_bare(source: Checkpoint | PathLike) -> TypeGuard[PathLike]:
    """Whether a folder has a config, and no weights in any format that is known."""
    if isinstance(source, Checkpoint):
        return False
    files = open_tree(source)
    return find_model_files(files).config is not None and not any(found.detect(files) for found in registry.formats().values())


def _opened(source: Checkpoint | PathLike, **said: Any) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else open(source, **said)


def _stored_model(opened: Checkpoint, asked: Target, weights: Weights, dequantize: bool) -> tuple[Model, dict[str, DType]]:
    """A checkpoint's model, and the element type of each of its weights as a conversion would store it."""
    check_answers(opened)
    config, content = opened.model_files.config, opened.content(Selection(weights))
    find_declared(config, opened.architecture)
    check_against_model(content, partial=False, strict=True)
    fixed = quantized_names(content, config)
    if dequantize:
        content, fixed = dequantized(content, config), frozenset()
    assert content.model is not None
    target = replace(asked, dtype_kept_for=fixed)
    return content.model, {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}


def _declared_model(model: Model, asked: Target, dequantize: bool) -> tuple[Model, dict[str, DType]]:
    """The same of a model without weights: its config says their element type, or --dtype, and which of them are quantised."""
    said = model.config.get("dtype") or model.config.get("torch_dtype")
    own = asked.dtype or from_user(str(said))
    if own is None:
        raise RequestError(f"the config does not say of which element type the weights are, but {said!r}", do="Say it with --dtype bf16")
    stored = {w.name: F8 if w.scales else F32 if w.scale else own for w in model.weights.values()}
    if not dequantize:
        return model, stored
    values = Model(model.architecture, without_quantization(model.config))
    return values, {name: (asked.dtype or BF16) if stored[name] == F8 else stored[name] for name in values.weights}


def find_described(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model whose config.json lies in a folder, with weights or without; or that a checkpoint's own settings describe."""
    return find_declared(find_model_files(open_tree(path)).config or open(path).model_files.config, architecture)


def find_declared(config: Mapping[str, Any] | None, architecture: Architecture | PathLike | None = None) -> Model:
    """The model that a config describes. Raises RequestError if there is none, or its architecture is not declared."""
    if config is None:
        raise RequestError(f"there is no {CONFIG} that says which model this is", do="Give the directory of the model's config")
    found = find_model(config, None if architecture is None else named_architecture(architecture))
    if found is None:
        raise RequestError(
            f"the architecture {config.get('model_type')!r} is not declared, or its weights are quantised in a way that is not known",
            why="What its weights are is not guessed",
            do=f"Known are {', '.join(known_model_types())}; another one can be declared in a file for --architecture",
        )
    return found
