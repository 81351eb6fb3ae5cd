"""What vLLM's model classes make of a model's weights, by model and by version: names, fusions, and who holds the model's ends.

Every row is a difference from a llama of the newest version. Measured on 0.32.0 (fixtures/vllm: what real ranks hold).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from reshard.architecture import Model
from reshard.dtypes import F32
from reshard.engines import Beside, EngineRules, Fusion
from reshard.errors import RequestError

NEWEST = "0.32.0"
Numbers = tuple[int, ...]


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: equal, and what is left over one each to the stages before the last (vLLM, distributed/utils.py)."""
    base, rest = divmod(layers, pp)
    counts = [base] * pp
    for i in range(2, rest + 2):
        counts[-i] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class _Version:
    """What changed for all models with one release: attention scales became buffers, experts moved, stages got their own file names."""

    since: Numbers
    scales: bool
    experts: str
    has_stages: bool = False


_VERSIONS = (
    _Version((0, 8, 5), scales=False, experts=""),
    _Version((0, 14), scales=True, experts=""),
    _Version((0, 25), scales=True, experts="routed_experts."),
    _Version((0, 32), scales=True, experts="routed_experts.", has_stages=True),
)


@dataclass(frozen=True, slots=True)
class _Own:
    """What a model's class has of its own, from a version on. quantizes_router: unless the config says that the router is not quantised.
    settings: what the config has to say."""

    since: Numbers = (0, 8, 5)
    renames: tuple[tuple[str, str], ...] = ()
    every_stage: tuple[str, ...] = ()
    as_stored: tuple[str, ...] = ()
    tied: str = "head"
    experts_share_ranks: bool = False
    quantizes_router: bool = False
    settings: tuple[tuple[str, str], ...] = ()


_ENDS = ("embedding", "position_embedding", "final_norm", "head")
_SHARED = (r"\.mlp\.shared_experts?\.", r".mlp.experts._shared_experts._layer.")
_LATENT = (
    (r"\.self_attn\.attn\.", ".self_attn.mla_attn.mla_attn."),
    (r"\.self_attn\.(q_a_layernorm|q_b_proj|q_proj|o_proj)\.", r".self_attn.mla_attn.\1."),
    (r"\.mlp\.gate\.", ".mlp.experts.gate."),
    _SHARED,
)
_MODELS: dict[str, tuple[_Own, ...]] = {
    "llama": (_Own(),),
    "mistral": (_Own(),),
    "qwen2": (_Own(),),
    "qwen3": (_Own(),),
    "phi3": (_Own(),),
    "gemma2": (_Own(every_stage=_ENDS, tied="embedding"),),
    "gpt2": (_Own(every_stage=_ENDS),),
    # Through the Transformers backend: heads keep their q, k and v together.
    "gpt_neox": (_Own(since=(0, 32), renames=((r"^gpt_neox\.", "model."), (r"^embed_out\.", "lm_head.")), as_stored=("attention.qkv",)),),
    "mixtral": (_Own(every_stage=_ENDS),),
    "qwen2_moe": (
        _Own(
            since=(0, 32),
            every_stage=_ENDS,
            renames=((r"\.mlp\.shared_expert_gate\.", ".mlp.experts._shared_experts._layer.expert_gate."), _SHARED),
            experts_share_ranks=True,
        ),
    ),
    "qwen3_moe": (
        _Own(
            since=(0, 32),
            every_stage=_ENDS,
            renames=((r"\.mlp\.gate\.", ".mlp.experts.gate."),),
            experts_share_ranks=True,
            quantizes_router=True,
        ),
    ),
    "deepseek_v2": (_Own(since=(0, 32), renames=_LATENT),),
    # Published configs say it; without it there is no place for the router's correction.
    "deepseek_v3": (_Own(since=(0, 32), renames=_LATENT, settings=(("topk_method", "noaux_tc"),)),),
}

