"""What DeepSpeed resumes from, whatever format it came from: groups of parameters with masters and states, the model's other tensors,
the run's counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import STEP, is_plain, parameter_and_kind
from reshard.containers.pickle_writer import Call, Instance, Name
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile

F32 = from_torch("float32", where="")
# The version that is written where the source is not DeepSpeed's. DeepSpeed's loaders ask for one, and refuse 0.3 and older.
_VERSION = "0.19.8"
# Keys of a model file that are written as they were read.
_CARRIED = ("lr_scheduler", "global_samples", "ds_config", "universal_checkpoint_info")


@value(eq=False, repr=False)
class TrainingState:
    """What DeepSpeed resumes from."""

    content: Content
    """The canonical tensors, and the facts about the run."""
    groups: tuple[ParamGroup, ...]
    """The param groups, each with its trained parameters in the optimizer's order."""
    states: Mapping[str, Mapping[str, str]]
    """Parameter -> kind of state, such as "exp_avg" -> key of the canonical tensor."""
    untrained: Mapping[str, Tensor]
    """Buffers and frozen weights, by name."""
    aliases: Mapping[str, str]
    """Tied parameters: second name -> the name under which the parameter is stored."""
    left_out: Mapping[str, str]
    """State that the files have no place for: key -> why."""

    def __repr__(self) -> str:
        return f"<training state of step {self.step}: {len(self.states)} trained parameters, {len(self.untrained)} other tensors>"

    @property
    def step(self) -> int:
        """The run's step."""
        return self.content.facts.step or 0

    @property
    def version(self) -> str:
        """The version of DeepSpeed that the files are written for: the source's, if DeepSpeed wrote it."""
        facts = self.content.facts
        return facts.version if facts.version and (facts.producer or "").startswith("DeepSpeed") else _VERSION

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return self.content.tensors[name].shape

    def param_shapes(self, names: Iterable[str]) -> dict[str, Call]:
        """The whole shapes of parameters, as a model file lists them."""
        return {name: Call(Name("torch", "Size"), (self.shape(name),)) for name in names}

    def elementwise_states(self, name: str) -> list[str]:
        """The kinds of state that have one element per element of the parameter; step counts are left out."""
        return [kind for kind, key in self.states[name].items() if self.shape(key) == self.shape(name)]

    @property
    def ds_config(self) -> Any:
        """DeepSpeed's config of the source's run; {} if it was another program's."""
        return self._carried.get("ds_config", {})

    @property
    def _carried(self) -> dict[str, Any]:
        state = self.content.facts.state
        return {key: state[key] for key in _CARRIED if key in state and is_plain(state[key])}

    def model_states(
        self, module: Mapping[str, Call], buffers: Sequence[str], groups: Iterable[Iterable[str]], dp: int, frozen: Mapping[str, Call]
    ) -> dict[str, Any]:
        """The root of a model file: tensors, names, counters, sizes, versions.

        groups: the parameters of each flat group. frozen: the rank's parts of frozen weights.
        """
        return {
            "module": module,
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": [self.param_shapes(names) for names in groups],
            "frozen_param_shapes": self.param_shapes(frozen) or None,
            "shared_params": dict(self.aliases),
            "frozen_param_fragments": frozen or None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": self.content.facts.state.get("skipped_steps", 0),
            "global_steps": self.step,
            "global_samples": 0,
            "dp_world_size": dp,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": self.version,
        } | self._carried

    def loss_scaler_keys(self) -> dict[str, Any]:
        """The keys of an optimizer file for the loss scaler: the source's; without one, a fixed scale of 1."""
        scaler = self.content.facts.state.get("loss_scaler") or {}
        attributes = dict(scaler.get("attributes") or {"cur_scale": 1.0, "dynamic": False})
        if "dtype" in attributes:
            attributes["dtype"] = Name("torch", attributes["dtype"])
        class_name = scaler.get("class") if scaler.get("class") in ("LossScaler", "DynamicLossScaler") else "LossScaler"
        instance = Instance(Name("deepspeed.runtime.fp16.loss_scaler", str(class_name)), attributes)
        return {"loss_scaler": instance, "dynamic_loss_scale": bool(scaler.get("dynamic")), "overflow": False}

    def settings(self, group: ParamGroup, numbers: Sequence[int]) -> dict[str, Any]:
        """A param group as a dict, with its step count if no state of its parameters has it. numbers: of its flat groups, for "params"."""
        is_counted = any(STEP in self.states[name] or name in self.content.step_counts for name in group.names)
        return {**{key: value for key, value in group.settings.items() if key != STEP or not is_counted}, "params": list(numbers)}

    def layout(
        self, files: list[TargetFile], target: Target, companions: ModelFiles, tracker: Sidecar, note: str, aliases: Mapping[str, str]
    ) -> Layout:
        """The layout with these files, and what a user has to know to load them. aliases: alias -> stored name."""
        facts = self.content.facts
        notes = ["the source does not tell its step, so the run goes on at step 0"] if facts.step is None else []
        if not facts.state.get("lr_scheduler"):
            notes.append(
                "the source holds no state of a learning-rate schedule: if the run has one, load with load_lr_scheduler_states=False"
            )
        notes += [note] if note else []
        sidecars = (*companions.sidecars({tensor.dtype for tensor in self.content.weights.values()}), tracker)
        stored = {alias: name for alias, name in aliases.items() if alias in self.content.tensors}
        return Layout(target.format, tuple(files), sidecars, target.parallel, tuple(notes), stored, left_out=self.left_out)


