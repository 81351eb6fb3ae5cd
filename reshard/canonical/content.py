"""Content: the tensors of a checkpoint that a conversion or comparison works on, under the model's canonical names.

An index holds everything that is stored. A content holds the chosen tensors: a tied head is a replica of the embedding, and optimizer state
has keys that tell its weight. Every tensor that is left out becomes a Drop, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from reshard.canonical.globs import any_layer, as_globs, check_globs, matches
from reshard.canonical.name_variants import names_besides, unknown_names
from reshard.canonical.optimizer_state import (
    STEP,
    counts_of_groups,
    is_state_key,
    is_unnamed,
    master_key,
    owner,
    parameter_and_kind,
    state_key,
    state_key_of,
    uncounted,
    with_values,
)
from reshard.canonical.renaming import is_of_adapter, is_wrapper
from reshard.canonical.tensor_classes import is_of_optimizer, root_of
from reshard.canonical.tied_head import tie
from reshard.errors import CheckpointError, IncompleteError, RequestError, UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable, value
from reshard.index.coverage import GATHERED, UNGATHERED, is_ungathered, wrong_shape
from reshard.index.index import Index, Kind, ParamGroup, RunFacts, Tensor
from reshard.models.lookup import declared_at
from reshard.models.model import Model
from reshard.models.weights import ModelWeight

if TYPE_CHECKING:
    from reshard.index.provenance import AppliedDelta, Combined, MergedAdapter


@value
class Selection:
    """Which tensors of a checkpoint are chosen. Globs match names after `strip_prefix` has been removed."""

    weights: Literal["model", "master"] | None = None
    """"model" for the copy that the model computes with, "master" for the optimizer's full-precision copy. None: for each weight the
    model's copy, or the master if there is no other."""
    include: tuple[str, ...] = ()
    """Only weights whose names match one of these globs; empty for all."""
    exclude: tuple[str, ...] = ()
    """No weights whose names match one of these globs."""
    strip_prefix: str = ""
    """A prefix to remove from names first."""
    optimizer: bool = False
    """Also the optimizer state of the chosen weights."""
    masters: bool = False
    """With `optimizer`: also the masters of the chosen weights. A weight without a separate master is its own master."""
    packed_states: bool = False
    """With `optimizer`: state in 8 and 4 bits as its tensors are stored, where the target has a place for them; otherwise as its values."""
    root: str | None = None
    """Which of several models in the checkpoint: the first part of its tensors' names. None: the main one."""
    keep_unknown: bool = False
    """Also the tensors that are withheld otherwise: run state, other models, and buffers that the declared architecture lacks."""
    keep_adapter: bool = False
    """Also the LoRA adapter beside the weights."""
    drop_unknown: bool = False
    """No weights that the declared architecture lacks."""

    def __post_init__(self) -> None:
        """One glob may be given as a text. Raises RequestError if unknown tensors are to be both kept and dropped."""
        for name in ("include", "exclude"):
            object.__setattr__(self, name, as_globs(getattr(self, name)))
        if self.keep_unknown and self.drop_unknown:
            raise RequestError(
                "`keep_unknown=True` and `drop_unknown=True` contradict each other", do="Give one of them, and `exclude=GLOB`"
            )

    @property
    def is_partial(self) -> bool:
        """Whether some weights may be left out by name."""
        return bool(self.include or self.exclude)

    def chooses(self, name: str) -> bool:
        """Whether the globs choose a name."""
        return (not self.include or matches(name, self.include)) and not matches(name, self.exclude)

    def check_globs(self, names: Collection[str]) -> None:
        """Raises RequestError if a glob matches none of these names."""
        check_globs("`include=`", self.include, names)
        check_globs("`exclude=`", self.exclude, names)


def _unreadable(key: str) -> float:
    raise CheckpointError("its value cannot be read here: no reader was given", where=key)


