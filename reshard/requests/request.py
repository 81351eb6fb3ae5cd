"""What a caller asks for, as values. The keywords that several verbs take are declared here once.

The TypedDicts type the keywords of the public functions, so that editors complete them and type checkers check them. A verb turns its
keywords into frozen values first, and passes these on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import wraps
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from reshard.adapter import registry
from reshard.adapter.format import ADAPTER, Format, Option
from reshard.canonical.content import Selection
from reshard.canonical.globs import as_globs
from reshard.canonical.quantizing import QUANTIZE, REQUANTIZE
from reshard.errors import RequestError, choices, nearest
from reshard.geometry import dtypes
from reshard.geometry.dtypes import DType
from reshard.geometry.parallel import Parallel
from reshard.geometry.value import value
from reshard.models.architecture import Architecture

PathLike = str | os.PathLike[str]
Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""
Weights = Literal["model", "master"]
Opened = TypeVar("Opened")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
OWN_ADAPTER = "self"
"""The value of --merge-adapter for the adapter that the checkpoint itself holds."""


class ModelOptions(TypedDict, total=False):
    """What the user says about the model of a checkpoint."""

    model: PathLike | None
    """A directory with the Hugging Face config, if the checkpoint has none."""
    model_wins: bool
    """Use the config of `model` even if it contradicts the checkpoint's own."""
    vocab_size: int | None
    """Vocabulary size without padding, if neither the checkpoint nor the config says it."""
    architecture: Architecture | PathLike | None
    """A declared model type, or a file that declares one, instead of the one that the config names."""
    stored_layout: PathLike | None
    """The learned layout that a serving engine's files follow, if none lies beside them."""


class OpenOptions(ModelOptions, total=False):
    """Keywords of `open`."""

    format: str | None
    """The format's name, instead of detecting it."""


class SelectionOptions(TypedDict, total=False):
    """Which tensors are meant. Globs match names after `strip_prefix` has been removed."""

    weights: Weights | None
    """The model's copy, or the optimizer's full-precision one (default: the model's where there is one)."""
    include: str | tuple[str, ...]
    """Only tensors whose names match one of these globs."""
    exclude: str | tuple[str, ...]
    """No tensors whose names match one of these globs."""
    strip_prefix: str
    """A prefix to remove from names first."""
    optimizer: bool
    """Also the optimizer state of the chosen weights."""
    root: str | None
    """Which of several models in the checkpoint, such as "ema" (default: the main one)."""
    keep_unknown: bool
    """Also run state, other models, and buffers that the model's architecture lacks."""
    drop_unknown: bool
    """No weights that the model's architecture lacks."""


class TargetOptions(TypedDict, total=False):
    """How the target is laid out. Options of one format, such as Megatron's `vp`, are accepted as further keywords."""

    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    ep: int
    """Expert-parallel size."""
    dp: int
    """Data-parallel ranks that share every tensor (FSDP, ZeRO-3)."""
    dtype: str | None
    """Cast floating-point weights to this type: bf16, fp16, fp32, fp8 ..."""
    keep_dtype: str | tuple[str, ...]
    """Globs of tensors that `dtype` does not cast."""
    dequantize: bool
    """Turn quantized weights into values, in `dtype` or bf16."""
    merge_adapter: PathLike | None
    """The directory of a LoRA adapter in PEFT's form, to be merged into the weights; "self": the adapter that the checkpoint holds."""
    drop_adapter: bool
    """Leave out the LoRA adapter that the checkpoint holds beside the weights."""
    quantize: str | None
    """Quantize linear layers from bf16: "fp8-block" or "mxfp4"."""
    requantize: str | None
    """Store quantized weights in another form that holds the same values: "fp8-block"."""
    max_shard_size: int | str | None
    """Start a new file when one would grow beyond this many bytes."""
    engine_version: str | None
    """The serving engine's version (default: the newest known)."""


