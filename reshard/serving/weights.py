"""The weights of a model that a serving engine holds: which have a slot in the engine's class, and in which element type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from reshard.errors import RequestError
from reshard.geometry.dtypes import U8, DType, are_same_bytes
from reshard.models.engine_rules import EngineRules, LeftOut
from reshard.models.model import LayerKind, Model
from reshard.models.parts import Part
from reshard.models.splits import SplitRules
from reshard.models.weights import ModelWeight


def parts_by_kind(model: Model, rules: EngineRules) -> dict[LayerKind | None, tuple[Part, ...]]:
    """Kind of layer -> the parts of its first layer that the engine has a slot for, in the model's order; None -> the parts outside of the
    layers. What is true of the first layer of a kind is true of all its layers."""
    return _parts_by_kind(model, frozenset(rules.keep_fused), rules.unsupported, rules.left_out)


def distinct_parts(model: Model, rules: EngineRules) -> tuple[Part, ...]:
    """One part for each role, parameter, shape and number of heads. These decide whether a parallel size is legal.

    Attention heads come first, since people understand a size that does not divide the heads best.
    """
    return _distinct_parts(model, frozenset(rules.keep_fused), rules.unsupported, rules.left_out)


@lru_cache(maxsize=16)
def _parts_by_kind(
    model: Model, keep_fused: frozenset[str], unsupported: frozenset[tuple[str, str]], left_out: tuple[LeftOut, ...]
) -> dict[LayerKind | None, tuple[Part, ...]]:
    absent = {model.weights[name].pattern for name in left_out_by_class(model, left_out)}
    weights: dict[LayerKind | None, tuple[ModelWeight, ...]] = {None: model.weights_outside_layers}
    weights.update({kind: kind.weights for kind in model.layer_kinds})
    return {
        kind: tuple(
            part
            for part in model.parts_of(alike, keep_fused=keep_fused)
            if (part.role, part.parameter) not in unsupported
            and part.pattern not in absent
            and (part.component is None or part.component.use != "group index")
        )
        for kind, alike in weights.items()
    }


@lru_cache(maxsize=16)
def _distinct_parts(
    model: Model, keep_fused: frozenset[str], unsupported: frozenset[tuple[str, str]], left_out: tuple[LeftOut, ...]
) -> tuple[Part, ...]:
    first: dict[tuple[object, ...], Part] = {}
    for parts in _parts_by_kind(model, keep_fused, unsupported, left_out).values():
        for part in parts:
            first.setdefault((part.role, part.parameter, part.array.shape, id(part.dimensions)), part)
    return tuple(sorted(first.values(), key=lambda part: not part.split.heads))


def split_rules(model: Model, rules: EngineRules, tp: int) -> SplitRules:
    """The padding with which `tp` ranks split the model."""
    steps = rules.quantized_steps
    is_quantized = bool(steps) and any(weight.form for weight in model.weights.values() if weight.role in steps)
    multiple = rules.vocabulary_multiple(model.dimensions.get("vocab", 0), tp) if rules.vocabulary_multiple else tp
    return SplitRules(multiple, steps if is_quantized else {})


def with_split(part: Part, rules: EngineRules) -> Part:
    """The part with the split that the engine uses for its role."""
    return replace(part, split=rules.splits[part.role]) if part.role in rules.splits else part


def weights_without_slot(model: Model, rules: EngineRules) -> tuple[str, ...]:
    """The weights that the engine's class of the model has no slot for, although the model's answers depend on them."""
    lacking: dict[int | None, set[str]] = {}
    left_out = {model.weights[name].pattern for name in left_out_by_class(model, rules.left_out)}
    for kind, parts in parts_by_kind(model, rules).items():
        weights = kind.weights if kind else model.weights_outside_layers
        stored = [weight for weight in weights if weight.component is None or weight.component.use != "group index"]
        if patterns := {weight.pattern for weight in stored} - {part.pattern for part in parts} - left_out:
            lacking.update(dict.fromkeys(kind.layers if kind else (None,), patterns))
    if not lacking:
        return ()
    return tuple(weight.name for weight in model.weights.values() if weight.pattern in lacking.get(weight.layer, ()))


@lru_cache(maxsize=16)
def left_out_by_class(model: Model, rows: tuple[LeftOut, ...]) -> dict[str, str]:
    """Weight -> why the engine's class of the model leaves it out, for weights that its answers do not depend on. rows: the rules'."""
    return {
        weight.name: row.why
        for row in rows
        for weight in model.weights.values()
        if fnmatchcase(weight.declared.name, row.names) and (row.behind is None or _block(weight) > _last_used(model, weight, row.behind))
    }


def _block(weight: ModelWeight) -> int:
    """The number, from 1, that a weight has among those that its declared name counts."""
    before = weight.declared.name.partition(f"{{{weight.declared.counted_by}}}")[0]
    return 1 + int(weight.name.removeprefix(before).partition(".")[0])


def _last_used(model: Model, weight: ModelWeight, key: str) -> int:
    """The number, from 1, of the last of these weights whose output the class takes."""
    blocks, number = model.dimensions[weight.declared.counted_by or ""], model.setting(key)
    if not isinstance(number, int) or not -blocks - 1 <= number <= blocks:
        raise RequestError(
            f"config.json gives {number!r} for {key}; the number of one of the {blocks} blocks is expected",
            why="The engine's class has the blocks up to that one",
            do="Give the model's own config with `model=DIR`",
        )
    return number if number >= 0 else blocks + 1 + number


def zero_biases(model: Model, rules: EngineRules) -> tuple[str, ...]:
    """The names of the biases that the model lacks, and that the engine's class has as zeros."""
    weights = (weight.name for weight in model.weights.values() if (weight.role, "bias") in rules.zeros) if rules.zeros else ()
    return tuple(name.removesuffix("weight") + "bias" for name in weights if name.endswith(".weight"))


