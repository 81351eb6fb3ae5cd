"""The state of the source's optimizer as Megatron's optimizers need it: state by weight, one step count, settings of param groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import STEP, counts_of_groups, parameter_and_kind, plain_settings
from reshard.containers.pickle_writer import Call
from reshard.errors import RequestError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import step_count
from reshard.geometry.value import value

# Settings that torch's Adam and Transformer Engine's look for in a param group. They stand in for what the source's groups lack;
# Megatron's scheduler sets the learning rates again.
_ADAM: dict[str, Any] = {
    "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip


@value(slots=False, eq=False)
class OptimizerContent:
    """The optimizer's part of the source's content."""

    content: Content
    """The source's content."""

    @cached_property
    def keys(self) -> Mapping[str, Mapping[str, str]]:
        """Weight -> {torch's name for a kind of state: key of that state among the content's tensors}."""
        keys: dict[str, dict[str, str]] = {}
        for key in self.content.states:
            weight, kind = parameter_and_kind(key)
            keys.setdefault(weight, {})[kind] = key
        return keys

    @property
    def step_keys(self) -> tuple[str, ...]:
        """The keys of the step counts that the source keeps per weight; empty if it keeps one step count for all weights."""
        return tuple(kinds[STEP] for kinds in self.keys.values() if STEP in kinds)

    @property
    def is_fused_adam(self) -> bool:
        """Whether the param groups are those of Transformer Engine's FusedAdam."""
        return any("bias_correction" in group.settings for group in self.content.param_groups())

    @cached_property
    def step(self) -> int:
        """The number of steps that the optimizer has made.

        Raises: RequestError if weights have made different numbers of steps.
        """
        counts = {int(self.content.read_scalar(key)) for key in self.step_keys}
        counts |= {*counts_of_groups(self.content.param_groups()).values()}
        if len(counts) > 1:
            raise RequestError(
                f"parameters have made different numbers of steps: {', '.join(map(str, sorted(counts)))}",
                why="Megatron's optimizers have one step count for all parameters",
                do="Leave out --optimizer",
            )
        return counts.pop() if counts else self.content.facts.step or 0

    def kinds(self, array: Mosaic) -> tuple[str, ...]:
        """The kinds of elementwise state, without masters, of a parameter with this array.

        Raises: RequestError if a weight in the array has no state, or other state than the weights that are fused with it.
        """
        # A rank's shard of the embedding can be padding only; it has the kinds of any other weight.
        names = array.names or (next(iter(self.keys)),)
        if missing := [name for name in names if name not in self.keys]:
            raise RequestError(
                "the optimizer has no state of it",
                where=missing[0],
                why="Megatron's optimizers have state of every parameter",
                do="Leave out --optimizer, or give a checkpoint in which all weights were trained",
            )
        kinds = tuple(sorted(self._elementwise_kinds(names[0])))
        if differing := [name for name in names if tuple(sorted(self._elementwise_kinds(name))) != kinds]:
            raise RequestError(f"the optimizer has other state of it than of {names[0]}, with which it is fused", where=differing[0])
        return kinds

    def _elementwise_kinds(self, name: str) -> Iterator[str]:
        for kind, key in self.keys[name].items():
            if kind != "master_param" and self.content.tensors[key].shape == self.content.tensors[name].shape:
                yield kind

    def state_array(self, array: Mosaic, kind: str) -> Mosaic:
        """The array with each weight replaced by its state of that kind."""
        return array.renamed(lambda name: self.keys[name][kind])

    def master_aliases(self, names: Sequence[str]) -> dict[str, str]:
        """The masters of weights that are their own full-precision copies: master -> weight."""
        return {self.keys[name]["master_param"]: name for name in names if name in self.keys}

    def step_tensor(self, file: TorchFile, names: Sequence[str]) -> Call:
        """Add the step count of these weights to the file: that of the first weight with a step count, or else `step`."""
        keys = self._step_keys_of(names)
        if not keys:
            return file.tensor(step_count(STEP, self.step))
        return file.whole(keys[0], self.content.tensors[keys[0]])

    def step_aliases(self, names: Sequence[str]) -> dict[str, str]:
        """The step counts of these weights that are not stored -> the step count that `step_tensor` stores for all of them."""
        keys = self._step_keys_of(names)
        return dict.fromkeys(keys[1:], keys[0]) if keys else {}

    def _step_keys_of(self, names: Sequence[str]) -> list[str]:
        return [self.keys[name][STEP] for name in dict.fromkeys(names) if STEP in self.keys.get(name, {})]

    def group_settings(self, names: Sequence[str], *, is_decayed: bool, is_expert: bool) -> dict[str, Any]:
        """The settings of a param group of these weights: those of the source's group of the first weight that is in one."""
        groups = self.content.param_groups()
        group = next((group for name in names for group in groups if name in group.names), groups[0] if groups else None)
        flags = {"wd_mult": 1.0 if is_decayed else 0.0, "lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False}
        source = plain_settings(group.settings) if group else {}
        return {**_ADAM, "default_config": True, **flags, **source, "is_expert_parallel": is_expert, STEP: self.step}
