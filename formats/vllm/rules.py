"""What vLLM's model classes make of a model's weights, by model and by version: names, fusions, and who holds the model's ends.

Measured on 0.32.0 (fixtures/vllm: what real ranks hold) and on the model classes of older versions (fixtures/vllm_versions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from reshard.errors import RequestError
from reshard.geometry.dtypes import F32
from reshard.models.model import Model
from reshard.serving.rules import LATENT_BIASES, EngineRules, ExtraTensor, Fusion, normalizer
from reshard.serving.versions import Numbers, version_numbers

NEWEST = "0.32.0"


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: equal, and what is left over one each to the stages before the last (vLLM, distributed/utils.py)."""
    base, rest = divmod(layers, pp)
    counts = [base] * pp
    for i in range(2, rest + 2):
        counts[-i] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class _Version:
    """What changed for all models with one release: projections into latent spaces were fused, a router's correction became 32 bits wide,
    attention scales became buffers, experts moved, stages got their own file names.

    maps_experts: where ranks share whole experts, each has a buffer that says which; such files are not written.
    """

    since: Numbers
    fuses_latent: bool = True
    corrects_wide: bool = True
    scales: bool = True
    maps_experts: bool = False
    experts: str = ""
    has_stages: bool = False


_VERSIONS = (
    _Version((0, 8, 5), fuses_latent=False, corrects_wide=False, scales=False),
    _Version((0, 10), corrects_wide=False, scales=False),
    _Version((0, 10, 2), scales=False),
    _Version((0, 11), scales=False, maps_experts=True),
    _Version((0, 14), maps_experts=True),
    _Version((0, 24), maps_experts=True, experts="routed_experts."),
    _Version((0, 27), experts="routed_experts."),
    _Version((0, 32), experts="routed_experts.", has_stages=True),
)
# From here on the placeholders of a quantised model's attention are those of today.
_QUANTIZED_SINCE = (0, 15)


@dataclass(frozen=True, slots=True)
class _Moved:
    """A pattern of names, and what is in its place from a version on; before the first of them, and where it says "", the name stays."""

    pattern: str
    to: tuple[tuple[Numbers, str], ...]


@dataclass(frozen=True, slots=True)
class _Own:
    """What a model's class has of its own. as_stored: roles of fused weights that stay fused as the model has them, and since when.
    quantizes_router: unless the config says that the router is not quantised. settings: what the config has to say; demands: what it must
    not say otherwise. lacks: see EngineRules; weights' loaders pass over biases that they do not know.
    keeps_normalizer_until: before that version the factor of embeddings is a key.
    """

    moved: tuple[_Moved, ...] = ()
    every_stage: tuple[str, ...] = ()
    as_stored: tuple[tuple[Numbers, str], ...] = ()
    tied: str = "head"
    keeps_normalizer_until: Numbers = ()
    experts_share_ranks: bool = False
    stages_need_experts: bool = False
    quantizes_router: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    demands: tuple[tuple[str, object], ...] = ()
    lacks: frozenset[tuple[str, str]] = frozenset()

    @property
    def changes(self) -> set[Numbers]:
        """The versions with which something changed."""
        moved = {since for moved in self.moved for since, _ in moved.to}
        return moved | {since for since, _ in self.as_stored} | {self.keeps_normalizer_until}