# Of a quantised model's attention: "not given" is said by -1, or by a scale of 1 (layers/quantization/kv_cache.py).
_PLACEHOLDERS = {
    "fp8": tuple(Beside("attention.o", f"attn.{name}_scale", -1.0, None) for name in ("q", "k", "v", "prob")),
    "compressed-tensors": (
        *(Beside("attention.o", f"attn.{name}_scale", 1.0, F32, (1,)) for name in ("q", "k", "v")),
        *(Beside("attention.o", f"attn.{name}_zero_point", 0.0, None, (1,)) for name in ("q", "k", "v")),
    ),
}
_SCALES = tuple(Beside("attention.o", f"attn.{name}", 1.0, F32) for name in ("_k_scale", "_q_scale", "_v_scale", "_prob_scale"))


Row = TypeVar("Row", _Version, _Own)


@dataclass(frozen=True, slots=True)
class VersionRules:
    """The rules of one version for one model. has_stages: whether its file names tell pipeline stages apart. settings: what the config has
    to say."""

    since: Numbers
    engine: EngineRules
    has_stages: bool
    quantizes_router: bool
    settings: tuple[tuple[str, str], ...]


def is_known(model_type: str) -> bool:
    """Whether the class that serves such models was compared with what is laid out here."""
    return model_type in _MODELS


def rules_for(model: Model, version: str) -> VersionRules:
    """The rules that hold for a version of vLLM. Raises RequestError if what it expects of this model is not known."""
    if not re.fullmatch(r"v?\d+(\.\d+)*([a-z+.-].*)?", version):
        raise RequestError(f"--engine-version {version}: a version such as {NEWEST} is expected")
    numbers = numbers_of(version)
    fitting = [rules for rules in all_rules(model) if rules.since <= numbers]
    if not fitting:
        oldest = min(rules.since for rules in all_rules(model))
        raise RequestError(
            f"--engine-version {version}: the oldest vLLM whose keys for {model.architecture.model_type} are known is {_text(oldest)}",
            do=f"Use vLLM {_text(oldest)} or newer, or convert to hf, which every version loads",
        )
    return fitting[-1]


def all_rules(model: Model) -> tuple[VersionRules, ...]:
    """The rules of all versions between which something changed for this model, oldest first."""
    own = _MODELS.get(model.architecture.family, (_Own(),))
    changes = {row.since for row in _VERSIONS} | {row.since for row in own}
    since = sorted(numbers for numbers in changes if numbers >= own[0].since)
    return tuple(_rules(model, numbers, _last(_VERSIONS, numbers), _last(own, numbers)) for numbers in since)


def first_with_stages() -> str:
    return _text(next(version.since for version in _VERSIONS if version.has_stages))


def numbers_of(version: str) -> Numbers:
    return tuple(int(word) for word in re.match(r"v?([\d.]+)", version)[1].strip(".").split("."))  # type: ignore[index]


def _last(rows: Sequence[Row], numbers: Numbers) -> Row:
    return [row for row in rows if row.since <= numbers][-1]


def _text(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))


def _rules(model: Model, since: Numbers, version: _Version, own: _Own) -> VersionRules:
    experts = version.experts
    engine = EngineRules(
        name="vLLM",
        fusions=(
            Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"),
            Fusion(("mlp.gate", "mlp.up"), "gate_up_proj"),
            Fusion(("shared_expert.gate", "shared_expert.up"), "gate_up_proj"),
            Fusion(("mla.q_a", "mla.kv_a"), "fused_qkv_a_proj"),
            Fusion(("expert.gate", "expert.up"), f"{experts}w13"),
            Fusion(("expert.down",), f"{experts}w2"),
        ),
        beside=tuple(_beside(model, version)),
        vocabulary_multiple=model.architecture.vocabulary_multiple or 64,
        partition=partition,
        every_stage=frozenset(own.every_stage),
        as_stored=frozenset(own.as_stored),
        tied=own.tied,
        renames=own.renames,
        dtypes={"router.correction": F32, "scale": F32},
        shared=frozenset({"input_scale"}),
        experts_share_ranks=own.experts_share_ranks,
    )
    return VersionRules(since, engine, version.has_stages, own.quantizes_router, own.settings)


def _beside(model: Model, version: _Version) -> Iterator[Beside]:
    if version.scales:
        yield from _SCALES
    if model.quantization and "kv_rank" not in model.dimensions:
        yield from _PLACEHOLDERS[model.quantization.method]


def with_partition(rules: EngineRules, counts: Numbers) -> EngineRules:
    """The rules of a run that dealt the layers so."""
    return replace(rules, partition=lambda layers, pp: counts)