@value
class Drop:
    """A stored tensor that is left out."""

    name: str
    """Its name."""
    kind: str
    """Its kind, such as "moment1"; "unknown" for a tensor that the declared architecture lacks."""
    nbytes: int
    """Its size in bytes."""
    reason: str
    """Why it is left out."""

    @property
    def is_unread(self) -> bool:
        """Whether it is an array of a class that reshard does not read."""
        return self.reason.endswith(_NOT_READ)

    @property
    def is_of_model(self) -> bool:
        """Whether a model without it may give other answers: it is a weight, of an adapter too, or may be one."""
        return self.kind in ("weight", "adapter", "unknown") or self.is_unread

    @classmethod
    def of(cls, tensor: Tensor, reason: str, kind: str | None = None) -> Drop:
        """The drop of a tensor. kind: what to call it; None for its own kind."""
        return cls(tensor.name, kind or tensor.kind, tensor.nbytes, reason)


@value(slots=False, eq=False)
class Content:
    """The chosen tensors of a checkpoint under canonical names."""

    tensors: Mapping[str, Tensor]
    """The chosen tensors. The key of a weight is its canonical name; optimizer state and masters have the keys of optimizer_state.py."""
    drops: tuple[Drop, ...]
    """The tensors that were left out."""
    model: Model | None
    """The model; None if it is not known."""
    tied: tuple[str, ...] = ()
    """Stored tensors that became replicas of another tensor, such as a tied head."""
    param_groups: Callable[[], tuple[ParamGroup, ...]] = tuple
    """Reads the optimizer's param groups, reduced to the chosen weights."""
    facts: RunFacts = field(default_factory=RunFacts)
    """What is known about the run that wrote the checkpoint."""
    duplicate_masters: tuple[str, ...] = ()
    """Keys of masters that are the chosen weight itself: `tensors` then has that tensor under two keys."""
    read_scalar: Callable[[str], float] = _unreadable
    """Reads the value of the tensor of one element with that key."""
    selection: Selection = field(default_factory=Selection)
    """The selection that chose the tensors."""
    recorded: Callable[[], Mapping[str, str]] = dict
    """Reads the digests that reshard recorded when it wrote these tensors, by key; a tensor that has none is not compared."""
    names: tuple[str, ...] = ()
    """The names that the globs of the selection are matched with: those of all stored tensors."""
    unknown: tuple[str, ...] = ()
    """The names of the chosen weights that the declared architecture lacks."""
    is_adapter: bool = False
    """Whether it is a LoRA adapter and no model."""
    adapter: Mapping[str, Tensor] = field(default_factory=dict)
    """The LoRA adapter beside the weights, which is left out: its tensors by name."""
    merged: MergedAdapter | None = None
    """The LoRA adapter that is merged into the weights when they are read; None if there is none."""
    combined: Combined | None = None
    """The checkpoints that the weights are combined from when they are read; None if they are of one."""
    deltas: tuple[AppliedDelta, ...] = ()
    """The deltas that change the tensors when they are read; `recorded` is then what the last one says of its result."""

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors of the model by canonical name."""
        states = self.states
        return {name: tensor for name, tensor in self.tensors.items() if name not in states} if states else self.tensors

    @cached_property
    def states(self) -> dict[str, Tensor]:
        """The optimizer state and the masters, by key (`optimizer_state.state_key`, `optimizer_state.master_key`)."""
        return {name: tensor for name, tensor in self.tensors.items() if is_state_key(name)}

    @cached_property
    def step_counts(self) -> Mapping[str, int]:
        """By parameter, the step counts that come from the settings of a param group: for parameters with moments, but no step tensor."""
        stored = {parameter_and_kind(key) for key in self.states}
        counts = counts_of_groups(self.param_groups() if self.states else ())
        return {name: count for name, count in counts.items() if (name, "exp_avg") in stored and (name, STEP) not in stored}

    @cached_property
    def withheld(self) -> tuple[Drop, ...]:
        """The tensors that are left out because they are no weights of the model or are not read, without other optimizer state."""
        others = (_OPTIMIZER, _OF_NO_WEIGHT)
        return tuple(drop for drop in self.drops if (drop.kind in _WITHHELD and drop.reason not in others) or drop.is_unread)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The names of the model's weights that are not among the tensors."""
        if len(self.weights) - len(self.besides_model) == len(self._model_weights):
            return ()
        return tuple(name for name in self._model_weights if name not in self.tensors)

    @cached_property
    def besides_model(self) -> tuple[str, ...]:
        """The names of the weights that the model does not have."""
        return tuple(name for name in self.weights if name not in self._model_weights)

    @property
    def recorded_in(self) -> str:
        """Where `recorded` comes from."""
        return f"the delta {self.deltas[-1].path}" if self.deltas else "reshard.json"

    @property
    def left_out(self) -> dict[str, str]:
        """The missing weights that the files leave out on purpose -> why."""
        return {name: self.facts.left_out[name] for name in self.missing if name in self.facts.left_out}

    @property
    def not_needed(self) -> tuple[str, ...]:
        """The names of the missing weights that are implied, or left out on purpose."""
        return (*self.implied, *self.left_out)

    @property
    def implied(self) -> tuple[str, ...]:
        """The names of the missing weights whose bytes follow from the shapes of others."""
        return tuple(name for name in self.missing if self._model_weights[name].implied is not None)

    @property
    def implied_dtypes(self) -> dict[str, DType]:
        """The element types of these weights."""
        return {name: dtype for name in self.implied if (dtype := self._model_weights[name].component_dtype)}

    @property
    def _model_weights(self) -> Mapping[str, ModelWeight]:
        return self.model.weights if self.model else {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every tensor by its key."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def __repr__(self) -> str:
        model = self.model.architecture.model_type if self.model else "unknown model"
        return f"Content({model}, {plural(len(self.tensors), 'tensor')}, {len(self.drops):,} left out)"


def content_of(index: Index, model: Model | None, selection: Selection, adapter: Callable[[Tensor], bool] | None = None) -> Content:
    """The tensors of an index that `selection` chooses. A stored tied head becomes a replica of the embedding.

    adapter: tells the tensors of the LoRA adapter, which are taken in place of the model's. Without it, an adapter is taken if there is
    nothing else.

    Raises: RequestError if no tensor is chosen, or two tensors would get one name; CheckpointError if a tied head differs from the
    embedding in dtype or shape.
    """
    of_kind, others = _of_kind(index, selection)
    chosen = _Chosen(_without_prefix(of_kind, selection.strip_prefix))
    tensors = chosen.tensors
    names = tuple(dict.fromkeys((*tensors, *(tensor.name.removeprefix(selection.strip_prefix) for tensor, _ in others))))
    if selection.is_partial:
        chosen.leave_out([name for name in tensors if not selection.chooses(name)], "left out by `include=` or `exclude=`")
    is_adapter, beside = _split_adapter(chosen, selection, adapter)
    tied, unknown = _known_to_model(chosen, index, model, selection) if model and not is_adapter else ((), ())
    if not tensors:
        selection.check_globs(names)
        raise RequestError(
            "no tensor is left to work on",
            why=f"The checkpoint has {len(index.tensors)} tensors: {len(others)} are of another kind, {len(chosen.drops)} are left out by "
            "name",
            do="Look at the names with `reshard inspect`, and at `include=`, `exclude=` and `weights=`",
        )
    check_read(tensors.values())
    states, duplicate_masters = _states(index, tensors, selection) if selection.optimizer else ({}, ())
    used = {id(leaf.shards) for tensor in states.values() for leaf in tensor.leaves}
    tensors |= {key: replace(tensor, name=key) for key, tensor in states.items()}
    return Content(
        tensors=tensors,
        drops=(*(Drop.of(tensor, reason) for tensor, reason in others if id(tensor.shards) not in used), *chosen.drops),
        model=model,
        tied=tied,
        param_groups=lambda: _groups(index, tensors, selection),
        facts=index.facts,
        duplicate_masters=duplicate_masters,
        selection=selection,
        names=names,
        unknown=unknown,
        is_adapter=is_adapter,
        adapter=beside,
    )


def check_read(tensors: Iterable[Tensor]) -> None:
    """Raises UnsupportedError, naming the class, if one of these is an array-like object that reshard does not read as a tensor."""
    if objects := [tensor for tensor in tensors if tensor.dtype.is_unread]:
        if objects[0].dtype.torch.endswith("meta_tensor_no_storage"):
            others = f"; so do {plural(len(objects) - 1, 'other tensor')}" if len(objects) > 1 else ""
            what = f"it lies on the meta device ({objects[0].dtype.torch}), so no values were saved{others}"
            raise UnsupportedError(what, where=objects[0].name, do="Save the model after its weights were loaded")
        raise UnsupportedError(
            f"it is stored as {objects[0].dtype.torch}{_NOT_READ}"
            + (f"; {plural(len(objects), 'entry', 'entries')} are of such classes" if len(objects) > 1 else ""),
            where=objects[0].name,
            why="Only the code of that class knows which values its parts stand for",
            do=f"Save plain tensors, for example by `.dequantize()`, `.to_dense()` or `.detach().clone()`, or leave it out with `exclude=` "
            f"'{any_layer(objects[0].name)}'",
        )


@mutable
class _Chosen:
    """The tensors that are chosen so far, by name, and those that were left out."""

    tensors: dict[str, Tensor]
    """The chosen ones."""
    drops: list[Drop] = field(default_factory=list)
    """The others, each with its reason."""

    def leave_out(self, names: Iterable[str], reason: str, kind: str | None = None) -> None:
        """Leave out the tensors of these names. kind: what to call them; None for their own kind."""
        self.drops += [Drop.of(self.tensors.pop(name), reason, kind) for name in names]


def _split_adapter(chosen: _Chosen, selection: Selection, adapter: Callable[[Tensor], bool] | None) -> tuple[bool, dict[str, Tensor]]:
    """Whether a LoRA adapter is chosen in place of a model; and the adapter beside the model, which is left out."""
    of_adapter = [name for name, tensor in chosen.tensors.items() if is_of_adapter(tensor)]
    if of_adapter and adapter is not None:
        base = [name for name, tensor in chosen.tensors.items() if not adapter(tensor)]
        chosen.leave_out(base, "a base weight; `to=hf` writes the base")
        return True, {}
    if of_adapter and len(of_adapter) == len(chosen.tensors):
        return True, {}
    if selection.keep_adapter or selection.keep_unknown:
        return False, {}
    beside = {name: chosen.tensors[name] for name in of_adapter}
    chosen.leave_out(of_adapter, ADAPTER_LEFT_OUT, "adapter")
    return False, beside


def _known_to_model(chosen: _Chosen, index: Index, model: Model, selection: Selection) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leave out what the architecture has no use for, and make further names of a weight its replicas.

    Tensors that the declared architecture lacks are left out if they are buffers, and on request if they are weights. If it lacks all
    tensors, they stay: a prefix may hide them.

    Returns the names that became replicas, such as that of a tied head, and those of the chosen weights that the architecture lacks.
    """
    tensors, model_type = chosen.tensors, model.architecture.model_type
    names = names_besides((name for name, tensor in tensors.items() if not is_of_adapter(tensor)), index, model)
    if not names:
        return (), ()
    for name in names:
        if reason := model.reason_to_drop(name):
            chosen.leave_out([name], reason)
    tied = tuple(alias for alias, name in model.aliases.items() if tie(tensors, alias, name))
    unknown = unknown_names([name for name in names if name in tensors], model)
    for name in unknown if len(unknown) < len(tensors) else ():
        if tensors[name].kind in _TRAINED and selection.drop_unknown:
            chosen.leave_out([name], f"the declaration of {model_type} lacks it; `drop_unknown=True` leaves it out", "unknown")
        elif tensors[name].kind == "buffer" and not selection.keep_unknown:
            chosen.leave_out([name], f"a buffer that a {model_type} model does not store; `keep_unknown=True` carries it")
    return tied, tuple(name for name in unknown if name in tensors and tensors[name].kind in _TRAINED)


def check_selected(*contents: Content) -> None:
    """Raises RequestError if a glob of the selection that chose these contents matches no tensor of any of them."""
    selection = contents[0].selection
    if selection.is_partial:
        selection.check_globs({name: None for content in contents for name in content.names})


def _groups(index: Index, chosen: Mapping[str, Tensor], selection: Selection) -> tuple[ParamGroup, ...]:
    """The optimizer's param groups, reduced to the chosen weights."""
    groups = []
    for group in index.param_groups():
        names = (name.removeprefix(selection.strip_prefix) for name in group.names)
        if chosen_names := tuple(name for name in names if name in chosen):
            groups.append(replace(group, names=chosen_names))
    return tuple(groups)


def _wrong_shape(tensor: Tensor, weight: ModelWeight, model: Model) -> CheckpointError:
    """The error for a weight whose shape is not that of the model: the declaration is wrong if it is the user's own, or else the config."""
    why, do = "The config belongs to another model, or the vocabulary was padded in training", "Name the directory of the config"
    what = wrong_shape(tensor.shape, weight.shape)
    if is_ungathered(tensor.shape, weight.shape):
        return CheckpointError(what, where=tensor.name, why=UNGATHERED, do=GATHERED)
    if (place := declared_at(model.architecture, weight.declared)) is not None:
        why = f"{place} declares it as {weight.role}: [{', '.join(weight.declared.shape)}]. The declaration is wrong, or the config is"
        do = "Correct the declaration, or name the directory of the config"
    return CheckpointError(what, where=tensor.name, why=why, do=f"{do} that this model was trained with: `model=DIR`")


def check_against_model(content: Content, *, partial: bool, strict: bool, optional: Collection[str] = ()) -> None:
    """Check that the content is the whole model of its config, if the model is known.

    partial: any weight may be missing. optional: names of weights that may be missing. strict: no weight may be unknown to the model.

    Raises: CheckpointError if a weight is missing, has another shape than the config says, or with `strict` is not a weight of the model;
    UnsupportedError if the names are a trainer's, and cannot be read as those of this model.
    """
    model = content.model
    if model is None or content.is_adapter:
        return
    for name, weight in model.weights.items():
        if name in content.tensors and content.tensors[name].shape != weight.shape:
            raise _wrong_shape(content.tensors[name], weight, model)
    missing = [name for name in content.missing if name not in optional and not model.weights[name].optional]
    unknown = [name for name in content.besides_model if not model.reason_not_served(name)]
    if missing and not partial and missing[0] in content.facts.left_out:
        raise _left_out_of_source(missing, content)
    if missing and not partial:
        from reshard.canonical.trainer_names import check_trainer

        check_trainer(content.weights, model)
        needs = f"{model.noun} needs it"
        raise IncompleteError(
            f"the checkpoint has no such weight; {needs}" + (f" and {len(missing) - 1} other missing weights" if len(missing) > 1 else ""),
            where=missing[0],
            why=f"It has, for example, {unknown[0]}, which this model does not have" if unknown else "An engine would serve unset memory",
            do=_prefix_hint(unknown, model) or "Check that all files of the save are there, and that `model=` is this model's config",
        )
    if unknown and strict:
        others = f", nor {plural(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"the declaration of {model.architecture.model_type} has no such weight{others}",
            where=unknown[0],
            why="This format must know the role of each weight, and without one the model may give other answers",
            do=f"Leave out such weights on purpose with `exclude=` '{any_layer(unknown[0])}' or `drop_unknown=True`, "
            "or name the right model "
            "with `model=DIR` or `architecture=FILE`",
            id="unsupported",
        )