_ENDS = ("embedding", "position_embedding", "final_norm", "head")
_LATENT = (
    _Moved(r"\.self_attn\.attn\.", (((0, 14), ".self_attn.mla_attn.mla_attn."),)),
    _Moved(r"\.self_attn\.(q_a_layernorm|q_b_proj|q_proj|o_proj)\.", (((0, 10, 2), r".self_attn.mla_attn.\1."),)),
    _Moved(
        r"\.mlp\.gate\.weight$",
        (
            ((0, 11, 1), ".mlp.experts._gate.weight"),
            ((0, 20), ""),
            ((0, 21), ".mlp.experts.runner.gate.weight"),
            ((0, 24), ".mlp.experts.gate.weight"),
        ),
    ),
    _Moved(
        r"\.mlp\.gate\.(e_score_correction_bias)$",
        (
            ((0, 8, 5), r".mlp.experts.\1"),
            ((0, 11, 1), r".mlp.experts._gate.\1"),
            ((0, 20), r".mlp.experts.\1"),
            ((0, 24), r".mlp.experts.gate.\1"),
        ),
    ),
    _Moved(
        r"\.mlp\.shared_experts\.",
        (((0, 10, 2), ".mlp.experts._shared_experts."), ((0, 20), ""), ((0, 24), ".mlp.experts._shared_experts._layer.")),
    ),
)
_OUTPUT_BIAS = frozenset({("attention.o", "bias")})
_MODELS: dict[str, _Own] = {
    "llama": _Own(),
    "mistral": _Own(),
    "qwen2": _Own(),
    "qwen3": _Own(lacks=_OUTPUT_BIAS),
    "phi3": _Own(),
    "gemma2": _Own(every_stage=_ENDS, tied="embedding", keeps_normalizer_until=(0, 9, 2), demands=(("tie_word_embeddings", True),)),
    "gpt2": _Own(every_stage=_ENDS),
    # Through the Transformers backend since 0.32: heads keep their q, k and v together.
    "gpt_neox": _Own(
        moved=(_Moved(r"^gpt_neox\.", (((0, 32), "model."),)), _Moved(r"^embed_out\.", (((0, 32), "lm_head."),))),
        as_stored=(((0, 32), "attention.qkv"),),
    ),
    "mixtral": _Own(every_stage=_ENDS, stages_need_experts=True),
    "qwen2_moe": _Own(
        moved=(
            _Moved(
                r"\.mlp\.shared_expert_gate\.",
                (
                    ((0, 11, 1), ".mlp.experts._shared_experts.expert_gate."),
                    ((0, 20), ".mlp.shared_expert.expert_gate."),
                    ((0, 24), ".mlp.experts._shared_experts._layer.expert_gate."),
                ),
            ),
            _Moved(
                r"\.mlp\.shared_expert\.(?!expert_gate)",
                (((0, 11, 1), ".mlp.experts._shared_experts."), ((0, 20), ""), ((0, 24), ".mlp.experts._shared_experts._layer.")),
            ),
        ),
        every_stage=_ENDS,
        experts_share_ranks=True,
        demands=(("qkv_bias", True),),
    ),
    "qwen3_moe": _Own(
        moved=(
            _Moved(
                r"\.mlp\.gate\.",
                (
                    ((0, 15), ".mlp.experts._gate."),
                    ((0, 20), ""),
                    ((0, 21), ".mlp.experts.runner.gate."),
                    ((0, 24), ".mlp.experts.gate."),
                ),
            ),
        ),
        every_stage=_ENDS,
        experts_share_ranks=True,
        stages_need_experts=True,
        quantizes_router=True,
        lacks=_OUTPUT_BIAS,
    ),
    "deepseek_v2": _Own(moved=_LATENT, tied="both", lacks=LATENT_BIASES),
    # Published configs say it; without it there is no place for the router's correction.
    "deepseek_v3": _Own(moved=_LATENT, tied="both", lacks=LATENT_BIASES, settings=(("topk_method", "noaux_tc"),)),
}

# Of a quantised model's attention: "not given" is said by -1, or by a scale of 1 (layers/quantization/kv_cache.py).
_PLACEHOLDERS = {
    "fp8": tuple(ExtraTensor("attention.o", f"attn.{name}_scale", -1.0, None) for name in ("q", "k", "v", "prob")),
    "compressed-tensors": (
        *(ExtraTensor("attention.o", f"attn.{name}_scale", 1.0, F32, (1,)) for name in ("q", "k", "v")),
        *(ExtraTensor("attention.o", f"attn.{name}_zero_point", 0.0, None, (1,)) for name in ("q", "k", "v")),
    ),
}
_SCALES = tuple(ExtraTensor("attention.o", f"attn.{name}", 1.0, F32) for name in ("_k_scale", "_q_scale", "_v_scale", "_prob_scale"))


@dataclass(frozen=True, slots=True)
class VersionRules:
    """The rules of one version for one model. has_stages: whether its file names tell pipeline stages apart. maps_experts: whether ranks
    that share whole experts have a buffer of which. settings: what the config has to say; demands: what it must not say otherwise.
    """

    since: Numbers
    engine: EngineRules
    has_stages: bool
    maps_experts: bool
    quantizes_router: bool
    settings: tuple[tuple[str, str], ...]
    demands: tuple[tuple[str, object], ...]


