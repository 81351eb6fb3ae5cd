"""Spellings: other names, and other cuts, under which libraries store the weights of one family. Data; the same for readers and writers.

    mlp.experts.gate_up_proj [E, 2 I, H]     what is published expert by expert, as transformers 5 has it in memory: so in
    mlp.experts.down_proj    [E, H, I]       training checkpoints, and in folders saved with save_original_format=False
    self_attn.qkv_proj, mlp.gate_up_proj     fused, as phi3 has them; q_proj, gate_proj, ... are the other way
    layers.0. ..., h.0. ...                  saved from the model without its head, so without "model." or "transformer."

What a name says is a Mosaic: which boxes of which canonical tensors its array is. Source: transformers 5.23, conversion_mapping.py (its
WeightConverters and WeightRenamings of mixtral, qwen2_moe and llava), core_model_loading.py (base_model_prefix) and
integrations/finegrained_fp8.py; measured on fixtures/hf/*-fused and gpt2-bare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile, joined, stacked
from reshard.index.index import Index, Kind, ParamGroup, Tensor
from reshard.index.join import rows_meeting
from reshard.index.shards import Shards, concatenated, subviews
from reshard.models.model import Model, Part


@dataclass(frozen=True, slots=True)
class NameVariant:
    """A name within a layer, with {expert} for a number and {kind} for weight or bias, and the roles that follow each other in it.

    stacked: it holds that kind of them for every expert, along a new first axis.
    """

    name: str
    roles: tuple[str, ...]
    stacked: str | None = None


SPELLINGS = (
    NameVariant("mlp.experts.gate_up_proj", ("expert.gate", "expert.up"), stacked="weight"),
    NameVariant("mlp.experts.down_proj", ("expert.down",), stacked="weight"),
    NameVariant("mlp.experts.gate_up_proj_scale_inv", ("expert.gate", "expert.up"), stacked="weight_scale_inv"),
    NameVariant("mlp.experts.down_proj_scale_inv", ("expert.down",), stacked="weight_scale_inv"),
    NameVariant("mlp.gate.{kind}", ("router",)),
    NameVariant("mlp.experts.{expert}.gate_proj.{kind}", ("expert.gate",)),
    NameVariant("mlp.experts.{expert}.up_proj.{kind}", ("expert.up",)),
    NameVariant("mlp.experts.{expert}.down_proj.{kind}", ("expert.down",)),
    NameVariant("block_sparse_moe.gate.{kind}", ("router",)),
    NameVariant("block_sparse_moe.experts.{expert}.w1.{kind}", ("expert.gate",)),
    NameVariant("block_sparse_moe.experts.{expert}.w2.{kind}", ("expert.down",)),
    NameVariant("block_sparse_moe.experts.{expert}.w3.{kind}", ("expert.up",)),
    NameVariant("self_attn.qkv_proj.{kind}", ("attention.q", "attention.k", "attention.v")),
    NameVariant("self_attn.q_proj.{kind}", ("attention.q",)),
    NameVariant("self_attn.k_proj.{kind}", ("attention.k",)),
    NameVariant("self_attn.v_proj.{kind}", ("attention.v",)),
    NameVariant("mlp.gate_up_proj.{kind}", ("mlp.gate", "mlp.up")),
    NameVariant("mlp.gate_proj.{kind}", ("mlp.gate",)),
    NameVariant("mlp.up_proj.{kind}", ("mlp.up",)),
)
_BY_NAME = {spelling.name: spelling for spelling in SPELLINGS}
# What stands at the front of a name, and what the canonical name has there; {base} is "model." or its like.
PREFIXES = (("", "{base}"), ("language_model.", ""), ("model.language_model.", "{base}"))
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class Names:
    """What stored names mean for one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        layered = next((weight.name for weight in model.architecture.weights if "{layer}" in weight.name), "{layer}")
        self._base = layered.partition(".")[0] + "."
        self._layer = re.compile(re.escape(layered.partition("{layer}")[0]) + r"(\d+)\.(.+)")
        self._shapes = {name: weight.shape for name, weight in model.weights.items()}
        head, embedding = model.architecture.tied
        if model.is_tied and embedding in self._shapes:
            self._shapes[head] = self._shapes[embedding]
        self._parts: Mapping[tuple[int | None, int | None, str, str], Part] | None = None

    def is_canonical(self, name: str) -> bool:
        return name in self._shapes or self._model.reason_to_drop(name) is not None

    def array(self, name: str) -> Mosaic | None:
        """What a stored tensor of that name holds; None if the name means nothing to this model."""
        for candidate in self._without_prefix(name):
            if candidate in self._shapes:
                return Mosaic.of(candidate, Box.whole(self._shapes[candidate]))
            if (found := self._spelled(candidate)) is not None:
                return found
        return None

    def unneeded(self, name: str) -> str | None:
        """The canonical name of what the architecture leaves out on purpose, under any of its names; None if it is needed."""
        return next((each for each in self._without_prefix(name) if self._model.reason_to_drop(each)), None)

    def _without_prefix(self, name: str) -> Iterator[str]:
        yield name
        for stored, own in PREFIXES:
            if name.startswith(stored):
                yield own.format(base=self._base) + name.removeprefix(stored)

    def _spelled(self, name: str) -> Mosaic | None:
        match = self._layer.fullmatch(name)
        if match is None:
            return None
        layer, inner = int(match[1]), match[2]
        number = _EXPERT.search(inner)
        expert = int(number[0]) if number else None
        module, _, kind = _EXPERT.sub("{expert}", inner).rpartition(".")
        spelling = _BY_NAME.get(f"{module}.{{kind}}") or _BY_NAME.get(inner)
        if spelling is None:
            return None
        if not spelling.stacked:
            return self._joined(spelling, layer, expert, kind)
        experts = [self._joined(spelling, layer, each, spelling.stacked) for each in range(self._model.dimensions.get("experts", 0))]
        held = [each for each in experts if each is not None]
        return stacked(held) if held and len(held) == len(experts) else None

    def _joined(self, spelling: NameVariant, layer: int, expert: int | None, kind: str) -> Mosaic | None:
        if self._parts is None:
            self._parts = {(part.layer, part.expert, part.role, part.parameter): part for part in self._model.parts()}
        parts = [self._parts.get((layer, expert, role, kind)) for role in spelling.roles]
        arrays = [part.array for part in parts if part is not None]
        if len(arrays) < len(parts) or (len(arrays) > 1 and not arrays[0].shape):
            return None  # a scale that is one for all cannot be one of two
        return joined(arrays)


