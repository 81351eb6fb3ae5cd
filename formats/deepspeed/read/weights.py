"""The model's own copy of its weights: in the module, in the layers' files, or, if frozen under ZeRO-3, in fragments; and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from reshard.containers import torch_zip
from reshard.containers.torch_zip import AnyTensor, is_stored, memory_of
from reshard.errors import CheckpointError
from reshard.index.index import Kind

from ..layout.partitions import Row, part_of_stage_3, ranks_of, slices_of_stage_3
from ..layout.states import ModelStates, Shape
from .join import TIED, Part, Reading


def read_weights(reading: Reading, states: ModelStates, place: tuple[int, int]) -> None:
    """The model's own copy: the module's tensors, or those of this stage's layers; of ZeRO-3 only what is not partitioned."""
    partitioned = {name for name, _ in chain(states.frozen_shapes, *(states.groups or ()))} if reading.tag.zero_models else set()
    partitioned |= set(reading.aliases) if reading.tag.zero_models else set()
    trained = {name for group in states.groups or () for name, _ in group}
    memory = {_memory(value): str(name) for name, value in (states.module or {}).items() if str(name) in trained and is_stored(value)}
    left = []
    for name, value in (states.module or {}).items():
        if not is_stored(value):
            if value is not None:
                reading.objects[str(name)] = None
        elif str(name) in partitioned:
            continue
        elif reading.tag.zero_models and states.buffers is not None and str(name) not in states.buffers and 0 in value.shape:
            left.append(str(name))
        else:
            if str(name) not in trained and 0 not in value.shape and (same := memory.get(_memory(value))):
                reading.aliases.setdefault(str(name), same)
            reading.add_whole("weight", str(name), value, place)
            if 0 in value.shape:
                reading.add_nothing(str(name), value.shape, place)
    if left:
        reading.notes.append(
            f"{len(left)} names of the module have no values here (frozen and left out of the save, or second names): {', '.join(left[:3])}"
        )
    if states.module is None:
        _read_layers(reading, place)


def _memory(tensor: AnyTensor) -> tuple[object, ...]:
    """What tensors that are one have in common: not a square weight and its transpose."""
    return *memory_of(tensor), tensor.strides


def _read_layers(reading: Reading, place: tuple[int, int]) -> None:
    """The layers' files of one tensor-parallel rank. Which stage holds which layer is not said and does not matter: the first reads all."""
    stage, tp_rank = place
    if stage:
        return
    if not reading.tag.layers:
        raise CheckpointError(
            "it holds no module, as PipelineModule leaves it to files of the layers, and none of them is here",
            where=next(iter(reading.tag.models.values())),
            do="Copy layer_*-model_states.pt from where the checkpoint was written",
        )
    for (layer, tp), path in reading.tag.layers.items():
        if tp == tp_rank:
            content = torch_zip.read(reading.files, path, locate=False)
            for name, value in content.items() if isinstance(content, Mapping) else ():
                if is_stored(value):
                    reading.add_whole("weight", f"{layer}.{name}", value, place)


def read_fragments(reading: Reading, own: Mapping[int, ModelStates], place: tuple[int, int]) -> None:
    """Frozen parameters of ZeRO-3: every rank's part of each."""
    first = own[min(own)]
    for name, shape in first.frozen_shapes:
        if 0 in shape:
            reading.add_nothing(name, shape, place)
            continue
        fragments = {dp: states.frozen_fragments[name] for dp, states in own.items() if name in states.frozen_fragments}
        if not fragments:
            continue
        if (dtype := next(iter(fragments.values())).dtype).name in ("I8", "U8"):
            raise CheckpointError(
                f"it is stored quantised ({dtype}), and its scales are in no file",
                where=f"{name} in {first.path}",
                why="zero_quantized_nontrainable_weights keeps the scales in an attribute that is not saved: the values are lost",
                do="Take this frozen weight from the model that the run started from, and save with exclude_frozen_parameters",
            )
        if missing := [dp for dp in own if dp not in fragments]:
            raise CheckpointError(f"rank {missing[0]}'s file holds no part of it", where=f"{name} in {own[missing[0]].path}")
        row = Row(tuple(own[dp].path for dp in fragments), ranks_of(fragments), tuple(fragments.values()), reading.locations)
        part = part_of_stage_3(shape, len(fragments))
        row.check([part] * len(fragments), f"part of {name}")
        (cut,) = slices_of_stage_3(((name, shape),), len(fragments))
        reading.add("weight", name, Part(*place, row.dtype, shape, row.shards(cut)))


def name_tied_layers(reading: Reading) -> None:
    """Gives a layer's file the name that the optimizer has for its module, where that is tied: tied_modules.<key>.

    A tied module is written under the number of the first layer that uses it. It is recognised by its parameters: the optimizer knows none
    under that number, and just one tied key has parameters of those names and shapes.
    """
    known = {name for (role, name) in reading.parts if role == "master"}
    keys: dict[str, dict[str, Shape]] = {}
    for role, name in reading.parts:
        if role == "master" and name.startswith("tied_modules."):
            _, key, rest = name.split(".", 2)
            keys.setdefault(key, {})[rest] = reading.parts[role, name][0].shape
    layers: dict[str, dict[str, Shape]] = {}
    for layer, _ in reading.tag.layers:
        inner = {
            name.partition(".")[2]: found[0].shape
            for (role, name), found in reading.parts.items()
            if role == "weight" and name.startswith(f"{layer}.")
        }
        if keys and inner and not any(f"{layer}.{name}" in known for name in inner):
            layers[str(layer)] = inner
    for number, inner in layers.items():
        fitting = [key for key, expected in keys.items() if all(inner.get(name) == shape for name, shape in expected.items())]
        if len(fitting) == 1:
            for name in inner:
                moved = reading.parts.pop(("weight", f"{number}.{name}"))
                copies = reading.parts.setdefault(("weight", f"tied_modules.{fitting[0]}.{name}"), [])
                # Another layer's file of the same module is a copy of it, as another stage's would be.
                stage = 1 + max((each.stage for each in copies), default=-1)
                copies.extend([replace(part, stage=stage) for part in moved])
        elif fitting:
            reading.notes.append(f"layer {number} is a tied module, but which of {', '.join(fitting)} is not told; it keeps its number")


def check_all_there(reading: Reading) -> None:
    """Raises CheckpointError if the optimizer knows a parameter of which the model's files, all but ZeRO-3's, hold no copy."""
    known = {name for role, name in reading.parts if role == "weight"}
    known |= reading.shapeless.keys()
    lost = [name for role, name in reading.parts if role == "master" and name not in known and not name.startswith(TIED)]
    if lost:
        layer = lost[0].partition(".")[0]
        file = f"layer_{int(layer):02d}-model_states.pt is not there" if layer.isdigit() else "a file of a layer or an expert is not there"
        raise CheckpointError(
            f"the optimizer holds its master, but none of the model's files holds it: {file}",
            where=lost[0],
            why=f"{len(lost)} trained parameters have no model copy",
            do="Copy the missing file from where the checkpoint was written",
        )


def add_aliases(reading: Reading) -> None:
    """A tied weight has its master under the second name, too, where the model's copy may be under both."""
    for alias, name in reading.aliases.items():
        roles: tuple[Kind, Kind] = ("weight", "master")
        for role in roles:
            found = reading.parts.get((role, name))
            if found and (role, alias) not in reading.parts:
                reading.parts[role, alias] = list(found)
