"""What changed in the keys of vLLM's state dicts between versions, for all models (RELEASES) and for single ones (HISTORY).

Measured on the model classes of ten older versions (fixtures/vllm_versions) and on 0.32.0 (fixtures/vllm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from reshard.serving.versions import Numbers

NEWEST = "0.32.0"


@dataclass(frozen=True, slots=True)
class Release:
    """What holds for all models from one version on, until the next Release."""

    since: Numbers
    """The version."""

    fuses_latent: bool = True
    """Whether q_a_proj and kv_a_proj of latent attention are one tensor."""

    wide_correction: bool = True
    """Whether the router's correction bias is stored in float32, whatever its element type in the model."""

    attention_scales: bool = True
    """Whether the scales of attention are tensors of the state dict."""

    needs_expert_map: bool = False
    """Whether a rank with some of the experts stores a map that names them. Such files are not written."""

    experts: str = ""
    """Module between `experts.` and the tensors in a key, with a dot at its end: "routed_experts."; "" if there is none."""

    has_stages: bool = False
    """Whether the names of the files contain the pipeline stage."""


RELEASES = (
    Release((0, 8, 5), fuses_latent=False, wide_correction=False, attention_scales=False),
    Release((0, 10), wide_correction=False, attention_scales=False),
    Release((0, 10, 2), attention_scales=False),
    Release((0, 11), attention_scales=False, needs_expert_map=True),
    Release((0, 14), needs_expert_map=True),
    Release((0, 24), needs_expert_map=True, experts="routed_experts."),
    Release((0, 27), experts="routed_experts."),
    Release((0, 32), experts="routed_experts.", has_stages=True),
)
# The first version with today's placeholder scales in the attention of a quantized model.
QUANTIZED_SINCE = (0, 15)


@dataclass(frozen=True, slots=True)
class Rename:
    """A pattern of Hugging Face names, and what replaces it in which versions."""

    pattern: str
    """The pattern."""

    replacements: tuple[tuple[Numbers, str], ...]
    """(first version, replacement), oldest first. Before the first version, and where the replacement is "", the name stays."""


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """What changed in vLLM's class of one model."""

    renames: tuple[Rename, ...] = ()
    """Names that changed."""

    keeps_fused: tuple[tuple[Numbers, str], ...] = ()
    """(first version, role) of fused weights that stay as the model stores them."""

    normalizer_until: Numbers = ()
    """The first version that no longer stores the normalizer, the factor of the embeddings; () if no version stores it."""

    @property
    def changes(self) -> set[Numbers]:
        """The versions in which something changed."""
        renamed = {since for rename in self.renames for since, _ in rename.replacements}
        return renamed | {since for since, _ in self.keeps_fused} | {self.normalizer_until}

    def renames_at(self, version: Numbers) -> Iterator[tuple[str, str]]:
        """(pattern, replacement) of the names that a version changes."""
        for rename in self.renames:
            replacements = [replacement for since, replacement in rename.replacements if since <= version]
            if replacements and replacements[-1]:
                yield rename.pattern, replacements[-1]

    def keeps_fused_at(self, version: Numbers) -> frozenset[str]:
        """The roles of the fused weights that a version stores as the model does."""
        return frozenset(role for since, role in self.keeps_fused if since <= version)


_LATENT = ModelHistory(
    renames=(
        Rename(r"\.self_attn\.attn\.", (((0, 14), ".self_attn.mla_attn.mla_attn."),)),
        Rename(r"\.self_attn\.(q_a_layernorm|q_b_proj|q_proj|o_proj)\.", (((0, 10, 2), r".self_attn.mla_attn.\1."),)),
        Rename(
            r"\.mlp\.gate\.weight$",
            (
                ((0, 11, 1), ".mlp.experts._gate.weight"),
                ((0, 20), ""),
                ((0, 21), ".mlp.experts.runner.gate.weight"),
                ((0, 24), ".mlp.experts.gate.weight"),
            ),
        ),
        Rename(
            r"\.mlp\.gate\.(e_score_correction_bias)$",
            (
                ((0, 8, 5), r".mlp.experts.\1"),
                ((0, 11, 1), r".mlp.experts._gate.\1"),
                ((0, 20), r".mlp.experts.\1"),
                ((0, 24), r".mlp.experts.gate.\1"),
            ),
        ),
        Rename(
            r"\.mlp\.shared_experts\.",
            (((0, 10, 2), ".mlp.experts._shared_experts."), ((0, 20), ""), ((0, 24), ".mlp.experts._shared_experts._layer.")),
        ),
    )
)
HISTORY = {
    "gemma2": ModelHistory(normalizer_until=(0, 9, 2)),
    # Served by the Transformers backend since 0.32: q, k and v of each head stay together.
    "gpt_neox": ModelHistory(
        renames=(Rename(r"^gpt_neox\.", (((0, 32), "model."),)), Rename(r"^embed_out\.", (((0, 32), "lm_head."),))),
        keeps_fused=(((0, 32), "attention.qkv"),),
    ),
    "qwen2_moe": ModelHistory(
        renames=(
            Rename(
                r"\.mlp\.shared_expert_gate\.",
                (
                    ((0, 11, 1), ".mlp.experts._shared_experts.expert_gate."),
                    ((0, 20), ".mlp.shared_expert.expert_gate."),
                    ((0, 24), ".mlp.experts._shared_experts._layer.expert_gate."),
                ),
            ),
            Rename(
                r"\.mlp\.shared_expert\.(?!expert_gate)",
                (((0, 11, 1), ".mlp.experts._shared_experts."), ((0, 20), ""), ((0, 24), ".mlp.experts._shared_experts._layer.")),
            ),
        )
    ),
    "qwen3_moe": ModelHistory(
        renames=(
            Rename(
                r"\.mlp\.gate\.",
                (
                    ((0, 15), ".mlp.experts._gate."),
                    ((0, 20), ""),
                    ((0, 21), ".mlp.experts.runner.gate."),
                    ((0, 24), ".mlp.experts.gate."),
                ),
            ),
        )
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


def first_with_stages() -> str:
    """The first version whose file names contain the pipeline stage."""
    return as_text(next(release.since for release in RELEASES if release.has_stages))


def first_without_expert_map() -> str:
    """The first version that no longer needs a map of experts in each rank's file."""
    return as_text(next(later.since for release, later in pairwise(RELEASES) if release.needs_expert_map and not later.needs_expert_map))


def as_text(numbers: Numbers) -> str:
    """(0, 32) as 0.32."""
    return ".".join(map(str, numbers))
