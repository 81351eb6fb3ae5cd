"""From the files of a tag to its index, in steps. Each step is a function that takes values and returns a value.

    Tag          which files there are                                 layout.tag.open_tag
    RunStates    what the pickles of all ranks hold                    read_run_states
    RunDegrees   the run's parallel sizes; all files are there         degrees_of_run
    Contents     parts of parameters, and facts beside them            contents_of_run
    Contents     the same, tied parameters under all their names       with_tied_parameters
    Tensors      joined over tensor-parallel ranks                     joined_tensors
    Index                                                              read_index

Between the steps, `checks` refuses files that are not from one save.
"""

from __future__ import annotations

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.containers.torch_zip import Locations
from reshard.index.index import Index
from reshard.storage.files import Files

from ..layout.degrees import RunDegrees
from ..layout.states import Shape
from ..layout.tag import Tag
from ..layout.tensor_parallel import JoinRules
from .checks import check_one_step, check_weights_of_masters
from .degrees import degrees_of_run
from .facts import run_facts
from .join import joined_tensors
from .leftover_layers import with_note_on_leftover_layers
from .parts import Contents, merged
from .plain_optimizer import plain_optimizer
from .run_states import RunStates, read_run_states
from .tied import with_aliases, with_tied_layer_names, without_drifting_copies
from .weights import expert_weights, weights_of_rank
from .zero_optimizer import zero_optimizer


def read_index(files: Files, tag: Tag, hints: Hints) -> Index:
    """The index of a tag.

    Raises: CheckpointError if a file is missing, left over from another save, or contradicts the others.
    """
    states = read_run_states(files, tag)
    check_one_step(states)
    degrees = degrees_of_run(states)
    shapes = config_shapes(hints)
    contents = with_tied_parameters(states, contents_of_run(states, degrees, shapes, Locations(files)))
    rules = JoinRules(states.first_model.universal_info, shapes, states.first_model.path)

    builder = IndexBuilder("deepspeed", files)
    builder.add_files([*tag.paths(), *(row.path for optimizer in states.optimizers.values() for row in optimizer.masters)])
    for tensor in joined_tensors(contents, rules, degrees.tp):
        builder.add_tensor(tensor)
    builder.add_objects(contents.objects)
    builder.add_notes(contents.notes)
    builder.param_groups = contents.param_groups
    return builder.build(run_facts(states, contents.aliases, hints.config, degrees))


def config_shapes(hints: Hints) -> dict[str, Shape]:
    """The whole shapes of the model's weights by name; {} if no config is known."""
    model = hints.model
    return {name: weight.shape for name, weight in model.weights.items()} if model else {}


def contents_of_run(states: RunStates, degrees: RunDegrees, shapes: dict[str, Shape], locations: Locations) -> Contents:
    """The parts of all parameters in all files. shapes: whole shapes by name, from the model's config.

    Raises: CheckpointError if the model's files and the optimizer's do not fit.
    """
    steps = [Contents(aliases=states.first_model.aliases)]
    for rank in degrees.each_model_rank():
        steps.append(weights_of_rank(states, rank, locations))
        steps.append(zero_optimizer(states, rank, shapes, locations) if states.optimizers else plain_optimizer(states, rank, locations))
    steps.append(expert_weights(states, degrees, locations))
    return merged(steps)


def with_tied_parameters(states: RunStates, contents: Contents) -> Contents:
    """The contents with tied parameters under all their names, with the same values under each name.

    Raises: CheckpointError if a weight is in no file.
    """
    contents = with_tied_layer_names(contents, [layer for layer, _ in states.tag.layers])
    contents = with_note_on_leftover_layers(states, contents)
    if not states.is_zero3:
        check_weights_of_masters(contents)
    return without_drifting_copies(with_aliases(contents))