def _left_out_of_source(missing: Sequence[str], content: Content) -> IncompleteError:
    """The error for weights that the files of the source leave out on purpose, and that are needed here."""
    return IncompleteError(
        f"the files of {content.facts.producer} have no such weight: {content.facts.left_out[missing[0]]}"
        + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
        where=missing[0],
        why="What is written here needs all weights of the model",
        do="Convert the checkpoint that these files were made of",
    )


def check_counted(content: Content) -> None:
    """Raises RequestError if a parameter has second moments and no step count."""
    states = ((tensor.kind, parameter_and_kind(key)[0]) for key, tensor in content.states.items())
    if names := uncounted(states, content.param_groups):
        raise RequestError(
            f"the optimizer has moments of {plural(len(names), 'parameter')}, and no count of the steps that made them",
            where=names[0],
            why="Adam's bias correction needs the count: without it a run does not resume, or starts the correction anew",
            do="Give a checkpoint that holds the counts, or convert the weights without the optimizer state",
        )


def tensors_by_key(index: Index) -> dict[str, Tensor]:
    """The weights of an index by name, and its optimizer state by the key of `optimizer_state.state_key`.

    A weight that is stored only as a master has its own name; a master beside a model copy has the key of `optimizer_state.master_key`.
    """
    stored, masters = _stored(index), index.by_kind("master")
    separate = {master_key(name): tensor for name, tensor in masters.items() if name in stored}
    return {**masters, **stored, **separate, **_states_by_key(index)}


