"""Canonical content: the tensors of a checkpoint that matter to a question, under the model's own names.

An index holds what is stored; this chooses and renames. What is left out is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from reshard.canonical.optimizer_state import is_state_key, is_unnamed, master_key, parameter_and_kind, state_key
from reshard.canonical.wrappers import is_wrapper
from reshard.errors import CheckpointError, RequestError
from reshard.index.index import KINDS, Index, ParamGroup, RunFacts, Tensor
from reshard.models.model import Model


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are meant. Globs match names after `strip_prefix` has been taken off.

    weights: "model" for the copy that the model computes with, "master" for the optimizer's full-precision one; None
    takes for each weight the model's copy if there is one. optimizer: also what the optimizer keeps of the chosen weights; masters: and
    their full-precision copies, which are the weights themselves where there are no others.
    """

    weights: Literal["model", "master"] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str = ""
    optimizer: bool = False
    masters: bool = False

    @property
    def is_partial(self) -> bool:
        return bool(self.include or self.exclude)


def _unreadable(key: str) -> float:
    raise CheckpointError("its value was not made readable", where=key)


@dataclass(frozen=True, slots=True)
class Drop:
    """A stored tensor that is left out, and why."""

    name: str
    kind: str
    nbytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Content:
    """The chosen tensors by canonical name, what was left out, and the model they belong to, if it is known.

    `tied` names the stored tensors that are counted as copies of another. Optimizer state, where it was chosen, follows the
    weights under the keys of `optimizers.state_key`, with its role. facts: of the run that wrote them. twice: keys under which a tensor is
    there once more. scalar: the value of a tensor of one element, which is read from its file. selection: what was meant.
    """

    tensors: Mapping[str, Tensor]
    drops: tuple[Drop, ...]
    model: Model | None
    tied: tuple[str, ...] = ()
    param_groups: Callable[[], tuple[ParamGroup, ...]] = tuple
    facts: RunFacts = field(default_factory=RunFacts)
    duplicate_masters: tuple[str, ...] = ()
    read_scalar: Callable[[str], float] = _unreadable
    selection: Selection = field(default_factory=Selection)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that are the model's."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_state_key(name)}

    @cached_property
    def states(self) -> dict[str, Tensor]:
        """The optimizer's tensors, by `optimizers.state_key`."""
        return {name: tensor for name, tensor in self.tensors.items() if is_state_key(name)}

    @cached_property
    def step_counts(self) -> Mapping[str, int]:
        """The steps that have been counted for a parameter where only its param group tells them, as some optimizers have it."""
        kept = {parameter_and_kind(key) for key in self.states}
        found: dict[str, int] = {}
        for group in self.param_groups() if self.states else ():
            count = group.settings.get("step")
            if isinstance(count, int | float) and count == int(count):
                found.update({name: int(count) for name in group.names if (name, "exp_avg") in kept and (name, "step") not in kept})
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def canonical(index: Index, model: Model | None, selection: Selection) -> Content:
    """The tensors that `selection` means, with a tied head counted as a copy of the embedding.

    Raises: RequestError if nothing is chosen, or renaming makes two tensors one.
    """
    chosen, left = _of_role(index, selection)
    drops: list[Drop] = []
    chosen = _renamed(chosen, selection.strip_prefix)
    for name in [name for name in chosen if not _is_meant(name, selection)]:
        drops.append(_drop(chosen.pop(name), "left out by --include or --exclude"))
    tied: tuple[str, ...] = ()
    if model:
        for name in [name for name in chosen if model.reason_to_drop(name)]:
            drops.append(_drop(chosen.pop(name), str(model.reason_to_drop(name))))
        if model.is_tied:
            tied = _tie(chosen, *model.architecture.tied)
    if not chosen:
        raise RequestError(
            "no tensor is left to work on",
            why=f"The checkpoint holds {len(index.tensors)} tensors, {len(drops)} of them were left out",
            do="Look at the names with `reshard inspect`, and at --include, --exclude and --weights",
        )
    twice: tuple[str, ...] = ()
    if selection.optimizer:
        states = _states(index, chosen, selection)
        if selection.masters:
            masters, twice = _masters(index, chosen, states, selection)
            states |= masters
        kept = {id(tensor) for tensor in states.values()}
        drops = [_drop(tensor, reason) for tensor, reason in left if id(tensor) not in kept] + drops
        chosen |= {key: replace(tensor, name=key) for key, tensor in states.items()}
    else:
        drops = [_drop(tensor, reason) for tensor, reason in left] + drops
    return Content(chosen, tuple(drops), model, tied, lambda: _groups(index, chosen, selection), index.facts, twice, selection=selection)


