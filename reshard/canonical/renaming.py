"""Renaming the tensors of an index: parts that wrappers and PEFT add to the names of a model's parameters.

_fsdp_wrapped_module.        FSDP1
_orig_mod.                   torch.compile
_checkpoint_wrapped_module.  activation checkpointing
_forward_module.             Lightning
pretrained_model.            TRL, around a model with a value head; removed where it stands first
module.                      DistributedDataParallel, DeepSpeed; removed only if all weights start with it: a model may have such a part

    base_model.model.<module>.lora_A.weight             [r, in]      in the file of PEFT; <module> is a module of the base model
    base_model.model.<module>.lora_A.default.weight                  in state dicts of trainers: with the adapter's name
    base_model.model.<module>.lora_B.weight             [out, r]     lora_B.bias [out]: lora_bias
    base_model.model.<module>.lora_embedding_A          [r, vocab]   lora_embedding_B [hidden, r]; (B x A) transposed is added
    base_model.model.<module>.lora_magnitude_vector     [out]        DoRA; in trainers .lora_magnitude_vector.default.weight
    base_model.model.<module>.token_adapter.trainable_tokens_delta   [tokens, hidden], the rows of trainable_token_indices
    base_model.model.<module>.weight                                 modules_to_save; in trainers .modules_to_save.default.weight
    base_model.model.<module>.base_layer.weight                      the base beside it; for modules_to_save .original_module.weight

The canonical name of an adapter's tensor is its name in PEFT's file. Source of PEFT's names: peft 0.21.2, utils/save_and_load.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from reshard.errors import CheckpointError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import Index, ParamGroup, Tensor

_INNER = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
_FRONT, _WITH_HEAD = "module.", "pretrained_model."
PREFIX = "base_model.model."
# Parts of the base's names that PEFT adds.
_BASE_PARTS = frozenset({"base_layer", "original_module", "token_adapter"})
_WITH_PARAMETER = frozenset({"lora_A", "lora_B"})
TRAINED_TOKENS = "trainable_tokens_delta"
_WITHOUT_PARAMETER = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", TRAINED_TOKENS})
_SAVED = "modules_to_save"
_OF_ADAPTERS = _WITH_PARAMETER | _WITHOUT_PARAMETER | {_SAVED}
_MARKS = ("lora_", _SAVED, TRAINED_TOKENS)


def renamed(index: Index, tensors: Iterable[Tensor], new_names: Callable[[str], tuple[str, ...]], note: str | None = None) -> Index:
    """The index with these tensors in place of its own, and their new names in the param groups and facts.

    new_names: the names of what is stored under a name: none, one or several. note: what to say about it.
    """

    def chained(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(new for name in names for new in new_names(name))

    def groups() -> tuple[ParamGroup, ...]:
        return tuple(replace(group, names=chained(group.names)) for group in index.param_groups())

    pairs = ((new_names(alias), new_names(name)) for alias, name in index.facts.tied.items())
    facts = replace(
        index.facts,
        notes=(*index.facts.notes, note) if note else index.facts.notes,
        buffers=None if index.facts.buffers is None else chained(index.facts.buffers),
        tied={aliases[0]: names[0] for aliases, names in pairs if aliases and names},
    )
    return replace(index, tensors=tuple(tensors), facts=facts, param_groups=groups)


def is_wrapper(prefix: str) -> bool:
    """Whether a prefix consists of parts that wrappers add."""
    return all(f"{part}." in (_FRONT, _WITH_HEAD) or part in _INNER for part in prefix.rstrip(".").split("."))


def unwrapped(name: str) -> str:
    """The name without the parts that only wrappers add. A leading "module." stays, because a model may have such a part."""
    if not any(part in name for part in _INNER):
        return name
    return ".".join(part for part in name.split(".") if part not in _INNER)


def without_wrappers(index: Index) -> Index:
    """The index with the names that the model itself has, and a note about the parts that were removed.

    Raises: CheckpointError if two tensors would get one name.
    """
    stored = "\n".join(tensor.name for tensor in index.tensors)
    if not any(part in stored for part in (*_INNER, _FRONT, _WITH_HEAD)):
        return index
    names = {tensor.name: unwrapped(tensor.name) for tensor in index.tensors}
    model_names = [names[tensor.name] for tensor in index.tensors if tensor.kind in ("weight", "master")]
    fronts = list[str]()
    while front := _front_of(model_names):
        fronts.append(front)
        model_names = [name.removeprefix(front) for name in model_names]
        names = {name: short.removeprefix(front) for name, short in names.items()}
    changed = {name: short for name, short in names.items() if name != short}
    if not changed:
        return index
    first_with: dict[tuple[str, str], str] = {}
    for tensor in index.tensors:
        if (other := first_with.setdefault((tensor.kind, names[tensor.name]), tensor.name)) != tensor.name:
            raise CheckpointError(
                f"{other} and {tensor.name} have the same name once the parts that wrappers add are removed",
                where=names[tensor.name],
                why="Nothing tells which of the two is the model's",
                do="Leave one out when saving the model",
            )
    counts = Counter(part for name, short in changed.items() for part in _removed_parts(name, short, fronts))
    parts = ", ".join(f"{part} ({count})" for part, count in counts.items())
    note = f"parts that wrappers add were removed from {plural(len(changed), 'name')}: {parts}"
    tensors = (replace(tensor, name=names[tensor.name]) for tensor in index.tensors)
    return renamed(index, tensors, lambda name: (names.get(name, name),), note)


def _front_of(names: list[str]) -> str | None:
    """The wrapper that stands first in the names of weights: in all of them, or around the model beside a head of its own."""
    if names and all(name.startswith(_FRONT) for name in names):
        return _FRONT
    return _WITH_HEAD if any(name.startswith(_WITH_HEAD) for name in names) else None


def _removed_parts(name: str, short: str, fronts: Iterable[str]) -> Iterable[str]:
    """The different parts that were removed from a name. fronts: those that were removed in front."""
    parts = name.split(".")
    inner = [f"{part}." for part in dict.fromkeys(parts) if part in _INNER]
    outer = len(parts) - sum(part in _INNER for part in parts) - len(short.split("."))
    return [*inner, *(front for front in dict.fromkeys(fronts) if outer and front.rstrip(".") in parts)]


@value
class AdapterName:
    """What the stored name of an adapter's tensor says."""

    module: str
    """The module of the base model, without the parts that PEFT adds in front. Nested `target_parameters` end in `.base_layer`."""
    parameter: str
    """Its name after the module in the file of PEFT, such as "lora_A.weight"; for modules_to_save the module's own, such as "weight"."""
    adapter: str | None
    """The name of the adapter, which state dicts of trainers hold; None in the file of PEFT."""

    @property
    def in_file(self) -> str:
        """The name in the file of PEFT."""
        return f"{PREFIX}{self.module}.{self.parameter}"


