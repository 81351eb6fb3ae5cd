"""What a caller asks for, as values: a verb turns its keywords into a request first, and planning makes a draft of it, step by step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from reshard.adapter import registry
from reshard.adapter.format import ADAPTER, Format, Option
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content, Selection
from reshard.canonical.globs import as_globs
from reshard.errors import RequestError, choices
from reshard.geometry import dtypes
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import Index
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import Combination, CombiningOptions, ManyPlanOptions, PathLike, SelectionOptions, take, unknown_keyword
from reshard.opening.open import adapter_of
from reshard.plans.layout import Layout, Target
from reshard.plans.summary import kinds as kinds_of
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.canonical.combining import Formula

OWN_ADAPTER = "self"
"""The value of --merge-adapter for the adapter that the checkpoint itself holds."""


@value
class ConversionRequest:
    """The target that a conversion is asked to write, independent of the source."""

    to: Format
    """The target format."""
    target: Target
    """What the format lays out."""
    selection: Selection
    """Which tensors are meant."""
    quantize: str
    """The form to which linear layers are quantized; empty: none."""
    requantize: str
    """The form, with the same values, in which quantized weights are stored; empty: their own."""
    dequantize: bool = False
    """Whether quantized weights become values."""
    merge_adapter: tuple[PathLike, ...] = ()
    """The directories of the LoRA adapters to merge into the weights, in order; "self": the checkpoint's own."""
    adapter_weights: tuple[float, ...] = ()
    """The factor of the updates of each of them."""
    combine: str = "cat"
    """How several of them become one: "cat" adds their updates, "linear" their factors."""
    drop_adapter: bool = False
    """Whether the checkpoint's own LoRA adapter is left out."""
    formula: Formula | None = None
    """How several sources become one; None: there is one source."""
    quantization: Mapping[str, Any] | None = None
    """The quantization_config of the form `quantize`, where the target has one already; None: that with which it is written."""

    @staticmethod
    def of(to: str, given: Mapping[str, Any]) -> ConversionRequest:
        """The request from the keywords of `plan`. A keyword that is not declared here is an option of the format `to`.

        Raises: RequestError for a format that is not written, an option that it does not know, or a value of the wrong type.
        """
        format, rest = registry.target(to), dict(given)
        sizes = {axis: rest.pop(axis, 1) for axis in ("tp", "pp", "ep", "dp")}
        dtype = dtype_named(rest.pop("dtype", None))
        _check_one_form(rest)
        kept, allow_overflow = kept_globs(rest.pop("keep_dtype", ()), dtype), rest.pop("allow_overflow", False)
        target = Target(format.name, Parallel(**sizes), dtype, kept, allow_overflow=bool(allow_overflow))
        quantize = _form(rest.pop("quantize", None), "`quantize=`")
        requantize = _form(rest.pop("requantize", None), "`requantize=`")
        about = {name: rest.pop(name) for name in ("dequantize", "drop_adapter") if name in rest}
        merged, weights = _adapters(rest.pop("merge_adapter", None), rest.pop("adapter_weight", None))
        combination = _combination(rest.pop("combine", None), merged)
        formula = formula_of(take(rest, CombiningOptions))
        selection, only_rank = selection_of(rest), rest.pop("only", None) or {}
        options = _options_of(format, rest, ADAPTER if OWN_ADAPTER in merged else ())
        target = replace(target, options=options, only_rank=only_rank)
        adapters: dict[str, Any] = {"merge_adapter": merged, "adapter_weights": weights, "combine": combination}
        return ConversionRequest(format, target, selection, quantize, requantize, **about, **adapters, formula=formula)

    @property
    def merges_own_adapter(self) -> bool:
        """Whether the adapter that the checkpoint holds is merged into its weights."""
        return OWN_ADAPTER in self.merge_adapter

    def adapters_for(self, base: Checkpoint) -> tuple[Checkpoint, ...]:
        """The adapters to merge into a base, opened, without the one that the base holds."""
        return tuple(adapter_of(base, path) for path in self.merge_adapter if path != OWN_ADAPTER)


