"""Whether Megatron-Core can hold a model, and whether the model divides by the parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.canonical.content import Content
from reshard.canonical.globs import any_layer
from reshard.errors import RequestError, UnsupportedError
from reshard.models.architecture import Architecture
from reshard.models.lookup import known_model_types
from reshard.models.model import Model

from ..layout.names import LayerSpec
from ..layout.settings import LINEAR_ROLES, model_settings, parts_by_role
from ..layout.stages import ParallelSizes
from ..layout.tensors import FRAMEWORK, ROLES, is_hybrid

_ANOTHER_MODEL = "The weights would load, but the model would be another one"
# The start of a role that Megatron's layers do not have -> what a model with such weights needs.
_NOT_IN_MEGATRON = {
    "vision.": "its tower for images",
    "audio.": "its tower for sound",
    "attention.post_norm": "norms after attention",
    "mlp.post_norm": "norms after the MLP",
    "embedding_norm": "a norm after the embedding",
    "minimax.": "norms of q and k over all heads at once",
    "cohere.": "attention beside the MLP in one layer",
    "apertus.": "an MLP with xIELU",
    "laguna.": "a projection of its own for the gate of attention's output",
    "step.": "a projection of its own for the gate of attention's output",
    "indexer.": "sparse attention whose results can be compared without a GPU",
    "ssm.dt_b_c": "layers of the first Mamba, which computes dt, B and C from x",
    "kda.": "Kimi's delta attention",
    "conv.": "gated short convolutions",
}


def megatron_compatible_model(content: Content) -> Model:
    """The model to write, without MTP layers if the source has no weights of them.

    Raises: RequestError if the model is not known, or Megatron-Core cannot hold or compute it.
    """
    model = content.model
    if model is None:
        raise UnsupportedError(
            "Megatron's layout of fused weights needs the model's architecture, which is not known",
            why=f"Declared are {', '.join(known_model_types())}",
            do="Give the model's Hugging Face config with `model=DIR`, and a declaration with `architecture=FILE` if it is none of these",
        )
    model.architecture.check_head("Megatron-Core's checkpoints are")
    if lacking := lacking_for(model.architecture):
        raise UnsupportedError(
            f"models of the type {model.architecture.model_type} need {lacking}, which Megatron-Core 0.16 does not have",
            why="The weights have no place there, or the model would be another one",
        )
    if foreign := [part for part in model.parts() if part.role not in ROLES]:
        raise UnsupportedError(
            f"Megatron-Core's layers have no such part ({foreign[0].role})",
            where=foreign[0].tensor,
            why=f"The form in which it would store a {model.architecture.model_type} model is not known, and reshard does not guess it",
        )
    if refusal := next(_refusals(model), None):
        raise refusal
    if carried := [name for name in content.besides_model if model.reason_not_served(name)]:
        raise UnsupportedError(
            "it belongs to no layer that was compared with Megatron-Core"
            + (f", nor do {len(carried) - 1} more" if len(carried) > 1 else ""),
            where=carried[0],
            why=f"It {model.reason_not_served(carried[0])}. How Megatron would keep it is not known, and is not guessed",
            do=f"Leave them out with `exclude='{any_layer(carried[0]).partition('*')[0]}*'`",
        )
    if model.quantization:
        raise UnsupportedError(
            f"the weights are quantized ({model.quantization.method}), Megatron's are not",
            why="Its layers would take the quantized elements for values",
            do="Convert them to values with `dequantize=True`",
        )
    if model.mtp_layers and not any(weight.optional and weight.name in content.tensors for weight in model.weights.values()):
        return Model(model.architecture, {**model.config, str(model.architecture.mtp_layers): 0})
    return model


def lacking_for(architecture: Architecture) -> str | None:
    """What the models of an architecture need and Megatron-Core does not have, as a noun phrase; None if nothing is known to lack."""
    computation = architecture.frameworks.get(FRAMEWORK)
    if computation and (computation.lacks or computation.built_by):
        return computation.lacks
    roles = [role for weight in architecture.weights for role in (weight.fuses or (weight.role,))]
    return next((reason for start, reason in _NOT_IN_MEGATRON.items() if any(role.startswith(start) for role in roles)), None)


def _refusals(model: Model) -> Iterator[UnsupportedError]:
    """The reasons why Megatron-Core cannot compute what the model computes."""
    head_dim, model_type = model.dimensions["head_dim"], model.architecture.model_type
    for part in model.parts():
        if part.role in ("attention.q_norm", "attention.k_norm") and part.array.shape != (head_dim,):
            yield UnsupportedError(
                f"it is a norm over {part.array.shape[0]} elements, all heads at once",
                where=part.tensor,
                why=f"The norms of q and k in Megatron-Core's attention are over the {head_dim} elements of one head",
            )
    computation = model.architecture.frameworks.get(FRAMEWORK)
    if computation is None:
        yield UnsupportedError(
            f"it is not known which of Megatron's norms, positions and routers a {model_type} model has",
            why="Its declaration describes the weights; Megatron's settings also describe what is computed with them",
            do="If it computes the same as a model that was compared, add `like:` and that model's name to the declaration; "
            "the page of this format lists them",
        )
    for key, value in computation.assumes if computation else ():
        if (setting := model.setting(key)) is not None and setting != value:
            yield UnsupportedError(f"the config sets {key} to {setting!r}, and Megatron-Core computes {value!r}", why=_ANOTHER_MODEL)
    # add_bias_linear gives biases to all linear layers.
    parameters = parts_by_role(model)
    linear = [role for role in (*LINEAR_ROLES, "router") if "weight" in parameters.get(role, ())]
    biased = [role for role in linear if "bias" in parameters[role]]
    has_qkv_bias = "bias" in parameters.get("attention.q", ())
    if (biased and len(biased) < len(linear)) or (biased and "attention.q" in parameters and not has_qkv_bias):
        yield UnsupportedError(
            f"{', '.join(biased)} have biases, other linear layers of the model have none",
            why="In Megatron-Core all linear layers have biases or none has (add_bias_linear), so it would miss some when loading",
        )
    # Groups of experts are chosen by a number of scores that follows from other settings (moe_utils.py, group_limited_topk).
    settings = model_settings(model)
    if groups := settings.get("moe_router_group_topk"):
        summed, expected = settings["moe_router_topk"] // groups, 2 if settings["moe_router_score_function"] == "sigmoid" else 1
        if summed != expected:
            yield UnsupportedError(
                f"Megatron-Core would choose groups of experts by their {summed} best scores, the model by {expected}",
                why=f"It sums num_experts_per_tok / topk_group scores of each group: {settings['moe_router_topk']} / {groups}",
            )


def check_spec(model: Model, spec: LayerSpec) -> None:
    """Raises RequestError if the layer classes have no place for the biases of experts, or Megatron-Core has the model's layers only of
    Transformer Engine's classes."""
    if spec.experts == "grouped" and _has_expert_biases(model):
        raise RequestError(
            f"`experts=grouped`: the experts of a {model.architecture.model_type} model have biases",
            why="Megatron's GroupedMLP has none, so they would be lost",
            do="Choose `experts=sequential` or `experts=te-grouped`",
        )
    roles = {part.role for part in model.parts()}
    if not spec.te and (model_settings(model)["layernorm_zero_centered_gamma"] or roles & {"ssm.out", "delta.out"}):
        raise RequestError(
            f"`transformer_impl=local`: Megatron-Core has no local layers for a {model.architecture.model_type} model",
            why="Its norms stored minus one, Mamba layers and gated delta nets are built of Transformer Engine's classes",
            do="Leave the option out",
        )


