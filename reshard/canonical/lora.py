"""LoRA adapters: the names of their tensors, and the settings that turn their factors into an update of the base weights.

    base_model.model.<module>.lora_A.weight             [r, in]      in the file of PEFT; <module> is a module of the base model
    base_model.model.<module>.lora_A.default.weight                  in state dicts of trainers: with the adapter's name
    base_model.model.<module>.lora_B.weight             [out, r]     lora_B.bias [out]: lora_bias
    base_model.model.<module>.lora_embedding_A          [r, vocab]   lora_embedding_B [hidden, r]; (B x A) transposed is added
    base_model.model.<module>.lora_magnitude_vector     [out]        DoRA; in trainers .lora_magnitude_vector.default.weight
    base_model.model.<module>.token_adapter.trainable_tokens_delta   [tokens, hidden], the rows of trainable_token_indices
    base_model.model.<module>.weight                                 modules_to_save; in trainers .modules_to_save.default.weight
    base_model.model.<module>.base_layer.weight                      the base beside it; for modules_to_save .original_module.weight

The canonical name of an adapter's tensor is its name in PEFT's file. Measured on peft 0.21.2 (fixtures/peft); source: lora/config.py,
lora/layer.py, utils/save_and_load.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.renaming import renamed
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor

PREFIX = "base_model.model."
# Parts of the base's names that PEFT adds.
_BASE_PARTS = frozenset({"base_layer", "original_module", "token_adapter"})
_WITH_PARAMETER = frozenset({"lora_A", "lora_B"})
TRAINED_TOKENS = "trainable_tokens_delta"
_WITHOUT_PARAMETER = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", TRAINED_TOKENS})
_SAVED = "modules_to_save"
_MARKS = ("lora_", _SAVED, TRAINED_TOKENS)


@value
class AdapterName:
    """What the stored name of an adapter's tensor says."""

    module: str
    """The module of the base model, without the parts that PEFT adds in front. Nested `target_parameters` end in `.base_layer`."""
    parameter: str
    """Its name after the module in the file of PEFT, such as "lora_A.weight"; for modules_to_save the module's own, such as "weight"."""
    adapter: str | None
    """The name of the adapter, which state dicts of trainers hold; None in the file of PEFT."""

    @property
    def in_file(self) -> str:
        """The name in the file of PEFT."""
        return f"{PREFIX}{self.module}.{self.parameter}"


def adapter_name(name: str) -> AdapterName | None:
    """What a name of an adapter's tensor says; None for other names. Those of modules_to_save in the file of PEFT look like others."""
    if not any(mark in name for mark in _MARKS):
        return None
    parts = name.removeprefix(PREFIX).split(".")
    for i, part in enumerate(parts):
        module, rest = ".".join(parts[:i]), parts[i + 1 :]
        if part in _WITH_PARAMETER and len(rest) in (1, 2) and rest[-1] in ("weight", "bias"):
            return AdapterName(module, f"{part}.{rest[-1]}", rest[0] if len(rest) == 2 else None)
        if part in _WITHOUT_PARAMETER and (len(rest) < 2 or (len(rest) == 2 and rest[1] == "weight")):
            return AdapterName(module, part, rest[0] if rest and rest != ["weight"] else None)
        if part == _SAVED and len(rest) > 1:
            return AdapterName(module, ".".join(rest[1:]), rest[0])
    return None


def base_name(name: str) -> str:
    """The name of a base weight without the parts that PEFT adds."""
    if not name.startswith(PREFIX) and not any(f".{part}." in name for part in _BASE_PARTS):
        return name
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in _BASE_PARTS)


def is_of_adapter(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of an adapter, or the only stored copy of one, which is a master."""
    return tensor.kind == "adapter" or (tensor.kind == "master" and adapter_name(tensor.name) is not None)


def adapters_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the adapters that the names of tensors tell, in their order; the file of PEFT does not tell one."""
    found = (adapter_name(tensor.name) for tensor in tensors)
    return tuple(dict.fromkeys(name.adapter for name in found if name is not None and name.adapter is not None))


def with_adapter_names(index: Index, adapter: str | None = None) -> Index:
    """The index in which the tensors of an adapter have their names in the file of PEFT. `index` itself if they have them already.

    adapter: the adapter; None for the only one. With several and none chosen, all keep their stored names.
    """
    found = {tensor.name: name for tensor in index.tensors if (name := adapter_name(tensor.name)) is not None}
    adapters = {name.adapter for name in found.values()}
    if not found or (adapter is None and len(adapters) > 1):
        return index
    names = {stored: name.in_file for stored, name in found.items() if adapter is None or name.adapter == adapter}
    if all(stored == new for stored, new in names.items()):
        return index
    tensors = (replace(tensor, name=names[tensor.name]) if tensor.name in names else tensor for tensor in index.tensors)
    return renamed(index, tensors, lambda name: (names.get(name, name),))


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
    def base_model(self) -> str | None:
        """The base model's name or path, as the trainer wrote it."""
        found = self.config.get("base_model_name_or_path")
        return str(found) if found else None

    @property
    def task_type(self) -> str | None:
        """The task, such as CAUSAL_LM."""
        found = self.config.get("task_type")
        return str(found) if found else None

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
            raise RequestError(f"--lora-alpha {given}: a number is expected") from None
        if alpha is None:
            raise RequestError(
                "lora_alpha is not known",
                why=f"The update is alpha / r times the product of the factors, and the checkpoint has no {_CONFIG} that gives alpha",
                do="Give it with --lora-alpha, or all settings with --adapter-config",
            )
        return LoraSettings({**self.config, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha})

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """The parameters, such as the weights of all experts, that are adapted without a module of their own."""
        return tuple(map(str, self.config.get("target_parameters") or ()))

    def check_parameters(self, modules: Iterable[str]) -> None:
        """Raises RequestError if one of the adapted modules holds experts, and no setting says which of their parameters it changes."""
        stacked = sorted(module for module in modules if module.endswith((".experts", ".base_layer")))
        if stacked and not self.target_parameters:
            raise RequestError(
                f"the adapter changes parameters of {stacked[0]}, and no {_CONFIG} gives target_parameters",
                where=f"{PREFIX}{stacked[0]}",
                why="The names of the tensors do not tell which parameters of the module they change",
                do="Give the settings of the training with --adapter-config",
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
