"""Combining checkpoints, described but not computed: each tensor gets the same tensor of the other checkpoints attached, with the weights,
and the values are computed when it is read (engine/origins/mixed.py has the formulas).

    average             sum of w*x        equal weights, given ones, or those that a window of a run gets (WSM, EMA)
    task-arithmetic     base + sum of w*(x - base)
    slerp               two checkpoints, along the arc between them

Inputs may have different formats and degrees: they are joined by canonical name. Weights are computed as exact numbers and rounded once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from reshard.canonical.content import Content
from reshard.errors import RequestError, UnsupportedError, choices
from reshard.geometry import precise
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.origin import Mixed, Rule, Tensor
from reshard.index.shards import Relocation
from reshard.models.lookup import changed_keys

EQUAL = "equal"
"""The weights of `--average` without a value: 1/n each."""
SCHEDULES = ("linear", "1-sqrt", "cosine")
"""What `wsm:` emulates: how a learning rate would have decayed over the window."""
# What the sum of given weights may differ from 1: decimals such as 0.333333333 that stand for a third.
_SUM_TOLERANCE = 1e-9


@value
class Formula:
    """How several checkpoints become one."""

    rule: Rule
    """The rule."""
    asked: str | tuple[float, ...] = EQUAL
    """The weights, or by what they follow from the number of inputs: "equal", "wsm:linear", "ema:0.99". Of slerp: (1 - t, t)."""
    any_sum: bool = False
    """Whether weights may have another sum than 1."""

    @staticmethod
    def averaging(asked: object) -> str | tuple[float, ...]:
        """The weights that `average=` asks for. Raises RequestError if it is not understood."""
        if asked is True:
            return EQUAL
        if isinstance(asked, str):
            return asked if asked == EQUAL or ":" in asked else tuple(float(_number(word, asked)) for word in asked.split(","))
        if isinstance(asked, Sequence):
            return tuple(float(_number(str(each), str(list(asked)))) for each in asked)
        raise _not_understood(str(asked))

    def weights(self, inputs: int) -> tuple[float, ...]:
        """The weight of each input; of task arithmetic, that of the base first, which is 1 and not used.

        Raises: RequestError if there are not as many weights as inputs, or their sum is not 1.
        """
        if self.rule == "slerp":
            if inputs != 2:
                raise RequestError(f"`slerp=` goes between two checkpoints, and {inputs} are given", do="Give two")
            assert not isinstance(self.asked, str)
            return self.asked
        if self.rule == "task-arithmetic":
            return (1.0, *self._weights(inputs - 1))
        found = self._weights(inputs)
        total = math.fsum(found)
        if abs(total - 1) > _SUM_TOLERANCE and not self.any_sum:
            raise RequestError(
                f"`average=`: the sum of the weights is {total!r}",
                why="An average has weights whose sum is 1; other sums make all weights of the model larger or smaller",
                do="Correct them, or say `any_sum=True`",
            )
        return found

    def _weights(self, inputs: int) -> tuple[float, ...]:
        if isinstance(self.asked, tuple):
            if len(self.asked) != inputs:
                raise RequestError(
                    f"`average=`: {plural(len(self.asked), 'weight')} for {plural(inputs, 'checkpoint')}", do="Give one each"
                )
            return self.asked
        kind, _, setting = self.asked.partition(":")
        if kind == EQUAL and not setting:
            return (1 / inputs,) * inputs
        if kind == "wsm":
            return wsm_weights(setting, inputs)
        if kind == "ema":
            return ema_weights(_number(setting, self.asked), inputs)
        raise _not_understood(self.asked)

    @property
    def text(self) -> str:
        """What is asked for, as text: "equal", "wsm:linear", "0.25, 0.75"."""
        return self.asked if isinstance(self.asked, str) else ", ".join(map(str, self.asked))

    def __str__(self) -> str:
        return f"{self.rule} ({self.text})"


def wsm_weights(schedule: str, inputs: int) -> tuple[float, ...]:
    """The weights of a window of checkpoints, the oldest first, that emulate a decay of the learning rate: s(i/n) - s((i+1)/n) for input i.

    schedule: the decay s; "linear" is 1 - x, "1-sqrt" is 1 - sqrt(x), "cosine" is (1 + cos(pi x)) / 2.

    Raises: RequestError for another schedule. Source: WSM (arXiv 2507.17634), as Megatron-LM's merge of checkpoints has it.
    """
    decays: dict[str, Callable[[Fraction], Fraction]] = {
        "linear": lambda x: 1 - x,
        "1-sqrt": lambda x: 1 - Fraction(precise.root(x)),
        "cosine": lambda x: (1 + Fraction(precise.cosine(precise.pi_times(x)))) / 2,
    }
    if schedule not in decays:
        raise RequestError(f"`average=wsm:{schedule}`: no such decay", do=choices(schedule, SCHEDULES))
    values = [decays[schedule](Fraction(i, inputs)) for i in range(inputs + 1)]
    return tuple(float(here - after) for here, after in pairwise(values))


def ema_weights(d: Fraction, inputs: int) -> tuple[float, ...]:
    """The weights of an exponential moving average, the oldest first: d^(n-1) for the first input, (1 - d) d^(n-1-i) for input i.

    Raises: RequestError unless the decay lies between 0 and 1.
    """
    if not 0 < d < 1:
        raise RequestError(f"`average=ema:{float(d):g}`: the decay is a number between 0 and 1, such as 0.99")
    return (float(d ** (inputs - 1)), *(float((1 - d) * d ** (inputs - 1 - i)) for i in range(1, inputs)))


def _number(word: str, asked: str) -> Fraction:
    """The exact number that a word such as 0.2, 1/3 or 5e-1 stands for. Raises RequestError for another word."""
    if not re.fullmatch(
        r"-?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[-+]?\d{1,2})?|-?\d{1,30}/\d{0,29}[1-9]\d{0,29}", word.strip(), re.IGNORECASE
    ):
        raise _not_understood(asked)
    return Fraction(word.strip())


def _not_understood(asked: str) -> RequestError:
    return RequestError(
        f"`average={asked}`: not weights",
        why="Without a value all checkpoints weigh the same; a value is the weight of each, or how weights follow from their order",
        do="Give numbers such as 0.2,0.3,0.5, or wsm:linear, wsm:1-sqrt, wsm:cosine, ema:0.99; put `average=` without a value last",
    )


# ---- contents ----


@value(eq=False)
class CombinedCheckpoint:
    """One of the checkpoints that are combined."""

    path: str
    """Its path, as the caller gave it."""
    content: Content
    """Its tensors."""
    relocation: Relocation | None = None
    """Gives its files their paths in the joined tree; None for the first checkpoint, whose files keep their paths."""

    def tensor(self, name: str) -> Tensor:
        """A tensor under the paths of the joined tree."""
        return self.relocated(self.content.tensors[name])

    def relocated(self, tensor: Tensor) -> Tensor:
        """A tensor of this checkpoint under the paths of the joined tree."""
        if self.relocation is None:
            return tensor
        return replace(tensor, shards=self.relocation.of(tensor.shards), origin=tensor.origin.with_inputs(self.relocated))


def combined(checkpoints: Sequence[CombinedCheckpoint], formula: Formula, stored_as: Callable[[Tensor], DType]) -> Content:
    """The content of the first checkpoint, with the tensors of the others attached to it.

    stored_as: the element type in which the target stores a tensor.

    Raises: RequestError if the checkpoints are of different models, or a tensor has different types and no type for the result is named;
    UnsupportedError for tensors that hold functions of weights.
    """
    first, *others = checkpoints
    for other in others:
        _check_same_model(first, other)
    weights, rule, paths = formula.weights(len(checkpoints)), formula.rule, tuple(each.path for each in checkpoints)
    tensors = {}
    for name, tensor in first.content.tensors.items():
        inputs = tuple(each.tensor(name) for each in checkpoints)
        _check_types(inputs, paths, stored_as)
        of_rule: Rule = rule if tensor.dtype.floating or tensor.is_computed else "equal"
        tensors[name] = replace(tensor, origin=Mixed(of_rule, inputs, paths, weights))
    drops = tuple(drop for each in checkpoints for drop in each.content.drops)
    tied = tuple(name for each in checkpoints for name in each.content.tied)
    # The digests that reshard recorded are those of single checkpoints.
    return replace(first.content, tensors=tensors, drops=drops, tied=tied, recorded=dict)


def _check_same_model(first: CombinedCheckpoint, other: CombinedCheckpoint) -> None:
    """Raises RequestError, with the first tensor that only one has or that has two shapes, if two checkpoints are of different models."""
    ours, theirs = first.content, other.content
    for name in ours.tensors.keys() ^ theirs.tensors.keys():
        lacking, having = (other, first) if name in ours.tensors else (first, other)
        raise RequestError(
            f"{lacking.path} has no such tensor, {having.path} has it",
            where=min(name for name in having.content.tensors if name not in lacking.content.tensors),
            why=_reason(first, other) or "Checkpoints are combined tensor by tensor, so each must have the same",
            do="Give checkpoints of one model; `exclude=` leaves a tensor out of all of them",
            id="source-mixed",
        )
    for name, tensor in ours.tensors.items():
        if (shape := theirs.tensors[name].shape) != tensor.shape:
            raise RequestError(
                f"its shape is {list(tensor.shape)} in {first.path}, and {list(shape)} in {other.path}",
                where=name,
                why=_reason(first, other) or "Checkpoints are combined element by element",
                do="Give checkpoints of one model with one vocabulary",
                id="source-mixed",
            )
    if reason := _reason(first, other):
        raise RequestError(
            f"{other.path} is of another model than {first.path}",
            why=reason,
            do="Give checkpoints of one model, or the right config for all with `model=DIR` `model_wins=True`",
            id="source-mixed",
        )


def _reason(first: CombinedCheckpoint, other: CombinedCheckpoint) -> str:
    """Which settings give the models of two checkpoints different weights; empty if none does, or a model is not known."""
    ours, theirs = first.content.model, other.content.model
    if ours is None or theirs is None:
        return ""
    changed = changed_keys(ours.config, theirs.config, ours.architecture)
    return f"Their configs differ: {', '.join(map(str, changed))}" if changed else ""


def _check_types(inputs: Sequence[Tensor], paths: Sequence[str], stored_as: Callable[[Tensor], DType]) -> None:
    """Raises RequestError unless the inputs have values of one kind, and lead to one element type of the result."""
    first = inputs[0]
    if first.dtype.function:
        raise UnsupportedError(
            f"{paths[0]} holds {first.dtype.function} of this weight",
            where=first.name,
            why="The mean of a function is not the function of the mean",
            do="Combine the checkpoints that it was made from",
        )
    for other, path in zip(inputs[1:], paths[1:], strict=True):
        if stored_as(other) != stored_as(first) or other.dtype.function:
            raise RequestError(
                f"it is {first.dtype} in {paths[0]}, and {other.dtype} in {path}",
                where=first.name,
                why="Nothing says which of the two the result has",
                do="Name the element type of the result with `dtype=`, such as `dtype=bf16`",
            )


def steps_note(steps: Sequence[int | None], formula: Formula) -> str | None:
    """A sentence if weights depend on the order, and the checkpoints are not in the order of their steps."""
    known = [step for step in steps if step is not None]
    if isinstance(formula.asked, str) and formula.asked != EQUAL and known != sorted(known):
        return f"the weights go by the order of the checkpoints, the oldest first, and their steps are {', '.join(map(str, known))}"
    return None
