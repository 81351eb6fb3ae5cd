"""The settings of a LoRA adapter: whether it can be merged, and the scale that turns its factors into an update of the base weights.

Measured on peft 0.21.2 (fixtures/peft); source: lora/config.py, lora/layer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import cache, lru_cache, reduce
from operator import or_
from re import _compiler, _parser  # type: ignore[attr-defined]  # the only parser of these expressions
from typing import Any

from reshard.canonical.renaming import PREFIX
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.value import value

# Settings of adapter_config.json under which the update is not scale * B x A, or the base is not the model that it names.
_OTHER_METHODS = {
    "use_qalora": "QALoRA pools the inputs of a module in groups",
    "alora_invocation_tokens": "an activated LoRA applies only after its invocation tokens",
    "layer_replication": "the adapted model has more layers than the base",
    "use_bdlora": "the factors are block-diagonal",
    "arrow_config": "a router mixes several adapters",
    "kasa_config": "KaSA changes the base weights",
    "velora_config": "VeLoRA changes the forward pass",
    "monteclora_config": "MonteCLoRA samples the factors",
}
# Initialisations after which the base weights are no longer those of the base model; PEFT can save such an adapter in plain form.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "orthogonal_base")
_CONFIG = "adapter_config.json"
# Of the regular expressions of an adapter, for all of its modules: some seconds.
_MOST_STEPS = 5_000_000


@value
class LoraSettings:
    """The settings of an adapter, from adapter_config.json."""

    config: Mapping[str, Any]
    """The content of adapter_config.json."""
    steps: list[int] = field(default_factory=lambda: [_MOST_STEPS])
    """How much more work its regular expressions may take."""

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
        return replace(self, config={**self.config, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha})

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

    def alpha_of(self, target: str) -> float:
        """lora_alpha of the module, or the parameter, with that name; `scale` has checked that there is one."""
        return self._of(target, "alpha_pattern", "lora_alpha") or 0.0

    def trained_rows(self, module: str, *aliases: str) -> tuple[int, ...]:
        """The numbers of the rows of an embedding that were trained alone, in the order of the stored ones. aliases: other names of it.

        Raises: CheckpointError if the config does not give them. Source: TrainableTokensWrapper of peft 0.21.2, which keeps their order.
        """
        given, names = self.config.get("trainable_token_indices"), [f".{name}" for name in (module, *aliases)]
        rows = given
        if isinstance(given, dict):
            rows = next((rows for name in names for key, rows in given.items() if name.endswith(f".{key}")), None)
        if not isinstance(rows, list | tuple) or not all(type(row) is int for row in rows):
            raise CheckpointError(
                f"single rows of the embedding were trained, and {_CONFIG} does not give their numbers (trainable_token_indices)",
                where=module,
                why="The tensor holds the rows, and not their numbers",
                do=f"Copy {_CONFIG} and the adapter from the same save",
            )
        return tuple(rows)

    def saves(self, module: str) -> bool:
        """Whether modules_to_save names a module: the training had its own copy of it, a tied one included (ensure_weight_tying: not)."""
        names = self.config.get("modules_to_save") or ()
        return any(module.endswith(str(name)) for name in names) and not self.config.get("ensure_weight_tying")

    def _of(self, target: str, pattern: str, default: str) -> float | None:
        """A setting of one module: by the first matching pattern, as peft's get_pattern_key, otherwise the general one."""
        for key, value in (self.config.get(pattern) or {}).items():
            try:
                if _is_match(rf"(.*\.)?({key})$", target, self.steps):
                    return _number(value)
            except (re.error, OverflowError):
                raise CheckpointError(f"{pattern} has the key {key!r}, which is not a regular expression", where=_CONFIG) from None
            except (_TooMuch, RecursionError):
                raise UnsupportedError(
                    f"{pattern} has the key {key!r}, which is too intricate, or looks around or back",
                    where=_CONFIG,
                    why="Such a regular expression can take longer than the conversion, and comes from a file",
                    do="Write the names of the modules in its place",
                ) from None
        return _number(self.config.get(default))


class _TooMuch(Exception):
    """A regular expression takes more steps than are left, or has what would take more than steps."""


def _is_match(pattern: str, text: str, steps: list[int]) -> bool:
    """Whether `re.match` finds a match. Unlike `re`, it tries all ways at once, so that the time does not explode: bit i of a number says
    that some way has come to position i. An example: .*b at the start of "abab", bit 0, has come to the bits 0 to 4, then to 2 and 4.

    steps: those that are left. Raises: re.error or OverflowError for what is no regular expression, _TooMuch.
    """
    if not re.search(r"[*+?{(]", pattern.removeprefix("(.*\\.)?(")):
        return re.match(pattern, text) is not None
    masks: dict[int, int] = {}

    @cache
    def ends(items: Iterable[Any], at: int) -> int:
        for item in items if at else ():
            steps[0] -= 1 + len(text) // 100
            operator, argument = str(item[0]), item[1]
            if steps[0] < 0:
                raise _TooMuch
            if operator == "SUBPATTERN" and not any(argument[1:3]):
                at = ends(argument[3], at)
            elif operator == "BRANCH":
                at = reduce(or_, [ends(branch, at) for branch in argument[1]])
            elif operator in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, body = argument
                for _ in range(min(least, len(text) + 1)):
                    at = ends(body, at)
                new = at
                for _ in range(min(most - least, len(text) + 1)):
                    if not (new := ends(body, new) & ~at):
                        break
                    at |= new
            elif operator in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
                if id(item) not in masks:
                    one = _compiler.compile(_parser.SubPattern(_parser.State(), [item]))
                    masks[id(item)] = sum(1 << i for i in range(len(text) + 1) if one.match(text, i))
                at = at & masks[id(item)] if operator == "AT" else (at & masks[id(item)]) << 1
            else:
                raise _TooMuch
        return at

    return ends(_parsed(pattern), 1) != 0


_parsed = lru_cache(maxsize=1 << 10)(_parser.parse)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
