"""State dicts as trainers save them: what lies at the root of a torch.save file, and which part of it is the model or the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from reshard.canonical.optimizer_state import GROUPS, ROOTS, STEP, names_for, note_on_plain, plain_groups
from reshard.canonical.tensor_classes import MODEL_ROOTS, RUN_ROOTS
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor, class_of
from reshard.containers.inert_pickle import Inert
from reshard.containers.torch_zip import DISTRIBUTED, AnyTensor, LocatedTensor, UnlocatedTensor, class_of_array, is_plain_tensor
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.value import value
from reshard.index.index import ParamGroup
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.adapter.index_builder import IndexBuilder
    from reshard.containers.safetensors import TensorEntry

# FSDP1's name for the one flat parameter of a wrapped module in LOCAL_STATE_DICT.
FLAT = "_flat_param"

# The last file that `_model_of_file` read of each tree: several formats look at the same file.
_LAST_READ: WeakKeyDictionary[Files, tuple[str, Mapping[Any, Any]]] = WeakKeyDictionary()
_OF_OTHER_SHAPE = re.compile(r"\.(?!state[12]$)|_row$|_col$|row_var|col_var|^(absmax|qmap|max|new_max)[12]$|^(unorm|gnorm)_vec$")
# States that may have the shape of a parameter, and are asked for it last.
_LAST = re.compile(r"state1$|^(inv_)?pre_cond")
# Limits the nesting that is followed: the dict of a hostile file can hold itself.
_DEEPEST, _DEEPEST_MODULE = 8, 24
# Composer keeps the state of its trainer under this key: {"state": {"model": ..., "optimizers": {"AdamW": ...}}}.
_STATE = "state"


@value
class SavedOptimizer:
    """An optimizer's state dict, and the tensors that a file holds of it."""

    state_dict: Mapping[str, Any]
    """{"state": ..., "param_groups": ...}, as the inert unpickler reads it."""
    tensors: list[tuple[Any, str, LocalTensor]]
    """(the parameter's name or number, kind of state, the file's part of it)."""
    packed: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of states that are several tensors, by the parameter's name or number."""
    plain: list[str] = field(default_factory=list)
    """The states that are no tensors, such as "3.RMS"."""

    def names(self, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Mapping[Any, str], list[str]]:
        """The names of the parameters that it lists, and notes on how they are known. parameters: names and shapes of the model's."""
        # Elements of lists, counts, other numbers, factors of rows and columns (Adafactor), scales and tables (bitsandbytes) have shapes of
        # their own. The first state of AdEMAMix8bit is two; Shampoo keeps square matrices before the moments.
        known = {shape for _, shape in parameters}
        of_shape = [state for state in reversed(self.tensors) if state[2].shape and not _OF_OTHER_SHAPE.search(state[1])]
        of_shape.sort(key=lambda state: (state[2].shape in known, not _LAST.search(state[1])))
        shapes = {parameter: local.shape for parameter, _, local in of_shape} | self.packed
        names, notes = names_for(self.state_dict, self.numbers(), shapes, parameters)
        return names, [*notes, *note_on_plain(self.plain)]

    def numbers(self) -> tuple[tuple[Any, ...], ...]:
        """The names or numbers of the parameters of each param group."""
        return group_numbers(self.state_dict)

    def param_groups(self, names: Mapping[Any, str]) -> tuple[ParamGroup, ...]:
        """Its param groups, with these names of its parameters."""
        return plain_groups(self.state_dict["param_groups"], names, self.state_dict["state"])

    def add_groups(self, builder: IndexBuilder, parameters: Mapping[str, tuple[int, ...]]) -> Mapping[Any, str]:
        """Add the param groups to an index. Returns the names of the parameters. parameters: the shapes of the model's, in its order."""
        names, notes = self.names(list(parameters.items()))
        builder.add_notes(notes)
        builder.param_groups = self.param_groups(names)
        return names


