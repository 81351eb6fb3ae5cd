"""Release: what one release of a serving engine takes of a Hugging Face folder, as data: release.json in the folder of its format.

tests/serving/release.py makes the data: it asks vLLM itself, whose own loader gets every declared model under the names of FORMS, and
reads SGLang's wheel. What the data do not know is not guessed: it is neither served nor refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.geometry.value import value
from reshard.models.model import Model
from reshard.models.quantization import quantization_settings

FORMS: Mapping[str, tuple[str, str]] = {
    "bare": ("", ""),
    "double": ("model.{base}", "model."),
    "language_model": ("language_model.{base}", "language_model."),
    "model.language_model": ("model.language_model.", ""),
    "_orig_mod": ("_orig_mod.{base}", "_orig_mod."),
    "module": ("module.{base}", "module."),
    "base_model": ("base_model.model.{base}", "base_model.model."),
    "_forward_module": ("_forward_module.{base}", "_forward_module."),
    "pretrained_model": ("pretrained_model.{base}", "pretrained_model."),
}
"""Form of names -> what stands in place of the first word of the language model, such as "model.", and before the other names."""
BARE = ("Gemma3TextModel",)
"""Classes that are the bare model: they take no names with "model.", where other classes in `Model` are language models (vLLM 0.32)."""
_IN_MEMORY: Mapping[str, str] = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
}
TOWER_FORMS: Mapping[str, Mapping[str, str]] = {
    "in-memory-4": _IN_MEMORY,
    "in-memory-5": {"vision_tower.vision_model.": "model.vision_tower.", **_IN_MEMORY},
}
"""Form of names of models with towers -> what stands in place of their first words, as transformers 4.52 and 5 hold them in memory."""


@value
class Release:
    """One release of an engine."""

    engine: str
    """The engine with its version, for messages."""
    classes: frozenset[str]
    """The classes of models that it has."""
    removed: Mapping[str, str]
    """Class that it had -> the last version with it."""
    suffixes: tuple[str, ...]
    """Endings of classes for which it takes its own class with another one of these endings."""
    refused_quantization: frozenset[str]
    """The methods of quantization that it does not know."""
    transformers: str
    """The release of transformers that it runs with."""
    of_transformers: frozenset[str]
    """The classes of that release, some of which it serves without a class of its own."""
    model_types: frozenset[str]
    """The model types whose config it reads without code of the checkpoint."""
    types_with_a_class: frozenset[str]
    """The model types whose class it knows where a config names none."""
    known_quantization: frozenset[str]
    """The methods of quantization that it or transformers names; empty if they are not known."""
    config_values: Mapping[str, frozenset[str]]
    """Key of a config -> the kinds of JSON values that the config classes of transformers allow."""
    config_keys: Mapping[str, frozenset[str]]
    """Declared model type -> those of these keys that its config class has, and so checks."""
    names: Mapping[str, frozenset[str]]
    """Declared model type -> the forms of names that the engine's loader takes beside the published ones, with a question mark those that
    it takes with some configs only; types that are missing were not tried."""

    pipelines: frozenset[str]
    """The classes of diffusers' pipelines that its diffusion server builds itself; empty if they are not known."""

    def has_class(self, name: str) -> bool | None:
        """Whether it serves a class; None if only its code for transformers' classes could tell."""
        if self.class_for(name):
            return True
        return None if name in self.of_transformers else False

    def class_for(self, name: str) -> str | None:
        """The class of its own that it takes for a class, such as LlamaForCausalLM for LlamaForTokenClassification, or None."""
        stem = next((name.removesuffix(suffix) for suffix in self.suffixes if name.endswith(suffix)), "")
        names = (name, *(stem + suffix for suffix in self.suffixes if stem))
        return next((own for own in names if own in self.classes), None)

    def lacks_front(self, name: str) -> str | None:
        """The class that it takes for a class, if that is a bare model, whose names lack "model."; else None.

        vLLM 0.32 takes Gemma3TextModel for Gemma3TextForSequenceClassification, and ends with "no module or parameter named 'model'".
        """
        own = self.class_for(name)
        is_bare = own and own != name and own.endswith("Model") and not own.endswith(("LMHeadModel", "ChatModel"))
        return own if is_bare or own in BARE else None

    def refused_method(self, config: Mapping[str, Any]) -> str | None:
        """The method by which a config says that the weights are quantized, if the release does not know it."""
        settings = quantization_settings(config)
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if not isinstance(method, str):
            return None
        # As vLLM 0.32 reads it: transformers_utils/model_arch_config_convertor.py, _normalize_quantization_config.
        name = method.lower().replace("compressed_tensors", "compressed-tensors")
        is_known = name in self.known_quantization or not self.known_quantization
        return None if is_known and name not in self.refused_quantization else method


@lru_cache(maxsize=8)
def release_at(path: Path, engine: str) -> Release | None:
    """The release that a file describes; None if there is no file."""
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    beside = Path(__file__).with_name(f"transformers-{data['transformers']}.json")
    data |= json.loads(beside.read_text(encoding="utf-8"))

    def words(*keys: str) -> frozenset[str]:
        return frozenset(word for key in keys for line in data[key] for word in line.split())

    return Release(
        engine=f"{engine} {data['release']}",
        classes=words("classes"),
        removed=data["removed"],
        suffixes=tuple(word for line in data["suffixes"] for word in line.split()),
        refused_quantization=words("refused_quantization"),
        transformers=data["transformers"],
        of_transformers=words("transformers_classes"),
        model_types=words("model_types", "config_types"),
        types_with_a_class=words("types_with_a_class"),
        known_quantization=words("known_quantization") if "known_quantization" in data else frozenset(),
        config_keys=_keys_by_type(data["config_keys"], words("checked_types")),
        config_values={key: frozenset(kinds.split()) for key, kinds in data["config_values"].items()},
        pipelines=words("pipelines") if "pipelines" in data else frozenset(),
        names={key: frozenset(forms.split()) for key, forms in data["names"].items()},
    )


def _keys_by_type(groups: Mapping[str, str], checked: frozenset[str]) -> dict[str, frozenset[str]]:
    """Model type -> keys, from keys -> the types that have them, or after a minus the types that do not."""
    keys: dict[str, set[str]] = {model_type: set() for model_type in checked}
    for of_group, types in groups.items():
        named = {*types.split()}
        for model_type in checked - named if "-" in named else named:
            keys[model_type].update(of_group.split())
    return {model_type: frozenset(of_type) for model_type, of_type in keys.items()}


def forms_of(model: Model, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Form -> name -> the name in that form, for the forms in which a model's names differ from these."""
    names, base = list(names), _base(model)
    forms = {form: {name: _in_form(name, base, fronts) for name in names} for form, fronts in FORMS.items()}
    if any(name.startswith(("visual.", "vision_tower.", "language_model.")) for name in names):
        forms |= {form: {name: _with_front(name, fronts) for name in names} for form, fronts in TOWER_FORMS.items()}
    return {form: changed for form, changed in forms.items() if any(old != new for old, new in changed.items())}


def _base(model: Model) -> str:
    """The first word of the names in the layers, with its dot."""
    return next((weight.name.partition(".")[0] + "." for weight in model.architecture.weights if "{layer}" in weight.name), "")


def _in_form(name: str, base: str, fronts: tuple[str, str]) -> str:
    inner, other = fronts
    return inner.format(base=base) + name.removeprefix(base) if base and name.startswith(base) else other + name


def _with_front(name: str, fronts: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in fronts.items() if name.startswith(old)), name)
