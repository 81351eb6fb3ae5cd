"""Every option of the command line, declared once; and how words become values.

An option has the name of the Python keyword that it sets, so that a command passes on what it was given. Options of one format come from
the registry and stand under the format's name in --help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.geometry.value import value

from .completion_words import architecture_names, format_names
from .metrics import METERED

if TYPE_CHECKING:
    from reshard.picture.page import Page
    from reshard.storage.output_file import OutputFile

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]

# The sections of --help, in order; formats' own sections come between the target and the selection.
TARGET, SELECTION, SOURCE, EFFORT, PARTS, OUTPUT, LOG = "Target", "Selection", "Source", "Effort", "Many machines", "Output", "Log"


class OutputFileParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """An output file (storage/output_file.py), which is checked before the command begins. is_of_log: the log opens it itself."""

    name = "file"

    def __init__(self, *, is_of_log: bool = False) -> None:
        self._is_of_log = is_of_log

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from reshard.storage.output_file import OutputFile

        if self._is_of_log or isinstance(value, OutputFile) or (ctx and ctx.resilient_parsing):
            return value
        return OutputFile(value, option=param.opts[0] if param else "")


EPILOG = (
    "Exit codes: 0 success; 1 difference or finding; 2 usage; 3 source broken or incomplete; 4 target exists or in use; "
    "5 no space or permission; 6 unsupported; 70 defect of reshard; 130 interrupted, 143 by SIGTERM."
)


class SectionedOption(click.Option):
    """An option that stands in a section of --help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def _log_option(*names: str, **settings: Any) -> SectionedOption:
    """An option of the log. It is read before the command runs (logs.py), so that commands do not get its value."""
    return SectionedOption(names, section=LOG, expose_value=False, **settings)


LOG_OPTIONS = (
    _log_option("-q", "--quiet", is_flag=True, help="Print only errors and a one-line result."),
    _log_option("-v", "--verbose", is_flag=True, help="Log what is read, what is decided, and how long each phase takes."),
    _log_option("--log-format", type=click.Choice(["text", "json"]), help="json: each line of the log is a JSON object, errors included."),
    _log_option("--log-file", metavar="FILE", type=OutputFileParam(is_of_log=True), help="Append a copy of the log to this file."),
    _log_option(
        "--metrics-file",
        metavar="FILE",
        type=OutputFileParam(is_of_log=True),
        help="At the end, write metrics for Prometheus (node_exporter's textfile collector).",
    ),
)


class Command(click.Command):
    """A command with the options of the log, whose --help has sections, and examples at the end."""

    def __init__(self, *args: Any, examples: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.params += [param for param in LOG_OPTIONS if param.name != "metrics_file" or self.name in METERED]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        first = [title for title in ("Options", TARGET) if title in sections]
        last = [title for title in (SELECTION, SOURCE, EFFORT, PARTS, OUTPUT, LOG) if title in sections]
        for title in (*first, *(title for title in sections if title not in (*first, *last)), *last):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}$ {example}\n")
        formatter.write_paragraph()
        formatter.write_text(EPILOG)


class SizeParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """A number of bytes: 512MiB, 5GB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from reshard.geometry.quantities import parse_size

        return parse_size(value, _flag(param))


class CountParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of things: 7B, 1.5M, 7000000000."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from reshard.geometry.quantities import parse_count

        return parse_count(value, _flag(param))


class ShareParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A share of a whole: 10% or 0.1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a share such as 10% or 0.1", param, ctx)


class NumbersParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers and ranges with commas between them: 7,8,8,7 or 1-4,8."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers: list[int] = []
        for word in str(value).split(","):
            first, dash, last = word.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
                self.fail(f"{value!r} is not a list of whole numbers such as 2,4,8 or 2-8", param, ctx)
            numbers.extend(range(int(first), int(last or first) + 1))
        return tuple(numbers)


class ParallelSize(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """One parallel size."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if "," in text or re.fullmatch(r"\d+-\d+", text):
            self.fail(f"{text!r}: this command lays out one size. To compare several, use `reshard degrees`", param, ctx)
        if not text.isdecimal() or int(text) < 1:
            self.fail(f"{text!r} is not a positive whole number", param, ctx)
        return int(text)


def _flag(param: click.Parameter | None) -> str:
    return param.opts[0] if param else "a size"