@value(eq=False)
class Draft:
    """A conversion that is being planned."""

    source: Checkpoint
    """The opened source."""
    request: ConversionRequest
    """What is asked for."""
    adapters: tuple[Checkpoint, ...]
    """The LoRA adapters to merge, without the source's own."""
    others: tuple[Checkpoint, ...]
    """The checkpoints that the source is combined with."""
    selection: Selection
    """Which tensors are taken."""
    companions: ModelFiles
    """The config, the tokenizer and the adapter's settings that go with the target."""
    index: Index
    """What is read, under the names that the target has."""
    files: Files
    """The files of `index`."""
    content: Content
    """The tensors to be written, and those that are left out; empty until `select`."""
    kept_for: frozenset[str] = frozenset()
    """Names of tensors that are never cast: quantized weights and their scales."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the plan."""
    layout: Layout | None = None
    """The files of the target; None until `lay_out`."""

    @staticmethod
    def of(source: Checkpoint, request: ConversionRequest, adapters: Sequence[Checkpoint] = (), others: Sequence[Checkpoint] = ()) -> Draft:
        """The draft before its first step. adapters: the opened ones of `merge_adapter`. others: what the source is combined with."""
        content, files = Content({}, (), source.model), source.model_files
        return Draft(
            source,
            request,
            tuple(adapters),
            tuple(others),
            request.selection,
            files,
            source.index,
            source.files,
            content,
            notes=files.notes,
        )

    @property
    def target(self) -> Target:
        """What the format lays out."""
        return replace(self.request.target, dtype_kept_for=self.kept_for)

    def noting(self, *notes: str) -> Draft:
        """The draft with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def __repr__(self) -> str:
        made = f"laid out in {plural(len(self.layout.files), 'file')}" if self.layout else "not laid out"
        chosen = f"{plural(len(self.content.tensors), 'tensor')} of {len(self.index.tensors)}"
        return f"Draft({self.source.format} -> {self.request.to.name}, {chosen}, {plural(len(self.notes), 'note')}, {made})"


def _adapters(
    paths: PathLike | Sequence[PathLike] | None, weights: float | Sequence[float] | None
) -> tuple[tuple[PathLike, ...], tuple[float, ...]]:
    """The adapters that are merged, and their weights. Raises RequestError if the numbers of the two differ, or `self` is not the first."""
    merged = (paths,) if isinstance(paths, str | os.PathLike) else tuple(paths or ())
    given = (weights,) if isinstance(weights, int | float) else tuple(weights or ())
    if given and len(given) != len(merged):
        raise RequestError(
            f"`adapter_weight=` is given for {plural(len(given), 'adapter')}, `merge_adapter=` names {len(merged)}",
            do="Give one weight for each adapter, in the same order",
        )
    if not all(map(math.isfinite, given)):
        raise RequestError(f"`adapter_weight={min(given)}`: a finite number is expected")
    if OWN_ADAPTER in merged[1:]:
        raise RequestError(
            f"`merge_adapter={OWN_ADAPTER}` comes after another adapter",
            why="Updates are added in order, and the checkpoint's own adapter is merged when its weights are read",
            do="Name it first",
        )
    return merged, tuple(map(float, given)) or (1.0,) * len(merged)


def _combination(asked: str | None, adapters: Sequence[PathLike]) -> str:
    """How adapters become one. Raises RequestError for another way, or if there are not several."""
    if asked not in (None, *get_args(Combination)):
        others = "PEFT's ways that drop values at random are not repeated, and svd and ties do not have its bits"
        raise RequestError(f"`combine={asked}`: no such way", why=others, do=choices(str(asked), get_args(Combination)))
    if asked and len(adapters) < 2:
        raise RequestError(
            f"`combine={asked}`: {plural(len(adapters), 'adapter')} cannot be combined", do="Name several with `merge_adapter=`"
        )
    return asked or "cat"


def cast_of_server(index: Index, served: str | None) -> str | None:
    """The element type to which a server casts the weights of a checkpoint, if it serves this type; None if it does not cast them."""
    kinds = [row for row in kinds_of(index) if row.kind in ("weight", "master")]
    stored = dtypes.from_user(max(kinds, key=lambda row: row.nbytes).dtype) if kinds else None
    held = dtypes.from_user(served) if served else None
    return served if stored and held and stored != held and stored.floating and stored.itemsize > 1 else None


def _check_one_form(given: Mapping[str, Any]) -> None:
    """Raises RequestError if several options say how quantized weights are stored."""
    named = [f"`{name}=`" for name in ("dequantize", "quantize", "requantize") if given.get(name)]
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)}: each says in which form weights are stored", do="Give one of them")


def _form(name: str | None, option: str) -> str:
    """The form that --quantize or --requantize names; empty for none. Raises RequestError for another name."""
    if name is None:
        return ""
    from reshard.canonical.quantizing import NEED_DATA, QUANTIZE, REQUANTIZE

    known = REQUANTIZE if "requantize" in option else QUANTIZE
    if need := NEED_DATA.get(name.lower()):
        raise RequestError(
            f"{option} {name}: {need} follow from activations, which the model has only on data",
            why="reshard computes what follows from the weights alone",
            do=f"Quantize with the library that calibrates it; without data there are {', '.join(known)}",
        )
    if name not in known:
        raise RequestError(f"{option} {name}: no such form", do=choices(name, known))
    return name


def formula_of(given: Mapping[str, Any]) -> Formula | None:
    """How several sources become one, from the keywords of CombiningOptions; None if none of them is given.

    Raises: RequestError if they contradict each other, or do not say the weights.
    """
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    if not chosen:
        return None
    from reshard.canonical.combining import Formula

    slerp, any_sum = chosen.get("slerp"), bool(chosen.get("any_sum"))
    needs = "`task_arithmetic=`" if "task_arithmetic" in chosen else "`last=`" if "last" in chosen else "`any_sum=True`"
    if slerp is not None:
        if others := sorted(chosen.keys() & {"average", "task_arithmetic", "any_sum"}):
            raise RequestError(f"`slerp=` and `{others[0]}=` contradict each other", do="Give one of them")
        if not 0 <= slerp <= 1:
            raise RequestError(f"`slerp={slerp}`: a number from 0, the first source, to 1, the second, is expected")
        return Formula("slerp", (1.0 - float(slerp), float(slerp)))
    if "average" not in chosen:
        raise RequestError(
            f"{needs} without `average=`",
            why="Nothing says what each checkpoint weighs",
            do="Add `average=` with the weight of each, such as 0.5,0.5, or without a value for equal weights",
        )
    asked = Formula.averaging(chosen["average"])
    return Formula("task-arithmetic" if "task_arithmetic" in chosen else "average", asked, any_sum)


def selection_of(given: dict[str, Any]) -> Selection:
    """The Selection from the keywords of SelectionOptions, which are removed from `given`."""
    return Selection(**take(given, SelectionOptions))


def kept_globs(given: str | Iterable[str], dtype: DType | None) -> tuple[str, ...]:
    """The globs of --keep-dtype. Raises RequestError if there are some, and no `dtype` to which other tensors are cast."""
    globs = as_globs(given)
    if globs and dtype is None:
        raise RequestError(
            f"`keep_dtype=` '{globs[0]}' without `dtype=`",
            why="Without `dtype=` no tensor is cast",
            do="Leave it out, or name the element type of the other tensors with `dtype=`",
        )
    return globs


def dtype_named(name: str | None, option: str = "`dtype=`") -> DType | None:
    """The floating-point type of that name; None for None. Raises RequestError, listing the usual names, if there is none."""
    if name is None:
        return None
    dtype = dtypes.from_user(name)
    if dtype is None or not dtype.floating:
        known = choices(name, dtypes.FLOATING_WORDS, nearest_of=dtypes.FLOATING_SPELLINGS)
        raise RequestError(f"{option} {name}: not a floating-point type", do=known)
    return dtype


def _options_of(target: Format, given: Mapping[str, Any], others: Sequence[Option]) -> dict[str, Any]:
    """The target's own options and `others`, parsed. An option whose value is None counts as not given."""
    known = {option.name: option for option in (*target.options, *others)}
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            raise _unknown_option(target, name)
        parsed[name] = known[name].parse(value)
    return parsed


def _unknown_option(target: Format, name: str) -> RequestError:
    options = {option.name: users for option, users in registry.options().items()}
    if name in options:
        return RequestError(
            f"`{name}=` does not apply to {target.name}", why=f"It is an option of {', '.join(options[name])}", do="Leave it out"
        )
    return unknown_keyword(name, [*ManyPlanOptions.__annotations__, *options])
