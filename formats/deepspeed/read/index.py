"""From the files of a tag to its index, in steps. Each step is a function that takes values and returns a value.

    Tag          which files there are                                 layout.tag.open_tag
    RunStates    what the pickles of all ranks hold                    read_run_states
    RunDegrees   the run's parallel sizes; all files are there         degrees_of_run
    Contents     parts of parameters, and facts beside them            contents_of_run
    Contents     the same, tied parameters under all their names       with_tied_parameters
    Tensors      joined over tensor-parallel ranks                     joined_tensors
    Index                                                              read_index

Between the steps, `one_save` refuses files that are not from one save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.containers.torch_zip import Locations
from reshard.index.index import Index, RunFacts
from reshard.storage.files import Files

from ..layout.states import Shape
from ..layout.tag import RunDegrees, Tag
from ..layout.tensor_parallel import JoinRules
from .one_save import check_one_step, check_weights_of_masters, degrees_of_run
from .parts import Contents, joined_tensors, merged
from .pipeline_layers import notes_on_leftover_layers, with_second_names, with_tied_layer_names, without_drifting_copies
from .plain_optimizer import plain_optimizer
from .run_states import RunStates, read_run_states
from .weights import expert_weights, objects_of, tied_names, weights_of_rank
from .zero_optimizer import zero_optimizer


def read_index(files: Files, tag: Tag, hints: Hints) -> Index:
    """The index of a tag.

    Raises: CheckpointError if a file is missing, left over from another save, or contradicts the others.
    """
    states = read_run_states(files, tag)
    check_one_step(states)
    degrees, shapes, tied = degrees_of_run(states), config_shapes(hints), tied_names(states)
    contents = with_tied_parameters(states, contents_of_run(states, degrees, shapes, Locations(files)), tied)

    builder = IndexBuilder("deepspeed", files)
    builder.add_files([*tag.paths(), *(group.master.path for optimizer in states.optimizers.values() for group in optimizer.groups)])
    for tensor in joined_tensors(contents, join_rules(states, shapes), degrees.tp):
        builder.add_tensor(tensor)
    builder.add_objects(name for model in states.models.values() for name in objects_of(model))
    builder.add_notes(contents.notes)
    builder.param_groups = contents.param_groups
    return builder.build(replace(run_facts(states), parallel=degrees.sizes(), tied=tied, config=hints.config))


def config_shapes(hints: Hints) -> dict[str, Shape]:
    """The whole shapes of the model's weights by name; {} if no config is known."""
    model = hints.model
    return {name: weight.shape for name, weight in model.weights.items()} if model else {}


def join_rules(states: RunStates, shapes: Mapping[str, Shape]) -> JoinRules:
    """The rules by which tensor-parallel parts are joined. shapes: whole shapes by name, from the model's config."""
    return JoinRules(states.first_model.universal_info, shapes, states.first_model.path)


def contents_of_run(states: RunStates, degrees: RunDegrees, shapes: Mapping[str, Shape], locations: Locations) -> Contents:
    """The parts of all parameters in all files. shapes: whole shapes by name, from the model's config.

    Raises: CheckpointError if the model's files and the optimizer's do not fit.
    """
    steps = []
    for rank in degrees.each_model_rank():
        steps.append(weights_of_rank(states, rank, locations))
        steps.append(zero_optimizer(states, rank, shapes, locations) if states.optimizers else plain_optimizer(states, rank, locations))
    return merged([*steps, expert_weights(states, degrees, locations)])


def with_tied_parameters(states: RunStates, contents: Contents, tied: Mapping[str, str]) -> Contents:
    """The contents with tied parameters under all their names, with the same values under each name. tied: second name -> stored name.

    Raises: CheckpointError if a weight is in no file.
    """
    contents = with_tied_layer_names(contents, [layer for layer, _ in states.tag.layers])
    contents = replace(contents, notes=(*contents.notes, *notes_on_leftover_layers(states, contents)))
    if not states.is_zero3:
        check_weights_of_masters(contents)
    return without_drifting_copies(with_second_names(contents, tied))


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
