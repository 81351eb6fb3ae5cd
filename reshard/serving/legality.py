"""Whether a serving engine serves a model: as its config describes it, in a version, and at which parallel sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.meshes import Parallel, stage_layers
from reshard.geometry.quantities import plural
from reshard.models.engine_rules import SIZES, WORDS, EngineRules, version_numbers, words_of
from reshard.models.lookup import draft_class, unknown_architecture
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.models.sizes import evaluate
from reshard.models.splits import problem
from reshard.models.stored_forms import not_read, or_dequantize
from reshard.serving.weights import distinct_parts, split_rules, with_split


def require_model(model: Model | None, config: Mapping[str, object] | None, engine: str, *, can_learn: bool = False) -> Model:
    """The model, which must not be None. Raises RequestError if it is, with the reason, which follows from the config.

    can_learn: whether the engine's loader can be traced.
    """
    if model is not None:
        return model
    if config is None:
        raise RequestError(
            "there is no config.json in the checkpoint or in its parent directory, so the model is not known",
            why=f"{engine}'s files hold each rank's slices, and their sizes depend on the numbers of heads in the config",
            do="Add `model=DIR`, the directory with the model's config",
        )
    if method := unknown_quantization(config):
        raise UnsupportedError(
            not_read(method),
            why="How packed weights and their scales split over ranks is not guessed",
            do=or_dequantize(
                method, "Serve its Hugging Face folder, if the engine knows the method; `to=hf` writes one with the same bytes"
            ),
        )
    error = unknown_architecture(config)
    if can_learn and not draft_class(config):
        where = "" if has_engine(engine.lower()) else " and `engine_python=PATH`, the Python that has it"
        error.do = f"Add `learn=True`{where}: {engine}'s own loader then says where each weight goes. Or: {error.do}"
    raise error


def has_engine(module: str) -> bool:
    """Whether this Python has the engine whose module has that name; a folder of that name that is no package does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def check_served(model: Model, rules: EngineRules) -> None:
    """Raises RequestError if the engine does not load the model, or would answer differently from the model that the config describes."""
    engine, model_type = rules.engine, model.architecture.model_type
    head = model.architecture.head
    for key, assumed in rules.assumes.items():
        if key == "tie_word_embeddings" and head and not head.beside:  # no head of the language model, which it would tie
            continue
        is_dimension = key in model.architecture.dimensions
        value = evaluate(str(assumed), model.dimensions, exact=False) if is_dimension else assumed
        setting = model.dimensions[key] if is_dimension else model.setting(key)
        if setting != value:
            shown = f"{assumed} = {value}" if is_dimension else json.dumps(value)
            raise UnsupportedError(
                f"{engine}'s class for a {model_type} model works as if {key} were {shown}, the config says {json.dumps(setting)}",
                why="It would refuse the weights, or serve wrong or unset ones",
                do="Serve it with another engine",
            )
    if model.quantization and model.quantization.library:
        raise UnsupportedError(
            f"the weights are quantized for {model.quantization.library}, and {engine} does not load them", do="Add `dequantize=True`"
        )
    if refusal := refused(model, rules):
        reason, _, remedy = refusal.partition(". ")
        raise UnsupportedError(f"{engine} does not load a {model_type} model from such files: {reason}", do=remedy or _ELSEWHERE)


_ELSEWHERE = "Serve it with another engine. A conversion to hf or dcp keeps it whole"


def refused(model: Model, rules: EngineRules, **sizes: int) -> str | None:
    """Why the class refuses a model, with numbers: the first of its reasons whose condition holds; None if none does.

    sizes: some of the SIZES, for the conditions that name sizes; without them, the others count.
    """
    values = {**_values_of(model), **sizes}
    for when, reason in rules.refuses.items():
        if bool(sizes) == words_of(when).isdisjoint(SIZES):
            continue
        if any(all(_is_so(term, model, values) for term in terms.split(" and ")) for terms in when.split(" or ")):
            return re.sub(r"\{(\w+)\}", lambda place: str(values.get(place[1], place[0])), reason)
    return None


@lru_cache(maxsize=16)
def _values_of(model: Model) -> Mapping[str, Any]:
    """The dimensions of a model, and the WORDS that are about it at all sizes."""
    router = next((weight.name for weight in model.weights.values() if weight.role == "router"), "") if model.quantization else ""
    return {
        **model.dimensions,
        "always": True,
        "quantized": model.quantization is not None,
        "quantized_router": bool(router and model.quantization and model.quantization.form_of(router)),
        "router": router,
        "sparse_layers": len(model.sparse_layers),
        "dense_layers": len(model.dense_layers),
        "first_dense_layer": next(iter(model.dense_layers), None),
    }


def _is_so(term: str, model: Model, values: Mapping[str, Any]) -> bool:
    """Whether a term of a condition holds. One with a dimension that the model lacks, or a size that is not asked about, does not."""
    left, _, right = term.removeprefix("not ").partition(" > ")
    if not words_of(f"{left} {right}") <= {*WORDS, *model.architecture.dimensions}:
        return model.holds(term)
    try:
        is_so = evaluate(left, values, exact=False) > evaluate(right or "0", values, exact=False)
    except (KeyError, ZeroDivisionError):
        return False
    return is_so is not term.startswith("not ")


