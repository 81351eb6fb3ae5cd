"""The optimizer beside a folder's weights, as trainers save it: a torch state dict.

    optimizer.pt     transformers.Trainer: a group with weight decay and one without, each in the order of the model's parameters
    optimizer.bin    accelerate's save_state with one process or DDP, and Trainer with FSDP: by numbers, or by names

Numbers count the model's parameters, whose order a pickle of the weights keeps; a safetensors file sorts names, and there the declaration
has it. Source: transformers/trainer.py (create_optimizer, _save_optimizer_and_scheduler) 5.23, accelerate/checkpointing.py 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.state_dicts import read_optimizer
from reshard.canonical.optimizer_state import state_kind
from reshard.errors import ReshardError
from reshard.index.index import RunFacts, Tensor
from reshard.storage.files import Files

from .files import SAFETENSORS

Shape = tuple[int, ...]


def add_optimizer(builder: IndexBuilder, files: Files, path: str, weights: Sequence[Tensor], hints: Hints) -> None:
    """Add the state in the file at `path` to the index of a folder with these weights.

    If it cannot be read, a note says why: the weights do not need it.
    """
    states = IndexBuilder(builder.format_name, files)
    try:
        optimizer = read_optimizer(files, path)
        parameters = _parameters(weights, hints)
        names = optimizer.add_groups(states, parameters)
        for parameter, kind, local in optimizer.tensors:
            states.add(*state_kind(names.get(parameter), parameter, kind), local, path)
        index = states.build(RunFacts())
    except ReshardError as error:
        builder.add_notes([f"{path} lies beside the weights; it is not read here: {error.what}"])
        return
    for tensor in index.tensors:
        builder.add_tensor(tensor)
    unknown = f"{path} numbers the optimizer's parameters, and their order in this model is not known: its optimizer state has no names"
    builder.add_notes(index.facts.notes if names or parameters else [unknown])
    builder.param_groups = index.param_groups()
    builder.add_files([path])


def _parameters(weights: Sequence[Tensor], hints: Hints) -> Mapping[str, Shape]:
    """The shapes of the model's parameters in its order; empty if the order is not known."""
    shapes = {tensor.name: tensor.shape for tensor in weights if tensor.dtype.floating}
    if not weights[0].shards.path(0).endswith(SAFETENSORS):
        return shapes
    model = hints.model
    # transformers 5 has the experts of a layer in two arrays, and earlier versions in an order that no declaration follows.
    is_ordered = model is not None and not any(weight.expert is not None for weight in model.weights.values())
    declared = [name for name in model.weights if name in shapes] if model and is_ordered else []
    return {name: shapes[name] for name in declared} if len(declared) == len(shapes) else {}