def together(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Several options as one decorator, in the order given."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def option(*names: str, section: str, **settings: Any) -> Decorator[Any]:
    """An option in a section of --help."""
    return click.option(*names, cls=SectionedOption, section=section, **settings)


def take(given: dict[str, Any], keywords: type) -> dict[str, Any]:
    """The keywords of a TypedDict, taken out of what a command was given."""
    return {name: given.pop(name) for name in keywords.__annotations__ if name in given}


def _needs_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value and not ctx.params.get("as_json"):
        raise click.UsageError("--full has a meaning only with --json", ctx)
    return value


# Eager: it is known when --full is looked at.
as_json = option("--json", "as_json", section=OUTPUT, is_flag=True, is_eager=True, help="Print one JSON document.")
summary_or_full = together(
    option("--json", "as_json", section=OUTPUT, is_flag=True, is_eager=True, help="Print a summary as one JSON document."),
    option("--full", section=OUTPUT, is_flag=True, callback=_needs_json, help="With --json: print everything, each tensor included."),
)
page = together(
    option(
        "--html",
        "page_path",
        section=OUTPUT,
        metavar="FILE",
        type=OutputFileParam(),
        help="Also write a picture of it to this file: one page without scripts.",
    ),
    option("--interactive", section=OUTPUT, is_flag=True, help="With --html: add a small script that filters and sorts."),
)


@value
class PageOptions:
    """Where a page is written; nowhere if `path` is None."""

    path: OutputFile | None
    interactive: bool

    def write(self, page: Page) -> None:
        """Write the page and say so in the log."""
        from reshard.engine.events import event
        from reshard.pages.pages import write_page

        if self.path is not None:
            nbytes = write_page(page, self.path, interactive=self.interactive)
            event("page", f"wrote {self.path}, {nbytes:,} bytes", path=str(self.path), bytes=nbytes)


def page_of(given: dict[str, Any]) -> PageOptions:
    """The options of the page, taken out of what a command was given. Raises click.UsageError for --interactive without --html."""
    found = PageOptions(given.pop("page_path"), given.pop("interactive"))
    if found.interactive and found.path is None:
        raise click.UsageError("--interactive has a meaning only with --html", click.get_current_context())
    return found


format_name = option(
    "--format", section=SOURCE, metavar="FORMAT", shell_complete=format_names, help="Format of the checkpoint, instead of detecting it."
)
architecture = option(
    "--architecture",
    section=SOURCE,
    metavar="NAME|FILE",
    shell_complete=architecture_names,
    help="Architecture name or file, if config.json does not identify a supported model.",
)


def _set_storage_options(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> None:
    """Until the command ends, stores are opened with these options."""
    if given:
        from reshard.storage.stores.urls import parsed_options, storage_options

        ctx.with_resource(storage_options(parsed_options(given)))


storage_option = option(
    "--storage-option",
    section=SOURCE,
    multiple=True,
    expose_value=False,
    metavar="KEY=VALUE",
    callback=_set_storage_options,
    help="Setting of the stores of URLs (s3://, gs://, hf:// ...), such as endpoint=http://minio:9000.",
)
model = together(
    option("--model", section=SOURCE, metavar="DIR", help="Directory or URL with config.json (and tokenizer), if the checkpoint has none."),
    option("--model-wins", section=SOURCE, is_flag=True, help="Use --model even if it contradicts the checkpoint's own config."),
    storage_option,
    option("--vocab-size", section=SOURCE, type=click.IntRange(1), metavar="N", help="Vocabulary size without padding (Megatron)."),
    architecture,
)


def selection(verb: str) -> Decorator[Any]:
    """Which tensors a command works on. verb: what it does with them, such as "Convert"."""
    return together(
        option(
            "--weights",
            section=SELECTION,
            type=click.Choice(["model", "master"]),
            help="Which copy of the weights: the model's, or the optimizer's in full precision.",
        ),
        option("--include", section=SELECTION, multiple=True, metavar="GLOB", help=f"{verb} only tensors whose names match."),
        option("--exclude", section=SELECTION, multiple=True, metavar="GLOB", help="Leave out tensors whose names match."),
        option("--strip-prefix", section=SELECTION, default="", metavar="P", help="Remove this prefix from tensor names first."),
        option("--optimizer", section=SELECTION, is_flag=True, help=f"Also {verb.lower()} the optimizer state."),
        option(
            "--root", section=SELECTION, metavar="NAME", help="Which model, if the checkpoint holds several; `reshard inspect` lists them."
        ),
        option(
            "--keep-unknown",
            section=SELECTION,
            is_flag=True,
            help=f"Also {verb.lower()} run state, other models, and buffers that the architecture lacks.",
        ),
        option("--drop-unknown", section=SELECTION, is_flag=True, help="Leave out weights that the architecture lacks."),
    )


sizes = together(
    option("--tp", section=TARGET, default=1, type=ParallelSize(), metavar="N", help="Tensor-parallel size."),
    option("--pp", section=TARGET, default=1, type=ParallelSize(), metavar="N", help="Pipeline-parallel size."),
    option("--ep", section=TARGET, default=1, type=ParallelSize(), metavar="N", help="Expert-parallel size."),
    option(
        "--dp",
        section=TARGET,
        default=1,
        type=ParallelSize(),
        metavar="N",
        help="Data-parallel ranks that shard every tensor.",
    ),
)


def target(*, required: bool = True) -> Decorator[Any]:
    """What to make, and the options of every installed format."""
    return together(
        option(
            "--to",
            section=TARGET,
            required=required,
            metavar="FORMAT",
            shell_complete=format_names,
            help="Target format; `reshard formats` lists them.",
        ),
        sizes,
        option("--dtype", section=TARGET, metavar="DTYPE", help="Cast floating-point weights: bf16, fp16, fp32, fp8 ..."),
        option("--keep-dtype", section=TARGET, multiple=True, metavar="GLOB", help="Do not cast tensors whose names match."),
        option("--dequantize", section=TARGET, is_flag=True, help="Dequantize weights to --dtype (default: bf16)."),
        option("--merge-adapter", section=TARGET, metavar="DIR", help="Merge the LoRA adapter of this PEFT directory; self: of SOURCE."),
        option("--drop-adapter", section=TARGET, is_flag=True, help="Leave out the LoRA adapter that the checkpoint holds."),
        option("--quantize", section=TARGET, metavar="FORM", help="Quantize linear layers from bf16: fp8-block, mxfp4."),
        option("--requantize", section=TARGET, metavar="FORM", help="Store quantized weights with the same values as fp8-block."),
        *_options_of_formats(),
    )


def _options_of_formats() -> Iterable[Decorator[Any]]:
    from reshard.adapter import registry

    for each, users in registry.options().items():
        title = f"Only for {', '.join(users)}"
        if each.type == "switch":
            off = f"/--{each.opposite.replace('_', '-')}" if each.opposite else ""
            yield option(f"{each.flag}{off}", each.name, section=title, is_flag=True, default=None, help=each.help)
        elif each.type == "choice":
            yield option(each.flag, section=title, type=click.Choice(list(each.choices)), help=each.help)
        else:
            yield option(each.flag, section=title, metavar=_METAVARS[each.type], help=each.help)


_METAVARS: Mapping[str, str] = {"number": "N", "numbers": "N,N,..", "size": "SIZE", "path": "PATH", "text": "V"}

parts = together(
    option(
        "--part",
        section=PARTS,
        metavar="I/N|auto",
        help="Convert part I of N, counted from 0; auto: as Slurm, torchrun or Kubernetes say. The last part completes TARGET.",
    ),
    option("--parts", section=PARTS, type=click.IntRange(1), metavar="N", help="With --part auto: how many parts there are (Kubernetes)."),
    option(
        "--plan", "plan_path", section=PARTS, metavar="FILE", help="Run the plan in FILE, which `reshard plan` has written with --plan-out."
    ),
    option("--ray", section=PARTS, is_flag=True, help="Convert with the tasks of a Ray cluster."),
    option("--ray-address", section=PARTS, metavar="ADDRESS", help="With --ray: the cluster (default: RAY_ADDRESS, or this machine)."),
    option("--finish", section=PARTS, is_flag=True, help="Complete TARGET if all parts are done; otherwise name what is missing."),
)

effort = together(
    option("--workers", section=EFFORT, type=click.IntRange(1), metavar="N", help="Threads (default: one per processor, at most 8)."),
    option(
        "--memory", section=EFFORT, type=SizeParam(), metavar="SIZE", help="Maximum size of all buffers (default: 256MiB; 1GiB for stores)."
    ),
    option(
        "--progress/--no-progress",
        "show_progress",
        section=OUTPUT,
        default=None,
        help="Show a progress bar (default: on a terminal; elsewhere one line every 30 s).",
    ),
)
