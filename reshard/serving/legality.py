"""Whether a serving engine serves a model: as its config describes it, in a version, and at which parallel sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.meshes import Parallel, stage_layers
from reshard.geometry.quantities import plural
from reshard.models.engine_rules import EngineRules, version_numbers
from reshard.models.lookup import draft_class, unknown_architecture
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.models.splits import problem
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
            f"the weights are quantized ({method}) with a method that reshard does not know",
            why="How packed weights and their scales split over ranks is not guessed",
            do=f"Convert to hf, which keeps them unchanged and which {engine} loads as well",
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
    engine = rules.engine
    what = f"{engine}'s class for a {model.architecture.model_type} model"
    for key, value in rules.assumed_settings:
        if (setting := model.setting(key)) != value:
            raise UnsupportedError(
                f"{what} works as if {key} were {json.dumps(value)}, the config says {json.dumps(setting)}",
                why="It would refuse the weights, or serve wrong or unset ones",
                do="Serve it with another engine",
            )
    if rules.no_class:
        raise UnsupportedError(
            f"{engine} has no class for a {model.architecture.model_type} model: {rules.no_class}",
            do="Serve it with another engine. A conversion to hf or dcp keeps it whole",
        )
    if rules.not_loadable:
        raise UnsupportedError(
            f"{engine} does not load a {model.architecture.model_type} model from such files: {rules.not_loadable}",
            do="Convert to hf, which it loads as well",
        )
    if model.quantization and model.quantization.library:
        raise UnsupportedError(
            f"the weights are quantized for {model.quantization.library}, and {engine} does not load them", do="Add `dequantize=True`"
        )
    if rules.refuses_quantized and model.quantization:
        raise UnsupportedError("the weights are quantized", why=rules.refuses_quantized, do="Add `dequantize=True`, or convert to hf")
    if rules.derives_head_dim:
        _check_head_dim(model, engine)
    if rules.ungrouped_heads and model.dimensions["kv_heads"] != model.dimensions["heads"]:
        raise UnsupportedError(
            f"{what} has a KV head for each of the {model.dimensions['heads']} heads; the config gives {model.dimensions['kv_heads']}",
            why="It does not load keys and values of other sizes",
            do="Serve it with another engine",
        )
    if rules.all_layers_sparse and model.dense_layers:
        raise UnsupportedError(
            f"{what} has experts in every layer, whatever the config says; layer {model.dense_layers[0]} has none",
            why="It would serve experts that were never loaded, without a message",
            do="Serve it with another engine",
        )
    if rules.quantizes_router:
        _check_router(model, engine)


def _check_head_dim(model: Model, engine: str) -> None:
    """Raises RequestError if the config's head dimension is not the one that the engine's class computes."""
    head_dim, derived = model.dimensions["head_dim"], model.dimensions["hidden"] // model.dimensions["heads"]
    if head_dim != derived:
        raise UnsupportedError(
            f"{engine}'s class for a {model.architecture.model_type} model computes a head dimension of hidden size / heads = {derived}, "
            f"the config says {head_dim}",
            why="It would load a part of every head without a message",
            do="Serve it with another engine",
        )


def _check_router(model: Model, engine: str) -> None:
    """Raises RequestError if the config does not exclude the routers of a quantized model from quantization."""
    router = next((weight.name for weight in model.weights.values() if weight.role == "router"), None)
    if router and model.quantization and model.quantization.form_of(router):
        raise UnsupportedError(
            "the config does not say that this router is not quantized",
            where=router,
            why=f"{engine} would build a quantized router and cast the weight to it without a message",
            do="Name the routers in quantization_config, under modules_to_not_convert or ignore",
        )


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
    experts = model.dimensions.get("experts", 0)
    if parallel.ep > 1 and not experts:
        raise RequestError(
            f"`ep={parallel.ep}`: a {model.architecture.model_type} model has no experts", do="Leave out `ep=`", id="illegal-sizes"
        )
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
    if pp > 1 and rules.one_stage is True:
        return "its class for this model cannot be divided into stages"
    if pp > 1 and isinstance(key := rules.one_stage, str) and model.holds(key):
        return f"its class for this model takes one stage, since the config says {key.replace('not ', 'nothing for ')}"
    counts = rules.layers_per_stage(model.dimensions["layers"], pp)
    for pp_rank in range(pp if rules.stages_need_experts and model.sparse_layers else 0):
        if not set(stage_layers(counts, pp_rank)) & model.sparse_layers:
            return f"stage {pp_rank} would have no layer with experts"
    return None


def legal_tensor_parallel_sizes(model: Model, rules: EngineRules, *, with_experts: bool = False) -> tuple[int, ...]:
    """The sizes over which every weight of the model splits, in ascending order. with_experts: each rank holds whole experts."""
    heads = model.dimensions["heads"]
    return tuple(tp for tp in range(1, heads + 1) if degree_problem(model, rules, tp, tp if with_experts else 1) is None)


def degree_problem(model: Model, rules: EngineRules, tp: int, ep: int = 1) -> tuple[str, str] | None:
    """The first weight that does not split over `tp` ranks, and why; None if all weights split. With `ep` > 1 experts are not split."""
    sizes, experts = split_rules(model, rules, tp), model.dimensions.get("experts", 0)
    for part in distinct_parts(model, rules):
        ranks = 1 if part.expert is not None and ep > 1 else tp
        if reason := problem(with_split(part, rules), ranks, sizes):
            return part.tensor, reason
    if rules.tp_at_most_experts and model.sparse_layers and tp > experts:
        return "experts", f"{tp} ranks are more than its {experts} experts"
    width = model.dimensions.get("expert_intermediate", 0) // tp
    if tp > 1 and ep == 1 and model.sparse_layers and width < rules.least_expert_width:
        least = rules.least_expert_width
        return "experts", f"over {tp} ranks, experts have a width of {width}, which the engine would fill up to {least} with unset elements"
    if ep > 1 and rules.no_expert_parallel:
        return "experts", rules.no_expert_parallel
    if rules.equal_experts and experts % ep:
        return "experts", f"{ep} ranks do not divide its {experts} experts"
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