def is_known(model_type: str) -> bool:
    """Whether the class that serves such models was compared with what is laid out here."""
    return model_type in _MODELS


def rules_for(model: Model, version: str) -> VersionRules:
    """The rules that hold for a version of vLLM. Raises RequestError if what it expects of this model is not known."""
    numbers = version_numbers(version, NEWEST)
    fitting = [rules for rules in all_rules(model) if rules.since <= numbers]
    if not fitting:
        oldest = min(rules.since for rules in all_rules(model))
        raise RequestError(
            f"--engine-version {version}: the oldest vLLM whose keys for {model.architecture.model_type} are known is {as_text(oldest)}",
            do=f"Use vLLM {as_text(oldest)} or newer, or convert to hf, which every version loads",
        )
    return fitting[-1]


def all_rules(model: Model) -> tuple[VersionRules, ...]:
    """The rules of all versions between which something changed for this model, oldest first."""
    own = _MODELS.get(model.architecture.family, _Own())
    first = _QUANTIZED_SINCE if model.quantization else _VERSIONS[0].since
    since = sorted({first, *own.changes, *(version.since for version in _VERSIONS)})
    return tuple(_rules(model, numbers, own) for numbers in since if numbers >= first)


def first_with_stages() -> str:
    return as_text(next(version.since for version in _VERSIONS if version.has_stages))


def without_expert_maps() -> str:
    """The version from which on no rank says which experts it has."""
    return as_text(next(later.since for version, later in pairwise(_VERSIONS) if version.maps_experts and not later.maps_experts))


def as_text(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))


def _rules(model: Model, since: Numbers, own: _Own) -> VersionRules:
    version = [row for row in _VERSIONS if row.since <= since][-1]
    fusions = (
        Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"),
        Fusion(("mlp.gate", "mlp.up"), "gate_up_proj"),
        Fusion(("shared_expert.gate", "shared_expert.up"), "gate_up_proj"),
        *((Fusion(("mla.q_a", "mla.kv_a"), "fused_qkv_a_proj"),) if version.fuses_latent else ()),
        Fusion(("expert.gate", "expert.up"), f"{version.experts}w13"),
        Fusion(("expert.down",), f"{version.experts}w2"),
    )
    engine = EngineRules(
        name="vLLM",
        fusions=fusions,
        extra_tensors=tuple(_beside(model, version, has_normalizer=since < own.keeps_normalizer_until)),
        vocabulary_multiple=model.architecture.vocabulary_multiple or 64,
        partition=partition,
        every_stage=frozenset(own.every_stage),
        as_stored=frozenset(role for first, role in own.as_stored if first <= since),
        tied_table_stored_as=own.tied,
        renames=tuple(_renames(own, since)),
        dtypes={"scale": F32, "router.correction": F32 if version.corrects_wide else None},
        scales_kept_once=frozenset({"input_scale"}),
        unsupported=own.lacks,
        experts_share_ranks=own.experts_share_ranks,
        stages_need_experts=own.stages_need_experts,
    )
    return VersionRules(since, engine, version.has_stages, version.maps_experts, own.quantizes_router, own.settings, own.demands)


def _renames(own: _Own, since: Numbers) -> Iterator[tuple[str, str]]:
    yield r"(?<!\.attn)\.([kv]_scale)$", r".attn.\1"
    for moved in own.moved:
        to = [text for first, text in moved.to if first <= since]
        if to and to[-1]:
            yield moved.pattern, to[-1]


def _beside(model: Model, version: _Version, *, has_normalizer: bool) -> Iterator[ExtraTensor]:
    if has_normalizer:
        yield normalizer(model)
    if version.scales:
        yield from _SCALES
    if model.quantization and "kv_rank" not in model.dimensions:
        yield from _PLACEHOLDERS[model.quantization.method]


def with_partition(rules: EngineRules, counts: Numbers) -> EngineRules:
    """The rules of a run that dealt the layers so."""
    return replace(rules, partition=lambda layers, pp: counts)