@dataclass(frozen=True, slots=True)
class _Held:
    """A canonical tensor's share of a stored one."""

    tensor: Tensor
    shape: tuple[int, ...]
    shards: Shards


def with_canonical_names(index: Index, model: Model | None, prefix: str = "") -> Index:
    """The index under the model's canonical names: stored tensors of other spellings as pieces of canonical ones, state of the optimizer
    alike. The same index if there are none. prefix: what stands before all names of the model.

    Raises: CheckpointError if one has another shape than its name says.
    """
    if model is None:
        return index
    if all(map(_declared(model).fullmatch, _own_names(index, prefix))):
        return index
    names = Names(model)
    known: dict[str, Mosaic | None] = {}

    def array(name: str) -> Mosaic | None:
        """Of a name that is not canonical."""
        if name not in known:
            own = name.removeprefix(prefix)
            known[name] = None if names.is_canonical(own) else names.array(own)
        return known[name]

    found: dict[tuple[Kind, str], list[_Held]] = {}
    respelled_names: dict[str, str] = {}
    for tensor in index.tensors:
        for name, held in _shares(tensor, array, names, model, prefix):
            found.setdefault((tensor.kind, name), []).append(held)
            if name != tensor.name:
                respelled_names.setdefault(tensor.name, name)
    if not respelled_names:
        return index
    tensors = tuple(_whole(name, held) for (_, name), held in found.items())

    def new_names(name: str) -> tuple[str, ...]:
        each = array(name)
        return (name,) if each is None else each.names

    def groups() -> tuple[ParamGroup, ...]:
        return tuple(replace(group, names=_all(map(new_names, group.names))) for group in index.param_groups())

    stored, own = next(iter(respelled_names.items()))
    note = f"{len(respelled_names)} tensors are stored under other names than the published ones, such as {stored}, which holds {own}"
    buffers = None if index.facts.buffers is None else _all(map(new_names, index.facts.buffers))
    tied = {new_names(alias)[0]: new_names(name)[0] for alias, name in index.facts.tied.items()}
    facts = replace(index.facts, notes=(*index.facts.notes, note), buffers=buffers, tied=tied)
    return replace(index, tensors=tensors, facts=facts, param_groups=groups)