def adapter_name(name: str) -> AdapterName | None:
    """What a name of an adapter's tensor says; None for other names. Those of modules_to_save in the file of PEFT look like others."""
    if not any(mark in name for mark in _MARKS):
        return None
    parts = name.removeprefix(PREFIX).split(".")
    for i, part in enumerate(parts):
        if part not in _OF_ADAPTERS:
            continue
        module, rest = ".".join(parts[:i]), parts[i + 1 :]
        if part in _WITH_PARAMETER and len(rest) in (1, 2) and rest[-1] in ("weight", "bias"):
            return AdapterName(module, f"{part}.{rest[-1]}", rest[0] if len(rest) == 2 else None)
        if part in _WITHOUT_PARAMETER and (len(rest) < 2 or (len(rest) == 2 and rest[1] == "weight")):
            return AdapterName(module, part, rest[0] if rest and rest != ["weight"] else None)
        if part == _SAVED and len(rest) > 1:
            return AdapterName(module, ".".join(rest[1:]), rest[0])
    return None


def base_name(name: str) -> str:
    """The name of a base weight without the parts that PEFT adds."""
    if not name.startswith(PREFIX) and not any(f".{part}." in name for part in _BASE_PARTS):
        return name
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in _BASE_PARTS)


def is_of_adapter(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of an adapter, or the only stored copy of one, which is a master."""
    return tensor.kind == "adapter" or (tensor.kind == "master" and adapter_name(tensor.name) is not None)


def adapters_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the adapters that the names of tensors tell, in their order; the file of PEFT does not tell one."""
    names = (adapter_name(tensor.name) for tensor in tensors)
    return tuple(dict.fromkeys(name.adapter for name in names if name is not None and name.adapter is not None))


def with_adapter_names(index: Index, adapter: str | None = None) -> Index:
    """The index in which the tensors of an adapter have their names in the file of PEFT. `index` itself if they have them already.

    adapter: the adapter; None for the only one. With several and none chosen, all keep their stored names.
    """
    by_stored = {tensor.name: name for tensor in index.tensors if (name := adapter_name(tensor.name)) is not None}
    adapters = {name.adapter for name in by_stored.values()}
    if not by_stored or (adapter is None and len(adapters) > 1):
        return index
    names = {stored: name.in_file for stored, name in by_stored.items() if adapter is None or name.adapter == adapter}
    if all(stored == new for stored, new in names.items()):
        return index
    # The new name of a module that is saved whole is one of the base: its kind alone tells whose it is. ZeRO-3 has its master alone.
    copies = {tensor.name for tensor in index.tensors if tensor.kind == "adapter"}
    only_masters = {name for name, new in names.items() if name not in copies and adapter_name(new) is None}

    def of_file(tensor: Tensor) -> Tensor:
        is_only = tensor.kind == "master" and tensor.name in only_masters
        return replace(tensor, name=names.get(tensor.name, tensor.name), kind="adapter" if is_only else tensor.kind)

    return renamed(index, map(of_file, index.tensors), lambda name: (names.get(name, name),))
