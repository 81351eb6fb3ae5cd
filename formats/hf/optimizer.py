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
from reshard.canonical.name_variants import Names, with_canonical_names
from reshard.canonical.optimizer_state import state_kind
from reshard.errors import ReshardError
from reshard.geometry.boxes import Shape
from reshard.index.index import RunFacts, Tensor
from reshard.models.model import Model
from reshard.models.weights import ModelWeight
from reshard.storage.files import Files

from .files import SAFETENSORS

# In this order (transformers/integrations/moe.py, 5.23).
_STACKS = ("gate_up_proj", "down_proj")


def add_optimizer(builder: IndexBuilder, files: Files, path: str, weights: Sequence[Tensor], hints: Hints) -> None:
    """Add the state in the file at `path` to the index of a folder with these weights.

    If it cannot be read, a note says why: the weights do not need it.
    """
    states = IndexBuilder(builder.format_name, files)
    try:
        optimizer = read_optimizer(files, path)
        orders = _orders(weights, hints)
        fitting = [order for order in orders if optimizer.names(list(order.items()))[0]] or orders[:1]
        parameters = fitting[0] if len(fitting) == 1 else {}
        names = optimizer.add_groups(states, parameters)
        for parameter, kind, local in optimizer.tensors:
            states.add(*state_kind(names.get(parameter), parameter, kind), local, path)
        index = states.build(RunFacts())
        if parameters and hints.model and parameters.keys() - hints.model.weights.keys():
            index = with_canonical_names(index, hints.model)  # the experts of stacks, one by one
    except ReshardError as error:
        builder.add_notes([f"{path} lies beside the weights; it is not read here: {error.what}"])
        return
    for tensor in index.tensors:
        builder.add_tensor(tensor)
    unknown = f"{path} numbers the optimizer's parameters, and their order in this model is not known: its optimizer state has no names"
    builder.add_notes(index.facts.notes if names or parameters else [unknown])
    builder.param_groups = index.param_groups()
    builder.add_files([path])


def _orders(weights: Sequence[Tensor], hints: Hints) -> list[Mapping[str, Shape]]:
    """The shapes of the model's parameters in the orders that it can have; empty if none is known."""
    shapes = {tensor.name: tensor.shape for tensor in weights if tensor.dtype.floating}
    if not weights[0].shards.path(0).endswith(SAFETENSORS):
        return [shapes]
    declared = {name: weight for name, weight in hints.model.weights.items() if name in shapes} if hints.model else {}
    if hints.model is None or len(declared) != len(shapes):
        return []
    if all(weight.expert is None for weight in declared.values()):
        return [{name: shapes[name] for name in declared}]
    return _stacked_orders(hints.model, declared, shapes)


def _stacked_orders(model: Model, declared: Mapping[str, ModelWeight], shapes: Mapping[str, Shape]) -> list[Mapping[str, Shape]]:
    """The orders of a model whose experts transformers 5 has in two arrays of three axes, at some place in the module of their router.

    mixtral has them after `mlp.gate`, qwen3_moe before it; the class decides, and their shapes tell. Before transformers 5 the parameters
    of each expert were numbered, in an order that no declaration follows: their number fits none of these orders.
    """
    # A router's correction is a buffer, or not trained.
    dense = [name for name, weight in declared.items() if weight.expert is None and weight.role != "router.correction"]
    modules = dict.fromkeys(name.partition(".experts.")[0] for name, weight in declared.items() if weight.expert is not None)
    members = {module: [at for at, name in enumerate(dense) if name.startswith(f"{module}.")] for module in modules}
    arrays, orders = Names(model), list[Mapping[str, Shape]]()
    for place in range(1 + max(map(len, members.values()))):
        placed = [((at, 0), name, shapes[name]) for at, name in enumerate(dense)]
        for module, inside in members.items():
            at = (inside[place], -2) if place < len(inside) else (max(inside, default=0), 1)
            stacks = ((name, arrays.array(f"{module}.experts.{name}")) for name in _STACKS)
            placed += [
                ((at[0], at[1] + 1 * (name == _STACKS[-1])), f"{module}.experts.{name}", array.shape) for name, array in stacks if array
            ]
        orders.append({name: shape for _, name, shape in sorted(placed)})
    return orders