def _has_expert_biases(model: Model) -> bool:
    return any(part.parameter == "bias" and part.role.startswith("expert.") for part in model.parts())


def check_sizes(model: Model, sizes: ParallelSizes) -> None:
    """Raises RequestError if the model does not divide by the parallel sizes. Stages are checked with their layers."""
    if sizes.vp > 1 and is_hybrid(model):
        raise UnsupportedError(
            f"`vp={sizes.vp}`: Megatron-Core does not interleave the stages of a {model.architecture.model_type} model",
            why="MambaModel refuses a virtual pipeline",
            do="Leave out `vp=`",
        )
    for what, why, do in _illegal_sizes(model, sizes):
        raise RequestError(what, why=why, do=do, id="illegal-sizes")


def _illegal_sizes(model: Model, sizes: ParallelSizes) -> Iterator[tuple[str, str | None, str | None]]:
    """(what does not divide, why, what to do)."""
    kind, experts, query_groups = model.architecture.model_type, model.dimensions.get("experts", 0), model.dimensions["kv_heads"]
    if sizes.ep > 1 and not experts:
        yield f"`ep={sizes.ep}`: a {kind} model has no experts", None, "Leave out `ep=`"
    if experts % sizes.ep:
        yield f"`ep={sizes.ep}` does not divide {experts} experts", None, f"Legal expert-parallel sizes are {_divisors(experts)}"
    if sizes.tp % sizes.etp:
        names = "Megatron's file names have the tensor- and the expert-parallel rank, and would not tell these ranks apart"
        yield f"`etp={sizes.etp}` does not divide `tp={sizes.tp}`", names, None
    if sizes.etp > 1 and _has_expert_biases(model):
        biases = "Megatron-Core refuses biases of experts that several tensor-parallel ranks share"
        yield f"`etp={sizes.etp}`: the experts of a {kind} model have biases", biases, "Add `etp=1`"
    if sizes.vp > 1 and sizes.pp == 1:
        yield f"`vp={sizes.vp}` needs several stages (`pp=`)", "Megatron interleaves chunks of different stages", None
    divided = {"ssm_groups": "groups of a Mamba layer", "delta_k_heads": "heads of a gated delta net", "heads": "attention heads"}
    for dimension, plural in divided.items():
        if (size := model.dimensions.get(dimension, 0)) % sizes.tp:
            yield f"`tp={sizes.tp}` does not divide {size} {plural}", None, f"Legal sizes are among {_divisors(size)}"
    if query_groups % sizes.tp and sizes.tp % query_groups:
        neither = f"`tp={sizes.tp}` and {query_groups} query groups: neither divides the other"
        yield neither, "Megatron-Core refuses it", "Choose another `tp=`"


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
