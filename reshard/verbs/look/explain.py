"""The verb `explain`: which mistake turned the right checkpoint into the wrong one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Unpack

import numpy as np

from reshard.canonical.content import Selection
from reshard.engine.compare import Side
from reshard.engine.views import LazyTensor, View
from reshard.geometry.quantities import plural
from reshard.geometry.sections import whole
from reshard.geometry.value import mutable, value
from reshard.index.fold import folded_name, name_pattern
from reshard.index.name_parts import layer_of, part_of_layer
from reshard.measures.mistakes import column_mistake, row_mistake, shape_mistake, stale_part, value_mistakes
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, PathLike, checked_keywords
from reshard.opening.open import opened
from reshard.storage.trees import JoinedFiles
from reshard.verbs.look.diff import diff
from reshard.verbs.verify import sides_of

_DIFFERENT = ("values", "shape", "dtype")


@value
class Mistake:
    """One mistake, which explains every bit of these tensors."""

    JSON = "text name tensors"

    text: str
    """What was done, such as "holds mlp.up_proj.weight"."""
    tensors: tuple[str, ...]
    """The tensors that it explains."""

    @property
    def name(self) -> str:
        """One name for them, with ranges in place of their numbers."""
        patterns: dict[str, list[str]] = {}
        for name in self.tensors:
            patterns.setdefault(name_pattern(name), []).append(name)
        return ", ".join(map(folded_name, patterns.values()))


@mutable
class Explanation:
    """Why two checkpoints differ."""

    JSON = "equal tensors mistakes unexplained missing brought"

    tensors: int = 0
    """The number of tensors that both have."""
    mistakes: list[Mistake] = field(default_factory=list)
    """The mistakes, those that explain most tensors first."""
    unexplained: list[str] = field(default_factory=list)
    """The tensors that differ and that no known mistake explains."""
    missing: list[str] = field(default_factory=list)
    """The tensors that only one of the checkpoints has."""
    brought: list[str] = field(default_factory=list)
    """The tensors that only one of them has because the adapter brings them, as the head of a classifier, or takes them away."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference to explain."""
        return not (self.mistakes or self.unexplained or self.missing)

    def __repr__(self) -> str:
        return f"Explanation({plural(len(self.mistakes), 'mistake')}, {len(self.unexplained):,} tensors unexplained)"


@checked_keywords
def explain(
    bad: Checkpoint | PathLike,
    good: Checkpoint | PathLike,
    *,
    adapter: Checkpoint | PathLike | None = None,
    selection: Selection | None = None,
    **options: Unpack[EffortOptions],
) -> Explanation:
    """The mistakes that explain why `bad` does not hold the weights of `good`, whatever their formats: tensors, rows or columns permuted,
    interleaved, exchanged or copied, matrices transposed, padding, a cast too many, norms off by one, a rank from another save.

    A mistake is named only if it explains every bit of a tensor. Memory is bounded by the largest tensor, not by a layer or a model:
    mistakes in values are found in parts of 2 million elements; those of rows with both sides of the tensor and one other tensor of its
    layer in memory; those of columns with both sides of the tensor and their transposes.

    adapter: `bad` is `good` with the LoRA adapter of this directory merged, by any program. The weights that it changes are compared with
    the right merge, within the roundings of their element type, and with wrong ones: scale forgotten, rsLoRA ignored, gate and up
    exchanged, experts read in another order, applied twice or never. An update that is smaller than the rounding tells nothing.
    """
    compared = diff(bad, good, selection=selection, **options)
    wrong_side, right_side = sides_of(bad, good, selection)
    wrong, right = _view(wrong_side), _view(right_side)
    different = list(dict.fromkeys(difference.name for difference in compared.differences if difference.kind in _DIFFERENT))
    result = Explanation(compared.tensors, missing=[lost.name for lost in compared.differences if lost.kind in ("missing", "extra")])
    by_text: dict[str, list[str]] = {}
    for name, text in ({} if adapter is None else _of_merge(wrong_side, right_side, opened(adapter))).items():
        if name in different:
            different.remove(name)
        if name in result.missing:
            result.missing.remove(name)
            result.brought += [name] if text == "" else []
        if text is None:
            result.unexplained.append(name)
        elif text:
            by_text.setdefault(text, []).append(name)
    stale: dict[tuple[int, int], list[str]] = {}
    moved = _moved_tensors(different, wrong, right)
    for name in different:
        text = moved.get(name) or _mistake(name, wrong, right, different)
        if text:
            by_text.setdefault(text, []).append(name)
            continue
        part = stale_part(wrong[name].words(), right[name].words()) if wrong[name].shape == right[name].shape else None
        if part:
            stale.setdefault(part[1:], []).append(name)
        else:
            result.unexplained.append(name)
    for (part_number, parts), names in stale.items():
        if len(names) > 1:  # one tensor may differ in such a part for any reason
            by_text[f"only part {part_number} of {parts} differs: the file of rank {part_number} is from another save"] = names
        else:
            result.unexplained += names
    result.mistakes = sorted((Mistake(text, tuple(names)) for text, names in by_text.items()), key=lambda mistake: -len(mistake.tensors))
    return result


