"""What serving engines do with LoRA adapters: which form of the adapter of experts they read right, and what they refuse.

vLLM has two layers for experts. That of the classes with the flag `is_3d_moe_weight` reads the fused form, all others read the split form,
and --enable-moe-shared-loras makes them read the stacked one. Source: vllm 0.32.0, lora/model_manager.py (_stack_moe_lora_weights,
_validate_moe_lora_format), lora/lora_model.py (check_unexpected_modules, from_lora_tensors), lora/utils.py, lora/peft_helper.py
(validate_legal), and the attributes of the classes in model_executor/models; read, not run.

SGLang reads r, lora_alpha, target_modules and use_dora alone of the settings. It joins q, k and v, and gate and up, when it loads. Where a
part that it counts on is missing, its scheduler stops at the first request, and the server with it. Run with SGLang 0.5.23 on a CPU and a
dense model; source: srt/lora/lora_config.py, lora.py (normalize_qkv_proj, normalize_gate_up_proj), mem_pool.py
(load_lora_weight_to_buffer). Of experts, its LoRAManager and LoRAMemoryPool were run on CPU tensors with its own classes: for the types of
_RUN_IN_SGLANG, B x A of its buffers is the update of PEFT's merge within 7e-7 of the largest element. Its kernels were not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.canonical.adapters.base import AdaptedBase
from reshard.canonical.adapters.forms import form_of
from reshard.canonical.content import Content
from reshard.canonical.renaming import adapter_name

# Model types whose class in vLLM 0.32 has is_3d_moe_weight.
FUSED_IN_VLLM = frozenset({"gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"})
# Model types whose experts have another module in vLLM than in memory of transformers 5: what is named after the latter is not found.
_RENAMED_IN_VLLM = frozenset({"mixtral"})
# Settings that PEFTHelper.validate_legal of vLLM 0.32 refuses.
_REFUSED_BY_VLLM = {
    "use_dora": "vLLM has no DoRA",
    "lora_bias": "vLLM has no biases of adapters",
    "alora_invocation_tokens": "vLLM has no activated LoRA",
    "layer_replication": "vLLM replicates no layers",
    "use_bdlora": "vLLM has no block-diagonal LoRA",
    "use_qalora": "vLLM has no QALoRA",
}
_REFUSED_BY_SGLANG = {
    "use_dora": "SGLang has no DoRA",
    "lora_bias": "SGLang reads no biases of adapters",
    "modules_to_save": "SGLang reads no whole modules",
    "trainable_token_indices": "SGLang reads no rows of the embedding",
}
# Of modules that SGLang joins, those that must be adapted where the first one is.
_JOINED_IN_SGLANG = {
    "q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",),
    "q_a_proj": ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa": ("q_a_proj",),
}  # fmt: skip
# Model types whose experts SGLang's loader was given, in the split form and in the stacked one.
_RUN_IN_SGLANG = frozenset({"gpt_oss", "mixtral", "qwen3_moe", "qwen3_vl_moe"})
# Model types with shared experts that their config does not count: SGLang has no buffers for their adapters, and stops at its start.
_NOT_STARTED_BY_SGLANG = frozenset({"llama4", "llama4_text"})
_OF_CLASSIFIERS = {"classifier", "score"}
# Initialisations that change no weight of the base (PEFTHelper._init_is_supported).
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Model types whose class in vLLM 0.32 lacks SupportsLoRA.
_WITHOUT_LORA = frozenset({
    "bailing_hybrid", "bloom", "cohere2_moe", "cohere2_vision", "dbrx", "deepseek_vl_v2", "falcon", "falcon_mamba", "gemma3n_text", "gpt2",
    "gptj", "kimi_k25", "kimi_vl", "llava_onevision", "mamba", "mamba2", "mimo_v2", "mimo_v2_flash", "paddleocr_vl", "qwen2_audio",
    "skywork_chat", "stablelm", "step3p5", "step3p7", "zamba2",
})  # fmt: skip
# Language models whose class has no embedding_modules: an adapter of an embedding or a head is of no module that it expects.
_WITHOUT_TABLES = frozenset({
    "afmoe", "bailing_moe", "chatglm", "deepseek", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3", "internlm2", "kimi_k2", "laguna", "longcat_flash", "mimo",
    "minimax_m2", "olmo_hybrid", "olmoe", "opt", "panguembedded", "qwen2", "qwen2_moe", "qwen3_next", "sarvam_mla", "sarvam_moe",
})  # fmt: skip
_FACTOR = re.compile(r"\.(lora_[AB]\.weight|lora_embedding_[AB])$|(^|\.)(score|classifier)\.(weight|bias)$")
# The copies of the base's tables that vLLM skips.
_SKIPPED = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_TABLE = re.compile(r"(?:^|\.)(embed_tokens|lm_head)\.lora_(?:A\.weight|B\.weight|embedding_A|embedding_B)$")
_SAVE_PLAIN = "Save it with PEFT as a plain LoRA adapter (path_initial_model_for_weight_conversion)"
_FOR_SGLANG = "Write it with `to=peft` and `engine=sglang`"
_MERGE = "Serve the merged model: `merge_adapter=`"


def form_for(engine: str, content: Content) -> str | None:
    """The form of the adapter of experts that an engine reads right; None if the adapter has it, or changes no experts."""
    stored = form_of(content.tensors)
    form = _read_by(engine, content.model.architecture.model_type if content.model else None)
    return None if stored in (None, form) else form


def has_names_of_tinker(content: Content, *, joins: bool) -> bool:
    """Whether an adapter of no routed experts has modules that its model has under other names, or that an engine joins with others."""
    if content.model is None or form_of(content.tensors) is not None:
        return False
    base = AdaptedBase(content.model, None, "", None)
    modules = {name.module for tensor in content.tensors if (name := adapter_name(tensor)) is not None}
    return any(base.renamed(module) != module or base.joined(module, attention=joins) != module for module in modules)


def about_serving(
    engine: str, tensors: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, str]]:
    """What an engine would do with an adapter: findings as (id, text, remedy). tensors: their shapes. base: the config of its base."""
    stored, model_type = form_of(tensors), str((base or {}).get("model_type"))
    if engine == "vllm":
        problems = [*_of_settings(settings), *(_of_experts(stored, tensors, model_type) if stored and base else ())]
        problems += _of_class(tensors, settings, base or {}) if base else ()
        problems += [] if problems else _of_names(tensors)
    else:
        problems = [*_of_sglang(tensors, settings), *(_of_experts_in_sglang(stored, tensors, model_type) if stored else ())]
    yield from problems
    if stored and base is None:
        yield "adapter-not-checked", f"its experts have the form {stored}, and the base is not known", "Name the base with `model=DIR`"
    elif stored and engine != "vllm" and not problems and model_type not in _RUN_IN_SGLANG:
        yield "adapter-not-checked", f"what SGLang does with adapters of the experts of {model_type} was not run", ""
    elif not problems:
        ranks = [settings.get("r"), *(settings.get("rank_pattern") or {}).values()]
        rank = max((rank for rank in ranks if isinstance(rank, int)), default=0)
        release = "vLLM 0.32" if engine == "vllm" else "SGLang 0.5.23"
        yield "adapter-served", f"{release} applies all of it; start it with --enable-lora --max-lora-rank of at least {rank}", ""


def _read_by(engine: str, model_type: str | None) -> str:
    return "fused" if engine == "vllm" and model_type in FUSED_IN_VLLM else "split"


def _of_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for setting, why in _REFUSED_BY_VLLM.items():
        if settings.get(setting):
            yield "not-served", f"adapter_config.json sets {setting}: {why}", _MERGE
    if unsupported := sorted({*map(str, settings.get("modules_to_save") or ())} - _OF_CLASSIFIERS):
        yield "not-served", f"modules_to_save has {', '.join(unsupported)}: vLLM takes whole modules of classifiers alone", _MERGE
    if settings.get("trainable_token_indices"):
        yield "not-served", "single rows of the embedding are trained (trainable_token_indices), which vLLM does not read", _MERGE
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_STARTS:
        yield "not-served", f"init_lora_weights is {init}: vLLM refuses adapters of a base whose weights the training changed", _SAVE_PLAIN


def _of_sglang(names: Iterable[str], settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    for setting, why in _REFUSED_BY_SGLANG.items():
        if settings.get(setting):
            yield "not-served", f"adapter_config.json sets {setting}: {why}", _MERGE
    if settings.get("use_rslora") and rank != 1 and isinstance(rank, int) and isinstance(alpha, int | float):
        yield "never-applied", "SGLang scales by lora_alpha / r and does not read use_rslora", _FOR_SGLANG
    for pattern, plain in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        if {*(settings.get(pattern) or {}).values()} - {plain}:
            what = (
                "its server stops at a matrix of another rank" if pattern == "rank_pattern" else "it scales all modules by lora_alpha / r"
            )
            yield "not-served", f"SGLang does not read {pattern}: {what}", _MERGE
    targets = settings.get("target_modules")
    if isinstance(targets, str) and targets not in ("all", "all-linear"):
        yield "not-served", "target_modules is a regular expression, and SGLang takes a list of names", _FOR_SGLANG
    elif isinstance(targets, list) and (unknown := sorted({"w1", "w2", "w3"} & {*map(str, targets)})):
        what = f"target_modules has {', '.join(unknown)}: SGLang knows gate_proj, up_proj and down_proj there, and refuses the adapter"
        yield "not-served", what, _FOR_SGLANG
    modules = {name.partition(".lora_")[0] for name in names}
    for module in sorted(modules):
        head, _, last = module.rpartition(".")
        if missing := [other for other in _JOINED_IN_SGLANG.get(last, ()) if f"{head}.{other}" not in modules]:
            yield "not-served", f"{module} is adapted without {' and '.join(missing)}: SGLang joins them, and its server stops", _MERGE
            return


def _of_experts_in_sglang(stored: str, tensors: Mapping[str, tuple[int, ...]], model_type: str) -> Iterator[tuple[str, str, str]]:
    if model_type in _NOT_STARTED_BY_SGLANG:
        yield "not-served", f"SGLang's server does not start with adapters of the experts of {model_type} (KeyError: gate_up_proj)", _MERGE
    elif stored == "fused":
        yield (
            "not-served",
            "SGLang loads fused experts, finds no module for them, and its server stops at the first request",
            _FOR_SGLANG,
        )
    elif stored == "stacked" and len({shape[0] for name, shape in tensors.items() if ".experts.w" in name and len(shape) == 3}) > 1:
        yield "not-served", "SGLang reads factors that all experts share with --experts-shared-outer-loras alone", _FOR_SGLANG


def _of_class(
    tensors: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """What vLLM's class for the base lacks."""
    model_type = str(base.get("model_type"))
    if model_type in _WITHOUT_LORA:
        yield "not-served", f"vLLM's class for {model_type} takes no adapters (SupportsLoRA)", _MERGE
    tables = {name: match[1] for name in tensors if (match := _TABLE.search(name))}
    if tables and model_type in _WITHOUT_TABLES:
        yield (
            "not-served",
            f"the adapter changes {min(tables.values())}, and vLLM's class for {model_type} adapts no tables of tokens",
            _MERGE,
        )
    vocab = (base.get("text_config") or base).get("vocab_size")
    sizes = {tensors[name][name.endswith("_A")] for name in tables if name.endswith(("embedding_A", "lm_head.lora_B.weight"))}
    if isinstance(vocab, int) and sizes - {vocab}:
        what = f"the adapter was trained with {max(sizes)} tokens, the base has {vocab}: vLLM adapts tables of one size alone"
        yield "not-served", what, _MERGE
    others = [name for name in map(str, settings.get("target_parameters") or ()) if ".experts." in f".{name}"]
    if other := next((name for name in others if name.rpartition(".")[2] not in ("gate_up_proj", "down_proj")), None):
        yield "not-served", f"the adapter changes {other}, which vLLM takes for a matrix of the experts", _MERGE


def _of_names(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """A tensor that is no factor: parse_fine_tuned_lora_name stops at its name."""
    if other := next((name for name in names if not _FACTOR.search(name) and not name.endswith(_SKIPPED)), None):
        yield "not-served", f"the file holds {other}, a whole tensor: vLLM reads factors, and the heads of classifiers", _MERGE


def _of_experts(stored: str, names: Iterable[str], model_type: str) -> Iterator[tuple[str, str, str]]:
    form = _read_by("vllm", model_type)
    remedy = f"Write it with `to=peft` and `experts={form}`"
    if stored == "fused" and model_type in _RENAMED_IN_VLLM:
        yield "never-applied", f"vLLM loads the fused experts of {model_type}, has no module of that name, and never applies them", remedy
    elif stored == "stacked":
        yield "not-served", "vLLM reads stacked experts with --enable-moe-shared-loras alone, as factors that all experts share", remedy
    elif stored != form:
        yield "not-served", f"vLLM refuses {stored} experts of {model_type}: its class reads the form {form}", remedy
    elif stored == "fused" and not any(".experts.base_layer." in name for name in names):
        what = "the adapter changes one parameter of the experts, and vLLM stops (AssertionError) unless both are there"
        yield "not-served", what, _MERGE
