"""Checks of an index: every tensor whole, all layers there, the shapes of the config, the optimizer state of each weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from reshard.canonical.optimizer_state import owner
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found, of_error
from reshard.index.coverage import GATHERED, is_ungathered, uncovered, wrong_names, wrong_shape
from reshard.index.index import Index, Kind, Tensor
from reshard.index.name_parts import family_of, is_scale, layer_of
from reshard.models.config_values import component_class
from reshard.models.model import Model
from reshard.models.quantization import check_has_settings, quantization_of, quantization_settings, unknown_quantization
from reshard.models.stored_forms import not_read
from reshard.storage.files import Files, read_range

_STEP_WORDS: Mapping[str, str] = {"F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_MOMENTS: tuple[Kind, ...] = ("moment1", "moment2")


def incomplete_tensors(index: Index) -> Iterator[Finding]:
    """Tensors of which a part is in no file, and names that occur twice or cannot be used."""
    yield from map(of_error, wrong_names(index.tensors))
    yield from map(of_error, uncovered(index.tensors))


def unread_arrays(index: Index) -> Iterator[Finding]:
    """Array-like objects of classes that are not read."""
    for tensor in (tensor for tensor in index.tensors if tensor.dtype.is_unread):
        kind = "unread-weight" if tensor.kind in ("weight", "master", "buffer", "adapter") else "unread-state"
        yield found(kind, f"it is stored as {tensor.dtype.torch}", tensor=tensor.name)


def missing_layers(weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Numbers between the first and the last layer that no weight has."""
    stacks: dict[str, set[int]] = {}
    for name in weights:
        layer = layer_of(name)
        if layer is not None:
            stacks.setdefault(name[: name.index(f".{layer}.")], set()).add(layer)
    for stack, layers in stacks.items():
        count = max(layers) + 1 - len(layers)
        # A list of modules that are not all layers with weights has gaps of its own, and few entries.
        if 0 < count < len(layers) - 1:
            missing = sorted(set(range(max(layers))) - layers)
            numbers = ", ".join(map(str, missing[:8]))
            yield found("missing-layer", f"{stack} has the layers 0 to {max(layers)} except {numbers}", tensor=f"{stack}.{missing[0]}")


def config_shapes(
    weights: Mapping[str, Tensor], model: Model | None, config: Mapping[str, Any] | None, left_out: Collection[str]
) -> Iterator[Finding]:
    """Weights that the config needs and that are missing, that have another shape, or that it does not know. left_out: weights that files
    of this format do not have on purpose."""
    if model is None:
        reason, do = "there is no config.json", ""
        if config is not None:
            reason, do = f"the architecture {config.get('model_type')!r} is not declared", "Name a declared one with `architecture=NAME`"
        if config and (method := unknown_quantization(config)):
            reason, do = not_read(method), "Check it with the library that quantized it, or what `dequantize=True` makes of it"
        elif component := component_class(config):
            reason, do = f"it is that of {component}, and the class alone knows its weights", "diffusers compares them while it loads them"
        yield found("config-not-checked", f"the names and shapes of the weights were not compared with a config: {reason}", do=do)
        return
    try:
        check_has_settings(model.config, {name: tensor.dtype.name for name, tensor in weights.items()})
        expected = model.as_published(whole=weights)
    except (RequestError, CheckpointError) as error:
        yield of_error(error)
        return
    if not expected.keys() & weights.keys():
        yield found(
            "config-not-checked", f"no weight has a name of a {model.architecture.model_type} model, such as {next(iter(expected))}"
        )
        return
    for name, weight in expected.items():
        tensor = weights.get(name)
        if tensor is not None and tensor.shape != weight.shape and not (weight.is_scale and tensor.elements == 1):
            do = GATHERED if is_ungathered(tensor.shape, weight.shape) else ""
            yield found("wrong-shape", wrong_shape(tensor.shape, weight.shape), tensor=name, do=do)
    unknown = [name for name in weights if name not in expected and name not in model.aliases and not model.reason_to_drop(name)]
    needed = (name for name, weight in expected.items() if not weight.optional and not weight.is_scale and name not in left_out)
    missing = [name for name in needed if name not in weights]
    kind = model.noun
    if missing and sum(weights[name].elements for name in unknown) >= sum(math.prod(expected[name].shape) for name in missing):
        detail = f"{plural(len(unknown), 'weight')}, such as {unknown[0]}, have other names than {kind} has, such as {missing[0]}"
        yield found("config-not-checked", detail)
        return
    yield from (found("missing-weight", f"{kind} needs it, and it is in no file", tensor=name) for name in missing)
    yield from (found("unknown-weight", f"{kind} has no such weight", tensor=name) for name in unknown)
    yield from _tied_shapes(weights, model)


def _tied_shapes(weights: Mapping[str, Tensor], model: Model) -> Iterator[Finding]:
    for pair in model.aliases.items():
        copy, weight = map(weights.get, pair)
        if copy is not None and weight is not None and (copy.shape, copy.dtype) != (weight.shape, weight.dtype):
            detail = (
                f"it is {copy.dtype} {list(copy.shape)}, {weight.name} is {weight.dtype} {list(weight.shape)}, and the config ties them"
            )
            yield found("tied-mismatch", detail, tensor=copy.name)


