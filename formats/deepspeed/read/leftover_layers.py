"""Layers of a PipelineModule of which the run trained no parameter: they are frozen, or left over from a run with more layers."""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import CheckpointError

from ..layout.states import TIED_PREFIX
from .parts import Contents
from .run_states import RunStates


def with_note_on_leftover_layers(states: RunStates, contents: Contents) -> Contents:
    """The contents, with a note if the run trained no parameter of its last layers.

    contents: with tied layers under their tied keys, so that only the other layers have numbers.
    Raises: CheckpointError if such a layer has a buffer that the model files do not list: it is certainly left over.
    """
    models = states.models.values()
    if not states.layers or any(model.groups is None or model.buffers is None for model in models):
        return contents
    trained = {name for model in models for name in model.trained_names}
    layers = _names_by_layer(contents)
    untrained = _untrained_layers(layers, trained)
    _check_buffers({layer: layers[layer] for layer in untrained}, {name for model in models for name in model.buffers or ()}, states)
    if not untrained or min(untrained) < max(layers.keys() - untrained, default=-1):
        return contents
    paths = ", ".join(path for (layer, _), path in states.tag.layers.items() if layer in untrained)
    note = f"the run trained no parameter of its last layers ({paths}): they are frozen, or left over from a run with more layers"
    return replace(contents, notes=(*contents.notes, note))


def _names_by_layer(contents: Contents) -> dict[int, set[str]]:
    """The names of the weights of each layer, within the layer."""
    layers: dict[int, set[str]] = {}
    for part in contents.parts:
        layer, _, name = part.name.partition(".")
        if part.kind == "weight" and layer.isdecimal():
            layers.setdefault(int(layer), set()).add(name)
    return layers


def _untrained_layers(layers: dict[int, set[str]], trained: set[str]) -> set[int]:
    """The layers without a trained parameter that cannot be tied modules, which are trained under a key."""
    tied: dict[str, set[str]] = {}
    for name in trained:
        if name.startswith(TIED_PREFIX):
            key, _, name_in_module = name.removeprefix(TIED_PREFIX).partition(".")
            tied.setdefault(key, set()).add(name_in_module)
    return {
        layer
        for layer, names in layers.items()
        if not any(f"{layer}.{name}" in trained for name in names) and not any(of_key <= names for of_key in tied.values())
    }


def _check_buffers(untrained: dict[int, set[str]], buffers: set[str], states: RunStates) -> None:
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
