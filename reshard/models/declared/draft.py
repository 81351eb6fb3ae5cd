"""Skeletons: the beginning of a declaration for a model that nobody has declared, from a checkpoint's names and shapes and its config.

Numbers in names are folded; a role is written where a name is a usual one and the shape is what that role has in this config. Everything
else gets a "?", with what is known as a comment, and a file in which one still stands is refused: a guess is never taken for a fact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import RequestError
from reshard.models.architecture import Architecture, Dimension, Weight
from reshard.models.declared.reader import UNKNOWN
from reshard.models.declared.weights import SHAPES
from reshard.models.lookup import built_in_model_types, find_architecture
from reshard.models.model import Model
from reshard.models.quantization import quantization_of

Shapes = Mapping[str, tuple[int, ...]]
_ASK = f'"{UNKNOWN}"'

# Which keys configs have for a dimension, and what holds without one.
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
_ALWAYS = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")

# What modules are usually called, by the word before ".weight"; in a module whose name matches the pattern.
_ENDS = {
    "embedding": "embed_tokens wte embed_in word_embeddings tok_embeddings",
    "position_embedding": "wpe embed_positions position_embeddings",
    "head": "lm_head embed_out",
    "final_norm": "norm ln_f final_layernorm final_layer_norm norm_f",
}
_LAYER = {
    "attention.norm": "input_layernorm ln_1 attention_norm",
    "mlp.norm": "post_attention_layernorm ln_2 ffn_norm pre_feedforward_layernorm",
    "attention.q": "q_proj wq",
    "attention.k": "k_proj wk",
    "attention.v": "v_proj wv",
    "attention.o": "o_proj wo attn.c_proj self_attn.out_proj attention.dense self_attention.dense",
    "attention.q_norm": "q_norm q_layernorm",
    "attention.k_norm": "k_norm k_layernorm",
    "mlp.gate": "gate_proj",
    "mlp.up": "up_proj c_fc dense_h_to_4h fc1",
    "mlp.down": "down_proj dense_4h_to_h fc2 mlp.c_proj",
    "router": "mlp.gate block_sparse_moe.gate mlp.router",
}
_FUSED = {
    "qkv_proj query_key_value c_attn Wqkv wqkv qkv": "`holds: [attention.q, attention.k, attention.v]`, and `by: heads` or `by: kv_heads` "
    "if they alternate head by head",
    "gate_up_proj dense_gate_up": "`holds: [mlp.gate, mlp.up]` in the order in which they lie",
}
_ROTARY = "rotary_emb.inv_freq"
_EXPERT = re.compile(r"(?<=experts)\.\d+\.|(?<=expert)\.\d+\.")


@dataclass(slots=True)
class _Row:
    """The tensors of one folded name: their shapes, and the layers that have them."""

    name: str
    shapes: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layers in self.shapes.values() for layer in layers})


def skeleton(shapes: Shapes, config: Mapping[str, Any] | None, where: str) -> str:
    """The text of a declaration to begin with. Raises RequestError without a config, whose numbers tell roles from look-alikes."""
    if config is None:
        raise RequestError(
            "no config.json says how many layers and heads the model has",
            where=where,
            why="A declaration takes its numbers from it",
            do="Give the directory of the model's config with --model DIR",
        )
    prefix = _layer_prefix(shapes)
    scales = _scales(config)
    rows = [row for row in _folded(shapes, prefix) if not row.name.endswith(_ROTARY) and row.name.rpartition(".")[2] not in scales]
    used = set(_ALWAYS) | _needed(rows)
    numbers = _numbers(config, used)
    lines = [
        "# A declaration to begin with; docs/architectures.md of reshard tells what may stand here.",
        f"# Where {_ASK} stands nothing was guessed: replace it. Roles that are written have a usual name and the shape that it goes with;",
        "# whether the model uses them as usual only its code tells.",
        *(["# Scales of quantised weights are not declared: they follow from the config's quantization_config."] if scales else []),
        *_alike(shapes, config),
        f"model_type: {_word(config.get('model_type'))}",
        "",
        "dimensions:",
        *_dimension_lines(config, used, numbers),
        "",
        "weights:    # in the order of the model's parameters, by which FSDP's flat ones are read",
        *(line for row in rows for line in _lines(row, rows, numbers)),
        *_layer_lines(rows, numbers),
        *_tied_lines(rows, config),
        *_dropped_lines(shapes, prefix),
    ]
    return "\n".join(lines)


def _word(value: object) -> str:
    return str(value) if re.fullmatch(r"[A-Za-z][\w.-]*", str(value or "")) else _ASK


def _scales(config: Mapping[str, Any]) -> set[str]:
    """What the scales of quantised weights are called."""
    known = quantization_of(config)
    return {scale.kind for scale in (*known.scales, *known.cache)} if known else set()


# ---- names ----


def _layer_prefix(shapes: Shapes) -> str | None:
    """What stands before the layers' numbers: the prefix of a number under which most tensors lie."""
    counts: dict[str, int] = {}
    for name in shapes:
        if match := re.match(r"(.*?\.)\d+\.", name):
            counts[match[1]] = counts.get(match[1], 0) + 1
    return max(counts, key=lambda prefix: counts[prefix], default=None)


