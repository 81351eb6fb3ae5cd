"""What one asks before anything runs: `estimate`, what training needs, and `degrees`, at which sizes a model can be served.

Both read a config, or a checkpoint's metadata; no weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from reshard import estimates, registry, serving, verbs
from reshard.activations import Batch
from reshard.architecture import Architecture, Model, find_model, known_model_types
from reshard.archives import open_tree
from reshard.canonical import Selection, check_against_model
from reshard.declarations import named_architecture
from reshard.dequantization import dequantized, quantized_names, without_quantization
from reshard.dtypes import BF16, F8, F32, DType, from_user
from reshard.errors import RequestError
from reshard.estimates import BytesPer, Estimate, Training
from reshard.model_files import CONFIG, find_model_files
from reshard.parallel import ONE_RANK, Parallel
from reshard.plans import Target
from reshard.schedules import Schedule
from reshard.serving import Degrees, Memory

PathLike = str | os.PathLike[str]


def estimate(
    source: PathLike | Model | int,
    *,
    zero: int | Sequence[int] = estimates.ZERO_STAGES,
    gpus: int | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vp: int = 1,
    schedule: str = "1f1b",
    microbatches: int = 1,
    seq_len: int | None = None,
    micro_batch: int = 1,
    recompute: Any = "none",
    sequence_parallel: bool = False,
    flash_attention: bool = False,
    activations: str = "published",
    stage_layers: tuple[int, ...] | None = None,
    vocab_multiple: int = 1,
    bytes_per: BytesPer = estimates.ADAM,
    link: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> Estimate:
    """What each rank of a training run holds: of the model whose config (or checkpoint) lies at `source`, or of so many parameters.

    zero: stages of ZeRO, 0 to 3; FSDP is 3. gpus or dp: how many ranks there are, or how many of them are data-parallel. Without seq_len
    activations are not counted. architecture: a declared model type, or a file that declares one.

    Raises: RequestError if the model does not divide by the sizes.
    """
    sizes = Parallel(tp, pp, ep, _data_parallel(gpus, dp, tp, pp))
    batch = None
    if seq_len is not None:
        batch = Batch(seq_len, micro_batch, tp, sequence_parallel, recompute, scores=not flash_attention)
    training = Training(sizes, Schedule(schedule, pp, microbatches, vp), batch, activations, bytes_per, stage_layers, vocab_multiple, link)
    subject = source if isinstance(source, int) else _trained(source, architecture)
    return estimates.estimate(subject, training, (zero,) if isinstance(zero, int) else tuple(zero))


def degrees(
    source: verbs.Checkpoint | PathLike,
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
    weights: verbs.Weights = None,
    dequantize: bool = False,
    engine_version: str | None = None,
    model: PathLike | None = None,
    vocab_size: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> Degrees:
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
    asked = Target(to, ONE_RANK, verbs.dtype_named(dtype), keep_dtype, engine_version)
    if _is_bare(source):
        described, dtypes = _declared_model(find_described(source, architecture), asked, dequantize)
    else:
        opened = _opened(source, model=model, vocab_size=vocab_size, architecture=architecture)
        described, dtypes = _stored_model(opened, asked, weights, dequantize)
    memory = None if gpu_memory is None else Memory(gpu_memory, gpu_memory_utilization, reserve, max_model_len)
    return serving.degrees(
        described,
        dtypes,
        lambda parallel: engine.engine_rules(described, replace(asked, parallel=parallel)),
        [Parallel(each_tp, each_pp, each_tp if ep else 1) for each_pp in pp for each_tp in tp],
        cache_dtype=verbs.dtype_named(kv_dtype, "--kv-dtype"),
        memory=memory,
    )


def _is_bare(source: verbs.Checkpoint | PathLike) -> TypeGuard[PathLike]:
    """Whether a folder has a config, and no weights in any format that is known."""
    if isinstance(source, verbs.Checkpoint):
        return False
    files = open_tree(source)
    return find_model_files(files).config is not None and not any(found.detect(files) for found in registry.formats().values())


def _opened(source: verbs.Checkpoint | PathLike, **said: Any) -> verbs.Checkpoint:
    return source if isinstance(source, verbs.Checkpoint) else verbs.open(source, **said)


def _stored_model(opened: verbs.Checkpoint, asked: Target, weights: verbs.Weights, dequantize: bool) -> tuple[Model, dict[str, DType]]:
    """A checkpoint's model, and the element type of each of its weights as a conversion would store it."""
    verbs.check_answers(opened)
    config, content = opened.model_files.config, opened.content(Selection(weights))
    find_declared(config, opened.architecture)
    check_against_model(content, partial=False, strict=True)
    fixed = quantized_names(content, config)
    if dequantize:
        content, fixed = dequantized(content, config), frozenset()
    assert content.model is not None
    target = replace(asked, fixed=fixed)
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


def _trained(source: PathLike | Model, architecture: Architecture | PathLike | None) -> Model:
    """The model as it is trained: not quantised."""
    model = source if isinstance(source, Model) else find_described(source, architecture)
    return Model(model.architecture, without_quantization(model.config))


def find_described(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model whose config.json lies in a folder, with weights or without; or that a checkpoint's own settings describe."""
    return find_declared(find_model_files(open_tree(path)).config or verbs.open(path).model_files.config, architecture)


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


def _data_parallel(gpus: int | None, dp: int | None, tp: int, pp: int) -> int:
    """How many data-parallel ranks there are. Raises RequestError if the numbers contradict each other."""
    if gpus is None:
        return dp or 1
    if gpus % (tp * pp) or (dp is not None and dp * tp * pp != gpus):
        product = " x ".join(f"{name} {size}" for name, size in (("DP", dp), ("TP", tp), ("PP", pp)) if size)
        raise RequestError(f"{gpus} GPUs are not {product}", do="Leave out --dp, or change one of the sizes")
    return gpus // (tp * pp)
