"""How vLLM stores a model: the EngineRules of each version. The differences between its model classes stand in the declarations of the
models, under `engines: vllm`. What changed in the keys of all models between versions is one of CHANGES.

Measured on 0.32.0 (fixtures/vllm: the tensors of real ranks) and on the model classes of older versions (fixtures/vllm_versions).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import F32, I32
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import plural
from reshard.models.engine_rules import EngineRules, ExtraTensor, Fusion, Rename, Version, version_numbers
from reshard.models.model import Model
from reshard.models.quantization import quantization_settings, settings_key
from reshard.models.roles import heads
from reshard.models.stored_forms import StoredForm
from reshard.models.weights import ModelWeight
from reshard.plans.layout import Target
from reshard.serving.legality import about_version, refused

NEWEST = "0.32.0"
# The variable by which vLLM takes the layers of each stage (distributed/utils.py, get_pp_indices).
_PARTITION = "VLLM_PP_LAYER_PARTITION"


# The first versions whose keys differ from those of the version before, for all models.
OLDEST = (0, 8, 5)
LATENT_FUSED = (0, 10)  # q_a_proj and kv_a_proj of latent attention are one tensor
WIDE_CORRECTION = (0, 10, 2)  # the router's correction bias is stored in float32, whatever its element type in the model
EXPERT_MAP = (0, 11)  # a rank with some of the experts stores a map that names them; such files are not written
ATTENTION_SCALES = (0, 14)  # the scales of attention are tensors of the state dict
QUANTIZED = (0, 15)  # the attention of a quantized model has today's placeholder scales
ROUTED_EXPERTS = (0, 24)  # experts are in a module `routed_experts`
NO_EXPERT_MAP = (0, 27)
STAGES = (0, 32)  # the names of the files contain the pipeline stage
CHANGES = (OLDEST, LATENT_FUSED, WIDE_CORRECTION, EXPERT_MAP, ATTENTION_SCALES, ROUTED_EXPERTS, NO_EXPERT_MAP, STAGES)


def as_text(numbers: Version) -> str:
    """(0, 32) as 0.32."""
    return ".".join(map(str, numbers))


_FUSIONS = (
    Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"),
    Fusion(("mlp.gate", "mlp.up"), "gate_up_proj"),
    Fusion(("shared_expert.gate", "shared_expert.up"), "gate_up_proj"),
)
# A layer of state-space heads takes more ranks than groups only if it has one group (layers/mamba/mamba_mixer2.py).
_GROUPS = dict.fromkeys(("ssm.b", "ssm.c", "ssm.conv_b", "ssm.conv_c"), heads("ssm_groups", copies=True, only_one=True))
_SCALES = tuple(
    ExtraTensor("attention.o", f"attn.{name}", 1.0, F32, since=ATTENTION_SCALES)
    for name in ("_k_scale", "_q_scale", "_v_scale", "_prob_scale")
)
# In the attention of a quantized model, -1 or a scale of 1 means "not given" (layers/quantization/kv_cache.py).
_NOT_GIVEN = tuple(ExtraTensor("attention.o", f"attn.{name}_scale", -1.0, None) for name in ("q", "k", "v", "prob"))
# Those that a checkpoint gives are kept in the type of the model, like the placeholders.
_CACHE_SCALES = ("attention.k_scale", "attention.v_scale", "attention.k_scales", "attention.v_scales")
_ROUNDED = (
    "the scales of the KV cache are rounded to the type of the model, in which vLLM holds them; `reshard verify --cast` compares them so"
)
_UNSET = (
    "the input scales of experts (w13_input_global_scale, w2_input_global_scale) are written as 1: activations are not quantized, so vLLM "
    "does not use them, and in files of its own they have any value. Comparisons leave them out"
)


def _of_compressed_tensors(each: int | str) -> tuple[ExtraTensor, ...]:
    """each: how many scales a rank has."""
    return (
        *(ExtraTensor("attention.o", f"attn.{name}_scale", 1.0, F32, (each,)) for name in ("q", "k", "v")),
        *(ExtraTensor("attention.o", f"attn.{name}_zero_point", 0.0, None, (each,)) for name in ("q", "k", "v")),
    )


_PLACEHOLDERS = {
    "fp8": _NOT_GIVEN,
    "quark": _NOT_GIVEN,
    "modelopt": _NOT_GIVEN,
    "modelopt_fp4": _NOT_GIVEN,
}


def rules_for_target(model: Model, target: Target) -> EngineRules:
    """The rules of the target's version of vLLM. Raises RequestError if that version cannot load the files at the target's sizes."""
    version = target.engine_version or NEWEST
    _check_packed(model, version, target.parallel)
    numbers, known = version_numbers(version, NEWEST), _changes(model)
    if numbers < known[0]:
        oldest = as_text(known[0])
        raise UnsupportedError(
            f"`engine_version={version}`: the oldest vLLM whose keys for {model.architecture.model_type} are known is {oldest}",
            do=f"Use vLLM {oldest} or newer, or convert to hf, which every version loads",
        )
    if target.parallel.pp > 1 and numbers < STAGES:
        raise UnsupportedError(
            f"`pp={target.parallel.pp}`: vLLM {version} cannot load pre-sharded stages",
            why="Its file names do not contain the stage, so that it would load files of another stage",
            do=f"Use `pp=1`, or vLLM {as_text(STAGES)} or newer",
        )
    if target.parallel.ep > 1 and EXPERT_MAP <= numbers < NO_EXPERT_MAP:
        raise UnsupportedError(
            f"`ep={target.parallel.ep}`: vLLM {version} needs a map of experts in every rank's file, which reshard does not write",
            do=f"Use vLLM {as_text(NO_EXPERT_MAP)} or newer, or leave out `ep=`",
        )
    rules, stages = _rules(model, max(since for since in known if since <= numbers)), _stages_of(model, target)
    return rules if stages is None else replace(rules, layers_per_stage=lambda layers, pp: stages)


def _check_packed(model: Model, version: str, parallel: Parallel) -> None:
    """Raises UnsupportedError for packed weights that vLLM does not load, or whose shape was not compared or depends on its kernel.

    Source: vLLM 0.32, layers/quantization: auto_gptq.py, auto_awq.py, modelopt.py, mxfp4.py (GptOssMxfp4MoEMethod), compressed_tensors_moe.
    """
    quantization = model.quantization
    if quantization is None:
        return
    if quantization.cache_scales and "kv_rank" in model.dimensions:
        raise UnsupportedError("the KV cache of latent attention is quantized, whose scales vLLM holds under other names", do=_TO_HF)
    is_modelopt = quantization.method.startswith("modelopt")
    if is_modelopt and any(form.name == "NVFP4" and not _has_input_scales(form) for form in quantization.forms):
        raise UnsupportedError("the weights are stored in NVFP4 without input_scale, which vLLM expects in its files of ranks", do=_TO_HF)
    settings, is_awq = quantization_settings(model.config), "auto_awq" in str(quantization_settings(model.config).get("packing_format"))
    if quantization.method in ("gptq", "auto-round") and not is_awq and not settings.get("sym", True):
        raise UnsupportedError("the weights are quantized by GPTQ with zero points (sym: false), which vLLM does not load", do=_TO_HF)
    if quantization.method == "intel/auto-round":
        raise UnsupportedError("the config names the method intel/auto-round, and vLLM knows it as auto-round alone", do=_TO_HF)
    if len(quantization.forms) > 1 and quantization.library is None:
        _check_joined(model)
    heads = {model.dimensions_in(layer).get("kv_heads") for layer in range(model.dimensions["layers"])}
    if any(scale.is_vector for scale in quantization.cache_scales) and len(heads) > 1:
        raise UnsupportedError("the KV cache has a scale for each head, and the layers have different numbers of heads", do=_TO_HF)
    experts, quirks = _packed_experts(model), model.quirks_of("vllm") or EngineRules()
    form, ranks = experts[0].form if experts else None, 1 if parallel.ep > 1 else parallel.tp
    is_compared = form is not None and form.unit == "FP8 block" and not is_modelopt
    has_one_form = all(weight.form is form for weight in experts)
    if form is None or (is_compared and has_one_form):
        return
    if not has_one_form:
        why = "vLLM takes one form for all experts of a layer"
    elif form.unit not in _PACKED_EXPERTS.get(quantization.method, ()):
        why = "The shapes in which vLLM holds such experts depend on the kernel that it chooses for the GPU at hand, or were not compared"
    elif version_numbers(version, NEWEST) < _PACKED_EXPERTS_SINCE:
        why = f"Older versions than {as_text(_PACKED_EXPERTS_SINCE)} hold such experts in shapes that depend on the kernel"
    elif form.unit.endswith("group or word") and not _fits_marlin(model, form):
        why = "vLLM holds them in other shapes unless the hidden size is a multiple of 128, and groups are of 32, 64 or 128"
    elif refusal := refused(model, quirks, packed_ranks=ranks):
        why = refusal
    elif is_modelopt and form.unit in ("NVFP4 group", "FP8 block") and not _has_input_scales(form):
        why = "They have no input scales, which vLLM expects in its files of ranks"
    else:
        return
    raise UnsupportedError(f"the experts are stored in {form.name}", where=experts[0].name, why=why, do=_TO_HF)


def _check_joined(model: Model) -> None:
    """Raises UnsupportedError if weights that vLLM joins into one differ in the number of bits or the size of their groups."""
    from reshard.canonical.quantizing import fused_sets

    forms = {name: weight.form for name, weight in model.weights.items() if weight.form and weight.component is weight.form.codes}
    for names in fused_sets(model, forms).values():
        for name in names:
            if forms[name].components != forms[names[0]].components:
                raise UnsupportedError(
                    f"it is stored in {forms[name].name}, and {names[0]} in {forms[names[0]].name}",
                    where=name,
                    why="vLLM joins the two into one weight, and refuses such models as well",
                    do=_TO_HF,
                )


def _has_input_scales(form: StoredForm) -> bool:
    return any(component.use == "input scale" for component in form.components)


def _fits_marlin(model: Model, form: StoredForm) -> bool:
    """Whether vLLM lays out experts by AWQ or GPTQ as Marlin's (utils/marlin_utils.py, check_moe_marlin_supports_config). A single group
    of all input features was compared for neither."""
    group = next(component.grid[1] for component in form.components if component.use == "scale")
    return model.dimensions["hidden"] % 128 == 0 and group in (32, 64, 128)


# Experts that vLLM allocates in the same shapes whatever its kernel is. Those of gpt-oss are rounded up for the kernel; vLLM copies what a
# file holds to the front of them, and the rest is zero.
_PACKED_EXPERTS = {
    "compressed-tensors": ("MXFP4 group", "MXFP8 group", "NVFP4 group", "INT4 group", "INT8 group"),
    "mxfp4": ("MXFP4 group",),
    "fp8": ("MXFP4 group",),  # of DeepSeek-V4
    "awq": ("INT4 group or word",),
    "gptq": ("INT4 group or word",),
    "modelopt": ("FP8 block", "NVFP4 group", "MXFP8 group"),
    "modelopt_fp4": ("NVFP4 group",),
}
_PACKED_EXPERTS_SINCE = (0, 32)
_TO_HF = "Convert to hf, which vLLM loads as well, or add `dequantize=True`"


def notes(model: Model, target: Target) -> tuple[str, ...]:
    """Notes about a version or a model class that was not measured."""
    notes = about_version("vLLM", target.engine_version or NEWEST, NEWEST, model, is_known="vllm" in model.architecture.engines)
    if model.quantization and any(scale.element_type is None for scale in model.quantization.cache_scales):
        notes = (*notes, _ROUNDED)
    notes = (*notes, *_about_stages(model, target), *_notes_on_head(model))
    if _rules(model, OLDEST).unset_input_scales:
        notes = (*notes, _UNSET)
    declared = model.architecture
    quirks = declared.engines.get("vllm")
    if quirks is None or declared.head or declared.class_name in (None, model.class_name) or model.quirks_of("vllm") is not quirks:
        return notes
    return (*notes, f"the config names the class {model.class_name}; the tensors are those of vLLM's class for {declared.class_name}")


def all_rules(model: Model) -> dict[Version, EngineRules]:
    """The rules for the model, by the first version with them, oldest first: one for each version that changed something."""
    return {since: _rules(model, since) for since in _changes(model)}


def _changes(model: Model) -> list[Version]:
    """The versions that changed something in the rules for the model, oldest first."""
    quirks = model.quirks_of("vllm") or EngineRules()
    first = max(quirks.since, _rules_of_head(model).since, QUANTIZED if model.quantization else OLDEST)
    return [since for since in sorted({first, *quirks.changes, *CHANGES}) if since >= first]


def quantized_modules(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, object]:
    """The key of config.json that lists the modules quantized by GPTQ, if it is not there.

    Without it vLLM takes them from the names in the headers of the files, and looks there for the parts of fused modules, which files of
    ranks have under other names (AutoGPTQConfig.maybe_update_config). For AWQ it takes the modules that are not quantized, and looks for
    fused names, too (auto_awq.py). The list has the form that transformers' GPTQConfig documents, a list of lists.
    """
    settings, listed = quantization_settings(config), "modules_in_block_to_quantize"
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "gptq" or settings.get(listed):
        return {}
    packed = (name.removesuffix(".qweight") for name in names if name.endswith(".qweight"))
    modules = dict.fromkeys(re.sub(r"(?<=\.experts)\.\d+\..*", "", module) for module in packed)
    return {f"{settings_key(config)}.{listed}": [[*modules]]}


def _stages_of(model: Model, target: Target) -> tuple[int, ...] | None:
    """The number of layers on each stage that the target names; None if it names none. Raises RequestError if they are not the model's."""
    given: tuple[int, ...] | None = target.options.get("pp_layers")
    layers, pp = model.dimensions["layers"], target.parallel.pp
    if given is not None and (len(given) != pp or sum(given) != layers or 0 in given):
        own = remainder_before_last_stage(layers, pp)
        raise RequestError(
            f"`pp_layers={_listed(given)}`: the model has {layers} layers, on {plural(pp, 'pipeline stage')}",
            do=f"Give the layers of each stage, such as `pp_layers={_listed(own)}`",
        )
    return given