class PlanOptions(ModelOptions, SelectionOptions, TargetOptions, total=False):
    """Keywords of `plan`."""

    only: Mapping[str, int] | None
    """Lay out one rank only, such as {"tp": 3}, to look at it. Such a plan cannot be run."""


class EffortOptions(TypedDict, total=False):
    """How much of the machine a verb may use."""

    workers: int | None
    """Threads (default: one per processor, at most 8)."""
    memory: int | None
    """Most bytes of buffers (default: 256 MiB)."""
    progress: Progress | None
    """Called with the number of bytes done since the last call."""


def checked_keywords(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The verb, which refuses a keyword that it does not have.

    Its keywords are those of its signature and of the TypedDict that types its `**options`. A verb that lays out a target takes the options
    of all formats too, and refuses those of another format by itself.

    Raises: RequestError, with the nearest keyword.
    """

    @wraps(verb)
    def checked(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        known = _keywords_of(verb)
        unknown = keywords.keys() - known
        if unknown and TargetOptions.__annotations__.keys() <= set(known):
            known += [option.name for option in registry.options()]
        for name in sorted(unknown.difference(known)):
            raise _unknown_keyword(name, known, where=f"{verb.__qualname__}()")
        return verb(*arguments, **keywords)

    return checked


def _keywords_of(verb: Callable[..., object]) -> list[str]:
    """The parameters of a function whose last one is `**options: Unpack[SomeTypedDict]`, with the keys of that TypedDict."""
    code, typed = verb.__code__, verb.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
    return [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *verb.__globals__[typed].__annotations__]


def _unknown_keyword(name: str, known: list[str], where: str | None = None) -> RequestError:
    near = nearest(name, known)
    return RequestError(f"there is no option {name!r}", where=where, do=f"Did you mean {near}?" if near else "Leave it out")


@value
class Effort:
    """How much of the machine a verb may use."""

    workers: int | None = None
    memory: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise RequestError(f"--workers {self.workers}: at least one thread is needed", do="Leave it out for one per processor")

    def report(self, nbytes: int) -> None:
        """Tell the caller that `nbytes` more bytes are done."""
        if self.progress:
            self.progress(nbytes)


@value
class ConversionRequest:
    """The target that a conversion is asked to write, independent of the source."""

    to: Format
    """The target format."""
    parallel: Parallel
    """The target's parallel sizes."""
    dtype: DType | None
    """Cast floating-point weights to this type; None: each weight keeps its own type."""
    keep_dtype: tuple[str, ...]
    """Globs of tensors that `dtype` does not cast."""
    dequantize: bool
    """Whether quantized weights become values."""
    merge_adapter: PathLike | None
    """The directory of the LoRA adapter to merge into the weights; "self": the checkpoint's own; None: none."""
    drop_adapter: bool
    """Whether the checkpoint's own LoRA adapter is left out."""
    quantize: str
    """The form to which linear layers are quantized; empty: none."""
    requantize: str
    """The form, with the same values, in which quantized weights are stored; empty: their own."""
    selection: Selection
    """Which tensors are meant."""
    only_rank: Mapping[str, int]
    """The one rank to lay out; empty for all."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The target format's own options."""

    @staticmethod
    def of(to: str, given: Mapping[str, Any]) -> ConversionRequest:
        """The request from the keywords of `plan`. A keyword that is not declared here is an option of the format `to`.

        Raises: RequestError for a format that is not written, an option that it does not know, or a value of the wrong type.
        """
        target = registry.target(to)
        rest = dict(given)
        sizes = {axis: rest.pop(axis, 1) for axis in ("tp", "pp", "ep", "dp")}
        dtype = dtype_named(rest.pop("dtype", None))
        _check_one_form(rest)
        merge_adapter = rest.pop("merge_adapter", None)
        return ConversionRequest(
            to=target,
            parallel=Parallel(**sizes),
            dtype=dtype,
            keep_dtype=kept_globs(rest.pop("keep_dtype", ()), dtype),
            dequantize=rest.pop("dequantize", False),
            merge_adapter=merge_adapter,
            drop_adapter=rest.pop("drop_adapter", False),
            quantize=_form(rest.pop("quantize", None), "--quantize", QUANTIZE),
            requantize=_form(rest.pop("requantize", None), "--requantize", REQUANTIZE),
            selection=selection_of(rest),
            only_rank=rest.pop("only", None) or {},
            options=_options_of(target, rest, ADAPTER if merge_adapter == OWN_ADAPTER else ()),
        )

    @property
    def merges_own_adapter(self) -> bool:
        """Whether the adapter that the checkpoint holds is merged into its weights."""
        return self.merge_adapter == OWN_ADAPTER

    def opened_adapter(self, open: Callable[[PathLike], Opened]) -> Opened | None:
        """The adapter to merge, opened by `open`; None if there is none, or the checkpoint holds it."""
        return None if self.merge_adapter is None or self.merges_own_adapter else open(self.merge_adapter)


def _check_one_form(given: Mapping[str, Any]) -> None:
    """Raises RequestError if several options say how quantized weights are stored."""
    named = [f"--{name}" for name in ("dequantize", "quantize", "requantize") if given.get(name)]
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)}: each says in which form weights are stored", do="Give one of them")