def _own_names(index: Index, prefix: str) -> Iterator[str]:
    return (tensor.name.removeprefix(prefix) for tensor in index.tensors if tensor.kind in ("weight", "master"))


def _declared(model: Model) -> re.Pattern[str]:
    """What the names of a model's modules look like, whatever its config says of their number and size."""
    names = [*(weight.name for weight in model.architecture.weights), *model.architecture.tied]
    modules = {re.escape(name.rpartition(".")[0]) for name in names}
    numbered = (re.sub(r"\\{(layer|expert)\\}", r"\\d+", module) for module in sorted(modules))
    return re.compile(rf"(?:{'|'.join(numbered)})\.\w+")


def _shares(tensor: Tensor, array: Callable[[str], Mosaic | None], names: Names, model: Model, prefix: str) -> Iterator[tuple[str, _Held]]:
    """The canonical tensors that a stored one holds something of, by name; itself, if its name is canonical or means nothing."""
    parameter, _, kind = tensor.name.rpartition(".") if tensor.kind == "state" else (tensor.name, "", "")
    suffix = f".{kind}" if tensor.kind == "state" else ""
    held = array(parameter) if parameter else None
    if held is None:
        short = tensor.name.removeprefix(prefix)
        own = None if names.is_canonical(short) or tensor.kind != "weight" else names.unneeded(short)
        yield own or tensor.name, _Held(tensor, tensor.shape, tensor.shards)
    elif tensor.shape == held.shape:
        for name, rows in _located(tensor.shards, held).items():
            # The shape of the embedding is that of a tied head, which is not among the weights.
            shape = model.weights[name].shape if name in model.weights else tensor.shape
            yield name + suffix, _Held(tensor, shape, subviews(tensor.shards, rows))
    elif tensor.elements == 1:  # a count of steps is every parameter's
        for name in held.names:
            yield name + suffix, _Held(tensor, tensor.shape, tensor.shards)
    elif tensor.kind == "state":
        yield tensor.name, _Held(tensor, tensor.shape, tensor.shards)
    else:
        raise CheckpointError(
            f"its shape is {list(tensor.shape)}; by its name it holds {', '.join(held.names[:3])}"
            + (f" and {len(held.names) - 3} more" if len(held.names) > 3 else "")
            + f", which come to {list(held.shape)}",
            where=tensor.name,
            why="The config belongs to another model, or a library stores it in an order that is not known",
            do="Give the config that this model was trained with by --model DIR",
        )


def _located(shards: Shards, array: Mosaic) -> dict[str, list[tuple[int, Tile]]]:
    """For every canonical tensor in an array: the rows of the stored tensor's pieces, and where in each row's array a box of it lies."""
    starts, stops = shards.offsets, shards.offsets + shards.sizes
    found: dict[str, list[tuple[int, Tile]]] = {name: [] for name in array.names}
    for tile in array.tiles:
        spans = [tile.span(axis) for axis in range(len(array.shape))]
        box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
        for row in rows_meeting(starts, stops, box).tolist():
            held: Tile | None = tile
            for axis, (start, stop) in enumerate(zip(starts[row].tolist(), stops[row].tolist(), strict=True)):
                held = held.cut(axis, start, stop) if held else None
            assert held is not None
            found[tile.name].append((row, held))
    return found


def _whole(name: str, held: Sequence[_Held]) -> Tensor:
    """A canonical tensor from all that was found of it."""
    first = held[0].tensor
    if len(held) == 1 and held[0].shards is first.shards:
        return first if first.name == name else replace(first, name=name)
    for other in held[1:]:
        if (other.tensor.dtype, other.shape) != (first.dtype, held[0].shape):
            kinds = [f"{each.tensor.name} says {each.tensor.dtype} {list(each.shape)}" for each in (held[0], other)]
            raise CheckpointError(
                ", ".join(kinds),
                where=name,
                why="Both are said to hold this weight, and it has one element type and shape",
                do="Save the model again with one of them",
            )
    return Tensor(name, first.dtype, held[0].shape, first.kind, concatenated([each.shards for each in held]))


def _all(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for each in names for name in each)
