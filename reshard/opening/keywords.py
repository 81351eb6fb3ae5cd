"""The keywords of the public functions, each declared once: its type for type checkers and editors, and what --help says about it.

The command line makes its options of these declarations (cli/options.py), and a verb refuses a keyword that is not among its own. This file
is light, so that --help loads nothing else. Options of one format are declared in the format (adapter/format.py).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar

from reshard.errors import RequestError, nearest
from reshard.geometry.quantities import parse_size
from reshard.geometry.value import value

if TYPE_CHECKING:
    import inspect

    from reshard.models.architecture import Architecture

PathLike = str | os.PathLike[str]
Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""
Weights = Literal["model", "master"]
Combination = Literal["cat", "linear"]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@value
class Keyword:
    """What the command line says about a keyword whose type stands beside it."""

    help: str
    """One imperative sentence. {take} is what the command does with tensors, such as "convert"; other keywords are written as `dtype=`."""
    metavar: str = ""
    """What stands for the value in --help; it says how words become a value (cli/options.py). Empty for a switch and a choice."""
    default: object = None
    """The value of an option that is not given; the verb's own default where that is None."""
    several: bool = False
    """Whether the option may be given several times, so that the value is a tuple."""


class ModelOptions(TypedDict, total=False):
    """What the user says about the model of a checkpoint."""

    model: Annotated[PathLike | None, Keyword("Directory or URL with config.json (and tokenizer), if the checkpoint has none.", "DIR")]
    model_wins: Annotated[bool, Keyword("Use `model=` even if it contradicts the checkpoint's own config.")]
    vocab_size: Annotated[int | None, Keyword("Vocabulary size without padding (Megatron).", "N")]
    architecture: Annotated[
        "Architecture | PathLike | None",
        Keyword("Architecture name or file, if config.json does not identify a supported model.", "NAME|FILE"),
    ]
    stored_layout: Annotated[PathLike | None, Keyword("The learned layout that a serving engine's files follow, if none lies beside them.")]


class OpenOptions(ModelOptions, total=False):
    """Keywords of `open`."""

    format: Annotated[str | None, Keyword("Format of the checkpoint, instead of detecting it.", "FORMAT")]
    deltas: Annotated[PathLike | Sequence[PathLike], Keyword("Deltas that change it, in their order, as `BASE+DELTA` does.", "DIR")]
    step: Annotated[int | str | None, Keyword("Which step of a run: its number, or latest.", "STEP")]
    part: Annotated[str | None, Keyword("Which checkpoint of a step or of a folder of models, such as actor.", "NAME")]


class SelectionOptions(TypedDict, total=False):
    """Which tensors are meant. Globs match names after `strip_prefix` has been removed."""

    weights: Annotated[Weights | None, Keyword("Which copy of the weights: the model's, or the optimizer's in full precision.")]
    include: Annotated[str | tuple[str, ...], Keyword("{Take} only tensors whose names match.", "GLOB")]
    exclude: Annotated[str | tuple[str, ...], Keyword("Leave out tensors whose names match.", "GLOB")]
    strip_prefix: Annotated[str, Keyword("Remove this prefix from tensor names first.", "P", "")]
    optimizer: Annotated[bool, Keyword("Also {take} the optimizer state.")]
    root: Annotated[str | None, Keyword("Which model, if the checkpoint holds several; `reshard inspect` lists them.", "NAME")]
    keep_unknown: Annotated[bool, Keyword("Also {take} run state, other models, and buffers that the architecture lacks.")]
    drop_unknown: Annotated[bool, Keyword("Leave out weights that the architecture lacks.")]


