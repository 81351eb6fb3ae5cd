"""Layers of a PipelineModule, whose files are named by number: tied modules, and layers of which the run trained no parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from reshard.errors import CheckpointError

from ..layout.states import TIED_PREFIX, Shape
from .parts import Contents, ParameterPart
from .run_states import RunStates


def with_tied_layer_names(contents: Contents, layers: Iterable[int]) -> Contents:
    """The contents with the weights of tied layers under the names that the optimizer has for them: tied_modules.<key>.<name>.

    PipelineModule writes a tied module under the number of the first layer that uses it. Such a layer is recognized by its parameters: the
    optimizer has none under the layer's number, and exactly one tied key has parameters of the same names and shapes.
    """
    keys: dict[str, dict[str, Shape]] = {}
    for name, shape in contents.shapes("master").items():
        if name.startswith(TIED_PREFIX):
            _, key, inner = name.split(".", 2)
            keys.setdefault(key, {})[inner] = shape
    key_of_layer: dict[str, str] = {}
    notes = []
    for layer, shapes in _untrained_layers_shapes(contents, layers).items() if keys else ():
        fitting = [key for key, expected in keys.items() if all(shapes.get(name) == shape for name, shape in expected.items())]
        if len(fitting) == 1:
            key_of_layer[layer] = fitting[0]
        elif fitting:
            notes.append(f"layer {layer} is a tied module, and nothing tells which of {', '.join(fitting)}; it keeps its number")
    return replace(contents, parts=_renamed(contents, key_of_layer), notes=(*contents.notes, *notes))


def _untrained_layers_shapes(contents: Contents, layers: Iterable[int]) -> dict[str, dict[str, Shape]]:
    """Layer -> shapes of its weights by name within the layer. Layers under whose number the optimizer has parameters are left out."""
    trained_layers = {name.partition(".")[0] for name in contents.shapes("master")}
    shapes: dict[str, dict[str, Shape]] = {str(layer): {} for layer in layers if str(layer) not in trained_layers}
    for name, shape in contents.shapes("weight").items():
        layer, _, inner = name.partition(".")
        if layer in shapes:
            shapes[layer][inner] = shape
    return {layer: of_layer for layer, of_layer in shapes.items() if of_layer}


def _renamed(contents: Contents, key_of_layer: Mapping[str, str]) -> tuple[ParameterPart, ...]:
    """The parts with the weights of these layers under their tied keys. Several layers of one key are copies, as several stages are."""
    parts = [part for part in contents.parts if part.tensor.kind != "weight" or part.tensor.name.partition(".")[0] not in key_of_layer]
    copies: dict[str, int] = {}
    for layer, key in key_of_layer.items():
        copy = copies[key] = copies.get(key, -1) + 1
        for part in contents.parts:
            number, _, name = part.tensor.name.partition(".")
            if part.tensor.kind == "weight" and number == layer:
                parts.append(replace(part.named(f"{TIED_PREFIX}{key}.{name}"), rank=replace(part.rank, stage=copy)))
    return tuple(parts)


def with_second_names(contents: Contents, tied: Mapping[str, str]) -> Contents:
    """The contents with the weight and the master of each tied parameter also under its second name, unless the files have them there."""
    by_tensor: dict[tuple[str, str], list[ParameterPart]] = {}
    for part in contents.parts:
        by_tensor.setdefault(part.key, []).append(part)
    copies = [
        part.named(alias)
        for alias, name in tied.items()
        for kind in ("weight", "master")
        if (kind, alias) not in by_tensor
        for part in by_tensor.get((kind, name), ())
    ]
    return replace(contents, parts=(*contents.parts, *copies))


def without_drifting_copies(contents: Contents) -> Contents:
    """The contents without the copies of tied vectors and step counts on later pipeline stages.

    PipelineModule keeps only the matrices of tied modules, such as the embedding, equal on all stages. Later stages do not use the other
    tensors of a tied module, such as a norm, and the values of these copies drift.
    """
    first_stage: dict[tuple[str, str], int] = {}
    parts, drifting = list[ParameterPart](), list[ParameterPart]()
    for part in contents.parts:
        is_first = part.rank.stage == first_stage.setdefault(part.key, part.rank.stage)
        is_kept = is_first or len(part.tensor.shape) >= 2 or not part.tensor.name.startswith(TIED_PREFIX)
        (parts if is_kept else drifting).append(part)
    names = list(dict.fromkeys(part.tensor.name for part in drifting if part.tensor.kind != "step"))
    notes = [f"only the first stage's copies of {len(names)} tensors in tied modules are used: {', '.join(names[:3])}"] if names else []
    return replace(contents, parts=tuple(parts), notes=(*contents.notes, *notes))


def notes_on_leftover_layers(states: RunStates, contents: Contents) -> tuple[str, ...]:
    """A note if the run trained no parameter of its last layers: they are frozen, or left over from a run with more layers.

    contents: with tied layers under their tied keys, so that only the other layers have numbers.
    Raises: CheckpointError if such a layer has a buffer that the model files do not list: it is certainly left over.
    """
    models = states.models.values()
    if not states.layers or any(model.groups is None or model.facts.buffers is None for model in models):
        return ()
    layers: dict[int, set[str]] = {}
    for name in contents.shapes("weight"):
        layer, _, inner = name.partition(".")
        if layer.isdecimal():
            layers.setdefault(int(layer), set()).add(inner)
    untrained = untrained_layers(layers, {name for model in models for name in model.trained_names})
    _check_buffers({layer: layers[layer] for layer in untrained}, {name for model in models for name in model.facts.buffers or ()}, states)
    if not untrained or min(untrained) < max(layers.keys() - untrained, default=-1):
        return ()
    paths = ", ".join(path for (layer, _), path in states.tag.layers.items() if layer in untrained)
    return (f"the run trained no parameter of its last layers ({paths}): they are frozen, or left over from a run with more layers",)


def untrained_layers(layers: Mapping[int, set[str]], trained: set[str]) -> set[int]:
    """The layers without a trained parameter that cannot be tied modules, which are trained under a key. layers: their tensors' names."""
    tied: dict[str, set[str]] = {}
    for name in trained:
        if name.startswith(TIED_PREFIX):
            key, _, inner = name.removeprefix(TIED_PREFIX).partition(".")
            tied.setdefault(key, set()).add(inner)
    return {
        layer
        for layer, names in layers.items()
        if not any(f"{layer}.{name}" in trained for name in names) and not any(of_key <= names for of_key in tied.values())
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