def layers_not_served(model: Model) -> dict[str, str]:
    """Weight -> why engines leave it out, for the weights of the layers for multi-token prediction."""
    layers = model.dimensions["layers"]
    if not model.mtp_layers:
        return {}
    why = "predicts further tokens; the served model has no such layer"
    return {weight.name: why for weight in model.weights.values() if weight.layer is not None and weight.layer >= layers}


def scale_aliases(model: Model, rules: EngineRules) -> dict[str, str]:
    """Scale -> the equal scale that an engine stores in its place, where it stores one scale for fused weights."""

    def is_kept_once(part: Part) -> bool:
        of_expert = part.expert is not None and part.parameter in rules.scales_kept_once
        return of_expert or (part.component is not None and part.component.kept_once)

    scales = _last_of_fused(model, rules, is_kept_once)
    return {name: stored for name, stored in scales if name != stored}


def not_stored_by_engines(model: Model, rules: EngineRules) -> dict[str, str]:
    """Component of a packed weight -> why it is left out. Engines know the groups of input features; of weights that they fuse, they keep
    the shape of the last."""
    of_fused = _last_of_fused(model, rules, lambda part: part.component is not None and part.component.use == "shape")
    why = "the shape of a packed weight; of fused weights the engine keeps that of the last"
    shapes = {name: why for name, stored in of_fused if name != stored}
    runs = "the groups of input features, which are runs of neighbours"
    indices = (weight.name for weight in model.weights.values() if weight.component and weight.component.use == "group index")
    return shapes | dict.fromkeys(indices, runs)


def _last_of_fused(model: Model, rules: EngineRules, is_kept_once: Callable[[Part], bool]) -> Iterator[tuple[str, str]]:
    """(component, that of the last of the weights with which its weight is fused), for the components for which `is_kept_once`."""
    if not any(is_kept_once(part) for parts in parts_by_kind(model, rules).values() for part in parts):
        return
    last_role = {role: fusion.roles[-1] for fusion in rules.fusions for role in fusion.roles}
    not_served = layers_not_served(model)
    kept = [part for part in model.parts(keep_fused=frozenset(rules.keep_fused)) if part.tensor not in not_served and is_kept_once(part)]
    names = {(part.layer, part.expert, part.parameter, part.role): part.tensor for part in kept}
    for part in kept:
        yield part.tensor, names[part.layer, part.expert, part.parameter, last_role.get(part.role, part.role)]


def model_dtype(model: Model, dtypes: Mapping[str, DType]) -> DType:
    """The element type that the model computes in: that of its embedding, which is never quantized."""
    return dtypes[next(weight.name for weight in model.weights.values() if weight.role == "embedding")]


def stored_dtypes(model: Model, rules: EngineRules, dtypes: Mapping[str, DType]) -> dict[str, DType]:
    """Canonical tensor -> the element type that the engine stores. `dtypes` are those that the conversion asks for."""
    dtypes = dict(dtypes)
    fixed = {role: dtype or model_dtype(model, dtypes) for role, dtype in rules.dtypes.items()}
    for weight in model.weights.values():
        if weight.component and weight.component.element_type == "U8" and are_same_bytes(dtypes.get(weight.name, U8), U8):
            dtypes[weight.name] = U8
            continue
        role = "scale" if weight.component and weight.component.element_type == "F32" else weight.role
        if (role in fixed or role in rules.values) and weight.name in dtypes:
            dtypes[weight.name] = fixed.get(role, dtypes[weight.name]).of(rules.values.get(role, ""))
    return dtypes