class RecipeOptions(TypedDict, total=False):
    """What is computed for the target."""

    dtype: Annotated[str | None, Keyword("Cast floating-point weights: bf16, fp16, fp32, fp8 ...", "DTYPE")]
    keep_dtype: Annotated[str | tuple[str, ...], Keyword("Do not cast tensors whose names match.", "GLOB")]
    allow_overflow: Annotated[bool, Keyword("Convert although values are too large for the element type, and become infinite.")]
    dequantize: Annotated[bool, Keyword("Dequantize weights to `dtype=` (default: bf16).")]
    merge_adapter: Annotated[
        "PathLike | Sequence[PathLike] | None",
        Keyword("Merge the LoRA adapter of this directory; self: of SOURCE. Again for each further one.", "DIR", several=True),
    ]
    adapter_weight: Annotated[
        "float | Sequence[float] | None",
        Keyword("Factor of the updates of each adapter, in order (default: 1).", "FACTOR", several=True),
    ]
    combine: Annotated[
        Combination | None, Keyword("Several adapters: cat (default) adds their updates; linear their factors, with cross terms.")
    ]
    drop_adapter: Annotated[bool, Keyword("Leave out the LoRA adapter that the checkpoint holds.")]
    quantize: Annotated[str | None, Keyword("Quantize linear layers: fp8-block, fp8-channel, mxfp4, mxfp8, nvfp4.", "FORM")]
    requantize: Annotated[str | None, Keyword("Store quantized weights with the same values as fp8-block, or MXFP4 as nvfp4.", "FORM")]


class TargetOptions(RecipeOptions, total=False):
    """How the target is laid out. Options of one format, such as Megatron's `vp`, are accepted as further keywords."""

    tp: Annotated[int, Keyword("Tensor-parallel size.", "N", 1)]
    pp: Annotated[int, Keyword("Pipeline-parallel size.", "N", 1)]
    ep: Annotated[int, Keyword("Expert-parallel size.", "N", 1)]
    dp: Annotated[int, Keyword("Data-parallel ranks that shard every tensor.", "N", 1)]


class PlanOptions(ModelOptions, SelectionOptions, TargetOptions, total=False):
    """Keywords of `plan`."""

    max_shard_size: Annotated[int | str | None, Keyword("Start a new file when one would grow beyond this many bytes.")]
    engine_version: Annotated[str | None, Keyword("The serving engine's version (default: the newest known).")]
    only: Annotated[Mapping[str, int] | None, Keyword('Lay out one rank only, such as {{"tp": 3}}, to look at it. It cannot be run.')]


class CombiningOptions(TypedDict, total=False):
    """How several checkpoints become one."""

    average: Annotated[
        "bool | str | Sequence[float] | None",
        Keyword("Average the sources; with weights: 0.2,0.3,0.5, wsm:linear|1-sqrt|cosine or ema:0.99.", "[WEIGHTS]"),
    ]
    last: Annotated[int | None, Keyword("The source is the folder of a run: take its last N steps.", "N")]
    task_arithmetic: Annotated[PathLike | None, Keyword("Add to BASE the weighted differences of the sources from it.", "BASE")]
    slerp: Annotated[float | None, Keyword("Go the part T, from 0 to 1, of the arc from the first source to the second.", "T")]
    any_sum: Annotated[bool, Keyword("Average with weights whose sum is not 1.")]


class ManyPlanOptions(PlanOptions, CombiningOptions, total=False):
    """Keywords of `plan`, which takes several sources."""


class EffortOptions(TypedDict, total=False):
    """How much of the machine a verb may use."""

    workers: Annotated[int | None, Keyword("Threads (default: one per processor, at most 8).", "N")]
    memory: Annotated[int | str | None, Keyword("Maximum size of all buffers (default: 256MiB; 1GiB for stores).", "SIZE")]
    progress: Annotated[Progress | None, Keyword("Called with the number of bytes done since the last call.")]
    source_checksums: Annotated[bool, Keyword("Do not compare what is read with the CRC-32 that the source holds of it.", "", True)]
    verify_source: Annotated[
        bool, Keyword("First read the files whole and compare them with recorded SHA-256: integrity.json, Hugging Face downloads.")
    ]


class ConvertOptions(EffortOptions, total=False):
    """Keywords of `convert` that `cache` takes, too."""

    fail_if_skipped: Annotated[bool, Keyword("Write nothing, and exit with 1, if tensors are skipped or files are left.")]


class RecordOptions(TypedDict, total=False):
    """What a conversion writes about its files."""

    checksums: Annotated[bool, Keyword("Also write SHA256SUMS for `sha256sum -c`; reads the result once more.")]
    card: Annotated[bool, Keyword("Also say in README.md what the files were made from, and how to check them.")]