def _groups(index: Index, chosen: Mapping[str, Tensor], selection: Selection) -> tuple[ParamGroup, ...]:
    """The optimizer's param groups, as far as they are about the chosen weights."""
    found = []
    for group in index.param_groups():
        names = (name.removeprefix(selection.strip_prefix) for name in group.names)
        if kept := tuple(name for name in names if name in chosen):
            found.append(replace(group, names=kept))
    return tuple(found)


def check_against_model(content: Content, *, partial: bool, strict: bool, optional: Collection[str] = ()) -> None:
    """Raises CheckpointError if a weight of the model is missing (unless `partial`, or among `optional`) or has another shape than the
    config says; with `strict` also if a tensor is none of the model's."""
    model = content.model
    if model is None:
        return
    missing = [
        name for name, weight in model.weights.items() if name not in content.tensors and name not in optional and not weight.optional
    ]
    unknown = [name for name in content.weights if name not in model.weights]
    for name, weight in model.weights.items():
        tensor = content.tensors.get(name)
        if tensor is not None and tensor.shape != weight.shape:
            raise CheckpointError(
                f"its shape is {list(tensor.shape)}, the config says {list(weight.shape)}",
                where=name,
                why="The config belongs to another model, or the vocabulary was padded in training",
                do="Give the config that this model was trained with by --model DIR",
            )
    if missing and not partial:
        raise CheckpointError(
            f"the checkpoint has no such weight, nor {len(missing) - 1} others that a {model.architecture.model_type} model needs"
            if len(missing) > 1
            else f"the checkpoint has no such weight, which a {model.architecture.model_type} model needs",
            where=missing[0],
            why=f"It has, for example, {unknown[0]}, which is no name of this model" if unknown else "An engine would serve unset memory",
            do=_prefix_hint(unknown, model) or "Check that all files of the save are there, and that --model is this model's config",
        )
    if unknown and strict:
        raise CheckpointError(
            f"there is no place for it in a {model.architecture.model_type} model"
            + (f", nor for {len(unknown) - 1} more" if len(unknown) > 1 else ""),
            where=unknown[0],
            why="A serving engine refuses weights that it does not know",
            do="Leave it out with --exclude, or name the right model with --model DIR",
        )


def keyed(index: Index) -> dict[str, Tensor]:
    """The weights by name, and what the optimizer keeps of them by `optimizers.state_key`: of what is there as both, also the master."""
    stored, masters = index.by_kind("weight"), index.by_kind("master")
    weights = {**masters, **stored}
    both = {master_key(name): tensor for name, tensor in masters.items() if name in stored}
    return {**weights, **both, **{key: tensor for tensor in index.tensors if (key := _state_key(tensor, weights)) is not None}}


