"""Layers of a PipelineModule, whose files are named by number: tied modules, layers of which the run trained no parameter, and the layers
of GPT-NeoX under the names of the published model.

    0.word_embeddings.weight, tied_modules.embed.word_embeddings.weight   gpt_neox.embed_in.weight
    2.attention.dense.weight, 3. ...                                      gpt_neox.layers.0.attention.dense.weight, 1. ...
    L+3.norm.weight, L+3.norm.bias                                        gpt_neox.final_layer_norm.weight, .bias
    L+4.final_linear.weight                                               embed_out.weight

Layers 1 and L+2 of its pipeline are functions without parameters. Without a pipeline the names begin with "sequential.". The MLP has three
spellings: dense_h_to_4h and dense_4h_to_h; linear1 and linear2 since 2024; those of Transformer Engine.

With a parallel residual, each tensor-parallel rank adds its own bias before the sum over the ranks: the model's bias is their sum. With a
sequential residual it is added after the sum, and each rank has the same. Source: EleutherAI's gpt-neox of 2026-05-19,
megatron/model/gpt2_model.py, megatron/model/transformer.py (gpt_j_residual), and tools/ckpts/convert_neox_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import CheckpointError

from ..layout.states import TIED_PREFIX
from .parts import Parts
from .run_states import RunStates

if TYPE_CHECKING:
    from reshard.models.model import Model

T = TypeVar("T")
_SEQUENTIAL = "sequential."
_NEOX_SPELLINGS = {
    "mlp.linear1.": "mlp.dense_h_to_4h.",
    "mlp.linear2.": "mlp.dense_4h_to_h.",
    "mlp.fc1_": "mlp.dense_h_to_4h.",
    "mlp.fc2_": "mlp.dense_4h_to_h.",
    "mlp.layer_norm_": "post_attention_layernorm.",
    "attention.qkv.": "attention.query_key_value.",
    "attention.proj.": "attention.dense.",
}
_NEOX_ROW_BIAS = re.compile(r".*\.(attention\.dense|mlp\.dense_4h_to_h)\.bias")
_NEOX_EMBEDDING = re.compile(r"(?:0|tied_modules\.embed)\.word_embeddings\.weight")


def name_neox_layers(parts: Parts, model: Model | None) -> None:
    """Give the tensors of a run of GPT-NeoX the names of the published model, whose shapes are known. Nothing happens if the config is of
    another model, or the numbers of the layers are not those of this one."""
    if model is None or model.architecture.model_type != "gpt_neox":
        return
    layers = model.dimensions["layers"]
    names = {name.removeprefix(_SEQUENTIAL) for _, name in parts.stages}
    if not any(map(_NEOX_EMBEDDING.fullmatch, names)) or f"{layers + 3}.norm.weight" not in names:
        return

    def new_name(name: str) -> str:
        name = name.removeprefix(_SEQUENTIAL)
        number, _, inner = name.partition(".")
        if _NEOX_EMBEDDING.fullmatch(name):
            return "gpt_neox.embed_in.weight"
        if number.isdecimal() and 2 <= int(number) < layers + 2:
            old, new = next((pair for pair in _NEOX_SPELLINGS.items() if inner.startswith(pair[0])), ("", ""))
            return f"gpt_neox.layers.{int(number) - 2}.{new}{inner.removeprefix(old)}"
        named = {f"{layers + 3}.norm": "gpt_neox.final_layer_norm", f"{layers + 4}.final_linear": "embed_out"}
        module, _, parameter = name.rpartition(".")
        return f"{named[module]}.{parameter}" if module in named else name

    parts.rename(new_name)
    parts.builder.add_notes(["the layers of GPT-NeoX have the names of the published model in place of their numbers"])
    if model.config.get("use_parallel_residual", True):
        parts.summed = {name for _, name in parts.stages if _NEOX_ROW_BIAS.fullmatch(name)}


def name_tied_layers(parts: Parts, states: RunStates) -> None:
    """Give the weights of tied layers the names that the optimizer has for them: tied_modules.<key>.<name>.

    PipelineModule writes a tied module under the number of the first layer that uses it. Such a layer is recognized by its parameters: the
    optimizer has none under the layer's number, and exactly one tied key has parameters of the same names and shapes.
    """
    masters, layers = parts.shapes("master"), _by_module(parts.shapes("weight"))
    keys, trained = _tied_modules(masters), _by_module(masters).keys()
    copies: dict[str, int] = {}
    for layer in dict.fromkeys(str(layer) for layer, _ in states.tag.layers):
        shapes = layers.get(layer, {}) if layer not in trained else {}
        fitting = [key for key, expected in keys.items() if all(shapes.get(name) == shape for name, shape in expected.items())]
        if len(fitting) == 1:
            key = fitting[0]
            # Several layers of one key are copies, as several stages are.
            copies[key] = copies.get(key, -1) + 1
            for name in shapes:
                parts.move(f"{layer}.{name}", f"{TIED_PREFIX}{key}.{name}", stage=copies[key])
        elif fitting:
            note = f"layer {layer} is a tied module, and nothing tells which of {', '.join(fitting)}; it keeps its number"
            parts.builder.add_notes([note])


def drop_drifting_copies(parts: Parts) -> None:
    """Drop the copies of tied vectors and step counts on later pipeline stages.

    PipelineModule keeps only the matrices of tied modules, such as the embedding, equal on all stages. Later stages do not use the other
    tensors of a tied module, such as a norm, and the values of these copies drift.
    """
    drifting: dict[str, None] = {}
    for key, stages in parts.stages.items():
        kind, name = key
        first, *later = stages
        if later and name.startswith(TIED_PREFIX) and len(parts.first_of(key).shape) < 2:
            parts.stages[key] = {first: stages[first]}
            drifting |= {name: None} if kind != "step" else {}
    if drifting:
        named = ", ".join(list(drifting)[:3])
        parts.builder.add_notes([f"only the first stage's copies of {len(drifting)} tensors in tied modules are used: {named}"])


def note_leftover_layers(parts: Parts, states: RunStates) -> None:
    """Add a note if the run trained no parameter of its last layers: they are frozen, or left over from a run with more layers.

    parts: with tied layers under their tied keys, so that only the other layers have numbers.
    Raises: CheckpointError if such a layer has a buffer that the model files do not list: it is certainly left over.
    """
    models = states.models.values()
    if not states.layers or any(model.groups is None or model.facts.buffers is None for model in models):
        return
    layers = {int(layer): {*names} for layer, names in _by_module(parts.shapes("weight")).items() if layer.isdecimal()}
    untrained = untrained_layers(layers, {name for model in models for name in model.trained_names})
    _check_buffers({layer: layers[layer] for layer in untrained}, {name for model in models for name in model.facts.buffers or ()}, states)
    if untrained and min(untrained) > max(layers.keys() - untrained, default=-1):
        paths = ", ".join(path for (layer, _), path in states.tag.layers.items() if layer in untrained)
        note = f"the run trained no parameter of its last layers ({paths}): they are frozen, or left over from a run with more layers"
        parts.builder.add_notes([note])


def untrained_layers(layers: Mapping[int, set[str]], trained: Collection[str]) -> set[int]:
    """The layers without a trained parameter that cannot be tied modules, which are trained under a key. layers: their tensors' names."""
    tied = _tied_modules(dict.fromkeys(trained)).values()
    return {
        layer
        for layer, names in layers.items()
        if not any(f"{layer}.{name}" in trained for name in names) and not any(of_key.keys() <= names for of_key in tied)
    }


def _check_buffers(untrained: Mapping[int, set[str]], buffers: set[str], states: RunStates) -> None:
    """Raises CheckpointError if a layer has a buffer that is not listed, and is known as a buffer because other layers have it, too."""
    names_of_buffers = {name.partition(".")[2] for name in buffers}
    for layer, names in untrained.items():
        for name in sorted(names & names_of_buffers):
            if f"{layer}.{name}" not in buffers:
                raise CheckpointError(
                    f"the model files list the buffers of all layers, and not {layer}.{name}: the run had no layer {layer}",
                    where=next(path for (number, _), path in states.tag.layers.items() if number == layer),
                    why="The file is left over from a run with more layers under the same tag",
                    do="Move it away",
                )


def _tied_modules(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Tied key -> name in the module -> what `tensors` has for it."""
    return _by_module({name.removeprefix(TIED_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(TIED_PREFIX)})


def _by_module(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """First word of a name -> the rest of the name -> what `tensors` has for it."""
    modules: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        module, _, inner = name.partition(".")
        modules.setdefault(module, {})[inner] = tensor
    return modules
