"""How TensorRT-LLM stores a model: the EngineRules. The differences between its model classes stand in the declarations of the models,
under `engines: trtllm`.

Compared with the files of NVIDIA's own writer, ModelOpt 0.47 (fixtures/trtllm).
"""

from __future__ import annotations

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import F32
from reshard.geometry.meshes import Parallel
from reshard.models.engine_rules import EngineRules, Fusion
from reshard.models.model import Model
from reshard.models.roles import VOCABULARY

from .config import MODEL_TYPES

_LAYER = "transformer.layers.{layer}."
_NAMES = {
    "embedding": "transformer.vocab_embedding",
    "position_embedding": "transformer.position_embedding",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention.norm": _LAYER + "input_layernorm",
    "attention.q": _LAYER + "attention.qkv",
    "attention.q_norm": _LAYER + "attention.q_layernorm",
    "attention.k_norm": _LAYER + "attention.k_layernorm",
    "attention.o": _LAYER + "attention.dense",
    "mlp.norm": _LAYER + "post_layernorm",
    "mlp.gate": _LAYER + "mlp.fc",
    "mlp.up": _LAYER + "mlp.gate",
    "mlp.down": _LAYER + "mlp.proj",
    "router": _LAYER + "mlp.router",
    "expert.up": _LAYER + "mlp.fc",
    "expert.down": _LAYER + "mlp.proj",
    "shared_expert.up": _LAYER + "mlp.shared_expert.fc",
    "shared_expert.down": _LAYER + "mlp.shared_expert.proj",
    "shared_expert.score": _LAYER + "mlp.shared_expert_gate",
}
_FUSIONS = (
    Fusion(("attention.q", "attention.k", "attention.v"), "qkv"),
    Fusion(("shared_expert.up", "shared_expert.gate"), "fc"),
    Fusion(("expert.up", "expert.gate"), "fc"),
    Fusion(("expert.down",), "proj"),
)


def rules_for_sizes(model: Model, parallel: Parallel) -> EngineRules:
    """The rules for the model. Raises RequestError if they are not known for the model, or a stage would have no layer."""
    quirks, what = model.quirks_of("trtllm"), f"a {model.architecture.model_type} model"
    if quirks is None or model.architecture.family not in MODEL_TYPES:
        raise UnsupportedError(
            f"how TensorRT-LLM names and fuses the weights of {what} is not known here",
            why="Only models whose files were compared with those of NVIDIA's own writer are written",
            do=f"Known models are {', '.join(MODEL_TYPES)}. Convert to hf, which current releases load",
        )
    fused_roles = {role for fusion in _FUSIONS for role in fusion.roles}
    if unnamed := sorted({part.role for part in model.parts() if not part.is_scale} - _NAMES.keys() - fused_roles):
        raise UnsupportedError(f"TensorRT-LLM's name for the {unnamed[0]} of {what} is not known", do="Convert to hf")
    if parallel.pp > model.dimensions["layers"]:
        raise RequestError(
            f"`pp={parallel.pp}`: there are only {model.dimensions['layers']} layers",
            why="TensorRT-LLM refuses a stage without a layer",
            id="illegal-sizes",
        )
    return EngineRules(
        engine="TensorRT-LLM",
        fusions=_FUSIONS,
        layers_per_stage=remainder_to_first_stages,
        module_names=_NAMES,
        splits={"position_embedding": VOCABULARY},
        dtypes={"router": F32},
        refuses={
            "quantized": "the weights are quantized, and TensorRT-LLM scales them in its own way. Add `dequantize=True`, or convert to hf",
            "experts % ep": "{ep} ranks do not divide its {experts} experts",
        },
    ).with_quirks(quirks)


def remainder_to_first_stages(layers: int, pp: int) -> tuple[int, ...]:
    """The number of layers on each stage: equal, and the remainder one by one to the first stages (mapping.py, pp_layers)."""
    base, remainder = divmod(layers, pp)
    return tuple(base + (stage < remainder) for stage in range(pp))


def notes(model: Model) -> tuple[str, ...]:
    """Notes on how to use the checkpoint, and on what it does not contain."""
    build = "build engines of it with trtllm-build; releases that do not build engines load hf instead"
    window = model.config.get("sliding_window")
    if not window or not model.config.get("use_sliding_window", True):
        return (build,)
    return build, f"the checkpoint does not contain the sliding window of {window}: give it at run time (--max_attention_window_size)"
