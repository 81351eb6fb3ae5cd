"""Provenance: what a checkpoint's values are made of besides its own files: an adapter, other checkpoints, deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reshard.geometry.value import value
from reshard.storage.files import Files


@value
class MergedAdapter:
    """A LoRA adapter that is merged into the weights."""

    path: str
    """Its absolute path; that of the checkpoint, if it lies beside the weights."""
    settings: Mapping[str, Any]
    """The content of its adapter_config.json."""
    weights: int
    """The number of weights that it changes."""
    weight: float = 1.0
    """The factor of its updates."""
    before: MergedAdapter | None = None
    """The adapter that was merged before it."""
    combination: str = ""
    """How this one and those before it became one adapter, "cat" or "linear"; empty if their updates were added."""

    @property
    def all(self) -> tuple[MergedAdapter, ...]:
        """This adapter and those that were merged before it, in the order in which they were merged."""
        return (*(self.before.all if self.before else ()), self)

    def to_json(self) -> dict[str, Any]:
        """What it is, as plain values with stable keys."""
        chosen = {key: self.settings.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "use_dora")}
        several = {"weight": self.weight, "before": self.before and self.before.to_json()} if self.before or self.weight != 1 else {}
        combination = {"combination": self.combination} if self.combination else {}
        return {"path": self.path, "weights": self.weights, **chosen, **several, **combination}


@value
class CombinedSource:
    """One of several checkpoints that are combined."""

    path: str
    """Its absolute path, or URL; with deltas as BASE+DELTA+DELTA."""
    files: Files
    """Its files."""
    deltas: tuple[AppliedDelta, ...]
    """The deltas that change it, the oldest first."""
    format: str
    """Its format."""
    step: int | None
    """Its step of the run, if it says so."""
    weight: float
    """Its weight."""
    recorded: Callable[[], Mapping[str, str]]
    """Reads the digests that reshard recorded when it wrote the checkpoint, by key."""

    def to_json(self) -> dict[str, Any]:
        """What it is, as plain values with stable keys."""
        return {"path": self.path, "format": self.format, "step": self.step, "weight": self.weight}


@value
class Combined:
    """Several checkpoints that become one."""

    rule: str
    """How: "average", "task-arithmetic", "slerp"."""
    asked: str
    """What was asked for: "equal", "wsm:linear", "0.25, 0.75"."""
    sources: tuple[CombinedSource, ...]
    """The checkpoints, in order."""

    def to_json(self) -> dict[str, Any]:
        """What it is, as plain values with stable keys."""
        return {"rule": self.rule, "asked": self.asked, "sources": [source.to_json() for source in self.sources]}


@value
class AppliedDelta:
    """A delta that changes the tensors when they are read."""

    path: str
    """Its absolute path or URL."""
    version: str
    """The version that it makes."""
    fingerprint: str | None
    """The fingerprint of what it makes; None if another program wrote the delta."""

    def to_json(self) -> dict[str, Any]:
        """What it is, as plain values with stable keys."""
        return {"path": self.path, "version": self.version, "fingerprint": self.fingerprint}
