"""How SGLang stores a model: the EngineRules. The differences between its model classes stand in the declarations of the models, under
`engines: sglang`.

Measured on 0.5.23 (fixtures/sglang: the tensors of real ranks).
"""

from __future__ import annotations

from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import F32
from reshard.models.engine_rules import EngineRules, Fusion, version_numbers
from reshard.models.lookup import built_in_model_types
from reshard.models.model import Model
from reshard.plans.layout import Target
from reshard.serving.legality import about_version

OLDEST, NEWEST = "0.5.10", "0.5.23"

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
    numbers = version_numbers(version, NEWEST)
    if numbers < version_numbers(OLDEST, NEWEST):
        raise UnsupportedError(
            f"`engine_version={version}`: the oldest SGLang whose files are known is {OLDEST}",
            do="Convert to hf, which every version loads",
        )
    quirks = model.quirks_of("sglang")
    if quirks is None and model.architecture.model_type in built_in_model_types():
        raise UnsupportedError(
            f"how SGLang names and joins the weights of a {model.architecture.model_type} model was not compared",
            why="Its class may name or join tensors in another way, and would then refuse the files, or serve unset weights",
            do="Learn the layout from SGLang's own loader with `reshard learn --engine sglang`, and add `layout=FILE`. Or convert to hf, "
            "which it loads as well",
        )
    multiple = model.architecture.vocabulary_multiple or 64
    rules = EngineRules(
        engine="SGLang",
        fusions=_FUSIONS,
        # Padded once more for the ranks where these do not divide the padded rows (layers/vocab_parallel_embedding.py).
        vocabulary_multiple=lambda rows, tp: multiple * tp if -(-rows // multiple) * multiple % tp else multiple,
        dtypes={"router.correction": F32},
        refuses={
            "quantized": "the weights are quantized, and SGLang reads such files after its kernels have changed the weights' form, which "
            "differs between machines. Add `dequantize=True`, or convert to hf",
            "experts % ep": "{ep} ranks do not divide its {experts} experts",
        },
    )
    return rules.with_quirks(quirks or EngineRules()).at(numbers)


def notes(model: Model, target: Target) -> tuple[str, ...]:
    """Notes about a version or a model class that was not measured."""
    return about_version("SGLang", target.engine_version or NEWEST, NEWEST, model, is_known="sglang" in model.architecture.engines)
