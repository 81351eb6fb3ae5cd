"""Computation: how a training framework computes a model, as the model's declaration says it.

    frameworks:
      megatron:
        settings: {rotary_interleaved: true, moe_router_topk_scaling_factor: {key: routed_scaling_factor}}
        assumes: {norm_topk_prob: true}

The weights of a model do not show how its router scores experts or which pairs of rows its rotary positions turn. What follows from the
weights, and from config keys that all models share, is in the framework's own file. declared/frameworks.py reads this section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from reshard.geometry.value import value


@value
class ConfigKey:
    """A setting whose value is that of a key of the model's config."""

    key: str
    when: str | None = None
    """A key of the config, or "not KEY": the setting is left out unless it is set. None: it always counts."""


@value
class LayersOf:
    """A setting whose value is a list with 1 for each layer of a set and 0 for the others."""

    layer_set: str


@value
class Computation:
    """How a framework computes one model. A model without one was not compared with the framework."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """The framework's own settings: a value, a ConfigKey or a LayersOf."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Role -> the function, one of functions.FUNCTIONS, whose values the framework stores in place of such a weight."""

    assumes: tuple[tuple[str, object], ...] = ()
    """Config keys that the framework cannot set, each with the value that it computes. A model with another value is refused."""

    lacks: str | None = None
    """What the framework does not have and the model needs, as a noun phrase; None: it computes the model."""

    built_by: str | None = None
    """The library that builds the model of the framework's layers and some of its own, and its class; None: the framework itself."""