class PartOptions(ConvertOptions, RecordOptions, total=False):
    """Keywords of `convert_part`."""

    whole_pipeline: Annotated[
        bool, Keyword("Also copy the rest of the diffusers pipeline around `model=`; the target becomes the pipeline.")
    ]


class WholePlanOptions(ManyPlanOptions, OpenOptions, total=False):
    """Keywords of `plan`, which opens its sources."""


class WholeConversionOptions(PartOptions, WholePlanOptions, total=False):
    """Keywords of `convert`, which plans unless it gets a plan."""


class LinkOptions(TypedDict, total=False):
    """How `Sender` and `push` are joined with engines that run."""

    bind: Annotated[str | None, Keyword("Where the servers' ranks find this command (default: on the way to them).", "ADDRESS")]
    port: Annotated[int, Keyword("The port there (default: a free one).", "PORT")]
    trust_network: Annotated[
        bool, Keyword("Tell servers on other hosts the secret of the push over HTTP, instead of by RESHARD_LIVE_TOKEN.")
    ]
    take_over: Annotated[bool, Keyword("Take the servers over from the Sender or push of another process that updates them.")]


def usual_values(keywords: type) -> dict[str, Any]:
    """The values of the keywords of a TypedDict that are not given."""
    return {name: _usual_value(annotation) for name, annotation in keywords.__annotations__.items()}


def _usual_value(annotation: Any) -> Any:
    """The value of a keyword that is not given; None if it is not declared as a Keyword."""
    if not hasattr(annotation, "__metadata__"):
        return None
    default = annotation.__metadata__[0].default
    return bool(default) if annotation.__origin__ is bool else default


def take(given: dict[str, Any], keywords: type) -> dict[str, Any]:
    """The keywords of a TypedDict, taken out of what was given."""
    return {name: given.pop(name) for name in keywords.__annotations__ if name in given}


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
            from reshard.adapter import registry

            known += [option.name for option in registry.options()]
        for name in sorted(unknown.difference(known)):
            raise unknown_keyword(name, known, where=f"{verb.__qualname__}()")
        for name in keywords.keys() & _sizes_of(verb):
            if isinstance(given := keywords[name], str):
                keywords[name] = parse_size(given, f"`{name}=`")
        return verb(*arguments, **keywords)

    checked.__signature__ = _signature_of(verb)  # type: ignore[attr-defined]
    return checked


def _signature_of(verb: Callable[..., object]) -> "inspect.Signature":
    """The signature with the keywords of the TypedDict in place of `**options`, for `help()` and notebooks. A verb that lays out a target
    keeps `**options`: it takes the options of all formats."""
    import inspect

    own, keywords = inspect.signature(verb), _options_of(verb)
    *first, options = own.parameters.values()
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in usual_values(keywords).items()
        if name not in own.parameters
    ]
    is_open = TargetOptions.__annotations__.keys() <= keywords.__annotations__.keys()
    return own.replace(parameters=[*first, *named, *([options] if is_open else [])])


def _keywords_of(verb: Callable[..., object]) -> list[str]:
    """The parameters of a function whose last one is `**options: Unpack[SomeTypedDict]`, with the keys of that TypedDict."""
    code = verb.__code__
    return [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *_options_of(verb).__annotations__]


def _sizes_of(verb: Callable[..., object]) -> set[str]:
    """The keywords of a function that are numbers of bytes. They may be given as texts, such as 80GiB."""
    annotations = _options_of(verb).__annotations__
    return {name for name, hint in annotations.items() if hasattr(hint, "__metadata__") and hint.__metadata__[0].metavar == "SIZE"}


def _options_of(verb: Callable[..., object]) -> type:
    """The TypedDict that types the `**options` of a function."""
    options: type = verb.__globals__[verb.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")]
    return options


def unknown_keyword(name: str, known: list[str], where: str | None = None) -> RequestError:
    near = nearest(name, known)
    return RequestError(f"there is no option {name!r}", where=where, do=f"Did you mean {near}?" if near else "Leave it out")