def saved_optimizer(root: Any, path: str) -> SavedOptimizer | None:
    """The optimizer in the root of a torch.save file, which lies at `path`; None if there is none."""
    state_dict = optimizer_part(root)
    if state_dict is None:
        return None
    decoder, tensors, packed = Decoder(path), list[tuple[Any, str, LocalTensor]](), dict[Any, tuple[int, ...]]()
    plain = list[str]()
    for parameter, kind, value in states(state_dict):
        parts = decoder.decode_state(f"{parameter}.{kind}", value)
        tensors.extend((parameter, f"{kind}{part}", local) for part, local in parts.items())
        if parts and "" not in parts:
            packed[parameter] = value.args[2]
        if not parts and kind != STEP:
            plain.append(f"{parameter}.{kind}")
    return SavedOptimizer(state_dict, tensors, packed, plain)


def read_optimizer(files: Files, path: str) -> SavedOptimizer:
    """The optimizer in a torch.save file. Raises CheckpointError if it holds none."""
    optimizer = saved_optimizer(torch_zip.read(files, path, locate=False), path)
    if optimizer is None:
        raise CheckpointError("it holds no optimizer state (state and param_groups)", where=path)
    return optimizer


def decoded(state_dict: Mapping[Any, Any], path: str) -> tuple[list[tuple[str, LocalTensor]], list[str]]:
    """The tensors and array-like objects in a model's state dict by name, as the file at `path` holds them, and the names of everything
    else in it. Those in lists and dicts have their numbers and keys behind the name. An optimizer beside the weights is not among them.
    """
    decoder, tensors, others = Decoder(path), list[tuple[str, LocalTensor]](), list[str]()
    own = (entry for entry in state_dict.items() if entry[0] not in ROOTS or optimizer_part(dict([entry])) is None)
    for key, value in (part for name, entry in own for part in leaves(str(name), entry)):
        local = decoder.decode(key, value)
        if local is None:
            others.append(str(key))
        else:
            tensors.append((str(key), local))
    return tensors, others


def plain_tensors(values: Mapping[Any, Any], path: str) -> dict[str, AnyTensor]:
    """The plain tensors among the values by name. Raises UnsupportedError, naming the class, for an array of any other class."""
    for name, value in values.items():
        if class_name := class_of_array(value):
            raise UnsupportedError(
                f"it is stored as {class_name}, and a plain tensor is needed here",
                where=f"{name} in {path}",
                why="Only the code of that class knows which values its parts stand for",
                do="Save plain tensors, for example by `.dequantize()` or `.to_dense()`",
            )
    return {str(name): value for name, value in values.items() if is_plain_tensor(value)}


def holds_tensors(files: Files, path: str) -> bool:
    """Whether a torch.save file holds a model's state dict; False also for a file that cannot be read."""
    return bool(_model_of_file(files, path))


def holds_sharded_tensors(files: Files, path: str) -> bool:
    """Whether a torch.save file holds DTensors or ShardedTensors of a model; False also for a file that cannot be read."""
    return any(class_of(value) in DISTRIBUTED for value in _model_of_file(files, path).values())


def holds_flat_parameters(files: Files, path: str) -> bool:
    """Whether a torch.save file holds FSDP1's flat parameters of a model; False also for a file that cannot be read."""
    return any(str(name).endswith(FLAT) for name in _model_of_file(files, path))


def _model_of_file(files: Files, path: str) -> Mapping[Any, Any]:
    """The model's state dict in a torch.save file. Empty if there is none, or if the file cannot be read: the reader reports that."""
    last = _LAST_READ.get(files)
    if last is None or last[0] != path:
        try:
            model, _ = model_part(torch_zip.read(files, path, locate=False))
        except CheckpointError:
            model = None
        last = _LAST_READ[files] = path, model or {}
    return last[1]