def stages_not_told(model: Model, target: Target) -> str | None:
    """Which stages vLLM would take instead of the target's if it were started in this environment; None if it would take these."""
    own, here = remainder_before_last_stage(model.dimensions["layers"], target.parallel.pp), _partition_here(target)
    listed = _listed(given := _stages_of(model, target) or own)
    if here == listed or (given == own and not here):
        return None
    start = f"start vLLM with {_PARTITION}={listed}" if given != own else f"start vLLM without {_PARTITION}"
    return f"the stages have {listed} layers, and {_PARTITION} is {here or 'not set'} here: {start}"


def _partition_here(target: Target) -> str:
    """The layers of the stages that this environment gives to vLLM; empty for none."""
    return os.environ.get(_PARTITION, "").replace(" ", "") if target.parallel.pp > 1 else ""


def _about_stages(model: Model, target: Target) -> Iterator[str]:
    """What vLLM must be told of the stages, and what it is told here."""
    here = _partition_here(target)
    if given := _stages_of(model, target):
        yield f"the stages have {_listed(given)} layers: start vLLM with {_PARTITION}={_listed(given)}"
    elif here and here != (own := _listed(remainder_before_last_stage(model.dimensions["layers"], target.parallel.pp))):
        what = f"{_PARTITION}={here} is set here, and the stages have {own} layers"
        yield f"{what}: where it is set, vLLM refuses the files; `pp_layers={here}` writes those that it takes"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def remainder_before_last_stage(layers: int, pp: int) -> tuple[int, ...]:
    """The number of layers on each stage: equal, and the remainder one by one to the stages before the last (distributed/utils.py)."""
    base, remainder = divmod(layers, pp)
    counts = [base] * pp
    for i in range(2, remainder + 2):
        counts[-i] += 1
    return tuple(counts)


