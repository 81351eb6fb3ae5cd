"""Tied parameters: several names, layers or pipeline stages share one weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..layout.states import TIED_PREFIX, Shape
from .parts import Contents


def with_tied_layer_names(contents: Contents, layers: Iterable[int]) -> Contents:
    """The contents with the weights of tied layers under the names that the optimizer has for them: tied_modules.<key>.<name>.

    PipelineModule writes a tied module under the number of the first layer that uses it. Such a layer is recognized by its parameters: the
    optimizer has none under the layer's number, and exactly one tied key has parameters of the same names and shapes.
    """
    keys = _shapes_by_key(contents)
    key_of_layer: dict[str, str] = {}
    notes = []
    for layer, shapes in _shapes_of_tied_layers(contents, layers).items() if keys else ():
        fitting = [key for key, expected in keys.items() if all(shapes.get(name) == shape for name, shape in expected.items())]
        if len(fitting) == 1:
            key_of_layer[layer] = fitting[0]
        elif fitting:
            notes.append(f"layer {layer} is a tied module, and nothing tells which of {', '.join(fitting)}; it keeps its number")
    return replace(_renamed(contents, key_of_layer), notes=(*contents.notes, *notes))


def _shapes_by_key(contents: Contents) -> dict[str, dict[str, Shape]]:
    """Tied key -> shapes of its parameters by name within the module, from the names of the masters."""
    keys: dict[str, dict[str, Shape]] = {}
    for part in contents.parts:
        if part.kind == "master" and part.name.startswith(TIED_PREFIX):
            _, key, name = part.name.split(".", 2)
            keys.setdefault(key, {}).setdefault(name, part.shape)
    return keys


def _shapes_of_tied_layers(contents: Contents, layers: Iterable[int]) -> dict[str, dict[str, Shape]]:
    """Layer -> shapes of its weights by name within the layer. Layers under whose number the optimizer has parameters are left out."""
    trained_layers = {name.partition(".")[0] for name in contents.names("master")}
    shapes: dict[str, dict[str, Shape]] = {str(layer): {} for layer in layers if str(layer) not in trained_layers}
    for part in contents.parts:
        layer, _, name = part.name.partition(".")
        if part.kind == "weight" and layer in shapes:
            shapes[layer].setdefault(name, part.shape)
    return {layer: of_layer for layer, of_layer in shapes.items() if of_layer}


def _renamed(contents: Contents, key_of_layer: Mapping[str, str]) -> Contents:
    """The contents with the weights of these layers under their tied keys. Several layers of one key are copies, as several stages are."""
    parts = [part for part in contents.parts if part.kind != "weight" or part.name.partition(".")[0] not in key_of_layer]
    layers_of_key: dict[str, int] = {}
    for layer, key in key_of_layer.items():
        copy = layers_of_key[key] = layers_of_key.get(key, -1) + 1
        parts += [
            replace(part, name=f"{TIED_PREFIX}{key}.{part.name.partition('.')[2]}", stage=copy)
            for part in contents.parts
            if part.kind == "weight" and part.name.startswith(f"{layer}.")
        ]
    return replace(contents, parts=tuple(parts))


def with_aliases(contents: Contents) -> Contents:
    """The contents with the weight and the master of each tied parameter also under its second name, unless the files have them there."""
    by_tensor = contents.by_tensor()
    copies = [
        replace(part, name=alias)
        for alias, name in contents.aliases.items()
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
    drifting: set[tuple[str, str]] = set()
    first_stage: dict[tuple[str, str], int] = {}
    parts = []
    for part in contents.parts:
        tensor = part.kind, part.name
        if part.stage == first_stage.setdefault(tensor, part.stage) or len(part.shape) >= 2 or not part.name.startswith(TIED_PREFIX):
            parts.append(part)
        else:
            drifting.add(tensor)
    names = list(dict.fromkeys(part.name for part in contents.parts if (part.kind, part.name) in drifting and part.kind != "step"))
    notes = [f"only the first stage's copies of {len(names)} tensors in tied modules are used: {', '.join(names[:3])}"] if names else []
    return replace(contents, parts=tuple(parts), notes=(*contents.notes, *notes))
