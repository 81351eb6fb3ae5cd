"""The settings of a LoRA adapter: whether it can be merged, and the scale that turns its factors into an update of the base weights.

Measured on peft 0.21.2 (fixtures/peft); source: lora/config.py, lora/layer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.canonical.renaming import PREFIX
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.value import value

# Settings of adapter_config.json under which the update is not scale * B x A, or the base is not the model that it names.
_OTHER_METHODS = {
    "use_qalora": "QALoRA pools the inputs of a module in groups",
    "alora_invocation_tokens": "an activated LoRA applies only after its invocation tokens",
    "layer_replication": "the adapted model has more layers than the base",
    "trainable_token_indices": "single rows of the embedding are trained",
    "use_bdlora": "the factors are block-diagonal",
    "arrow_config": "a router mixes several adapters",
    "kasa_config": "KaSA changes the base weights",
    "velora_config": "VeLoRA changes the forward pass",
    "monteclora_config": "MonteCLoRA samples the factors",
}
# Initialisations after which the base weights are no longer those of the base model; PEFT can save such an adapter in plain form.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "orthogonal_base")
_CONFIG = "adapter_config.json"


@value
class LoraSettings:
    """The settings of an adapter, from adapter_config.json."""

    config: Mapping[str, Any]
    """The content of adapter_config.json."""

    @property
    def alpha(self) -> float | None:
        """lora_alpha; None if the config does not give it."""
        return _number(self.config.get("lora_alpha"))

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence if the scale is not certain."""
        if "use_rslora" in self.config:
            return ()
        return ("use_rslora: nothing says whether the scale is alpha / sqrt(r); alpha / r is taken, as PEFT does without the setting",)

    def with_alpha(self, given: str | None) -> LoraSettings:
        """The settings with the lora_alpha that the user gives, if any. Raises RequestError if it is not known."""
        try:
            alpha = self.alpha if given is None else float(given)
        except ValueError:
            raise RequestError(f"`lora_alpha={given}`: a number is expected") from None
        if alpha is None:
            raise RequestError(
                "lora_alpha is not known",
                why=f"The update is alpha / r times the product of the factors, and the checkpoint has no {_CONFIG} that gives alpha",
                do="Give it with `lora_alpha=`, or all settings with `adapter_config=`",
            )
        return LoraSettings({**self.config, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha})

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """The parameters, such as the weights of all experts, that are adapted without a module of their own."""
        return tuple(map(str, self.config.get("target_parameters") or ()))

    @property
    def peft_releases(self) -> tuple[tuple[int, int, int], ...]:
        """Releases of PEFT, one of which is that of the training: 0.19.1.dev0 lies between 0.19.0 and 0.20.0. Before 0.18, PEFT does not
        write peft_version, and neither do other libraries."""
        numbers = re.match(r"(\d{1,4})\.(\d{1,4})\.?(\d{0,4})(.*)", str(self.config.get("peft_version")))
        if numbers is None:
            return (0, 17, 0), (0, 21, 0)
        major, minor, patch = (int(number or 0) for number in numbers.groups()[:3])
        return ((major, minor, patch - 1), (major, minor, patch), (major, minor + 1, 0)) if numbers[4] else ((major, minor, patch),)

    def check_parameters(self, modules: Iterable[str]) -> None:
        """Raises RequestError if one of the adapted modules holds experts, and no setting says which of their parameters it changes."""
        stacked = sorted(module for module in modules if module.endswith((".experts", ".base_layer")))
        if stacked and not self.target_parameters:
            raise RequestError(
                f"the adapter changes parameters of {stacked[0]}, and no {_CONFIG} gives target_parameters",
                where=f"{PREFIX}{stacked[0]}",
                why="The names of the tensors do not tell which parameters of the module they change",
                do="Give the settings of the training with `adapter_config=`",
            )

    def trains_bias(self, name: str) -> bool:
        """Whether a base weight with that stored name is a bias that was trained with the adapter."""
        match self.config.get("bias", "none"):
            case "all":
                return name.endswith(".bias")
            case "lora_only":
                return name.endswith(".base_layer.bias")
        return False

    def check_mergeable(self) -> None:
        """Raises UnsupportedError for an adapter that is not a LoRA adapter, or whose update does not follow from its factors alone."""
        peft_type = str(self.config.get("peft_type") or "LORA").upper()
        reason = None if peft_type == "LORA" else f"it is a {peft_type} adapter"
        for setting, meaning in _OTHER_METHODS.items():
            if reason is None and self.config.get(setting):
                reason = f"{setting} is set: {meaning}"
        init = str(self.config.get("init_lora_weights", "")).lower()
        if reason is None and init.startswith(_CHANGES_BASE):
            reason = f"init_lora_weights is {init}: training began with changed base weights, and the adapter belongs to those"
        if reason is not None:
            raise UnsupportedError(
                f"the adapter cannot be merged: {reason}",
                where=_CONFIG,
                why="Its update is not the scaled product of its two factors, so the result would be another model",
                do="Merge it with PEFT (merge_and_unload), then convert the result",
            )

    def scale(self, target: str, rank: int) -> float:
        """The factor of B x A for the module, or the parameter of `target_parameters`, with that name.

        Raises: CheckpointError if the config gives no lora_alpha, or another rank than `rank`, which is that of the matrices.
        """
        expected = self._of(target, "rank_pattern", "r")
        if expected is not None and expected != rank:
            raise CheckpointError(
                f"its matrices have the rank {rank}, {_CONFIG} says {expected:g}",
                where=target,
                why="The file and the config are from different trainings, and the scale follows from the rank",
                do=f"Copy {_CONFIG} and the adapter from the same save",
            )
        alpha = self._of(target, "alpha_pattern", "lora_alpha")
        if alpha is None:
            raise CheckpointError(
                f"{_CONFIG} gives no lora_alpha",
                where=target,
                why="The update is alpha / r times the product of the factors, and nothing else tells alpha",
                do=f"Put lora_alpha, as it was in training, into {_CONFIG}",
            )
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _of(self, target: str, pattern: str, default: str) -> float | None:
        """A setting of one module: by the first matching pattern, as peft's get_pattern_key, otherwise the general one."""
        for key, value in (self.config.get(pattern) or {}).items():
            try:
                if re.match(rf"(.*\.)?({key})$", target):
                    return _number(value)
            except re.error:
                raise CheckpointError(f"{pattern} has the key {key!r}, which is not a regular expression", where=_CONFIG) from None
        return _number(self.config.get(default))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
