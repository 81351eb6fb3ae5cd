"""What serving engines do with LoRA adapters: which form of the adapter of experts they read right, and what they refuse.

vLLM has two layers for experts. That of the classes with the flag `is_3d_moe_weight` reads the fused form, all others read the split form,
and --enable-moe-shared-loras makes them read the stacked one. Source: vllm 0.32.0, lora/model_manager.py (_stack_moe_lora_weights,
_validate_moe_lora_format), lora/lora_model.py (check_unexpected_modules), lora/peft_helper.py (validate_legal), and the attribute in
model_executor/models; read, not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.canonical.adapters.forms import form_of
from reshard.canonical.content import Content

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
_OF_CLASSIFIERS = {"classifier", "score"}
_MERGE = "Serve the merged model: `merge_adapter=`"


def form_for(engine: str, content: Content) -> str | None:
    """The form of the adapter of experts that an engine reads right; None if the adapter has it, or changes no experts."""
    stored = form_of(content.tensors)
    form = _read_by(engine, content.model.architecture.model_type if content.model else None)
    return None if stored in (None, form) else form


def about_serving(
    engine: str, names: Sequence[str], settings: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, str]]:
    """What an engine would do with an adapter: findings as (id, text, remedy). names: of its tensors. base: the config of its base."""
    stored, model_type = form_of(names), str((base or {}).get("model_type"))
    if engine != "vllm":
        yield "adapter-not-checked", f"what {engine} does with adapters was not run; it reads the split form of experts", ""
        return
    problems = [*_of_settings(settings), *(_of_experts(stored, names, model_type) if stored and base else ())]
    yield from problems
    if stored and base is None:
        yield "adapter-not-checked", f"its experts have the form {stored}, and the base is not known", "Name the base with `model=DIR`"
    elif not problems:
        ranks = [settings.get("r"), *(settings.get("rank_pattern") or {}).values()]
        rank = max((rank for rank in ranks if isinstance(rank, int)), default=0)
        yield "adapter-served", f"vLLM 0.32 applies all of it; start it with --enable-lora --max-lora-rank of at least {rank}", ""


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


def _of_experts(stored: str, names: Sequence[str], model_type: str) -> Iterator[tuple[str, str, str]]:
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
