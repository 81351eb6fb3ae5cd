"""How SGLang stores a model: the differences between its model classes, and the EngineRules.

Measured on 0.5.23 (fixtures/sglang: the tensors of real ranks).
"""

from __future__ import annotations

from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import F32
from reshard.models.model import Model
from reshard.plans.target import Target
from reshard.serving.rules import LATENT_BIASES, EngineRules, Fusion, ModelQuirks, normalizer
from reshard.serving.versions import about_version, version_numbers

OLDEST, NEWEST = "0.5.10", "0.5.23"

_MLP_BIASES = frozenset((role, "bias") for role in ("mlp.gate", "mlp.up", "mlp.down"))
_ALWAYS_TIED = (("tie_word_embeddings", True),)
_START_UNFUSED = "start SGLang with --disable-shared-experts-fusion: otherwise it may take a shared expert for one more routed expert"
QUIRKS = {
    "llama": ModelQuirks(unsupported=_MLP_BIASES),
    "mistral": ModelQuirks(unsupported=_MLP_BIASES),
    "qwen2": ModelQuirks(),
    "qwen3": ModelQuirks(),
    "phi3": ModelQuirks(),
    "gemma2": ModelQuirks(
        tied_table_stored_as="embedding",
        stores_normalizer=True,
        config_defaults=(("hidden_act", "gelu_pytorch_tanh"),),
        assumed_settings=_ALWAYS_TIED,
    ),
    "gpt2": ModelQuirks(assumed_settings=_ALWAYS_TIED),
    "mixtral": ModelQuirks(tied_table_stored_as="both", derives_head_dim=True),
    "qwen2_moe": ModelQuirks(tied_table_stored_as="both", derives_head_dim=True, all_layers_sparse=True, tp_at_most_experts=True),
    "qwen3_moe": ModelQuirks(tied_table_stored_as="both", all_layers_sparse=True, tp_at_most_experts=True),
    "deepseek_v2": ModelQuirks(
        config_defaults=(("moe_layer_freq", 1), ("scoring_func", "softmax")),
        unsupported=LATENT_BIASES,
        tp_at_most_experts=True,
        notes=(_START_UNFUSED,),
    ),
    "deepseek_v3": ModelQuirks(
        config_defaults=(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
        unsupported=LATENT_BIASES,
        tp_at_most_experts=True,
        notes=(_START_UNFUSED,),
    ),
    "gpt_neox": ModelQuirks(not_loadable="it has no class for them, and the names in its Transformers backend were not measured"),
}

_FUSIONS = (
    Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"),
    Fusion(("mlp.gate", "mlp.up"), "gate_up_proj"),
    Fusion(("shared_expert.gate", "shared_expert.up"), "gate_up_proj"),
    Fusion(("mla.q_a", "mla.kv_a"), "fused_qkv_a_proj_with_mqa"),
    Fusion(("expert.gate", "expert.up"), "w13"),
    Fusion(("expert.down",), "w2"),
)


def rules_for_target(model: Model, target: Target) -> EngineRules:
    """The rules for the model. Raises RequestError for a version of SGLang whose files are not known."""
    version = target.engine_version or NEWEST
    if version_numbers(version, NEWEST) < version_numbers(OLDEST, NEWEST):
        raise UnsupportedError(
            f"--engine-version {version}: the oldest SGLang whose files are known is {OLDEST}",
            do="Convert to hf, which every version loads",
        )
    quirks = QUIRKS.get(model.architecture.family, ModelQuirks())
    return EngineRules(
        engine="SGLang",
        fusions=_FUSIONS,
        extra_tensors=(normalizer(model),) if quirks.stores_normalizer else (),
        vocabulary_multiple=model.architecture.vocabulary_multiple or 64,
        pads_vocabulary_for_tp=True,
        layers_per_stage=lambda layers, pp: (layers,),
        quirks=quirks,
        dtypes={"router.correction": F32},
        equal_experts=True,
        refuses_quantized="SGLang reads these files after its kernels have changed the weights' form, which differs between machines",
    )


def notes(model: Model, target: Target) -> tuple[str, ...]:
    """Notes about a version or a model class that was not measured."""
    return about_version("SGLang", target.engine_version or NEWEST, NEWEST, model, is_known=model.architecture.family in QUIRKS)