def elements_of(stored: AnyTensor, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> AnyTensor:
    """A view of a stored tensor's memory, from element `start` on."""
    skipped = start * stored.dtype.itemsize
    if isinstance(stored, UnlocatedTensor):
        return replace(stored, skipped=stored.skipped + skipped, shape=sizes, strides=strides)
    return replace(stored, byte_offset=stored.byte_offset + skipped, shape=sizes, strides=strides)


def part_of(stored: AnyTensor, box: Box) -> AnyTensor:
    """A box of a stored tensor."""
    start = sum(at * stride for at, stride in zip(box.offsets, stored.strides, strict=True)) if box.volume else 0
    return elements_of(stored, start, box.sizes, stored.strides)


def stored_entry(path: str, entry: TensorEntry) -> LocatedTensor:
    """A tensor of a safetensors file."""
    return LocatedTensor(path, entry.byte_offset, entry.dtype, entry.shape, row_major(entry.shape), entry.name)


def is_tensor(value: Any) -> bool:
    """Whether a value of a pickle is a tensor, plain, distributed or of any other class."""
    return is_plain_tensor(value) or class_of(value) in DISTRIBUTED or (isinstance(value, Inert) and bool(class_of_array(value)))


def flat(module: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values of a nested state dict under their full names; lists that hold arrays with their numbers, as torch flattens them.

    Megatron's GPT models nest theirs: {"language_model": {"encoder": ...}}.
    """
    for name, value in module.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from flat(value, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, list | tuple) and depth < _DEEPEST:
            yield from leaves(f"{prefix}{name}", value, depth + 1)
        else:
            yield f"{prefix}{name}", value


def leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a list, tuple or dict holds, if there are arrays in it: each value under its own name. Otherwise the value itself."""
    if isinstance(value, Mapping | list | tuple) and class_of_array(value) not in ("", torch_zip.STORAGE):
        yield from flat(value if isinstance(value, Mapping) else dict(enumerate(value)), f"{name}.", depth)
    else:
        yield name, value


def model_part(root: Any) -> tuple[Mapping[Any, Any] | None, list[str]]:
    """The dict of the model's tensors (None if there is none), and the keys beside it that hold something else.

    The dict is the value of a key in MODEL_ROOTS, the only one of `_named_models`, or the root itself. If the root has such a key, its own
    tensors are not weights: {"model": {...}, "step": a tensor} is not a model with one weight called "step".
    """
    *around, innermost = _levels(root)
    model, _ = innermost
    has_tensors = isinstance(model, Mapping) and any(map(is_tensor, model.values()))
    return model if has_tensors else None, [str(key) for level, model_key in around for key in level if key != model_key]


def beside_model(root: Any) -> Iterator[tuple[str, Any]]:
    """The tensors beside the model's dict and the optimizer, under names that begin with their keys. Of several models none of which is
    the main one: of all of them."""
    *around, innermost = _levels(root)
    several = _named_models(innermost[0]) if not around else []
    yield from flat({key: as_state_dict(innermost[0][key]) for key in several})
    for level, model_key in around:
        others = {key: value for key, value in level.items() if key != model_key and optimizer_part({key: value}) is None}
        yield from ((name, value) for name, value in flat(others) if is_tensor(value) or class_of_array(value))


def _levels(root: Any) -> Iterator[tuple[Any, Any]]:
    """(dict, the key in it that leads to the model) of each dict around the model's; then the innermost value, and None. A module that was
    saved itself is its state dict."""
    root = as_state_dict(root)
    for depth in range(_DEEPEST):
        keys = MODEL_ROOTS if isinstance(root, Mapping) else ()
        model_key = next((key for key in keys if isinstance(as_state_dict(root.get(key)), Mapping) and root[key]), None)
        if model_key is None and keys and isinstance(state := root.get(_STATE), Mapping) and any(key in state for key in MODEL_ROOTS):
            model_key = _STATE
        if depth == 0 and model_key is None and len(named := _named_models(root)) == 1:
            model_key = named[0]
        yield root, model_key
        if model_key is None:
            return
        root = as_state_dict(root[model_key])
    yield None, None


def _named_models(root: Any) -> list[str]:
    """The keys of the models in a root that holds no tensor itself: under names of the trainer, such as generator, critic, params_ema.

    A dict counts as a model if it holds a matrix of floating-point numbers, and its key is none of a run's state.
    """
    if not isinstance(root, Mapping) or any(map(is_tensor, root.values())):
        return []
    others = {*RUN_ROOTS, *ROOTS, _STATE}
    return [
        key
        for key, value in root.items()
        if isinstance(key, str) and key not in others and isinstance(module := as_state_dict(value), Mapping) and _has_matrix(module)
    ]


def _has_matrix(module: Mapping[Any, Any]) -> bool:
    return any(is_plain_tensor(value) and value.dtype.floating and len(value.shape) > 1 for value in module.values())


def as_state_dict(value: Any) -> Any:
    """The state dict of a pickled torch.nn.Module, of any class; any other value as it is."""
    return dict(_of_module(value)) if _is_module(value) else value


def _is_module(value: Any) -> bool:
    return isinstance(value, Inert) and all(isinstance(value.get(part), Mapping) for part in ("_parameters", "_buffers", "_modules"))


def _of_module(module: Inert, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The parameters and persistent buffers of a module and of those in it, under the names that `Module.state_dict` gives them."""
    unsaved = module.get("_non_persistent_buffers_set") or ()
    for part in ("_parameters", "_buffers"):
        yield from ((f"{prefix}{name}", value) for name, value in module.get(part).items() if value is not None and name not in unsaved)
    for name, inner in module.get("_modules").items() if depth < _DEEPEST_MODULE else ():
        if _is_module(inner):
            yield from _of_module(inner, f"{prefix}{name}.", depth + 1)


def parameter_shapes(tensors: Iterable[tuple[str, LocalTensor]]) -> dict[str, tuple[int, ...]]:
    """The global shapes of a model's parameters, in the order of its state dict: its floating-point tensors; tied tensors are listed once.

    Buffers of floating-point numbers are among them, because a state dict does not tell them apart.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    memories = set[object]()
    for name, local in tensors:
        if local.dtype.floating and local.memory not in memories:
            shapes[name] = local.shape
            memories |= {local.memory} - {None}
    return shapes


def optimizer_part(root: Any, depth: int = 0) -> Mapping[str, Any] | None:
    """The dict with "state" and "param_groups": the root itself, or the value of a key in ROOTS. None if there is none."""
    if not isinstance(root, Mapping) or depth == _DEEPEST:
        return None
    state = root.get(_STATE)
    if isinstance(state, Mapping) and "param_groups" in root:
        return root
    stored = [root[key] for key in ROOTS if key in root] or ([state] if isinstance(state, Mapping) else [])
    # Lightning keeps a list of optimizers, Composer a dict by their classes; with Muon there are two.
    several = [[*part.values()] if isinstance(part, Mapping) else _listed(part) for part in stored]
    single = [parts[0] for parts in several if len(parts) == 1]
    of_one = (optimizer_part(part, depth + 1) for part in (*stored, *single))
    return next((part for part in (*of_one, *map(_as_one, several)) if part is not None), None)


def _as_one(optimizers: Sequence[Any]) -> Mapping[str, Any] | None:
    """The state dict of one optimizer that has the param groups of several, whose numbers go on; None if one is no state dict, or if two
    have a parameter of the same name."""
    if not optimizers or not all(
        isinstance(optimizer, Mapping) and isinstance(optimizer.get(_STATE), Mapping) and "param_groups" in optimizer
        for optimizer in optimizers
    ):
        return None
    state: dict[Any, Any] = {}
    groups: list[Any] = []
    first = 0
    for optimizer in optimizers:
        listed = [parameter for numbers in group_numbers(optimizer) for parameter in numbers]
        moved = {parameter: parameter + first if type(parameter) is int else parameter for parameter in (*listed, *optimizer[_STATE])}
        if not state.keys().isdisjoint(moved.values()):
            return None
        state |= {moved[parameter]: kinds for parameter, kinds in optimizer[_STATE].items()}
        for group in _listed(optimizer["param_groups"]):
            params = group.get("params") if isinstance(group, Mapping) else None
            groups.append({**group, "params": [moved[parameter] for parameter in params]} if isinstance(params, list | tuple) else group)
        first = 1 + max((parameter for parameter in moved.values() if type(parameter) is int), default=first - 1)
    return {_STATE: state, "param_groups": groups}


def states(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """(the parameter's name or number, kind of state, value) of each entry of an optimizer's state; of GROUPS, each array among the
    settings of its param groups."""
    for parameter, kinds in optimizer["state"].items():
        if isinstance(kinds, Mapping):
            yield from ((parameter, name, part) for kind, value in kinds.items() for name, part in leaves(str(kind), value))
    settings = leaves("", dict(enumerate(_listed(optimizer.get("param_groups")))))
    yield from ((GROUPS, name.lstrip("."), value) for name, value in settings if class_of_array(value) or is_tensor(value))


def group_numbers(optimizer: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """The names or numbers of the parameters of each param group."""
    listed = [group.get("params") for group in _listed(optimizer.get("param_groups")) if isinstance(group, Mapping)]
    return tuple(tuple(params) for params in listed if isinstance(params, list | tuple))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