def _folded(shapes: Shapes, prefix: str | None) -> list[_Row]:
    found: dict[str, _Row] = {}
    for name, shape in shapes.items():
        match = re.match(rf"{re.escape(prefix)}(\d+)\.(.*)", name) if prefix else None
        folded = f"{prefix}{{layer}}.{_EXPERT.sub('.{expert}.', match[2])}" if match else name
        layers = found.setdefault(folded, _Row(folded)).shapes.setdefault(shape, [])
        if match and int(match[1]) not in layers:
            layers.append(int(match[1]))
    return list(found.values())


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _usual(name: str) -> str | None:
    """The role that a name usually has."""
    module = _module(name)
    table = _LAYER if "{layer}" in name else _ENDS
    role = next((role for role, words in table.items() if any(_ends_with(module, word) for word in words.split())), None)
    if role and role.startswith("mlp.") and ".experts." in module:
        return role.replace("mlp.", "expert.")
    if role and role.startswith("mlp.") and re.search(r"\.shared_experts?\.", module):
        return role.replace("mlp.", "shared_expert.")
    return role


def _ends_with(module: str, word: str) -> bool:
    return module == word or module.endswith("." + word)


def _needed(rows: Sequence[_Row]) -> set[str]:
    """The dimensions that the usual roles' shapes are about."""
    roles = [role for row in rows if (role := _usual(row.name))]
    words = {word for role in roles for axis in SHAPES[role] for word in re.findall(r"[a-z_]+", axis)}
    return words | ({"experts"} if any("{expert}" in row.name for row in rows) else set())


# ---- dimensions ----


def _numbers(config: Mapping[str, Any], used: set[str]) -> dict[str, int]:
    """The dimensions of this model, as far as the config says them under a usual key."""
    found: dict[str, int] = {}
    for name in (name for name in _DIMENSIONS if name in used):
        try:
            found |= Model(
                Architecture("", {**{n: Dimension((), str(v)) for n, v in found.items()}, name: _DIMENSIONS[name]}, ()), config
            ).dimensions
        except RequestError:
            continue
    return found


def _dimension_lines(config: Mapping[str, Any], used: set[str], numbers: Mapping[str, int]) -> Iterator[str]:
    for name in (name for name in _DIMENSIONS if name in used):
        known = _DIMENSIONS[name]
        key = next((key for key in known.keys if config.get(key) is not None), None)
        if name not in numbers:
            yield f"  {name}: {_ASK}    # the key of the config that says it; none of {', '.join(known.keys)} is there"
        elif known.default:
            yield f"  {name}: {{keys: {key or known.keys[0]}, default: {known.default}}}"
        else:
            yield f"  {name}: {key}"


# ---- weights ----


def _lines(row: _Row, rows: Sequence[_Row], numbers: Mapping[str, int]) -> Iterator[str]:
    known, remark = _known(row, rows, numbers)
    layers = numbers.get("layers")
    if "{layer}" in row.name and layers is not None and row.layers != list(range(layers)):
        known = {**known, "layers": _ASK}
        remark = "; ".join(filter(None, (remark, f"of {layers} layers only {_runs(row.layers)} have it: dense, sparse or extra")))
    value = known["role"] if set(known) == {"role"} else "{" + ", ".join(f"{key}: {text}" for key, text in known.items()) + "}"
    name = row.name if re.fullmatch(r"\w[\w.{}/-]*", row.name) else json.dumps(row.name)
    yield f"  {name}: {value}" + (f"    # {remark}" if remark else "")


