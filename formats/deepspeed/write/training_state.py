"""What a checkpoint that DeepSpeed goes on training from is made of, whatever it came from: groups of parameters with masters and
states, the rest of the model, and the run's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import is_plain, parameter_and_kind
from reshard.containers.pickle_writer import Call, Instance, Name
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, from_torch
from reshard.index.index import ParamGroup, Tensor
from reshard.plans.target import Target

F32 = from_torch("float32", where="")
# Which DeepSpeed's files these are like, where the source is not DeepSpeed's. Its loaders ask for a version, and refuse 0.3 and older.
_VERSION = "0.19.8"
# Keys of a model-states file that are written as they were read.
_CARRIED = ("lr_scheduler", "global_samples", "ds_config", "universal_checkpoint_info")


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """groups: param groups with the trained parameters, in the order that the optimizer has them. states: kind -> key of the canonical
    tensor, by parameter. rest: what is not trained (buffers, frozen weights). aliases: tied name -> the name that is stored."""

    content: Content
    groups: tuple[ParamGroup, ...]
    states: Mapping[str, Mapping[str, str]]
    rest: Mapping[str, Tensor]
    aliases: Mapping[str, str]

    @property
    def step(self) -> int:
        return self.content.facts.step or 0

    @property
    def version(self) -> str:
        facts = self.content.facts
        return facts.version if facts.version and (facts.producer or "").startswith("DeepSpeed") else _VERSION

    def shape(self, name: str) -> tuple[int, ...]:
        return self.content.tensors[name].shape

    def kinds(self, name: str) -> list[str]:
        """The kinds of state that have an element for each of the parameter's."""
        return [kind for kind, key in self.states[name].items() if self.content.tensors[key].shape == self.shape(name)]

    def run_states(self, dp: int) -> dict[str, Any]:
        """The counters of a model-states file."""
        kept = self.content.facts.state
        known = {key: kept[key] for key in _CARRIED if is_plain(kept.get(key)) and key in kept}
        return {
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": kept.get("skipped_steps", 0),
            "global_steps": self.step,
            "global_samples": 0,
            "dp_world_size": dp,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": self.version,
        } | known

    def scaler(self) -> dict[str, Any]:
        """The loss scaler of the source's run; 1, and fixed, where it had none."""
        known = self.content.facts.state.get("loss_scaler") or {}
        attributes = dict(known.get("attributes") or {"cur_scale": 1.0, "dynamic": False})
        if "dtype" in attributes:
            attributes["dtype"] = Name("torch", attributes["dtype"])
        kind = known.get("class") if known.get("class") in ("LossScaler", "DynamicLossScaler") else "LossScaler"
        scaler = Instance(Name("deepspeed.runtime.fp16.loss_scaler", str(kind)), attributes)
        return {"loss_scaler": scaler, "dynamic_loss_scale": bool(known.get("dynamic")), "overflow": False}

    def notes(self) -> tuple[str, ...]:
        """What who loads it has to know."""
        if self.content.facts.state.get("lr_scheduler"):
            return ()
        return ("the source tells no state of a learning-rate schedule: load with load_lr_scheduler_states=False if the run has one",)

    def settings(self, group: ParamGroup, numbers: list[int]) -> dict[str, Any]:
        return {**{key: value for key, value in group.settings.items() if key != "step"}, "params": numbers}


def training_of(content: Content, target: Target, what: str) -> Training:
    """Raises: RequestError if the source has no optimizer state, or not all that goes on training needs."""
    if target.dtype is not None:
        raise RequestError(f"--dtype does not apply to {what}: masters and moments are full-precision", do="Leave it out")
    groups = content.param_groups()
    if not content.states or not groups:
        raise RequestError(
            f"{what} is there to go on training, and the source has no {'param groups' if content.states else 'optimizer state'}",
            why="DeepSpeed takes learning rates, weight decay and the order of parameters from them",
            do="Give a checkpoint with the optimizer's state, or write --to hf",
        )
    states: dict[str, dict[str, str]] = {}
    for key in content.states:
        parameter, kind = parameter_and_kind(key)
        states.setdefault(parameter, {})[kind] = key
    trained = [name for group in groups for name in group.names]
    if without := [name for name in trained if name not in states]:
        raise RequestError(
            f"{what} needs the optimizer's state of every trained parameter, and of this one there is none",
            where=without[0],
            do="Give a checkpoint that holds it",
        )
    if lost := sorted(states.keys() - set(trained)):
        raise RequestError(
            "it has optimizer state, and is in no param group", where=lost[0], do="Give a checkpoint that lists it in a group"
        )
    rest = {name: tensor for name, tensor in content.weights.items() if name not in states}
    aliases = {alias: name for alias, name in content.facts.tied.items() if name in states and alias in rest}
    if content.model and content.model.is_tied:
        head, embedding = content.model.architecture.tied
        aliases |= {head: embedding} if embedding in states else {}
    return Training(content, groups, states, {name: tensor for name, tensor in rest.items() if name not in aliases}, aliases)


def stored_dtype(tensor: Tensor) -> DType:
    """Full precision for what is trained or kept of it; masters in a smaller type (an optimizer on bf16 weights) are widened."""
    return F32 if tensor.dtype.floating and tensor.dtype.itemsize < 4 else tensor.dtype


def size(shape: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (shape,))


def stage(number: int) -> Call:
    return Call(Name("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))