def training_state(content: Content, target: Target, what: str) -> TrainingState:
    """The training state of the content. what: the target, for messages.

    Raises: RequestError if the source lacks optimizer state that DeepSpeed needs; UnsupportedError for state that its files cannot hold.
    """
    if target.dtype is not None:
        raise RequestError(f"`dtype=` does not apply to {what}: masters and moments are full-precision", do="Leave it out")
    groups = content.param_groups()
    if not groups:
        raise RequestError(
            f"{what} is made to resume training, and the source has no param groups",
            why="DeepSpeed takes learning rates, weight decay and the order of parameters from them",
            do="Give a checkpoint with the optimizer's param groups, or write a format without them",
        )
    states: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    for key in content.states:
        parameter, kind = parameter_and_kind(key)
        if content.tensors[key].shape in ((), content.tensors[parameter].shape):
            states.setdefault(parameter, {})[kind] = key
        else:
            left_out[key] = f"its shape is not that of the parameter, and {what} has no place for it"
    trained = [name for group in groups for name in group.names]
    if without_state := [name for name in trained if name not in states]:
        raise RequestError(
            f"{what} needs the optimizer's state of every trained parameter, and the source has none for this one",
            where=without_state[0],
            do="Give a checkpoint that holds it",
        )
    if without_group := sorted(states.keys() - set(trained)):
        raise RequestError(
            "it has optimizer state, and is in no param group", where=without_group[0], do="Give a checkpoint that lists it in a group"
        )
    for group in groups:
        kinds = {kind for name in group.names for kind in states[name]}
        if lacking := [(name, kind) for name in group.names for kind in sorted(kinds) if kind not in states[name]]:
            name, kind = lacking[0]
            if unread := next((drop.reason for drop in content.drops if drop.name == name and drop.is_unread), None):
                raise UnsupportedError(f"its {kind} is {unread}", where=name, do="Write `to=dcp` or `to=fsdp`, which leave it out")
            if other := next((other for of, other in map(parameter_and_kind, left_out) if of == name), None):
                raise UnsupportedError(
                    f"the optimizer's state has no {kind} of this parameter's shape, which other parameters of its param group have",
                    where=name,
                    why=f"Some of its state has another shape, such as {other}: {what} has a place only for states of their parameter's "
                    "shape, and needs the same kinds for all of a group",
                    do="Write `to=dcp` or `to=fsdp`, which keep all of the state, or leave out the optimizer",
                )
            raise CheckpointError(
                f"the optimizer's state has no {kind}, which other parameters of its param group have",
                where=name,
                why=f"{what} needs the same kinds of state for all parameters of a group; a file may have been lost in a copy",
                do="Copy the checkpoint again",
            )
    untrained = {name: tensor for name, tensor in content.weights.items() if name not in states}
    aliases = {alias: name for alias, name in content.facts.tied.items() if name in states and alias in untrained}
    if content.model and content.model.is_tied:
        head, embedding = content.model.architecture.tied
        aliases |= {head: embedding} if embedding in states else {}
    return TrainingState(
        content, groups, states, {name: tensor for name, tensor in untrained.items() if name not in aliases}, aliases, left_out
    )


def stored_dtype(tensor: Tensor) -> DType:
    """The element type of a master or state: full precision. Narrower masters, as of an optimizer on bf16 weights, are widened."""
    return F32 if tensor.dtype.floating and tensor.dtype.itemsize < 4 else tensor.dtype


def zero_stage(number: int) -> Call:
    """A member of ZeroStageEnum, pickled."""
    return Call(Name("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))