def _form(name: str | None, option: str, known: tuple[str, ...]) -> str:
    """The form that --quantize or --requantize names; empty for none. Raises RequestError for another name."""
    if name is not None and name not in known:
        raise RequestError(f"{option} {name}: no such form", do=choices(name, known))
    return name or ""


def selection_of(given: dict[str, Any]) -> Selection:
    """The Selection from the keywords of SelectionOptions, which are removed from `given`."""
    return Selection(
        weights=given.pop("weights", None),
        include=given.pop("include", ()),
        exclude=given.pop("exclude", ()),
        strip_prefix=given.pop("strip_prefix", ""),
        optimizer=given.pop("optimizer", False),
        root=given.pop("root", None),
        keep_unknown=given.pop("keep_unknown", False),
        drop_unknown=given.pop("drop_unknown", False),
    )


def kept_globs(given: str | Iterable[str], dtype: DType | None) -> tuple[str, ...]:
    """The globs of --keep-dtype. Raises RequestError if there are some, and no `dtype` to which other tensors are cast."""
    globs = as_globs(given)
    if globs and dtype is None:
        raise RequestError(
            f"--keep-dtype '{globs[0]}' without --dtype",
            why="Without --dtype no tensor is cast",
            do="Leave it out, or name the element type of the other tensors with --dtype",
        )
    return globs


def dtype_named(name: str | None, option: str = "--dtype") -> DType | None:
    """The floating-point type of that name; None for None. Raises RequestError, listing the usual names, if there is none."""
    if name is None:
        return None
    found = dtypes.from_user(name)
    if found is None or not found.floating:
        known = choices(name, dtypes.FLOATING_WORDS, nearest_of=dtypes.FLOATING_SPELLINGS)
        raise RequestError(f"{option} {name}: not a floating-point type", do=known)
    return found


def _options_of(target: Format, given: Mapping[str, Any], others: Sequence[Option]) -> dict[str, Any]:
    """The target's own options and `others`, parsed. An option whose value is None counts as not given."""
    known = {option.name: option for option in (*target.options, *others)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            raise _unknown_option(target, name)
        found[name] = known[name].parse(value)
    return found


def _unknown_option(target: Format, name: str) -> RequestError:
    flag, options = "--" + name.replace("_", "-"), {option.name: users for option, users in registry.options().items()}
    if name in options:
        return RequestError(
            f"{flag} does not apply to {target.name}", why=f"It is an option of {', '.join(options[name])}", do="Leave it out"
        )
    return _unknown_keyword(name, [*PlanOptions.__annotations__, *options])