def _rules(model: Model, version: Version) -> EngineRules:
    method = model.quantization.method if model.quantization else ""
    form = next((weight.form for weight in _packed_experts(model)), None)
    nvfp4 = form if form and form.unit == "NVFP4 group" else None
    is_modelopt_nvfp4 = method.startswith("modelopt") and nvfp4 is not None
    rules = EngineRules(
        engine="vLLM",
        fusions=tuple(_fusions(version)),
        extra_tensors=tuple(_extra_tensors(model)),
        vocabulary_multiple=lambda *_: model.architecture.vocabulary_multiple or 64,
        layers_per_stage=remainder_before_last_stage,
        names=(
            Rename(r"(?<!\.attn)(?:\.[kv]_proj)?\.([kv]_scale)$", r".attn.\1"),
            Rename(r"\.([kv])_proj\.output_scale$", r".attn.\1_scale"),  # of Quark
        ),
        splits=_GROUPS,
        dtypes={"scale": F32, "router.table": I32, "router.correction": F32 if version >= WIDE_CORRECTION else None}
        | dict.fromkeys(_CACHE_SCALES),
        # Experts by GPTQ have them even where the model has none (layers/quantization/auto_gptq.py).
        zero_expert_biases=method == "gptq",
        without_axes=frozenset(_CACHE_SCALES) if method == "fp8" else frozenset(),  # layers/quantization/kv_cache.py
        unset_input_scales=method == "compressed-tensors" and nvfp4 is not None and not _has_input_scales(nvfp4),
        # ModelOpt's experts in NVFP4 keep two (layers/quantization/modelopt.py).
        scales_kept_once=frozenset() if is_modelopt_nvfp4 else frozenset({"input_scale"}),
        refuses={"ep > 1": _GLOBAL_SCALES} if is_modelopt_nvfp4 else {},
    )
    return _rules_of_head(model).with_quirks(rules).with_quirks(model.quirks_of("vllm") or EngineRules()).at(version)


