"""Drafts: a declaration for a model that nobody has declared, from the names and shapes of a checkpoint and its config.

A draft extends the declared model with the most names and shapes in common, and states only what differs. If there is no such model, it
declares every weight: a role is written if the name is usual for it and the shape is the one that the role has with this config.
Everything else gets a "?" and a comment, and a file that still contains a "?" is refused: a guess is never taken for a fact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.boxes import Shape
from reshard.geometry.quantities import number_runs
from reshard.geometry.value import value
from reshard.models.architecture import Architecture, Dimension, Weight
from reshard.models.declared.reader import LANGUAGE, UNKNOWN
from reshard.models.declared.relatives import Relative, StoredWeight, nearest, stored_weights
from reshard.models.lookup import built_in_model_types, find_architecture
from reshard.models.model import Model
from reshard.models.quantization import quantization_of
from reshard.models.roles import ROLES

_ASK = f'"{UNKNOWN}"'

# The keys under which configs usually give a dimension, and the usual default.
_DIMENSIONS: dict[str, Dimension] = {
    "vocab": Dimension(("vocab_size", "n_vocab")),
    "hidden": Dimension(("hidden_size", "n_embd", "d_model", "hidden_dim", "dim")),
    "layers": Dimension(("num_hidden_layers", "n_layer", "n_layers", "num_layers")),
    "heads": Dimension(("num_attention_heads", "n_head", "n_heads", "num_heads")),
    "kv_heads": Dimension(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"), "heads"),
    "head_dim": Dimension(("head_dim", "head_size", "kv_channels"), "hidden / heads"),
    "intermediate": Dimension(("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff"), "4 * hidden"),
    "positions": Dimension(("max_position_embeddings", "n_positions")),
    "experts": Dimension(("num_experts", "num_local_experts", "n_routed_experts")),
    "expert_intermediate": Dimension(("moe_intermediate_size", "expert_intermediate_size"), "intermediate"),
    "shared_intermediate": Dimension(("shared_expert_intermediate_size",)),
}
_ALWAYS = {"vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate"}
# Names of modules that are usually fused, and what to write for them.
_FUSED = {
    "qkv_proj query_key_value c_attn Wqkv wqkv qkv": "`fuses: [attention.q, attention.k, attention.v]`, and `interleaved_by: heads` or "
    "`interleaved_by: kv_heads` if they alternate",
    "gate_up_proj dense_gate_up": "`fuses: [mlp.gate, mlp.up]`, in the order of their rows",
}
_MOST_ROLES, _RARE = 6, ("mtp.", "hyper.")
"""The roles that a question names, and how those begin that few models have."""
_ROTARY = "rotary_emb.inv_freq"


def draft(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None, where: str) -> str:
    """The text of a draft. Raises RequestError without a config: its numbers tell roles with the same usual names apart."""
    if config is None:
        raise RequestError(
            "no config.json gives the numbers of layers and heads",
            where=where,
            why="A declaration takes its numbers from it",
            do="Give the directory of the model's config with `model=DIR`",
        )
    scales = _scale_kinds(config)
    with_rotary = [weight for weight in stored_weights(shapes) if weight.parameter not in scales]
    weights = [weight for weight in with_rotary if not weight.name.endswith(_ROTARY)]
    relative = nearest(weights, config, filter(None, map(find_architecture, built_in_model_types())))
    listed = list(relative.others) if relative else weights
    used = _used_dimensions(listed) | (set() if relative else _ALWAYS)
    numbers = {**_numbers(config, used), **(relative.model.dimensions if relative else {})}
    facts = _Facts(weights, config, numbers, relative)
    lines = [
        f"language: {LANGUAGE}",
        f"model_type: {_word(config.get('model_type'))}",
        *(_extends_lines(facts, relative) if relative else [""]),
        *_section("dimensions:", _dimension_lines(facts, used)),
        *_section("weights:    # in the order of the model's parameters", (_weight_line(weight, facts) for weight in listed)),
        *_layer_lines(listed, facts),
        *_tied_lines(facts),
        *_section("dropped:", _dropped_lines(with_rotary, facts)),
    ]
    has_questions = any(_ASK in line for line in lines)
    return "\n".join([*_comments(relative, has_questions, bool(scales)), *lines]).rstrip("\n")


@value
class _Facts:
    """What is known about the checkpoint."""

    weights: Sequence[StoredWeight]
    """All stored weights, scales and rotary frequencies excluded."""
    config: Mapping[str, Any]
    """The content of config.json."""
    numbers: Mapping[str, int]
    """The values of the dimensions, as far as the config gives them."""
    relative: Relative | None
    """The declared model that the draft extends."""

    def layer_kind(self, layers: list[int]) -> str | None:
        """The kind of the layers with these indices; "" if these are all layers, or their number is not known; None: not known."""
        if layers == list(range(self.numbers.get("layers", 0))) or "layers" not in self.numbers:
            return ""
        model = self.relative.model if self.relative else None
        if model is None or model.mtp_layers or model.architecture.sparse_layers is None:
            return None
        return {tuple(sorted(model.sparse_layers)): "sparse", model.dense_layers: "dense"}.get(tuple(layers))


def _section(title: str, lines: Iterator[str]) -> list[str]:
    """A section of the file; empty without lines."""
    body = list(lines)
    return [title, *body, ""] if body else []


def _word(value: object) -> str:
    return str(value) if re.fullmatch(r"[A-Za-z][\w.-]*", str(value or "")) else _ASK


def _scale_kinds(config: Mapping[str, Any]) -> set[str]:
    """The last words of the names of quantization scales."""
    quantization = quantization_of(config)
    return set(quantization.kinds) if quantization else set()


def _written(name: str) -> str:
    """A name as declarations write it: * in place of a number between two dots; quoted if YAML needs it."""
    name = name.replace(".{layer}.", ".*.").replace(".{expert}.", ".*.")
    return name if re.fullmatch(r"\w[\w.*{}/-]*", name) else json.dumps(name)


# ---- what stands above the weights ----


def _comments(relative: Relative | None, has_questions: bool, has_scales: bool) -> Iterator[str]:
    yield "# A draft by `reshard architectures --start`. docs/architectures.md of reshard explains every key."
    if relative:
        name, shared = relative.model.architecture.model_type, len(relative.shared)
        which = f"{shared} of {shared + len(relative.others)} weights have the names and shapes of {name} with this config"
        which = which if relative.distance else f"All names and shapes are those of {name} with this config"
        yield f"# {which}. Only the model's code tells whether they mean the same."
    if has_questions:
        yield f"# {_ASK} marks an open question: replace it with the answer. A role is written if the name is usual for it and the shape is"
        yield "# that of the role. Only the model's code tells whether the model uses the weight in the usual way."
    if has_scales:
        yield "# Scales of quantized weights follow from the config's quantization_config and are not declared."


def _extends_lines(facts: _Facts, relative: Relative) -> list[str]:
    name = relative.model.architecture.model_type
    lines = [f"extends: {name}"]
    if not relative.distance:
        lines.append(f"# like: {name}    # add this line if it computes what {name} computes: engines then take it for a {name}")
    removed = [name for name in relative.missing if not _is_open_head(name, facts)]
    return [*lines, *(_section("without:", (f"  - {_written(name)}" for name in removed)) or [""])]


def _used_dimensions(weights: Sequence[StoredWeight]) -> set[str]:
    """The names of the dimensions in the usual shapes of these weights."""
    roles = [role for weight in weights if (role := _usual_role(weight))]
    words = {word for role in roles for axis in ROLES[role].shape for word in re.findall(r"[a-z_]+", axis)}
    return words | ({"experts"} if any("{expert}" in weight.name for weight in weights) else set())


def _numbers(config: Mapping[str, Any], used: set[str]) -> dict[str, int]:
    """The values of the dimensions that the config gives under a usual key."""
    numbers: dict[str, int] = {}
    for name in (name for name in _DIMENSIONS if name in used):
        try:
            numbers |= Model(Architecture("", {**_constants(numbers), name: _DIMENSIONS[name]}, ()), config).dimensions
        except RequestError:
            continue
    return numbers


def _constants(numbers: Mapping[str, int]) -> dict[str, Dimension]:
    return {name: Dimension((), str(number)) for name, number in numbers.items()}


def _dimension_lines(facts: _Facts, used: set[str]) -> Iterator[str]:
    declared = facts.relative.model.architecture.dimensions if facts.relative else {}
    for name in (name for name in _DIMENSIONS if name in used and name not in declared):
        usual = _DIMENSIONS[name]
        key = next((key for key in usual.keys if facts.config.get(key) is not None), None)
        if name not in facts.numbers:
            yield f"  {name}: {_ASK}    # the config's key; the config has none of {', '.join(usual.keys)}"
        elif usual.default:
            yield f"  {name}: {{keys: {key or usual.keys[0]}, default: {usual.default}}}"
        else:
            yield f"  {name}: {key}"


# ---- weights ----


def _usual_role(weight: StoredWeight) -> str | None:
    """The role that a weight of this name usually has."""
    in_layer = "{layer}" in weight.name
    usual = (role.name for role in ROLES.values() if role.in_layer == in_layer and _has_name(weight, role.names))
    role = next(usual, None)
    if role and role.startswith("mlp.") and ".experts." in weight.module:
        return role.replace("mlp.", "expert.")
    if role and role.startswith("mlp.") and re.search(r"\.shared_experts?\.", weight.module):
        return role.replace("mlp.", "shared_expert.")
    return role


def _has_name(weight: StoredWeight, names: str) -> bool:
    """Whether the module of a weight ends with one of the names."""
    return any(weight.module == name or weight.module.endswith("." + name) for name in names.split())


def _weight_line(weight: StoredWeight, facts: _Facts) -> str:
    keys, remark = _keys_of(weight, facts)
    kind = facts.layer_kind(weight.layers) if "{layer}" in weight.name else ""
    if kind is None:
        only = f"only layers {', '.join(number_runs(weight.layers))} of {facts.numbers['layers']} have it: dense, sparse or mtp"
        remark = "; ".join(filter(None, (remark, only)))
    if kind != "":
        keys = {**keys, "layers": kind or _ASK}
    value = keys["role"] if set(keys) == {"role"} else "{" + ", ".join(f"{key}: {text}" for key, text in keys.items()) + "}"
    return f"  {_written(weight.name)}: {value}" + (f"    # {remark}" if remark else "")


def _keys_of(weight: StoredWeight, facts: _Facts) -> tuple[dict[str, str], str]:
    """The keys to write for a weight, and a remark."""
    several = len(weight.layers_of_shape) > 1
    stored_as = "stored as " + " or ".join(
        f"{list(shape)}" + (f" in layers {', '.join(number_runs(sorted(layers)))}" if several else "")
        for shape, layers in weight.layers_of_shape.items()
    )
    if fused := next((text for names, text in _FUSED.items() if _has_name(weight, names)), None):
        return {"role": _ASK}, f"{stored_as}; if it is several weights in one, write {fused}"
    role = _usual_role(weight)
    if role is None and weight.parameter in ("weight", "bias") and not several:
        fitting = " or ".join(_roles_by_shape(weight, facts))
        return {"role": _ASK}, stored_as + (f"; by its shape {fitting}" if fitting else "")
    if role is None or weight.parameter not in ("weight", "bias") or several:
        return {"role": _ASK}, stored_as
    same = [other for other in facts.weights if _usual_role(other) == role and other.parameter == weight.parameter]
    if role == "mlp.norm" and len(same) > 1:
        return {"role": _ASK}, f"{stored_as}; there are several norms, and mlp.norm is the one before the MLP"
    (shape,), usual = weight.layers_of_shape, _usual_shape(role, weight.parameter, facts.numbers)
    if usual is None:
        return {"role": _ASK}, f"{stored_as}; the name is usual for {_with_article(role)}"
    if shape == usual and not (_has_name(weight, "c_proj c_fc c_attn") and len(shape) == 2 and shape[0] == shape[1]):
        return {"role": role}, ""
    if shape == usual:
        return {"role": role, "transposed": _ASK}, f"{stored_as}: true if that is [in, out], as of a Conv1D, else false"
    if shape == usual[::-1]:
        return {"role": role, "transposed": "true"}, ""
    return {"role": _ASK}, f"{stored_as}; the name is usual for {_with_article(role)}, which would be {list(usual)}"


def _roles_by_shape(weight: StoredWeight, facts: _Facts) -> list[str]:
    """The roles that have the shape of a weight and that no other weight has by its name; if there are none, those that another one has."""
    (shape,), in_layer, of_expert = weight.layers_of_shape, "{layer}" in weight.name, "{expert}" in weight.name
    taken = {_usual_role(other) for other in facts.weights if other.parameter == weight.parameter}
    usual = {
        role: _usual_shape(role, weight.parameter, facts.numbers)
        for role in ROLES
        if ROLES[role].in_layer == in_layer and role.startswith("expert.") == of_expert and not role.startswith(_RARE)
    }
    fitting = [role for role in usual if usual[role] == shape] or [role for role in usual if usual[role] == shape[::-1]]
    free = [role for role in fitting if role not in taken]
    return (free or fitting)[:_MOST_ROLES]


def _usual_shape(role: str, parameter: str, numbers: Mapping[str, int]) -> Shape | None:
    """The shape of a weight or bias of that role; None if a dimension has no value."""
    axes = ROLES[role].shape[:1] if parameter == "bias" else ROLES[role].shape
    model = Model(Architecture("", _constants({"layers": 1, **numbers}), (Weight("w", role, axes),)), {})
    try:
        return model.weights["w"].shape
    except (RequestError, KeyError):
        return None


def _with_article(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


# ---- what stands below the weights ----


def _layer_lines(listed: Sequence[StoredWeight], facts: _Facts) -> list[str]:
    """The keys `sparse_layers` and `mtp_layers`, if weights depend on them and the relative does not declare them."""
    declared = facts.relative.model.architecture if facts.relative else None
    in_layers = [weight for weight in listed if "{layer}" in weight.name]
    in_some = [weight for weight in in_layers if facts.layer_kind(weight.layers) != ""]
    lines = []
    if not (declared and declared.sparse_layers):
        if in_some:
            lines.append(f"sparse_layers: {_ASK}    # all, or {{first: KEY, step: KEY, offset: N, dense: KEY}} with keys of the config")
        elif any("{expert}" in weight.name for weight in in_layers):
            lines.append("sparse_layers: all")
    if not (declared and declared.mtp_layers) and any(weight.layers[-1] >= facts.numbers["layers"] for weight in in_some):
        lines.append(f"mtp_layers: {_ASK}    # the config's key for the number of layers after the last one, for multi-token prediction")
    return [*lines, ""] if lines else []


def _is_open_head(name: str, facts: _Facts) -> bool:
    """Whether a missing weight of the relative is the head, and the config does not say whether the head is tied."""
    is_head = facts.relative is not None and name == facts.relative.model.architecture.tied[0]
    return is_head and "tie_word_embeddings" not in facts.config


def _tied_lines(facts: _Facts) -> list[str]:
    if facts.relative:
        is_open = any(_is_open_head(name, facts) for name in facts.relative.missing)
    else:
        is_open = "tie_word_embeddings" not in facts.config and not any(_usual_role(weight) == "head" for weight in facts.weights)
    question = "no head is stored, and the config does not say whether it is the embedding"
    return [f"defaults: {{tie_word_embeddings: {_ASK}}}    # {question}", ""] if is_open else []


def _dropped_lines(weights: Sequence[StoredWeight], facts: _Facts) -> Iterator[str]:
    model = facts.relative.model if facts.relative else None
    for weight in weights:
        if weight.name.endswith(_ROTARY) and not (model and all(model.reason_to_drop(name) for name in weight.tensors)):
            yield f"  {weight.name}: every engine computes it from the config"
