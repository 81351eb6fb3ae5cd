"""What serving engines do with the adapter of experts: which form they read right.

vLLM has two layers for experts: one reads the fused form, for the classes with the flag `is_3d_moe_weight`; the other reads the split form.
Source: vllm 0.32.0, lora/model_manager.py (_stack_moe_lora_weights) and the attribute in model_executor/models; the functions were run.
"""

from __future__ import annotations

from reshard.canonical.adapters.forms import form_of
from reshard.canonical.content import Content

# Model types whose class in vLLM 0.32 has is_3d_moe_weight.
FUSED_IN_VLLM = frozenset(
    {
        "gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe",
    }
)  # fmt: skip


def form_for(engine: str, content: Content) -> str | None:
    """The form of the adapter of experts that an engine reads right; None if the adapter has it, or changes no experts."""
    stored = form_of(content.tensors)
    if stored is None:
        return None
    model_type = content.model.architecture.model_type if content.model else None
    form = "fused" if engine == "vllm" and model_type in FUSED_IN_VLLM else "split"
    return None if stored == form else form