def about_version(engine: str, version: str, newest: str, model: Model, *, is_known: bool) -> tuple[str, ...]:
    """Notes about what was not measured: a version after `newest`, or the engine's class of the model. is_known: the class was measured."""
    notes = []
    if version_numbers(version, newest) > version_numbers(newest, newest):
        notes.append(f"{engine} {version} is newer than the newest version that was measured, {newest}")
    if not is_known:
        model_type = model.architecture.model_type
        notes.append(f"{engine}'s own class for {model_type} was not compared; it may name or fuse tensors in another way")
    return tuple(notes)


def check_degrees(model: Model, rules: EngineRules, parallel: Parallel) -> None:
    """Raises RequestError, naming the legal sizes, if the engine cannot split the model over `parallel`."""
    check_has_experts(model, parallel)
    check_expert_parallel(parallel, rules.engine)
    if refused := degree_problem(model, rules, parallel.tp, parallel.ep):
        name, reason = refused
        legal = legal_tensor_parallel_sizes(model, rules, with_experts=parallel.ep > 1)
        raise RequestError(
            f"`tp={parallel.tp}` does not fit this model: {reason}",
            where=name,
            why=f"{rules.engine} would refuse it, or give ranks parts of a head",
            do=f"Legal tensor-parallel sizes are {', '.join(map(str, legal)) or 'none: the engine cannot serve this model'}",
            id="illegal-sizes",
        )
    if unfit := stage_problem(model, rules, parallel.pp):
        raise RequestError(
            f"`pp={parallel.pp}` does not fit this model: {unfit}",
            why=f"{rules.engine} would refuse it",
            do="Use fewer stages",
            id="illegal-sizes",
        )


def check_has_experts(model: Model, parallel: Parallel) -> None:
    """Raises RequestError if experts are split that the model does not have."""
    if parallel.ep > 1 and not model.dimensions.get("experts"):
        raise RequestError(
            f"`ep={parallel.ep}`: a {model.architecture.model_type} model has no experts", do="Leave out `ep=`", id="illegal-sizes"
        )


def check_expert_parallel(parallel: Parallel, engine: str) -> None:
    """Raises RequestError if experts would be distributed over other ranks than the tensor-parallel ones."""
    if parallel.ep > 1 and parallel.ep != parallel.tp:
        raise RequestError(
            f"`ep={parallel.ep}` with `tp={parallel.tp}`: {engine} distributes experts over the tensor-parallel ranks",
            do=f"Give `ep={parallel.tp}`, or leave it out",
            id="illegal-sizes",
        )


def check_stages(model: Model, pp: int) -> None:
    """Raises RequestError if there are more stages than layers. Engines start such a stage; it is a mistake, so it is not written."""
    layers = model.dimensions["layers"]
    if pp > layers:
        raise RequestError(
            f"`pp={pp}` does not fit this model: {plural(layers, 'layer')} on {pp} stages",
            why="Some stages would hold no layer",
            do=f"Use at most {plural(layers, 'stage')}",
        )


def stage_problem(model: Model, rules: EngineRules, pp: int) -> str | None:
    """Why the engine refuses to distribute the layers over `pp` stages; None if it does not."""
    counts = rules.layers_per_stage(model.dimensions["layers"], pp)
    for stage in range(pp):
        sparse_layers = len(model.sparse_layers.intersection(stage_layers(counts, stage)))
        if refusal := refused(model, rules, pp=pp, stage=stage, sparse_layers_of_stage=sparse_layers):
            return refusal
    return None


def legal_tensor_parallel_sizes(model: Model, rules: EngineRules, *, with_experts: bool = False) -> tuple[int, ...]:
    """The sizes over which every weight of the model splits, in ascending order. with_experts: each rank holds whole experts."""
    heads = model.dimensions["heads"]
    return tuple(tp for tp in range(1, heads + 1) if degree_problem(model, rules, tp, tp if with_experts else 1) is None)


def degree_problem(model: Model, rules: EngineRules, tp: int, ep: int = 1) -> tuple[str, str] | None:
    """The first weight that does not split over `tp` ranks, and why; None if all weights split. With `ep` > 1 experts are not split."""
    sizes = split_rules(model, rules, tp)
    for part in distinct_parts(model, rules):
        ranks = 1 if part.expert is not None and ep > 1 else tp
        if reason := problem(with_split(part, rules), ranks, sizes):
            return part.tensor, reason
    if refusal := refused(model, rules, tp=tp, ep=ep):
        return "experts" if "expert" in refusal else model.architecture.model_type, refusal
    return _unaligned(model, rules)


def _unaligned(model: Model, rules: EngineRules) -> tuple[str, str] | None:
    """A block-quantized weight that does not end at the end of a block, while another weight follows it in the fused tensor; and why."""
    followed_roles = {role for fusion in rules.fusions for role in fusion.roles[:-1]}
    for part in distinct_parts(model, rules):
        block = part.blocks[0] if part.blocks else 1
        size = part.array.shape[0] * (part.block_shape[0] or 1) if part.blocks else 0
        if part.role in followed_roles and size % block:
            return part.tensor, f"{size} output features are not a multiple of the block of {block}, and others follow in the same tensor"
    return None
