"""The quantization that a config describes: how the quantized weights of the model are stored (stored_forms.py).

Sources: transformers 5.23, quantizers (finegrained_fp8, compressed_tensors, mxfp4); compressed-tensors 0.20, compressors; vLLM 0.32,
layers/quantization; NVIDIA ModelOpt 0.47; AutoAWQ 0.2.9; GPTQModel 7.7; published configs of DeepSeek-V3, Qwen3-FP8 and gpt-oss. MLX and
AutoRound are in libraries/.

Where the settings stand:

    config.json               quantization_config, text_config.quantization_config, or compression_config (compressed-tensors before 0.5)
    hf_quant_config.json      ModelOpt; alone up to 0.29, beside those of config.json later
    quantize_config.json      AutoGPTQ, and early AutoAWQ
    quant_config.json         AutoAWQ
    config.json, quantization MLX, with a copy under quantization_config; both without a quant_method

A file is read if config.json has no settings; its content then stands in the config, under quantization_config, as engines put it there.
Source: vLLM 0.32, transformers_utils/config.py (get_config) and model_loader/weight_utils.py (get_quant_config).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import fp4, integers, signed_byte
from reshard.models.stored_forms import BlockShape, Component, Quantization, StoredForm, UnknownForm

SETTING = "quantization_config"
_OLD_SETTING = "compression_config"
_MLX_SETTING = "quantization"
_INNER = "text_config"
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""The files beside config.json in which settings stand, in the order in which they are looked for."""

PLACES = f"{SETTING}, {_INNER}.{SETTING} and {_OLD_SETTING} of config.json, {', '.join(SETTINGS_FILES[:-1])} and {SETTINGS_FILES[-1]}"
"""All places, for a message."""


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """The settings in a config; None if it has none. They are a mapping unless the config is broken."""
    settings = next((settings for settings in _places(config).values() if settings), None)
    return _with_method(settings) if isinstance(settings, Mapping) else settings


def settings_key(config: Mapping[str, Any]) -> str | None:
    """The key under which the settings stand, with a dot before that of an inner config; None if there are none."""
    return next((key for key, settings in _places(config).items() if settings), None)