def _known(row: _Row, rows: Sequence[_Row], numbers: Mapping[str, int]) -> tuple[dict[str, str], str]:
    """What to write of a weight, and a remark."""
    stored = " or ".join(f"{list(shape)}" + (f" in layers {_runs(of)}" if len(row.shapes) > 1 else "") for shape, of in row.shapes.items())
    told = next((text for words, text in _FUSED.items() if any(_ends_with(_module(row.name), word) for word in words.split())), None)
    if told:
        return {"role": _ASK}, f"stored as {stored}; if it is several in one, write {told}"
    role, kind = _usual(row.name), row.name.rpartition(".")[2]
    if role is None or kind not in ("weight", "bias") or len(row.shapes) != 1:
        return {"role": _ASK}, f"stored as {stored}"
    if role == "mlp.norm" and sum(_usual(each.name) == role and each.name.endswith(kind) for each in rows) > 1:
        return {"role": _ASK}, f"stored as {stored}; there are several norms, and only one is the mlp.norm before the MLP"
    (shape,) = row.shapes
    expected = SHAPES[role][:1] if kind == "bias" else SHAPES[role]
    try:
        usual = Model(
            Architecture("", {n: Dimension((), str(v)) for n, v in {"layers": 1, **numbers}.items()}, (Weight("w", role, expected),)), {}
        )
        wanted = usual.weights["w"].shape
    except (RequestError, KeyError):
        return {"role": _ASK}, f"stored as {stored}; it is called as {_an(role)} usually is"
    if shape == wanted and not (_is_conv1d(row.name) and len(shape) == 2 and shape[0] == shape[1]):
        return {"role": role}, ""
    if shape == wanted:
        return {"role": role, "transposed": _ASK}, f"stored as {stored}: true if that is [in, out], as of a Conv1D, or false"
    if shape == wanted[::-1]:
        return {"role": role, "transposed": "true"}, ""
    return {"role": _ASK}, f"stored as {stored}; {_an(role)}, as which it is called, would be {list(wanted)}"


def _is_conv1d(name: str) -> bool:
    return _module(name).rpartition(".")[2] in ("c_proj", "c_fc", "c_attn")


def _an(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def _runs(numbers: Sequence[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ---- the rest ----


def _layer_lines(rows: Sequence[_Row], numbers: Mapping[str, int]) -> list[str]:
    layers = numbers.get("layers")
    held = [row.layers for row in rows if "{layer}" in row.name]
    if layers is None or all(each == list(range(layers)) for each in held):
        return ["", "sparse: all"] if any("{expert}" in row.name for row in rows) else []
    lines = [
        "",
        f"sparse: {_ASK}    # which layers are sparse: all, or {{first: KEY, step: KEY, offset: N, dense: KEY}} with keys of the config",
    ]
    if any(each[-1] >= layers for each in held if each):
        lines.append(f"extra_layers: {_ASK}    # the config's key for how many layers follow the last one")
    return lines


def _tied_lines(rows: Sequence[_Row], config: Mapping[str, Any]) -> list[str]:
    if any(_usual(row.name) == "head" for row in rows) or "tie_word_embeddings" in config:
        return []
    return [
        "",
        f"defaults: {{tie_word_embeddings: {_ASK}}}    # no head is stored, and the config does not say whether it is the embedding",
    ]


def _dropped_lines(shapes: Shapes, prefix: str | None) -> list[str]:
    found = [row.name for row in _folded({name: shape for name, shape in shapes.items() if name.endswith(_ROTARY)}, prefix)]
    return ["", "dropped:", *(f"  {name}: every engine computes it from the config" for name in found)] if found else []


def _alike(shapes: Shapes, config: Mapping[str, Any]) -> list[str]:
    """A remark if all names and shapes are those of a declared model."""
    found = [name for name in built_in_model_types() if _is_alike(find_architecture(name), shapes, config)]
    if not found:
        return []
    return [
        "#",
        f"# All names and shapes are those of {' and '.join(found)} with this config. If it computes the same, this is enough:",
        f"#     model_type: {_word(config.get('model_type'))}",
        f"#     like: {found[0]}",
    ]


def _is_alike(architecture: Architecture | None, shapes: Shapes, config: Mapping[str, Any]) -> bool:
    if architecture is None:
        return False
    model = Model(architecture, config)
    try:
        weights = model.weights
    except RequestError:
        return False
    absent = {architecture.tied[0]} if model.is_tied else set()
    held = {name: shape for name, shape in shapes.items() if name not in absent and not model.reason_to_drop(name)}
    needed = {name for name, weight in weights.items() if not weight.optional}
    return needed <= held.keys() and all(name in weights and weights[name].shape == shape for name, shape in held.items())
