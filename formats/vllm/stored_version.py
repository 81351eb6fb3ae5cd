"""The versions of vLLM that load a checkpoint, found by comparing its keys with those that each version expects."""

from __future__ import annotations

import re
from dataclasses import replace

from reshard.adapter.serving_format.engine import RankHeaders
from reshard.errors import CheckpointError
from reshard.geometry.meshes import Parallel
from reshard.models.engine_rules import EngineRules
from reshard.models.model import Model
from reshard.serving.ranks import placeholder_dtypes, rank_tensors

from .rules import all_rules, as_text


def stored_rules(model: Model, parallel: Parallel, headers: RankHeaders) -> tuple[EngineRules, str]:
    """The rules whose keys for the first rank are closest to the stored ones, and the versions with the same keys: >=0.8.5,<0.14.

    Of several equally close versions, the rules are the newest one's. The layers of each stage are taken from the keys, since a run can
    distribute them as it likes.

    Raises: CheckpointError if the stages do not hold the model's layers in order.
    """
    counts = _stored_layers_per_stage(headers, model, parallel.pp)
    candidates = [(since, replace(rules, layers_per_stage=lambda layers, pp: counts)) for since, rules in all_rules(model).items()]

    def number_of_differences(rules: EngineRules) -> int:
        expected = rank_tensors(model, placeholder_dtypes(model, rules), rules, replace(parallel, tp=1, ep=1), 0, 0)
        return len({tensor.name for tensor in expected} ^ set(headers[0, 0]))

    differences = [number_of_differences(rules) for _, rules in candidates]
    fits = [difference == min(differences) for difference in differences]
    newest = max(i for i, fit in enumerate(fits) if fit)
    oldest = next(i for i in range(newest, -1, -1) if i == 0 or not fits[i - 1])
    before = "".join(f",<{as_text(since)}" for since, _ in candidates[newest + 1 : newest + 2])
    return candidates[newest][1], f">={as_text(candidates[oldest][0])}{before}"


def _stored_layers_per_stage(headers: RankHeaders, model: Model, pp: int) -> tuple[int, ...]:
    """The number of layers that the keys of each stage name.

    A layer's number follows the word `layers` or `h`, or the word before it in the model's own names or in vLLM's.
    """
    layers = model.dimensions["layers"]
    fronts = {weight.name.partition("{layer}")[0] + "{layer}" for weight in model.architecture.weights}
    names = [*fronts, *(rules.renamed(front) for rules in all_rules(model).values() for front in fronts)]
    words = {"layers", "h", *re.findall(r"(\w+)\.\{layer\}", " ".join(names))}
    quirks = model.quirks_of("vllm")
    lists = {f"{module}.": sorted(model.layer_sets[of]) for of, module in (quirks.layer_lists if quirks else {}).items()}
    words |= {module.split(".")[-2] for module in lists}
    layer_number = re.compile(rf"(?:^|\.)(?:{'|'.join(sorted(words))})\.(\d+)\.")
    # The blocks of towers have numbers, too.
    counted = [weight.name.partition("{")[0] for weight in model.architecture.weights if weight.counted_by]
    towers = tuple({rules.renamed(name) for rules in all_rules(model).values() for name in counted})

    def layer_of(name: str) -> int | None:
        """The layer that a key names, by its number in the model or in a list of its own; None if it names none."""
        match = layer_number.search(name)
        own = next((numbers for module, numbers in lists.items() if name.startswith(module)), None)
        return int(match[1]) if match and own is None else own[int(match[1])] if match and own and int(match[1]) < len(own) else None

    layers_of_stages: list[set[int]] = [set() for _ in range(pp)]
    for (pp_rank, _), rank_headers in headers.items():
        named = (layer_of(name) for name in rank_headers if not name.startswith(towers))
        layers_of_stages[pp_rank].update(layer for layer in named if layer is not None)
    counts = tuple(map(len, layers_of_stages))
    if [layer for stage in layers_of_stages for layer in sorted(stage)] != list(range(layers)):
        raise CheckpointError(
            f"the stages hold {', '.join(map(str, counts))} layers, which are not the model's {layers} in order",
            why="Some files are of another model or another split, or the config is another model's",
        )
    return counts
