"""Mistakes of a merge of a LoRA adapter: which other reading of the adapter gives the wrong weights.

Each mistake is an adapter like the right one, or none, merged into the same base and compared with the wrong weights. A program that merges
rounds the product, the sum, or both, and adds the terms in its own order. So a tensor fits a reading if each element lies within these
roundings of it. Where an update is smaller than the rounding, several readings fit a tensor. Then the reading is taken that fits most
tensors, and of those the nearest one. Mistakes that were made together are tried for the tensors that no single one explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np

from reshard.canonical.adapters.base import AdaptedBase
from reshard.canonical.adapters.heads import with_own_head
from reshard.canonical.adapters.reading import read_adapter
from reshard.canonical.adapters.updates import Adapter, BiasUpdate, Update
from reshard.canonical.content import Content
from reshard.canonical.lora import LoraSettings
from reshard.canonical.merging import with_updates
from reshard.engine.compare import Side
from reshard.engine.views import LazyTensor, View
from reshard.geometry.dtypes import BF16, F16, F32, DType
from reshard.geometry.low_rank import Float32
from reshard.geometry.sections import whole
from reshard.index.index import Tensor
from reshard.index.origin import Merged
from reshard.index.provenance import MergedAdapter
from reshard.storage.files import Files

RIGHT = ""
"""The reading that is no mistake."""
_SLOWEST = "lora_B of the experts was read expert-slowest, as by Unsloth before September 2026; PEFT has the expert fastest"
_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
# The largest relative error of one rounding.
_ROUNDING = {BF16.name: 2.0**-8, F16.name: 2.0**-11, F32.name: 2.0**-24}
# The largest error of the terms of B x A, added in float32 in another order, in parts of the largest element of the update.
_ORDER = 2.0**-20


def adapter_mistakes(
    wrong: Side, base: Side, path: str, settings: LoraSettings, tensors: Mapping[str, Tensor], files: Files
) -> dict[str, str | None]:
    """The mistake by which each weight that an adapter changes was merged: RIGHT for none, None for one that is not known. RIGHT also for
    weights of the base that the right merge does not have, and the wrong one neither.

    wrong: the weights after the merge. base: the weights before it. path, settings, tensors: the adapter. files: those of base and adapter.
    """
    content, tensors = with_own_head(base.content, settings, tensors)
    readings = _Readings(content, path, settings, tensors)
    right = readings.merged(readings.right)
    changed = [name for name, tensor in right.tensors.items() if tensor is not base.content.tensors.get(name)]
    held = wrong.content.tensors
    names = [name for name in changed if name in held and held[name].shape == right.tensors[name].shape]
    bad = _view(held, names, wrong.files)
    before = _view({name: _before(right.tensors[name], content.tensors[name]) for name in names}, names, files)
    result: dict[str, str | None] = dict.fromkeys(names)
    for number in range(1, readings.most + 1):
        left = [name for name in names if result[name] is None]
        views = {RIGHT: _view(right.tensors, left, files)} if left else {}
        views |= {text: _view(readings.merged(adapter).tensors, left, files) for text, adapter in readings.with_mistakes(number) if left}
        views |= {"the adapter was never applied": before} if number == 1 else {}
        result |= _explained(
            {name: _fitting(bad[name], before, {text: view[name] for text, view in views.items()}, held[name].dtype) for name in left}
        )
    gone = base.content.tensors.keys() - right.tensors.keys() - held.keys()
    return result | dict.fromkeys(sorted(gone), RIGHT)


class _Readings:
    """The right reading of an adapter, and the wrong ones: mistakes of each kind are made alone, or together with those of other kinds."""

    def __init__(self, content: Content, path: str, settings: LoraSettings, tensors: Mapping[str, Tensor]) -> None:
        self._content, self._path, self._settings = content, path, settings
        base = AdaptedBase(content.model, content, path, settings.config.get("base_model_name_or_path"))
        self.right = read_adapter(base, settings, tensors)
        slowest = read_adapter(base, settings, tensors, expert_slowest=True)
        self._kinds: tuple[dict[str, Callable[[Adapter], Adapter]], ...] = (
            {_SLOWEST: lambda _: slowest},
            {"gate and up were exchanged": lambda adapter: replace(adapter, updates=tuple(_exchanged(adapter.updates, base)))},
            {text: partial(_scaled, scale_of) for text, scale_of in _wrong_scales(settings)},
            {"the adapter was applied twice": lambda adapter: replace(adapter, updates=(*adapter.updates, *adapter.updates))},
        )
        self.most = len(self._kinds)
        """The largest number of mistakes that are made together."""

    def with_mistakes(self, number: int) -> Iterator[tuple[str, Adapter]]:
        """Yield the readings with `number` mistakes, each with a description of its mistakes."""
        for kinds in combinations(self._kinds, number):
            for mistakes in product(*(kind.items() for kind in kinds)):
                adapter = self.right
                for _, mistake in mistakes:
                    adapter = mistake(adapter)
                yield ", and ".join(text for text, _ in mistakes), adapter

    def merged(self, adapter: Adapter) -> Content:
        """The base with a reading merged."""
        base = AdaptedBase(self._content.model, self._content, self._path, None)
        return with_updates(self._content, base, adapter, MergedAdapter(self._path, self._settings.config, 0))


def _wrong_scales(settings: LoraSettings) -> Iterator[tuple[str, Callable[[Update], float]]]:
    """Mistakes in the scale of an update, and the scale that they give."""
    alpha, is_rslora = settings.config.get("lora_alpha"), settings.config.get("use_rslora")
    yield "the scale was forgotten: B x A was added without alpha / r", lambda update: 1.0
    if is_rslora:
        yield "rsLoRA was ignored: the scale is alpha / r instead of alpha / sqrt(r)", lambda update: update.alpha / update.rank
    else:
        text = "the scale is that of rsLoRA, alpha / sqrt(r), and use_rslora is not set"
        yield text, lambda update: update.alpha / math.sqrt(update.rank)
    if settings.config.get("alpha_pattern") and isinstance(alpha, int | float):
        yield "alpha_pattern was ignored: alpha is lora_alpha everywhere", lambda update: update.scale / update.alpha * alpha


def _scaled(scale_of: Callable[[Update], float], adapter: Adapter) -> Adapter:
    """The adapter with other scales of its matrices."""
    scaled = (replace(update, scale=scale_of(update)) if isinstance(update, Update) else update for update in adapter.updates)
    return replace(adapter, updates=tuple(scaled))


def _exchanged(updates: Iterable[Update | BiasUpdate], base: AdaptedBase) -> Iterator[Update | BiasUpdate]:
    """The updates with those of gate and up in each other's place."""
    by_module = {update.module: update for update in updates if isinstance(update, Update)}
    for update in updates:
        before, _, name = update.module.rpartition(".") if isinstance(update, Update) else ("", "", "")
        other = by_module.get(f"{before}.{_OTHER_HALF.get(name)}")
        if isinstance(update, Update) and name == "gate_up_proj":
            half = update.b.shape[0] // 2
            firsts, step = ((0, 1), 2) if base.alternates(update.array) else ((0, half), 1)
            for first, place in zip(firsts, reversed(firsts), strict=True):
                yield replace(update.rows(first, half, step, update.module), first_row=place)
        elif isinstance(update, Update) and other is not None and other.b.shape == update.b.shape:
            yield replace(update, array=other.array, first_row=other.first_row, row_step=other.row_step)
        else:
            yield update


