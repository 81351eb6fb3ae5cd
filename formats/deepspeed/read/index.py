"""From the files of a tag to its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.processes import in_processes
from reshard.errors import CheckpointError
from reshard.index.index import Index, RunFacts, StoredFile
from reshard.storage.files import Files

from ..layout.states import ModelStates, OptimizerStates, read_model, read_optimizer
from ..layout.tag import Tag
from ..layout.tensor_parallel import Joins
from . import experts
from .checks import check_steps_agree, data_parallel_ranks, topology_of
from .join import Reading
from .weights import add_aliases, check_all_there, name_tied_layers, read_fragments, read_weights
from .zero_optimizer import merged_groups, parameters_in_order, read_optimizers_of_experts, read_plain_optimizer, read_zero


def read(files: Files, tag: Tag, hints: Hints) -> Index:
    """The index of a tag."""
    reading = Reading(files, tag, hints)
    is_stage_3 = bool(tag.zero_models)
    if tag.models and tag.zero_models:
        raise CheckpointError(
            f"{next(iter(tag.models.values()))} is of a save without ZeRO-3, {next(iter(tag.zero_models.values()))} of one with it",
            where=files.root,
            why="Two saves lie under the same tag; which of them is meant cannot be known",
            do="Move the files of the older save away",
        )
    models = models_of(files, tag)
    topology = topology_of(tag, models)
    check_steps_agree(models)
    optimizers = _optimizers(files, tag)
    topology.dp = data_parallel_ranks(tag, models, optimizers, topology)
    first = next(iter(models.values()))
    # Only the first rank of all notes which weights are tied.
    reading.aliases.update(first.aliases)
    for mp_rank in range(topology.pp * topology.tp):
        place = topology.place(mp_rank)
        own = {dp: states for (dp, mp), states in models.items() if mp == mp_rank}
        states = own[min(own)]
        reading.objects.update(dict.fromkeys(states.client))
        kept = {dp: found for (dp, mp), found in optimizers.items() if mp == mp_rank}
        read_weights(reading, states, place)
        if is_stage_3:
            read_fragments(reading, own, place)
            if not kept:
                raise CheckpointError(
                    "the optimizer's files are missing, and with ZeRO-3 they hold the only copy of the weights",
                    where=states.path,
                    do="Copy *_optim_states.pt from where the checkpoint was written",
                )
        if kept:
            read_zero(reading, own, kept, topology, place)
        elif ep := read_optimizers_of_experts(reading, states, mp_rank, place):
            topology.ep = ep
        elif isinstance(states.optimizer, Mapping):
            read_plain_optimizer(reading, states.optimizer, states.path, parameters_in_order(states), (), place)
    experts.read(reading, first, topology)
    name_tied_layers(reading)
    if not is_stage_3:
        check_all_there(reading)
    add_aliases(reading)
    joins = joins_of(first, hints)
    tensors = tuple(reading.tensors(joins, topology.tp))
    if reading.unread:
        some = ", ".join(list(reading.unread)[:3])
        reading.notes.append(f"of tied modules only the tables are kept equal by the stages; taken from the first stage alone: {some}")
    facts = RunFacts(
        _producer(first, optimizers),
        first.version or next((found.version for found in optimizers.values() if found.version), None),
        first.step,
        {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp} | ({"ep": topology.ep} if topology.ep > 1 else {}),
        hints.config,
        tuple(dict.fromkeys(reading.notes)),
        state=state_of(first, optimizers),
        tied=dict(reading.aliases),
        buffers=None if first.buffers is None else tuple(sorted(first.buffers)),
    )
    used = dict.fromkeys((*tag.paths(), *(flat.path for states in optimizers.values() for flat in states.masters)))
    stored = tuple(StoredFile(path, files.size(path) or 0) for path in used)
    merged = merged_groups(reading.groups)
    return Index("deepspeed", tensors, stored, facts, objects=tuple(reading.objects), param_groups=lambda: merged)


def joins_of(first: ModelStates, hints: Hints) -> Joins:
    """The rules by which tensor-parallel parts are joined, from the first model file and, if it has none, from the config."""
    model = hints.model
    return Joins(first.universal, {name: weight.shape for name, weight in model.weights.items()} if model else {}, first.path)


def models_of(files: Files, tag: Tag) -> dict[tuple[int, int], ModelStates]:
    """The model states by (data-parallel rank, mp rank); of ZeRO-3 the module of each mp rank's first file only."""
    jobs = list(tag.zero_models.items()) or [((0, *numbers), path) for numbers, path in tag.models.items()]
    if not jobs:
        raise CheckpointError(
            "there is no file with model states (mp_rank_.._model_states.pt, or zero_pp_rank_.. with ZeRO-3)",
            where=f"{files.root}/{tag.folder}",
            why="It tells the names and shapes of what the optimizer's files hold",
            do="Copy it from where the checkpoint was written",
        )

    def perform(some: Sequence[tuple[tuple[int, ...], str]]) -> dict[tuple[int, int], ModelStates]:
        found = {}
        for (dp, mp), path in some:
            states = read_model(files, path)
            found[dp, mp] = states if dp == 0 else states.without_module()
        return found

    return dict(chain.from_iterable(found.items() for found in in_processes(jobs, perform)))


def _optimizers(files: Files, tag: Tag) -> dict[tuple[int, int], OptimizerStates]:
    # With model parallelism, which global rank a swap folder is of is not told.
    alone = all(mp == 0 for _, mp in tag.optimizers)

    def perform(some: Sequence[tuple[tuple[int, ...], str]]) -> dict[tuple[int, int], OptimizerStates]:
        return {(dp, mp): read_optimizer(files, path, tag.swapped_of(dp) if alone else None) for (dp, mp), path in some}

    return dict(chain.from_iterable(found.items() for found in in_processes(list(tag.optimizers.items()), perform)))


def _producer(first: ModelStates, optimizers: Mapping[tuple[int, int], OptimizerStates]) -> str:
    found = next(iter(optimizers.values()), None)
    if found is None:
        return "DeepSpeed"
    stage = first.config.get("zero_optimization", {}).get("stage") if isinstance(first.config.get("zero_optimization"), Mapping) else None
    return f"DeepSpeed ZeRO-{3 if found.stage == 3 else stage if stage in (1, 2) else '1/2'}"


def state_of(first: ModelStates, optimizers: Mapping[tuple[int, int], OptimizerStates]) -> dict[str, Any]:
    """What the run would go on from, for the formats that DeepSpeed itself loads."""
    found = next(iter(optimizers.values()), None)
    return {
        **first.progress,
        **({"loss_scaler": found.scaler} if found and found.scaler else {}),
    }