def _places(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get(_INNER)
    of_inner = inner.get(SETTING) if isinstance(inner, Mapping) else None
    if of_mlx := _settings_of_mlx(config):
        return {_MLX_SETTING: {**of_mlx, "quant_method": "mlx"}}
    return {SETTING: config.get(SETTING), f"{_INNER}.{SETTING}": of_inner, _OLD_SETTING: config.get(_OLD_SETTING)}


def _settings_of_mlx(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of MLX in a config; None if it has none."""
    settings = config.get(_MLX_SETTING)
    is_mlx = isinstance(settings, Mapping) and "quant_method" not in settings and {"bits", "group_size"} <= settings.keys()
    return settings if is_mlx else None


def with_stored_modules(config: Mapping[str, Any] | None, names: Iterable[str]) -> Mapping[str, Any] | None:
    """The config with the names of all quantized modules, if only the names in the files tell them, as for MLX."""
    settings = _settings_of_mlx(config or {})
    if config is None or settings is None:
        return config
    from reshard.models.libraries import mlx

    return {**config, _MLX_SETTING: mlx.with_modules(settings, names)}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, not quantized."""
    unwanted = {SETTING, _OLD_SETTING, settings_key(config)}
    plain = {key: value for key, value in config.items() if key not in unwanted}
    inner = plain.get(_INNER)
    if isinstance(inner, Mapping) and SETTING in inner:
        plain[_INNER] = {key: value for key, value in inner.items() if key != SETTING}
    return plain


def settings_of_file(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of one of SETTINGS_FILES as the settings of a config: with the method that wrote it, if it names none."""
    methods = {"hf_quant_config.json": "modelopt", "quant_config.json": "awq"}
    return {"quant_method": methods.get(name, "awq" if "w_bit" in content else "gptq"), **content}


def _with_method(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the name of their method: ModelOpt's can name their producer instead, compressed-tensors' is written in two ways."""
    method, producer = settings.get("quant_method"), settings.get("producer")
    if method is None and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        method = "modelopt"
    elif method is None and "config_groups" in settings:
        method = "compressed-tensors"
    elif isinstance(method, str):
        method = method.lower().replace("compressed_tensors", "compressed-tensors")
    return settings if method == settings.get("quant_method") else {**settings, "quant_method": method}


_FP8_TYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_BYTES, _WORDS = ("U8", "I8"), ("I32",)
_WHOLE: BlockShape = (None, None)
# AWQ puts column k of eight at the place _AWQ[k] of the word (awq/utils/packing_utils.py).
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config describes; None if there is none, or its method is not known (`unknown_quantization`)."""
    settings = quantization_settings(config)
    if not isinstance(settings, Mapping):
        return None
    try:
        return _quantization(settings, config)
    except UnknownForm:
        return None


def unknown_quantization(config: Mapping[str, Any]) -> str | None:
    """The method that a config names, if weights quantized by it cannot be read, and why; None if they can, or are not quantized."""
    settings = quantization_settings(config)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        return repr(settings)
    try:
        _quantization(settings, config)
    except UnknownForm as reason:
        return f"{settings.get('quant_method')}{reason}"
    return None


def check_has_settings(config: Mapping[str, Any], element_types: Mapping[str, str]) -> None:
    """Raises CheckpointError if weights are packed and a config does not say how. element_types: that of every stored tensor by name."""
    if quantization_settings(config):
        return
    for name in packed_names(element_types):
        raise CheckpointError(
            "the weight is packed, and no settings say how",
            where=name,
            why=f"None were found in {PLACES}",
            do="Copy the file with the settings beside config.json, or give the model's own config with `model=DIR`",
        )


_OF_CODES = re.compile(r"[._](q?weight|weight_packed|blocks|packed|codes)$")
_OF_SCALES = re.compile(r"[._](?=[^.]*(?:scale|zero|absmax|SCB|quant_map)[^.]*$)")


def packed_names(element_types: Mapping[str, str]) -> Iterator[str]:
    """The tensors that hold codes of quantized weights, whatever a config says: integers or 8-bit floats with scales, zero points or a
    table beside them, and integers that their name calls packed. element_types: that of every stored tensor by name."""
    codes = [name for name, dtype in element_types.items() if dtype in (*_FP8_TYPES, *_BYTES, *_WORDS, "I16", "U16", "U32")]
    scaled = {_OF_CODES.sub("", name[: at.start()]) for name in element_types if codes for at in _OF_SCALES.finditer(name)}
    for name in codes:
        is_packed = name.endswith((".qweight", ".weight_packed")) and element_types[name] not in _FP8_TYPES
        if is_packed or _OF_CODES.sub("", name) in scaled:
            yield name


def _quantization(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Quantization:
    method = settings.get("quant_method")
    if method == "mlx":
        from reshard.models.libraries import mlx

        return mlx.quantization(settings, config)
    if method == "modelopt" and isinstance(settings.get("quantization"), Mapping):
        settings = {**settings, **settings["quantization"]}
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
    excluded = next((settings[name] for name in names if settings.get(name)), ())
    if not isinstance(excluded, list | tuple):
        raise RequestError(
            f"the quantization_config of config.json excludes the modules {str(excluded)[:100]!r}; a list of names is expected",
            why="Which weights have scales depends on it",
            do="Give the model's own config with `model=DIR`",
        )
    read = _METHODS.get(str(method))
    if read is None:
        raise UnknownForm("")
    is_deepseek_v4 = method == "fp8" and str(config.get("model_type")).startswith("deepseek_v4")
    forms = _deepseek_v4(settings, config) if is_deepseek_v4 else read(settings)
    entries = [entry for listed in excluded for entry in _entries(str(listed), str(method))]
    dynamic = settings.get("dynamic")  # of GPTQModel, which leaves these modules as they are
    entries += ["re:" + key.removeprefix("-:") for key in dynamic if key.startswith("-:")] if isinstance(dynamic, Mapping) else []
    if read is _auto_round:
        from reshard.models.libraries import auto_round

        entries += auto_round.left_out(settings)
    scales = _cache_scales_of_quark(settings) if method == "quark" else _cache_scales(settings, str(method))
    # compressed-tensors quantizes the modules of linear layers, and its producers make each expert such a module.
    return Quantization(str(method), forms, tuple(entries), scales, by_expert=method == "compressed-tensors")


def _entries(listed: str, method: str) -> tuple[str, ...]:
    """The patterns for an entry in the list of excluded modules. ModelOpt up to 0.38 also lists words from the middle of a name, and the
    engine looks for them there (vLLM 0.32, modelopt.py, is_layer_excluded)."""
    is_part = method.startswith("modelopt") and "*" not in listed
    return (listed, f"*.{listed}", f"{listed}.*", f"*.{listed}.*") if is_part else (listed,)


def _cache_scales(settings: Mapping[str, Any], method: str) -> tuple[Component, ...]:
    """The scales of the KV cache. Raises UnknownForm if it is quantized to anything but FP8."""
    scheme, named = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    if not scheme and not named:
        return ()
    words = ("FP8", "static") if method == "fp8" else ("FP8",)
    is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) if isinstance(scheme, Mapping) else (scheme or named) in words
    if not is_fp8:
        raise UnknownForm(f" with the KV cache in {str(scheme or named)[:60]}")
    if isinstance(scheme, Mapping) and scheme.get("dynamic"):
        return ()
    if method == "fp8":  # of AutoFP8
        return tuple(Component(f"{kind}_scale", "scale", _WHOLE, single_shape=(1,)) for kind in "kv")
    if method.startswith("modelopt"):
        return tuple(Component(f"{kind}_proj.{kind}_scale", "scale", _WHOLE) for kind in "kv")
    if isinstance(scheme, Mapping) and scheme.get("strategy") == "attn_head":  # stored as [kv_heads, 1, 1]
        return tuple(Component(f"{kind}_scale", "scale", (1, None), is_vector=True, element_type="F32") for kind in "kv")
    return tuple(Component(f"{kind}_scale", "scale", _WHOLE, single_shape=(1,), element_type="F32") for kind in "kv")


def _cache_scales_of_quark(settings: Mapping[str, Any]) -> tuple[Component, ...]:
    """The scales of the KV cache by Quark, which quantizes the outputs of k_proj and v_proj (vLLM 0.32, quark.py, from_config)."""
    if not settings["export"].get("kv_cache_group"):
        return ()
    outputs = [of_module.get("output_tensors") for of_module in settings["layer_quant_config"].values()]
    kinds = {
        (each.get("dtype"), each.get("qscheme"), bool(each.get("is_dynamic"))) if isinstance(each, Mapping) else () for each in outputs
    }
    if kinds != {("fp8_e4m3", "per_tensor", False)}:
        raise UnknownForm(f" with the KV cache in {str(outputs)[:60]}")
    return tuple(Component(f"{kind}_proj.output_scale", "scale", _WHOLE) for kind in "kv")


def _fp8(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    block = settings.get("weight_block_size")
    if block is not None:
        # Weights are multiplied by weight_scale_inv, in spite of its name.
        return (_of_fp8(Component("weight_scale_inv", "scale", _block(block), element_type="F32")),)
    single = (1,) if settings.get("kv_cache_scheme") else ()  # of AutoFP8, which alone has this key
    inputs = (replace(_INPUT_SCALE, single_shape=single),) if settings.get("activation_scheme") == "static" else ()
    return (_of_fp8(Component("weight_scale", "scale", _WHOLE, single_shape=single, element_type="F32"), *inputs),)


def _deepseek_v4(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """Experts in MXFP4, tables of n-grams in MXFP8, everything else in FP8, and each scale called `scale`
    (vllm/models/deepseek_v4/quant_config.py, deepseek_v41/common/engram.py)."""
    block = _of_fp8(
        Component("scale", "scale", _block(settings.get("weight_block_size") or [128, 128]), read_as="F8_E8M0", element_type="F8_E8M0")
    )
    table = _microscaled(
        "MXFP8",
        Component("weight", "codes"),
        replace(_exponents("scale", 32), element_type="F8_E8M0"),
        weights=r".*\.engram\.embed\.weight",
    )
    experts = str(config.get("expert_dtype") or settings.get("expert_dtype") or "fp4")
    if experts == "fp8":
        return (table, block)
    codes = Component("weight", "codes", packing=fp4(), element_type="U8")
    return (_microscaled("MXFP4", codes, _exponents("scale", 32), weights=r".*\.experts\.[^.]+\.w[123]\.weight"), table, block)


def _of_fp8(scale: Component, *inputs: Component) -> StoredForm:
    is_blocked = any(size is not None and size > 1 for size in scale.block_shape)
    name = f"FP8 in blocks of {' x '.join(map(str, scale.block_shape))}" if is_blocked else "FP8"
    return StoredForm(name, "FP8 block", (Component("weight", "codes"), scale, *inputs), _FP8_TYPES)


def _block(value: Any) -> BlockShape:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_size(size) for size in value):
        raise RequestError(
            f"the quantization_config of config.json has the block size {str(value)[:100]}; two positive numbers are expected",
            why="The places of the scales depend on it",
            do="Give the model's own config with `model=DIR`",
        )
    return value[0], value[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _exponents(kind: str, group: int) -> Component:
    return Component(kind, "scale", (1, group), read_as="F8_E8M0", element_type="U8")


def _microscaled(name: str, codes: Component, *beside: Component, **more: Any) -> StoredForm:
    """A form with a scale for each group of input features."""
    types = _FP8_TYPES if codes.packing is None else _BYTES
    return StoredForm(name, f"{name} group", (codes, *beside), types, **more)


def _gpt_oss(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """The experts of gpt-oss: `*_blocks` [experts, out, in / 32, 16] and `*_scales`; the model's own tensor is [experts, in, out]
    (transformers, integrations/mxfp4.py)."""
    codes = Component("_blocks", "codes", packing=fp4(words=(16,)))
    return (_microscaled("MXFP4", codes, _exponents("_scales", 32), weights=r".*experts\.\w+_proj", transposed=True),)


def _modelopt(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """Source: ModelOpt 0.47, export/quant_utils.py (to_quantized_weight) and convert_hf_config.py."""
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        return _mixed(settings)
    form = _MODELOPT.get(algorithm)
    if form is None:
        raise UnknownForm(f" with quant_algo {algorithm[:40]}")
    if form.name == "NVFP4" and (settings.get("group_size") or 16) != 16:
        raise UnknownForm(f" with groups of {str(settings['group_size'])[:20]}")
    return (form,)


_INPUT_SCALE = Component("input_scale", "input scale", _WHOLE, element_type="F32")
_NVFP4 = (
    Component("weight", "codes", packing=fp4()),
    Component("weight_scale", "scale", (1, 16), element_type="F8_E4M3"),
    Component("weight_scale_2", "scale", _WHOLE, element_type="F32"),
)
_MODELOPT = {
    "FP8": _of_fp8(Component("weight_scale", "scale", _WHOLE, element_type="F32"), _INPUT_SCALE),
    "FP8_PER_CHANNEL_PER_TOKEN": _of_fp8(Component("weight_scale", "scale", (1, None), is_vector=True, element_type="F32")),
    "FP8_PB_WO": _of_fp8(Component("weight_scale", "scale", (128, 128), unit_axes=True, element_type="F32")),
    "MXFP8": _microscaled("MXFP8", Component("weight", "codes"), _exponents("weight_scale", 32)),
    "NVFP4": _microscaled("NVFP4", *_NVFP4, _INPUT_SCALE),
    "W4A16_NVFP4": _microscaled("NVFP4", *_NVFP4),
}


def _mixed(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """The form of each algorithm, for the modules that `quantized_layers` lists with it; others are not quantized."""
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise UnknownForm(" with quant_algo MIXED_PRECISION and no quantized_layers")
    modules: dict[tuple[str, int | None], set[str]] = {}
    for name, layer in layers.items():
        group = layer.get("group_size")
        if group is not None and not isinstance(group, int):
            raise UnknownForm(f" with groups of {str(group)[:20]}")
        modules.setdefault((str(layer.get("quant_algo")), group), set()).add(str(name))
    forms = []
    for (algorithm, group), names in modules.items():
        if algorithm.upper() == "MIXED_PRECISION":
            raise UnknownForm(" with MIXED_PRECISION in quantized_layers")
        (form,) = _modelopt({"quant_algo": algorithm, "group_size": group})
        forms.append(replace(form, modules=frozenset(names)))
    return tuple(forms)


def _awq(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """Stored as [in, out], packed along the output features."""
    bits, version = settings.get("bits", settings.get("w_bit")), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not settings.get("zero_point", True):
        raise UnknownForm(
            f" of version {version[:20]} with {str(bits)[:20]} bits{'' if settings.get('zero_point', True) else ' without zero points'}"
        )
    group = _group(settings.get("group_size", settings.get("q_group_size")))
    packing = integers(4, 0, axis=0, places=_AWQ)
    codes = Component("qweight", "codes", packing=packing, transposed=True)
    zeros = Component("qzeros", "zero point", (1, group), packing, transposed=True, element_type="I32")
    scales = Component("scales", "scale", (1, group), transposed=True)
    return (StoredForm(f"INT4 (AWQ, {_groups_of(group)})", "INT4 group or word", (codes, zeros, scales), _WORDS, keeps_scale_type=True),)


def _gptq(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """Codes as [in / 8, out], packed along the input features; zero points packed along the output features.

    In the first version of the format zero points are stored minus one. With act-order the groups are not runs of input features.
    """
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise UnknownForm(f" with {str(bits)[:20]} bits")
    if settings.get("desc_act"):
        raise UnknownForm(" with act-order (desc_act)")
    version = "marlin" if settings.get("is_marlin_format") else str(settings.get("checkpoint_format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise UnknownForm(f" in the format {version[:20]}")
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(key).startswith("-:") for key in dynamic):
        raise UnknownForm(" with settings of single modules (dynamic)")
    group = _group(settings.get("group_size"))
    zeros = integers(bits, 1 if version == "gptq" else 0, axis=0)
    components = (
        Component("qweight", "codes", packing=integers(bits, 0), transposed=True),
        Component("qzeros", "zero point", (1, group), zeros, transposed=True, element_type="I32"),
        Component("scales", "scale", (1, group), transposed=True),
        Component("g_idx", "group index", (None, 1), is_vector=True, element_type="I32"),
    )
    return (StoredForm(f"INT{bits} (GPTQ, {_groups_of(group)})", f"INT{bits} group or word", components, _WORDS, keeps_scale_type=True),)


def _auto_round(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    from reshard.models.libraries import auto_round

    readers = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": lambda known: _awq({**known, "zero_point": True})}
    return auto_round.forms(settings, readers)


def _groups_of(group: int | None) -> str:
    return "one scale per output feature" if group is None else f"group {group}"


def _group(size: Any) -> int | None:
    """The group size; None for one group of all input features."""
    if size in (-1, None):
        return None
    if not _is_size(size):
        raise UnknownForm(f" with groups of {str(size)[:20]}")
    return int(size)


def _compressed(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """The form of each group. A group of named modules comes before that of all linear layers, as compressed-tensors looks them up."""
    groups, sparsity = settings.get("config_groups"), settings.get("sparsity_config")
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    if sparse != "dense":
        raise UnknownForm(f" with sparse weights in the format {str(sparse)[:40]}")
    if not isinstance(groups, Mapping) or not groups:
        raise UnknownForm("")
    forms = [_of_group(group, settings) for group in groups.values()]
    if len([form for form in forms if not form.targets]) > 1:
        raise UnknownForm(" with several config_groups for the same modules")
    return tuple(sorted(forms, key=lambda form: not form.targets))


def _of_group(group: Any, settings: Mapping[str, Any]) -> StoredForm:
    if not isinstance(group, Mapping):
        raise UnknownForm("")
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        raise UnknownForm("")
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or (targets != ["Linear"] and not all(map(_names_modules, targets))):
        raise UnknownForm(f" for the modules {str(targets)[:40]}")
    name = group.get("format") or settings.get("format")
    read = _COMPRESSED.get(str(name))
    if read is None:
        raise UnknownForm(f" in the format {str(name)[:40]}")
    form = read(weights, inputs)
    return form if targets == ["Linear"] else replace(form, targets=tuple(targets))


def _names_modules(target: Any) -> bool:
    """Whether a target is the name of a module or a regular expression, not a class such as "Linear"."""
    return isinstance(target, str) and (target.startswith("re:") or "." in target)


def _compressed_fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredForm:
    strategy, block = str(weights.get("strategy")), weights.get("block_structure")
    block_shape: BlockShape = _block(block) if strategy == "block" else {"tensor": _WHOLE, "channel": (1, None)}.get(strategy, ())
    if not block_shape or weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise UnknownForm(f" with the strategy {strategy[:20]}")
    input_scales = (replace(_INPUT_SCALE, single_shape=(1,)),) if inputs and not inputs.get("dynamic") else ()
    return _of_fp8(Component("weight_scale", "scale", block_shape, single_shape=(1,), element_type="F32"), *input_scales)


def _compressed_integers(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredForm:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in (4, 8) or weights.get("type") != "int" or strategy not in ("group", "channel"):
        raise UnknownForm(f" with {str(bits)[:20]} bits and the strategy {str(strategy)[:20]}")
    if weights.get("actorder") in ("group", True):
        raise UnknownForm(" with act-order (actorder group)")
    if inputs:
        raise UnknownForm(" with quantized activations")
    group = _group(weights.get("group_size")) if strategy == "group" else None
    offset = -(1 << (bits - 1))
    zeros = Component("weight_zero_point", "zero point", (1, group), integers(bits, offset, axis=0), element_type="I32")
    components = (
        Component("weight_packed", "codes", packing=integers(bits, offset)),
        Component("weight_scale", "scale", (1, group)),
        *(() if weights.get("symmetric", True) else (zeros,)),
        Component("weight_shape", "shape", _WHOLE, single_shape=(2,), element_type="I64"),
    )
    return StoredForm(f"INT{bits} ({_groups_of(group)})", f"INT{bits} group", components, _WORDS, keeps_scale_type=True)


def _compressed_int8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredForm:
    """INT8 weights for INT8 activations: elements as they are, and a scale for each output feature or for the weight (compressed-tensors
    0.20, format int-quantized; vLLM 0.32, compressed_tensors_w8a8_int8.py)."""
    strategy, is_static = str(weights.get("strategy")), bool(inputs) and not inputs.get("dynamic")
    block: BlockShape = {"tensor": _WHOLE, "channel": (1, None)}.get(strategy, ())
    if not block or (weights.get("type"), weights.get("num_bits")) != ("int", 8) or not weights.get("symmetric", True):
        raise UnknownForm(f" with {str(weights.get('num_bits'))[:20]} bits and the strategy {strategy[:20]}")
    codes = Component("weight", "codes", packing=signed_byte(), element_type="I8")
    scale = Component("weight_scale", "scale", block, single_shape=(1,), element_type="F32")
    beside = [replace(_INPUT_SCALE, single_shape=(1,), kept_once=True)] if is_static else []
    if is_static and not inputs.get("symmetric", True):
        beside.append(replace(beside[0], kind="input_zero_point", element_type="I8"))
    return StoredForm("INT8", "INT8 weight", (codes, scale, *beside), ("I8",), keeps_scale_type=True)


def _quark(settings: Mapping[str, Any]) -> tuple[StoredForm, ...]:
    """AMD Quark's FP8, with a scale for each weight and one for its activations (vLLM 0.32, layers/quantization/quark/quark.py)."""
    of_all, export = settings.get("global_quant_config"), settings.get("export")
    if not isinstance(of_all, Mapping) or not isinstance(export, Mapping):
        raise UnknownForm(" without global_quant_config and export")
    of_modules, cached = settings.get("layer_quant_config") or {}, export.get("kv_cache_group") or ()
    # The settings of the KV cache are those of k_proj and v_proj, with the same weights and inputs as all others.
    of_cache = {"*k_proj", "*v_proj"} if cached else set()
    is_usual = isinstance(of_modules, Mapping) and all(
        isinstance(each, Mapping) and all(each.get(key) == of_all.get(key) for key in ("weight", "input_tensors", "bias"))
        for each in of_modules.values()
    )
    if not is_usual or {*of_modules} != of_cache or (cached and {*cached} != of_cache):
        raise UnknownForm(f" with settings of single modules (layer_quant_config{', kv_cache_group' if cached else ''})")
    if settings.get("layer_type_quant_config"):
        raise UnknownForm(" with settings of single modules (layer_type_quant_config)")
    weight, inputs = of_all.get("weight"), of_all.get("input_tensors") or {}
    kinds = [(each.get("dtype"), each.get("qscheme")) for each in (weight, inputs) if isinstance(each, Mapping) and each]
    if not kinds or set(kinds) != {("fp8_e4m3", "per_tensor")}:
        raise UnknownForm(f" with {' and '.join(f'{dtype} {scheme}' for dtype, scheme in kinds)[:60] or 'no settings of weights'}")
    beside = (_INPUT_SCALE,) if inputs and not inputs.get("is_dynamic") else ()
    return (_of_fp8(Component("weight_scale", "scale", _WHOLE, element_type="F32"), *beside),)


def _compressed_nvfp4(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredForm:
    components = [
        Component("weight_packed", "codes", packing=fp4()),
        Component("weight_scale", "scale", (1, 16), element_type="F8_E4M3"),
        Component("weight_global_scale", "divisor", _WHOLE, single_shape=(1,), element_type="F32"),
    ]
    if inputs and inputs.get("dynamic") is not True:
        components.append(Component("input_global_scale", "input scale", _WHOLE, single_shape=(1,), element_type="F32"))
    return _microscaled("NVFP4", *components)


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _gpt_oss,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "quark": _quark,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
_COMPRESSED_MXFP4 = _microscaled("MXFP4", Component("weight_packed", "codes", packing=fp4()), _exponents("weight_scale", 32))
_COMPRESSED: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], StoredForm]] = {
    "float-quantized": _compressed_fp8,
    "naive-quantized": _compressed_fp8,
    "None": _compressed_fp8,
    "pack-quantized": _compressed_integers,
    "int-quantized": _compressed_int8,
    "nvfp4-pack-quantized": _compressed_nvfp4,
    "mxfp4-pack-quantized": lambda weights, inputs: _COMPRESSED_MXFP4,
    "mxfp8-quantized": lambda weights, inputs: _MODELOPT["MXFP8"],
}
