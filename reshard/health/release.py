"""Checks of a Hugging Face folder against what a release of an engine takes (adapter/serving_format/release.py): class, type and values of
the config, and names of the weights. A finding is an error only if the release refuses the folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.adapter.serving_format.release import Release, forms_of
from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found
from reshard.models.config_values import stated_class
from reshard.models.declared.heads import plain_class
from reshard.models.model import Model
from reshard.models.quantization import quantization_settings

_KINDS: Mapping[type, str] = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", type(None): "null"}


def config_of_release(config: Mapping[str, Any], release: Release, model: Model | None) -> Iterator[Finding]:
    """What the release rejects in a config. Code of the checkpoint's own may know more classes and types than it does."""
    has_code = bool(config.get("auto_map"))
    yield from _class(config, release, model, has_code)
    model_type = config.get("model_type")
    if not model_type:
        yield found("no-type", f"config.json has no model_type, by which {release.engine} chooses the model's config", file="config.json")
    elif model_type not in release.model_types and not has_code:
        detail = f"neither {release.engine} nor transformers {release.transformers} knows the model_type {model_type!r}"
        yield found("no-type", detail, file="config.json", do="Name the model type with the same weights, as `like:` does in a declaration")
    elif model_type in release.model_types:
        yield from _values(config, release)
    for key, kind in (("architectures", list), ("quantization_config", dict)):  # vLLM 0.32: config/model.py, ModelConfig
        if not isinstance(config.get(key), kind | None):
            detail = f"{key} is {config[key]!r}, of the kind {_KINDS.get(type(config[key]))}; {release.engine} takes {kind.__name__}"
            yield found("unlike-value", detail, file="config.json")
    if method := release.refused_method(config):
        yield found("refused-setting", f"{release.engine} has no quantization method {method!r}", file="config.json",
                    do="Serve the model that it was quantized from; a plugin may add the method")  # fmt: skip
    settings = quantization_settings(config)
    sparsity = settings.get("sparsity_config") if isinstance(settings, Mapping) else None
    if isinstance(sparsity, str) or (isinstance(sparsity, Mapping) and sparsity.get("targets")):
        form = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
        do = "`to=hf` leaves the setting out" if form == "dense" else "Quantize the model again without sparsity"
        yield found("refused-setting", f"{release.engine} takes no sparsity_config ({form})", file="config.json", do=do)


def _class(config: Mapping[str, Any], release: Release, model: Model | None, has_code: bool) -> Iterator[Finding]:
    """The class that the config names."""
    named = stated_class(config)
    if named is None:
        if config.get("model_type") in release.types_with_a_class:
            yield found("not-known", f"config.json names no class; {release.engine} takes that of its model_type", file="config.json")
        else:
            yield found("no-class", "config.json names no class: `architectures` is missing or empty", file="config.json")
        return
    has_class = release.has_class(named)
    if has_class is None or (has_class is False and has_code):
        where = "code of the checkpoint" if has_class is False else f"transformers {release.transformers}"
        yield found("not-known", f"{release.engine} has no class {named} of its own; that of {where} may serve", file="config.json")
    elif has_class is False:
        plain = (model.class_name if model else plain_class(named, None)) or named
        last = f"; {release.removed[named]} was the last version with it" if named in release.removed else ""
        do = "Serve it with an engine that has the class, or name the class of a model with the same weights"
        if plain != named and release.has_class(plain) is not False:
            do = f"`to=hf` writes {plain}, the model's own class"
        detail = f"{release.engine} has no class {named}, nor has transformers {release.transformers}{last}"
        yield found("no-class", detail, file="config.json", do=do)


def _values(config: Mapping[str, Any], release: Release) -> Iterator[Finding]:
    """Values of a kind that transformers' config classes reject: they check it since 5.0."""
    for key in sorted(config.keys() & release.config_keys.get(str(config.get("model_type")), frozenset())):
        kinds, value = release.config_values[key], config[key]
        kind = _KINDS.get(type(value), "")
        if kind not in kinds and not (kind == "bool" and "int" in kinds):
            allowed = " or ".join(sorted(kinds - {"null"}))
            detail = f"{key} is {value!r}, of the kind {kind}; transformers {release.transformers} takes {allowed}"
            yield found("unlike-value", detail, file="config.json")


def names_of_release(stored: Collection[str], release: Release, model: Model) -> Iterator[Finding]:
    """Names of weights that the release's class for this model does not take; or that this is not known."""
    head, own = model.architecture.head, [*model.as_published(), *model.aliases]
    forms, taken = forms_of(model, own), release.names.get(model.architecture.model_type)
    forms_by_name: dict[str, set[str]] = {}
    for form, changed in forms.items():
        for name in changed.values():
            forms_by_name.setdefault(name, set()).add(form)
    others = [name for name in stored if name not in own and name in forms_by_name]
    if head is not None:
        yield from _head(release, model)
    # vLLM's classes for pooling take weights that are relative to `model` (models/adapters.py, _load_pooling_model_weights).
    if head is not None and not head.module and head.front[0] not in ("", "model.") and "bare" not in (taken or ()):
        yield found("not-known", f"whether {release.engine} takes names without {head.front[0]} was not tried", tensor=own[0])
    if taken is None:
        if others:
            detail = (
                f"{plural(len(others), 'weight')} have other names than the published ones; which of them its class takes was not tried"
            )
            yield found("not-known", f"{release.engine}: {detail}", tensor=others[0])
        return
    others = [name for name in others if not forms_by_name[name] & taken]
    refused = [name for name in others if not {f"{form}?" for form in forms_by_name[name]} & taken]
    if others and not refused:
        detail = f"takes such names with some configs of a {model.architecture.model_type} model, and not with others"
        yield found("not-known", f"{release.engine} {detail}", tensor=others[0])
    if refused:
        more = f", and {plural(len(refused) - 1, 'other weight')}" if len(refused) > 1 else ""
        yield found("unknown-name", f"{release.engine}'s class for a {model.architecture.model_type} model takes no such name{more}",
                    tensor=refused[0])  # fmt: skip


def _head(release: Release, model: Model) -> Iterator[Finding]:
    """The head of a class that the release makes of a language model's: vLLM's `as_seq_cls_model` has one matrix, `score`."""
    head = model.architecture.head
    assert head is not None
    one_matrix = head.module == "score" and "weight" in head.parts
    if (head.module or not head.front[0]) and (bare := release.lacks_front(head.class_name)):
        detail = f"{release.engine} takes {bare} for the class {head.class_name}, and {bare} has no names with `model.`"
        do = "Serve it with the library that trained it" if head.module else "Take `model.` off the names"
        yield found("unknown-name", detail, do=do)
    if not (head.module or head.is_usual) and release.has_class(head.class_name):
        detail = f"{release.engine}'s class {head.class_name} has no such head as the files have"
        yield found("unknown-name", detail, do="Serve it with the library that trained it")
    if head.module and not (head.is_usual and (head.class_name in release.classes or one_matrix)):
        name = f"{head.module}.{head.parts[0]}"
        yield found("unknown-name", f"the class that {release.engine} makes for {head.class_name} has no such weight", tensor=name,
                    do="Serve it with the library that trained it, or store one matrix as `score.weight`")  # fmt: skip
