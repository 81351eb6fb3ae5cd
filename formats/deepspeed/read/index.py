"""From the files of a tag to its index, in steps.

    Tag          which files there are                                 layout.tag.open_tag
    RunStates    what the pickles of all ranks hold                    read_run_states
    Parallel     the run's parallel sizes; all files are there         degrees_of_run
    Parts        of weights, masters and states                        add_weights, add_zero_optimizer, ...
                 tied parameters under all their names                 name_tied_layers, add_second_names
    Tensors      joined over tensor-parallel ranks                     Parts.join
    Index                                                              index_of_tag, read

Between the steps, `one_save` refuses files that are not from one save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.errors import IncompleteError
from reshard.geometry.meshes import Parallel
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from ..layout.states import Shape
from ..layout.tag import Tag, find_tag_folder, model_ranks, open_tag
from ..layout.tensor_parallel import JoinRules
from .one_save import check_masters, check_one_step, check_weights_of_masters, degrees_of_run
from .parts import Parts
from .pipeline_layers import drop_drifting_copies, name_neox_layers, name_tied_layers, note_leftover_layers
from .plain_optimizer import add_plain_optimizer
from .run_states import RunStates, read_run_states
from .weights import add_experts, add_objects, add_weights, tied_names
from .zero_optimizer import add_zero_optimizer

# Found by this name (adapter/format.py).
check_values = check_masters


def read(files: Files, hints: Hints) -> Index:
    """The index of the tag.

    Raises: IncompleteError if there is none; CheckpointError if its files contradict each other.
    """
    folder = find_tag_folder(files)
    if folder is None:
        raise IncompleteError("there is no tag: no *_model_states.pt, and no folder with such a file", where=files.root)
    index = index_of_tag(files, open_tag(files, folder), hints)
    beside = next((path for path in files.list() if path.endswith("/") and f"{path}zero/" in files.list(path)), None)
    note = (f"{beside.rstrip('/')} beside it is a universal checkpoint, which `format=universal` reads",) if beside else ()
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, *note)))


def index_of_tag(files: Files, tag: Tag, hints: Hints) -> Index:
    """The index of a tag.

    Raises: CheckpointError if a file is missing, left over from another save, or contradicts the others.
    """
    states = read_run_states(files, tag)
    check_one_step(states)
    degrees, shapes, tied = degrees_of_run(states), config_shapes(hints), tied_names(states)
    parts = parts_of_run(files, states, degrees, shapes)
    name_tied_layers(parts, states)
    note_leftover_layers(parts, states)
    if not states.is_zero3:
        check_weights_of_masters(parts)
    parts.add_second_names(tied)
    drop_drifting_copies(parts)
    name_neox_layers(parts, hints.model)
    parts.builder.add_files(tag.paths())
    parts.builder.add_files(group.master.path for optimizer in states.optimizers.values() for group in optimizer.groups)
    parts.join(join_rules(states, shapes), degrees.tp)
    add_objects(parts.builder, states)
    # Expert parallelism lies inside data parallelism: it does not multiply the number of ranks.
    sizes = {"dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp} | ({"ep": degrees.ep} if degrees.ep > 1 else {})
    return parts.builder.build(replace(run_facts(states), parallel=sizes, tied=tied, config=hints.config))


def parts_of_run(files: Files, states: RunStates, degrees: Parallel, shapes: Mapping[str, Shape]) -> Parts:
    """The parts of all parameters in all files. shapes: whole shapes by name, from the model's config.

    Raises: CheckpointError if the model's files and the optimizer's do not fit.
    """
    parts = Parts(IndexBuilder("deepspeed", files))
    for rank in model_ranks(degrees):
        add_weights(parts, states, rank)
        if states.optimizers:
            add_zero_optimizer(parts, states, rank, shapes)
        else:
            add_plain_optimizer(parts, states, rank)
    add_experts(parts, states, degrees.tp)
    return parts


def config_shapes(hints: Hints) -> dict[str, Shape]:
    """The whole shapes of the model's weights by name; {} if no config is known."""
    model = hints.model
    return {name: weight.shape for name, weight in model.weights.items()} if model else {}


def join_rules(states: RunStates, shapes: Mapping[str, Shape]) -> JoinRules:
    """The rules by which tensor-parallel parts are joined. shapes: whole shapes by name, from the model's config."""
    return JoinRules(states.first_model.universal_info, shapes, states.first_model.path)


def run_facts(states: RunStates) -> RunFacts:
    """What the first rank's files tell about the run. Only the config distinguishes ZeRO-1 from ZeRO-2."""
    model, optimizer = states.first_model, states.first_optimizer
    versions = (model.facts.version, *(other.version for other in states.optimizers.values()))
    producer, state = "DeepSpeed", model.facts.state
    if optimizer:
        settings = model.config.get("zero_optimization")
        stage = settings.get("stage") if isinstance(settings, Mapping) else None
        producer = f"DeepSpeed ZeRO-{3 if optimizer.zero_stage == 3 else stage if stage in (1, 2) else '1/2'}"
        state = {**state, "loss_scaler": optimizer.loss_scaler} if optimizer.loss_scaler else state
    return replace(model.facts, producer=producer, version=next(filter(None, versions), None), state=state)