def _states(index: Index, chosen: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    """What the optimizer keeps of the chosen weights. Raises RequestError if there is none, or if it is not known whose it is."""
    if unnamed := [tensor for tensor in index.tensors if is_unnamed(tensor)]:
        why = next((note for note in index.facts.notes if "optimizer" in note), "The files do not give its name")
        raise RequestError(
            f"--optimizer: the parameter of {unnamed[0].name} is not known",
            why=why,
            do="Save the optimizer with names (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or leave out --optimizer",
        )
    stored = {**index.by_kind("master"), **index.by_kind("weight")}
    found: dict[str, Tensor] = {}
    for tensor in index.tensors:
        key = _state_key(tensor, stored)
        if key is not None:
            parameter, kind = parameter_and_kind(key)
            short = parameter.removeprefix(selection.strip_prefix)
            if short in chosen:
                found[f"optim.state.{short}.{kind}"] = tensor
    if not found:
        raise RequestError("--optimizer: there is no optimizer state of the chosen weights here", do="Leave out --optimizer")
    return found


def _masters(
    index: Index, chosen: Mapping[str, Tensor], states: Mapping[str, Tensor], selection: Selection
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The full-precision copies of the chosen weights that the optimizer keeps state of, by key; and the keys of those that are the chosen
    tensors themselves."""
    stored = {name.removeprefix(selection.strip_prefix): tensor for name, tensor in index.by_kind("master").items()}
    names = dict.fromkeys(parameter_and_kind(key)[0] for key in states)
    found = {master_key(name): stored.get(name, chosen[name]) for name in names}
    return found, tuple(master_key(name) for name in names if name not in stored or chosen[name].kind == "master")


def _state_key(tensor: Tensor, weights: Mapping[str, Tensor]) -> str | None:
    if tensor.kind == "state":
        name, _, _ = tensor.name.rpartition(".")
        return f"optim.state.{tensor.name}" if name in weights else None
    return state_key(tensor)


def _of_role(index: Index, selection: Selection) -> tuple[dict[str, Tensor], list[tuple[Tensor, str]]]:
    """The tensors of the wanted role, and the others with the reason why they are left out."""
    stored, masters = index.by_kind("weight"), index.by_kind("master")
    if selection.weights == "master" and not masters:
        raise RequestError(
            "this checkpoint stores no full-precision masters",
            why="--weights master asks for them",
            do="Use --weights model, or leave it out",
        )
    if selection.weights == "model" and (only := next((name for name in masters if name not in stored), None)):
        raise RequestError(
            "--weights model: it is stored as a full-precision master only",
            where=only,
            why="The run kept no copy in the type that it computes with",
            do="Leave out --weights, and name the type with --dtype if the masters' is not wanted",
        )
    if selection.weights == "model" and not stored:
        raise RequestError("this checkpoint stores no model copy of the weights", do="Use --weights master, or leave it out")
    # What there is once (buffers and frozen weights have no master, ZeRO-3 has no model copy of what is trained) belongs to both.
    chosen = {**stored, **masters} if selection.weights == "master" else {**masters, **stored}
    kept = {id(tensor) for tensor in chosen.values()}
    reasons: dict[str, str] = dict.fromkeys(KINDS, "optimizer state, which serving does not need")
    reasons["state"] = "state of the run, which serving does not need"
    reasons["weight"] = "the model copy; --weights master was chosen"
    reasons["master"] = "the full-precision master; the model copy was taken (--weights master takes this one)"
    return chosen, [(tensor, reasons[tensor.kind]) for tensor in index.tensors if id(tensor) not in kept]


def _renamed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if not prefix:
        return tensors
    if not any(name.startswith(prefix) for name in tensors):
        if is_wrapper(prefix):
            return tensors  # it was taken off when the checkpoint was opened
        raise RequestError(
            f"--strip-prefix {prefix}: no tensor's name starts with it", do=f"The first name is {next(iter(tensors), 'none at all')}"
        )
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(prefix)
        if not new or new in renamed:
            raise RequestError(f"--strip-prefix {prefix} makes {new!r} the name of two tensors", where=name)
        renamed[new] = replace(tensor, name=new)
    return renamed


def _is_meant(name: str, selection: Selection) -> bool:
    if selection.include and not any(fnmatchcase(name, glob) for glob in selection.include):
        return False
    return not any(fnmatchcase(name, glob) for glob in selection.exclude)


def _tie(tensors: dict[str, Tensor], head: str, embedding: str) -> tuple[str, ...]:
    """Make a stored tied head a copy of the embedding, which is compared with it whenever it is read. Returns what became a copy."""
    if head not in tensors:
        return ()
    copy = tensors.pop(head)
    kept = tensors.get(embedding)
    if kept is None:
        tensors[embedding] = replace(copy, name=embedding)
        return ()
    if (kept.dtype, kept.shape) != (copy.dtype, copy.shape):
        raise CheckpointError(
            f"it is {copy.dtype} {list(copy.shape)}, {embedding} is {kept.dtype} {list(kept.shape)}",
            where=head,
            why="The config ties the two (tie_word_embeddings), so they must be one tensor",
            do="Give the right config with --model DIR",
        )
    tensors[embedding] = replace(kept, shards=kept.shards.with_copies([copy.shards]))
    return (head,)


def _prefix_hint(unknown: list[str], model: Model) -> str | None:
    """The prefix whose removal would turn an unknown name into a known one."""
    for name in unknown[:8]:
        for known in model.weights:
            if name.endswith("." + known) or (name.endswith(known) and name != known):
                return f"Take the prefix off with --strip-prefix {name.removesuffix(known)}"
    return None


def _drop(tensor: Tensor, reason: str) -> Drop:
    return Drop(tensor.name, tensor.kind, tensor.nbytes, reason)