def mixed_dtypes(weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Weights whose element type differs from that of the same weight in most other layers."""
    families: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        if layer_of(name) is not None:
            families.setdefault(family_of(name), []).append(tensor)
    for family in families.values():
        types = Counter(tensor.dtype.name for tensor in family)
        if len(types) > 1:
            rare, count = types.most_common()[-1]
            tensor = next(tensor for tensor in family if tensor.dtype.name == rare)
            detail = f"it is {rare}, as in {count} of {len(family)} layers or experts; the others are {types.most_common(1)[0][0]}"
            yield found("mixed-dtypes", detail, tensor=tensor.name)


def missing_scales(weights: Mapping[str, Tensor], config: Mapping[str, Any] | None, *, of_engine: bool) -> Iterator[Finding]:
    """Scales that belong to quantized weights and are not there: those that the config describes, else any that other weights have.

    of_engine: whether a serving engine loads the files: it keeps no more of what is implied than it needs.
    """
    quantization = quantization_of(config or {})
    if quantization is not None:
        types = {name: tensor.dtype.name for name, tensor in weights.items()}
        for weight, form in quantization.stored_weights(types):
            names = form.names(weight)
            codes, *beside = names
            for name in (name for name in beside if name not in weights and not (of_engine and names[name].is_implied)):
                yield found("missing-scale", f"{codes} is stored as {form.name}, and this {names[name].use} is in no file", tensor=name)
        return
    modules = {name.rpartition(".")[0] for name in weights if is_scale(name)}
    eight_bit = [name for name, tensor in weights.items() if name.endswith(".weight") and tensor.dtype.name.startswith("F8")]
    if modules or quantization_settings(config or {}):
        for name in (name for name in eight_bit if name.removesuffix(".weight") not in modules):
            detail = f"{name} is stored as {weights[name].dtype}, and this scale is in no file"
            yield found("missing-scale", detail, tensor=name.removesuffix("weight") + "weight_scale")


def uneven_steps(index: Index, files: Files) -> Iterator[Finding]:
    """Step counts of the optimizer that differ. Reads one count of each parameter, in turn of each rank."""
    counts: dict[float, list[tuple[str, str]]] = {}
    steps = [tensor for tensor in index.tensors if tensor.kind == "step" and tensor.elements == 1 and tensor.dtype.name in _STEP_WORDS]
    for number, tensor in enumerate(steps):
        if not len(tensor.shards):
            continue
        try:
            extent = tensor.shards.extent(number % len(tensor.shards))
            data = read_range(files, extent.path, extent.byte_offset, extent.dtype.itemsize)
        except CheckpointError as error:
            yield of_error(error)
            continue
        count = float(np.frombuffer(data, _STEP_WORDS[tensor.dtype.name])[0])
        counts.setdefault(count, []).append((tensor.name, extent.path))
    if len(counts) > 1:
        common, rare = max(counts, key=lambda count: len(counts[count])), min(counts, key=lambda count: len(counts[count]))
        name, path = counts[rare][0]
        some, most = plural(len(counts[rare]), "parameter"), plural(len(counts[common]), "other")
        detail = f"the optimizer has counted {rare:g} steps for {some}, and {common:g} for {most}"
        yield found("uneven-steps", detail, tensor=name, file=path)


def optimizer_state(index: Index) -> Iterator[Finding]:
    """Every trained weight has all its moments, with its own shape."""
    weights: Mapping[str, Tensor] = {**index.by_kind("master"), **index.by_kind("weight")}
    moments = {kind: index.by_kind(kind) for kind in _MOMENTS}
    trained = {name for tensors in moments.values() for name in tensors}
    if not trained:
        return
    for kind, tensors in moments.items():
        lacking = sorted(trained - tensors.keys())
        if tensors and lacking:
            other = next(moment for moment in _MOMENTS if moment != kind)
            for name in lacking:
                yield found(
                    "missing-moment", f"it has {other} but no {kind}, which {plural(len(tensors), 'other parameter')} have", tensor=name
                )
        for name, tensor in tensors.items():
            weight = weights.get(name)
            if weight is None:
                yield found("lone-moment", f"there is a {kind} of {list(tensor.shape)}, but no weight of this name", tensor=name)
            elif tensor.shape != weight.shape:
                yield found("moment-shape", f"its {kind} is {list(tensor.shape)}, the weight is {list(weight.shape)}", tensor=name)
    yield from _masters_without_moments(index, trained)
    # Other optimizers keep other state, such as Muon's momentum.
    trained |= {state[0] for tensor in index.tensors if (state := owner(tensor, weights))}
    untrained = [name for name, weight in weights.items() if name not in trained and weight.dtype.floating]
    if untrained:
        yield found("no-moments", f"{plural(len(untrained), 'weight')} without optimizer state, such as {untrained[0]}")


def _masters_without_moments(index: Index, trained: set[str]) -> Iterator[Finding]:
    """An optimizer keeps a full-precision copy of exactly those weights that it trains, if it keeps any beside the model's."""
    stored = index.by_kind("weight")
    masters = [name for name in index.by_kind("master") if name in stored and name not in index.facts.tied]
    lacking = [name for name in masters if name not in trained]
    if Counter(name in trained for name in masters)[True] > len(lacking):
        for name in lacking:
            yield found("missing-moment", "the optimizer holds its full-precision copy, but no moments", tensor=name)