def _rules_of_head(model: Model) -> EngineRules:
    """What a head that is not a language model's adds to the rules."""
    if model.architecture.head is None:
        return EngineRules()
    from .heads import pooling_rules

    return pooling_rules(model, model.architecture.head)


def _notes_on_head(model: Model) -> tuple[str, ...]:
    if model.architecture.head is None:
        return ()
    from .heads import notes_on_head

    return notes_on_head(model.architecture.head)


# ModelOptNvFp4FusedMoE.create_weights, use_global_sf.
_GLOBAL_SCALES = "which ranks hold the input scales of experts depends on the kernel that vLLM chooses for the GPU at hand"


def _packed_experts(model: Model) -> list[ModelWeight]:
    """The tensors in which the quantized weights of experts are stored."""
    return [weight for weight in model.weights.values() if weight.form and weight.role.startswith("expert.")] if model.quantization else []


def _fusions(version: Version) -> Iterator[Fusion]:
    experts = "routed_experts." if version >= ROUTED_EXPERTS else ""
    yield from _FUSIONS
    if version >= LATENT_FUSED:
        yield Fusion(("mla.q_a", "mla.kv_a"), "fused_qkv_a_proj")
    yield Fusion(("expert.gate", "expert.up"), f"{experts}w13")
    yield Fusion(("expert.gate_up",), f"{experts}w13")
    yield Fusion(("expert.down",), f"{experts}w2")
    yield Fusion(("expert.down_bias",), f"{experts}w2")


def _extra_tensors(model: Model) -> Iterator[ExtraTensor]:
    yield from _SCALES
    # With MIXED_PRECISION vLLM has a method for the KV cache only if it is quantized (ModelOptMixedPrecisionConfig.get_quant_method).
    is_mixed = any(form.modules is not None for form in model.quantization.forms) if model.quantization else False
    if model.quantization and "kv_rank" not in model.dimensions and (model.quantization.cache_scales or not is_mixed):
        by_head = any(scale.is_vector for scale in model.quantization.cache_scales)
        is_compressed = model.quantization.method == "compressed-tensors"
        yield from (
            _of_compressed_tensors("rank_kv_heads" if by_head else 1) if is_compressed else _PLACEHOLDERS.get(model.quantization.method, ())
        )
