"""The parallel sizes at which a serving engine can hold a model, and why it refuses others."""

from __future__ import annotations

from reshard.errors import RequestError
from reshard.geometry.parallel import Parallel, stage_layers
from reshard.geometry.quantities import plural
from reshard.models.model import Model
from reshard.models.splits import problem
from reshard.serving.rules import EngineRules
from reshard.serving.weights import distinct_parts


def check_degrees(model: Model, rules: EngineRules, parallel: Parallel) -> None:
    """Raises RequestError, naming the legal sizes, if the engine cannot split the model over `parallel`."""
    experts = model.dimensions.get("experts", 0)
    if parallel.ep > 1 and not experts:
        raise RequestError(
            f"--ep {parallel.ep}: a {model.architecture.model_type} model has no experts", do="Leave out --ep", id="illegal-sizes"
        )
    if parallel.ep > 1 and parallel.ep != parallel.tp:
        raise RequestError(
            f"--ep {parallel.ep} with --tp {parallel.tp}: {rules.engine} distributes experts over the tensor-parallel ranks",
            do=f"Give --ep {parallel.tp}, or leave it out",
            id="illegal-sizes",
        )
    if refused := degree_problem(model, rules, parallel.tp, parallel.ep):
        name, reason = refused
        legal = legal_tensor_parallel_sizes(model, rules, with_experts=parallel.ep > 1)
        raise RequestError(
            f"--tp {parallel.tp} does not fit this model: {reason}",
            where=name,
            why=f"{rules.engine} would refuse it, or give ranks parts of a head",
            do=f"Legal tensor-parallel sizes are {', '.join(map(str, legal)) or 'none: the engine cannot serve this model'}",
            id="illegal-sizes",
        )
    if unfit := stage_problem(model, rules, parallel.pp):
        raise RequestError(
            f"--pp {parallel.pp} does not fit this model: {unfit}",
            why=f"{rules.engine} would refuse it",
            do="Use fewer stages",
            id="illegal-sizes",
        )


def check_stages(model: Model, pp: int) -> None:
    """Raises RequestError if there are more stages than layers. Engines start such a stage; it is a mistake, so it is not written."""
    layers = model.dimensions["layers"]
    if pp > layers:
        raise RequestError(
            f"--pp {pp} does not fit this model: {plural(layers, 'layer')} on {pp} stages",
            why="Some stages would hold no layer",
            do=f"Use at most {plural(layers, 'stage')}",
        )


def stage_problem(model: Model, rules: EngineRules, pp: int) -> str | None:
    """Why the engine refuses to distribute the layers over `pp` stages; None if it does not."""
    if pp > 1 and rules.quirks.one_stage:
        return "its class for this model cannot be divided into stages"
    if pp > 1 and (key := rules.quirks.one_stage_if) and model.holds(key):
        return f"its class for this model takes one stage, since the config says {key.replace('not ', 'nothing for ')}"
    counts = rules.layers_per_stage(model.dimensions["layers"], pp)
    for pp_rank in range(pp if rules.quirks.stages_need_experts and model.sparse_layers else 0):
        if not set(stage_layers(counts, pp_rank)) & model.sparse_layers:
            return f"stage {pp_rank} would have no layer with experts"
    return None


def legal_tensor_parallel_sizes(model: Model, rules: EngineRules, *, with_experts: bool = False) -> tuple[int, ...]:
    """The sizes over which every weight of the model splits, in ascending order. with_experts: each rank holds whole experts."""
    heads = model.dimensions["heads"]
    return tuple(tp for tp in range(1, heads + 1) if degree_problem(model, rules, tp, tp if with_experts else 1) is None)


def degree_problem(model: Model, rules: EngineRules, tp: int, ep: int = 1) -> tuple[str, str] | None:
    """The first weight that does not split over `tp` ranks, and why; None if all weights split. With `ep` > 1 experts are not split."""
    split_rules, experts = rules.split_rules(model, tp), model.dimensions.get("experts", 0)
    for part in distinct_parts(model, rules):
        ranks = 1 if part.expert is not None and ep > 1 else tp
        if reason := problem(rules.with_split(part), ranks, split_rules):
            return part.tensor, reason
    if rules.quirks.tp_at_most_experts and model.sparse_layers and tp > experts:
        return "experts", f"{tp} ranks are more than its {experts} experts"
    width = model.dimensions.get("expert_intermediate", 0) // tp
    if tp > 1 and ep == 1 and model.sparse_layers and width < rules.quirks.least_expert_width:
        least = rules.quirks.least_expert_width
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