def _before(merged: Tensor, base: Tensor) -> Tensor:
    """A weight before its updates: the base's, or a table of another number of tokens that the adapter holds."""
    own = merged.origin.base if isinstance(merged.origin, Merged) else merged
    return base if own.shape == base.shape else own


def _view(tensors: Mapping[str, Tensor], names: Iterable[str], files: Files) -> View:
    """The values of tensors in float32, not rounded to the element type."""
    return View({name: whole(name, F32, tensors[name].shape) for name in names}, tensors, files)


def _fitting(bad: LazyTensor, before: View, readings: Mapping[str, LazyTensor], dtype: DType) -> dict[str, float]:
    """The readings that a tensor fits, each with the sum of the squares of the differences; without those that equal the right one here."""
    fits, same = dict.fromkeys(readings, 0.0), set(readings) - {RIGHT}
    rounding = _ROUNDING.get(dtype.name, 0.0) * 1.01
    parts = zip(bad.parts(), before[bad.name].parts(), *(tensor.parts() for tensor in readings.values()), strict=True)
    for held, base, *candidates in parts:
        wrong, start = _numbers(held), _numbers(base)
        right = _numbers(candidates[0])
        for text, candidate in zip(readings, candidates, strict=True):
            expected = _numbers(candidate)
            if text != RIGHT and not np.array_equal(expected, right):
                same.discard(text)
            if text in fits:
                update, error = np.abs(expected - start), np.abs(wrong - expected)
                allowed = rounding * (np.abs(expected) + update) + _ORDER * update.max(initial=0)
                fits[text] += float(np.square(error, dtype=np.float64).sum())
                if not (error <= allowed).all():
                    del fits[text]
        if not fits:
            break
    return {text: error for text, error in fits.items() if text not in same}


def _numbers(tensor: LazyTensor) -> Float32:
    return tensor.words().view(np.float32)


def _explained(fits: Mapping[str, Mapping[str, float]]) -> dict[str, str | None]:
    """The reading by which each tensor was made: again and again the one that fits most of the tensors that are left."""
    result: dict[str, str | None] = dict.fromkeys(fits)
    left = dict(fits)
    while texts := {text for own in left.values() for text in own}:
        own = {text: [name for name in left if text in left[name]] for text in texts}
        rank = {text: (-len(names), sum(left[name][text] for name in names)) for text, names in own.items()}
        best = min(rank.values())
        chosen = sorted(text for text in texts if rank[text] == best)
        names = own[chosen[0]]
        result |= dict.fromkeys(names, RIGHT if RIGHT in chosen else "; or ".join(chosen))
        left = {name: tensor for name, tensor in left.items() if name not in names}
    return result