def _states_by_key(index: Index) -> dict[str, Tensor]:
    """The optimizer state by key, without that of parameters that are not among the weights under their names."""
    weights, keyed = {**index.by_kind("master"), **_stored(index)}, {}
    for tensor in index.tensors:
        of_weight = owner(tensor, weights)
        if key := state_key_of(*of_weight) if of_weight else state_key(tensor):
            keyed[key] = tensor
    return keyed


def _states(index: Index, chosen: Mapping[str, Tensor], selection: Selection) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The optimizer state, and the masters if they are asked for, of the chosen weights by key; and the keys of the masters that are the
    chosen weight itself.

    Raises: RequestError if there is none, or if the files do not tell the parameter of a state.
    """
    if unnamed := [tensor for tensor in index.tensors if is_unnamed(tensor)]:
        why = next((note for note in index.facts.notes if "optimizer" in note), "The files do not give its name")
        raise RequestError(
            f"`optimizer=True`: the parameter of {unnamed[0].name} is not known",
            why=why,
            do="Save the optimizer with names (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or "
            "leave out `optimizer=True`",
        )
    states, masters = dict[str, Tensor](), dict[str, Tensor]()
    stored = {name.removeprefix(selection.strip_prefix): tensor for name, tensor in index.by_kind("master").items()}
    for key, tensor in _states_by_key(index).items():
        parameter, kind = parameter_and_kind(key)
        name = parameter.removeprefix(selection.strip_prefix)
        if name in chosen and not tensor.dtype.is_unread:
            states[state_key_of(name, kind)] = tensor
            masters[name] = stored.get(name, chosen[name])
    if not states:
        unread = next((note for note in index.facts.notes if note.startswith("optimizer.")), None)
        what = "`optimizer=True`: no optimizer state of the chosen weights is read" if unread else _NO_STATE
        raise RequestError(what, why=unread, do="Leave out `optimizer=True`")
    states = with_values(states, chosen, keep=selection.packed_states)
    if not selection.masters:
        return states, ()
    duplicates = tuple(master_key(name) for name in masters if name not in stored or chosen[name].kind == "master")
    return states | {master_key(name): tensor for name, tensor in masters.items()}, duplicates


def _of_kind(index: Index, selection: Selection) -> tuple[dict[str, Tensor], list[tuple[Tensor, str]]]:
    """One tensor for each weight, its model copy or its master, by name; and all other tensors, each with the reason to leave it out."""
    stored, masters = _stored(index), index.by_kind("master")
    if selection.weights == "master" and not masters:
        raise RequestError(
            "`weights=master`: this checkpoint stores no full-precision masters",
            do="Use `weights=model`, or leave it out",
        )
    if selection.weights == "model" and (only_master := next((name for name in masters if name not in stored), None)):
        raise RequestError(
            "`weights=model`: it is stored as a full-precision master only",
            where=only_master,
            why="The run saved no copy in the element type in which it computes",
            do="Leave out `weights=`; to cast the masters, name the element type with `dtype=`",
        )
    if selection.weights == "model" and not stored:
        raise RequestError(
            "`weights=model`: this checkpoint stores no model copy of the weights", do="Use `weights=master`, or leave it out"
        )
    # A weight that is stored once is chosen in both cases: buffers and frozen weights have no master, and the trained weights of ZeRO-3
    # have no model copy.
    chosen = {**stored, **masters} if selection.weights == "master" else {**masters, **stored}
    if selection.keep_unknown:
        carried = ("state", "other") if selection.root is None else ("state",)
        others = [tensor for tensor in index.tensors if tensor.kind in carried and not is_of_optimizer(tensor, chosen)]
        chosen |= {tensor.name: tensor for tensor in others if tensor.name not in chosen}
    if len(chosen) == len(index.tensors):
        return chosen, []
    used = {id(tensor) for tensor in chosen.values()}
    others = [tensor for tensor in index.tensors if id(tensor) not in used]
    return chosen, [(tensor, _reason_to_drop(tensor, stored, with_optimizer=selection.optimizer)) for tensor in others]


# What a model's state dict consists of.
_STORED: tuple[Kind, ...] = ("weight", "buffer", "adapter")
_TRAINED: tuple[Kind, ...] = ("weight", "master")
_WITHHELD = ("state", "other", "buffer", "adapter", "unknown")
_OPTIMIZER = "optimizer state, which serving does not need"
_NO_STATE = "`optimizer=True`: the checkpoint has no optimizer state of the chosen weights"
_NOT_READ = ", which reshard does not read"
_OF_NO_WEIGHT = "optimizer state that belongs to no chosen weight"
ADAPTER_LEFT_OUT = "a LoRA adapter, not merged; `merge_adapter=self` merges it, `to=peft` writes it"
"""The reason to leave out the adapter beside the weights."""


def _reason_to_drop(tensor: Tensor, stored: Mapping[str, Tensor], *, with_optimizer: bool) -> str:
    """Why a tensor is left out that is not the chosen copy of a weight. with_optimizer: whether optimizer state is chosen."""
    if tensor.dtype.is_unread:
        return f"of the class {tensor.dtype.torch}{_NOT_READ}"
    if tensor.kind in _STORED:
        return "the model copy; the masters were chosen (`weights=model` chooses this one)"
    if tensor.kind == "master":
        return "the full-precision master; the model copy was chosen (`weights=master` chooses this one)"
    if tensor.kind == "other":
        return f"of another model; `root=` {root_of(tensor.name)} selects it"
    if tensor.kind == "state" and not is_of_optimizer(tensor, stored):
        return "run state, not a weight; `keep_unknown=True` carries it"
    return _OF_NO_WEIGHT if with_optimizer else _OPTIMIZER


def _stored(index: Index) -> dict[str, Tensor]:
    """The model's copy of its tensors by name, in the order of the index."""
    return {tensor.name: tensor for tensor in index.tensors if tensor.kind in _STORED}


def _without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if not prefix:
        return tensors
    if not any(name.startswith(prefix) for name in tensors):
        if is_wrapper(prefix):
            return tensors  # the prefix was removed when the checkpoint was opened
        first = next(iter(tensors), None)
        raise RequestError(
            f"`strip_prefix={prefix}`: no tensor name starts with it",
            why=f"The first name is {first}" if first else "The checkpoint has no tensors",
            do="Leave it out, or correct the prefix",
        )
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(prefix)
        if not new or new in renamed:
            raise RequestError(
                f"`strip_prefix={prefix}`: without it the name is {new!r}, which is empty or belongs to another tensor", where=name
            )
        renamed[new] = replace(tensor, name=new)
    return renamed


def _prefix_hint(unknown: list[str], model: Model) -> str | None:
    """A hint to remove the prefix that distinguishes an unknown name from a weight of the model; None if there is no such prefix."""
    prefixes = (name.removesuffix(weight) for name in unknown[:8] for weight in model.weights if name.endswith(weight))
    return next((f"Remove the prefix with `strip_prefix=` '{prefix}'" for prefix in prefixes if prefix), None)
