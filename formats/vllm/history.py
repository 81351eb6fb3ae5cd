"""What changed in the keys of vLLM's state dicts between versions, for all models. Changes in the class of one
model stand in its declaration.

Measured on the model classes of ten older versions (fixtures/vllm_versions) and on 0.32.0 (fixtures/vllm).
"""

from __future__ import annotations

from itertools import pairwise

from reshard.geometry.value import value
from reshard.serving.versions import Numbers

NEWEST = "0.32.0"


@value
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


def first_with_stages() -> str:
    """The first version whose file names contain the pipeline stage."""
    return as_text(next(release.since for release in RELEASES if release.has_stages))


def first_without_expert_map() -> str:
    """The first version that no longer needs a map of experts in each rank's file."""
    return as_text(next(later.since for release, later in pairwise(RELEASES) if release.needs_expert_map and not later.needs_expert_map))


def as_text(numbers: Numbers) -> str:
    """(0, 32) as 0.32."""
    return ".".join(map(str, numbers))