def _of_merge(wrong: Side, base: Side, adapter: Checkpoint) -> dict[str, str | None]:
    """The mistake by which each weight that an adapter changes or takes away was merged: "" for none, None for one that is not known."""
    from reshard.measures.adapter_mistakes import adapter_mistakes
    from reshard.requests.adapters import adapter_in

    settings, tensors = adapter_in(adapter, "adapter")
    return adapter_mistakes(wrong, base, adapter.path, settings, tensors, JoinedFiles(base.files, [adapter.files]))


def _view(side: Side) -> View:
    tensors = side.content.tensors
    return View({name: whole(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, tensors, side.files)


def _moved_tensors(names: list[str], wrong: View, right: View) -> dict[str, str]:
    """The tensors that hold another whole tensor of the right checkpoint."""
    digests: dict[tuple[object, ...], str] = {}
    for name in names:
        digests.setdefault(_digest(right[name]), name)
    moved: dict[str, str] = {}
    for name in names:
        other = digests.get(_digest(wrong[name]))
        if other is not None and other != name:
            moved[name] = _placed(name, other)
    return moved


def _digest(tensor: LazyTensor) -> tuple[object, ...]:
    digest = hashlib.blake2b(digest_size=16)
    for part in tensor.parts():
        digest.update(part.words().reshape(-1).view(np.uint8).data)
    return tensor.shape, tensor.dtype.name, digest.digest()


def _placed(name: str, other: str) -> str:
    """The sentence for a tensor that holds another one."""
    if name_pattern(name) != name_pattern(other):
        if layer_of(name) != layer_of(other):
            return f"holds {other}"
        return f"holds {part_of_layer(other)}: the two are exchanged, or one was written twice"
    if layer_of(name) != layer_of(other) and layer_of(name) is not None:
        return f"layer {layer_of(name)} holds layer {layer_of(other)}"
    numbers = [pair for pair in zip(_numbers(name), _numbers(other), strict=True) if pair[0] != pair[1]]
    return "experts or ranks are permuted: " + ", ".join(f"{a} holds {b}" for a, b in numbers)


def _numbers(name: str) -> list[str]:
    return [word for word in name.split(".") if word.isdecimal()]


def _mistake(name: str, wrong: View, right: View, different: list[str]) -> str | None:
    """A mistake inside one tensor, or among the tensors of its layer."""
    if wrong[name].dtype != right[name].dtype:
        return None
    if wrong[name].shape == right[name].shape and (text := _value_mistake(wrong[name], right[name])):
        return text
    bad, good = wrong[name].words(), right[name].words()
    text = shape_mistake(bad, good)
    if bad.shape != good.shape:
        return text
    if text is None and bad.ndim > 1:
        group = {other: right[other].words for other in _neighbours(name, right, different)}
        text = row_mistake(name, bad, {name: lambda: good, **group}) or column_mistake(bad, good)
    return text and _without_layer(text, right)


def _value_mistake(wrong: LazyTensor, right: LazyTensor) -> str | None:
    """A mistake in single values, found part by part: where there is none, the first part rules all out."""
    mistakes: list[str] | None = None
    for bad, good in zip(wrong.parts(), right.parts(), strict=True):
        here = value_mistakes(bad.words(), good.words(), right.dtype)
        mistakes = here if mistakes is None else [text for text in mistakes if text in here]
        if not mistakes:
            return None
    return mistakes[0] if mistakes else None


def _neighbours(name: str, right: View, different: list[str]) -> Iterator[str]:
    """The other tensors that differ in the same layer and expert, with rows of the same length."""
    tensor = right[name]
    numbers = _numbers(name)
    for other in different:
        if (
            other != name
            and _numbers(other) == numbers
            and right[other].shape[1:] == tensor.shape[1:]
            and right[other].dtype == tensor.dtype
        ):
            yield other


def _without_layer(text: str, right: Mapping[str, LazyTensor]) -> str:
    """The sentence with names that are the same in every layer."""
    words = [part_of_layer(word) if word.rstrip(",") in right else word for word in text.split(" ")]
    return " ".join(words)


def summary_of(explanation: Explanation) -> str:
    """The result in one line."""
    if explanation.equal:
        return f"equal: {plural(explanation.tensors, 'tensor')}, nothing to explain"
    explained = sum(len(mistake.tensors) for mistake in explanation.mistakes)
    return f"{plural(len(explanation.mistakes), 'mistake')} found: {explained:,} tensors explained, {len(explanation.unexplained):,} not"
