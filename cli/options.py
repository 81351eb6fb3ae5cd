"""Every option of the command line, declared once; and how words become values.

An option has the name of the Python keyword that it sets, so that a command passes on what it was given. Options of one format come from
the registry and stand under the format's name in --help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from reshard.adapter.save_folders import split_step
from reshard.errors import RequestError
from reshard.geometry.quantities import parse_count, parse_size
from reshard.opening.keywords import (
    CombiningOptions,
    ConvertOptions,
    EffortOptions,
    Keyword,
    ModelOptions,
    OpenOptions,
    PartOptions,
    SelectionOptions,
    TargetOptions,
)
from reshard.opening.keywords import take as take

from . import help
from .help import EFFORT as EFFORT
from .help import OF_FORMATS, PARTS
from .help import OUTPUT as OUTPUT
from .help import SELECTION as SELECTION
from .help import SOURCE as SOURCE
from .help import TARGET as TARGET
from .logs import EPILOG, LOG_OPTIONS, OutputFileParam, SectionedOption
from .metrics import METERED
from .replies import Output, Reply

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]


class Command(help.HelpfulCommand):
    """A command with the options of the log and --json, whose arguments may be folders in which --step and --component choose one."""

    def __init__(self, *args: Any, has_json: bool, **kwargs: Any) -> None:
        super().__init__(*args, epilog=EPILOG, **kwargs)
        if has_json and "as_json" not in (param.name for param in self.params):
            self.params.append(SectionedOption(["--json", "as_json"], section=OUTPUT, is_flag=True, help="Print one JSON document."))
        self.params += [param for param in LOG_OPTIONS if param.name != "metrics_file" or self.name in METERED]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        ctx.params |= Chosen.of(ctx).model(ctx.params.get("model"))
        Chosen.of(ctx).check_used()
        return rest

    def invoke(self, ctx: click.Context) -> None:
        """Run the command, show the reply that it returns, and end with its exit code."""
        output = Output(ctx.params.pop("as_json", False), ctx.params.pop("page_path", None), ctx.params.pop("interactive", False))
        if output.interactive and output.page is None:
            raise click.UsageError("--interactive has a meaning only with --html", ctx)
        ctx.meta["reshard.output"] = output
        reply = super().invoke(ctx)
        if isinstance(reply, Reply):
            output.show(reply)
            ctx.exit(reply.code)


def command(name: str, *examples: str, has_json: bool = True) -> Decorator[Any]:
    """A function as a command of that name. has_json: whether it prints a document with --json."""
    return click.command(name, cls=Command, examples=examples, has_json=has_json)


class Word(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """A word that a function makes a value of. parse: gets the word and the flag; raises ValueError for another word."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value, param.opts[0] if param else self.name) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _share(text: str, flag: str) -> float:
    try:
        return float(text.strip()[:-1]) / 100 if text.strip().endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a share such as 10% or 0.1") from None


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"{text!r} is not a list of whole numbers such as 2,4,8 or 2-8")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _parallel_size(text: str, flag: str) -> int:
    if "," in text or re.fullmatch(r"\d+-\d+", text):
        raise ValueError(f"{text!r}: this command lays out one size. To compare several, use `reshard degrees`")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(text)


SIZE = Word("size", parse_size)
"""A number of bytes: 512MiB, 5GB, 1000000."""
NUMBERS = Word("numbers", _numbers)
"""Whole numbers and ranges with commas between them: 7,8,8,7 or 1-4,8."""


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


def switch(names: str, section: str, text: str, **settings: Any) -> Decorator[Any]:
    """An option without a value. text: of its help."""
    return option(*names.split(), section=section, is_flag=True, help=text, **settings)


def sizes(name: str, usual: str, text: str) -> Decorator[Any]:
    """An option with several sizes. usual: those without the option. text: of its help."""
    return click.option(name, type=NUMBERS, default=usual, metavar="N,N,..", help=text)


def output_file(names: str, text: str, *, section: str = "Options", **settings: Any) -> Decorator[Any]:
    """An option that names a file to write. text: of its help."""
    return option(*names.split(), section=section, metavar="FILE", type=OutputFileParam(), help=text, **settings)


def keywords(declared: Any, *names: str, section: str = "Options", verb: str = "Take", type: Any = None) -> Decorator[Any]:
    """The keywords of a TypedDict as options, in the order of `names`; without names, all of them.

    verb: what the command does with tensors. type: used instead of what the metavars say.
    """
    annotations = declared.__annotations__
    return together(*(_of_keyword(name, annotations[name], section, verb, type) for name in names or annotations))


def _of_keyword(name: str, annotation: Any, section: str, verb: str, type: Any) -> Decorator[Any]:
    """The option of one keyword: a switch, one with two sides if its type has None, a choice, or a value that its metavar describes."""
    python, (keyword,) = annotation.__origin__, annotation.__metadata__
    settings: dict[str, Any] = {"help": keyword.help.format(take=verb.lower(), Take=verb), "default": keyword.default}
    words = [word for hint in (python, *get_args(python)) if get_origin(hint) is Literal for word in get_args(hint)]
    flag = "--" + name.replace("_", "-")
    if python is bool and keyword.default:
        return option(f"--no-{flag.removeprefix('--')}", name, section=section, is_flag=True, flag_value=False, **settings)
    if python is bool:
        settings |= {"is_flag": True, "default": False}
    elif python == bool | None:
        settings |= {"is_flag": True, "default": None}
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    elif words:
        settings["type"] = click.Choice(words)
    else:
        if keyword.metavar.startswith("["):  # the value may be left out
            settings |= {"is_flag": False, "flag_value": "equal"}
        settings |= {"metavar": keyword.metavar, "type": type or _TYPES.get(keyword.metavar), "shell_complete": _COMPLETED.get(name)}
        settings["multiple"] = keyword.metavar == "GLOB" or keyword.several
    return option(flag, section=section, **settings)


def _about(name: str) -> str:
    """What --help says about a keyword of `open`."""
    keyword: Keyword = OpenOptions.__annotations__[name].__metadata__[0]
    return keyword.help


def format_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Formats whose names begin so; for --to only those that can be written."""
    from reshard.adapter import registry

    return [name for name, format in registry.formats().items() if name.startswith(incomplete) and (format.can_write or param.name != "to")]


def architecture_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Declared model types whose names begin so."""
    from reshard.models.lookup import known_model_types

    return [name for name in known_model_types() if name.startswith(incomplete)]


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Known models whose names begin so, and files and folders."""
    from click.shell_completion import CompletionItem

    from reshard.models.known_models import known_names

    return [*(name for name in known_names() if name.startswith(incomplete)), CompletionItem(incomplete, type="file")]


def _dtype_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from reshard.geometry.dtypes import FLOATING_WORDS

    return [word for word in FLOATING_WORDS if word.startswith(incomplete)]


# How the words become a value, by the metavar; texts for the others.
_TYPES: Mapping[str, Any] = {
    "N": click.IntRange(1),
    "M": click.IntRange(1),
    "N,N,..": NUMBERS,
    "SIZE": SIZE,
    "COUNT": Word("count", parse_count),
    "SHARE": Word("share", _share),
    "FRACTION": click.FloatRange(0, 1, min_open=True),
    "T": click.FloatRange(0, 1),
    "FACTOR": click.FLOAT,
    "PORT": click.IntRange(1, 65535),
}
_COMPLETED = {"format": format_names, "architecture": architecture_names, "dtype": _dtype_names, "kv_dtype": _dtype_names}


def _needs_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value and not ctx.params.get("as_json"):
        raise click.UsageError("--full has a meaning only with --json", ctx)
    return value


summary_or_full = together(
    switch("--json as_json", OUTPUT, "Print a summary as one JSON document.", is_eager=True),
    switch("--full", OUTPUT, "With --json: print everything, each tensor included.", callback=_needs_json),
)
page = together(
    output_file("--html page_path", "Also write a picture of it to this file: one page without scripts.", section=OUTPUT),
    switch("--interactive", OUTPUT, "With --html: add a small script that filters and sorts."),
)


class Chosen:
    """What --step and --component of one command line say, until its arguments become the paths of the checkpoints that they choose."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.part: str | None = None
        self.two_steps: tuple[str, ...] = ()
        self._is_used = False
        self._unused: Exception | None = None

    @staticmethod
    def of(ctx: click.Context) -> Chosen:
        chosen = ctx.meta.setdefault("reshard.chosen", Chosen())
        assert isinstance(chosen, Chosen)
        return chosen

    def path(self, given: str) -> str:
        """The path of the checkpoint that a path means. Of two checkpoints, one may be no run."""
        run, named = split_step(given)
        if (self.step is None and self.part is None and named is None) or given.startswith(("http://", "https://")):
            return given
        from reshard.opening.choice import Choice, NothingToChoose

        try:
            chosen = Choice.of(run, named, self.step, self.part).path(run)
        except NothingToChoose as error:
            if named is not None:
                raise
            self._unused = error
            return given
        self._is_used = True
        return chosen

    def model(self, given: Any) -> dict[str, Any]:
        """What --model becomes, where it is a pipeline of diffusers and --component names a component of it."""
        if self.part is None or not isinstance(given, str):
            return {}
        from reshard.opening.choice import component_of

        component = component_of(given, self.part)
        self._is_used = self._is_used or component is not None
        return {"model": component} if component else {}

    def both(self, left: str, right: str | None) -> tuple[str, str]:
        """The paths of two checkpoints: of one run, if --step is given twice. Raises click.UsageError if one is missing."""
        from reshard.opening.choice import Choice

        if right is None and self.two_steps:
            first, second = (Choice(step, self.part).path(left) for step in self.two_steps)
            return first, second
        if right is None or self.two_steps:
            what = "Missing argument 'RIGHT'." if right is None else "Two paths and two steps are given."
            raise click.UsageError(f"{what} Write RUN@A RUN@B, or RUN --step A --step B.", click.get_current_context())
        return left, right

    def check_used(self) -> None:
        """Raises RequestError if there is a choice, and no argument is a folder in which to choose."""
        if self._unused is not None and not self._is_used:
            raise self._unused


class CheckpointPlace(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """The path of a checkpoint: of the chosen one, where a path is a run or a folder of models."""

    name = "checkpoint"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ctx is None or ctx.resilient_parsing or not isinstance(value, str):
            return value
        return Chosen.of(ctx).path(value)


def checkpoint(*names: str, **settings: Any) -> Decorator[Any]:
    """An argument that is a checkpoint."""
    return click.argument(*names, type=CheckpointPlace(), **settings)


def _choose_step(ctx: click.Context, param: click.Parameter, given: str | None) -> None:
    Chosen.of(ctx).step = given


def _choose_steps(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> None:
    if len(given) > 2:
        raise click.BadParameter(f"{', '.join(given)}: two steps are compared", ctx, param)
    chosen = Chosen.of(ctx)
    chosen.step, chosen.two_steps = (None, given) if len(given) == 2 else (next(iter(given), None), ())


def _choose_component(ctx: click.Context, param: click.Parameter, given: str | None) -> None:
    chosen = Chosen.of(ctx)
    if given and chosen.part:
        raise click.BadParameter(f"{chosen.part} and {given}: give one of them", ctx, param)
    chosen.part = chosen.part or given


def _share_of_work(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> str | None:
    """The part of the work, such as 3/8. Another word chooses a checkpoint, as before 0.3."""
    shares = [word for word in given if _SHARE.fullmatch(word)]
    if len(shares) > 1:
        raise click.BadParameter(f"{' and '.join(shares)}: give one of them", ctx, param)
    for name in (word for word in given if word not in shares):
        help.warn_of_old_name("--part")
        _choose_component(ctx, param, name)
    return next(iter(shares), None)


_SHARE = re.compile(r"auto|-?\d*/?-?\d*")
_chooses: dict[str, Any] = {"section": SOURCE, "is_eager": True, "expose_value": False}
_component = option("--component", metavar="NAME", callback=_choose_component, help=_about("part"), **_chooses)
choice = together(option("--step", metavar="STEP", callback=_choose_step, help=_about("step"), **_chooses), _component)
"""Which checkpoint of a run or of a folder of models. Eager: it is known when the arguments are looked at."""
choice_of_two = together(
    option(
        "--step",
        metavar="STEP",
        multiple=True,
        callback=_choose_steps,
        help="Which step of a run: its number, or latest. Given twice: the two steps of LEFT.",
        **_chooses,
    ),
    _component,
)
"""The same, for a command that compares two checkpoints, which may be steps of one run."""
formats_of_two = option(
    "--format",
    "formats",
    section=SOURCE,
    metavar="FORMAT",
    multiple=True,
    shell_complete=format_names,
    help="Format of those of the two that it fits, instead of detecting it. Given twice: of LEFT, then of RIGHT.",
)
format_name = together(keywords(OpenOptions, "format", section=SOURCE), choice)
architecture = keywords(ModelOptions, "architecture", section=SOURCE)


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
    keywords(ModelOptions, "model", "model_wins", section=SOURCE),
    storage_option,
    keywords(ModelOptions, "vocab_size", "architecture", section=SOURCE),
)


def selection(verb: str) -> Decorator[Any]:
    """Which tensors a command works on. verb: what it does with them, such as "Convert"."""
    return keywords(SelectionOptions, section=SELECTION, verb=verb)


def target(*, required: bool = True, of_engines: bool = False) -> Decorator[Any]:
    """What to make, and the options of every installed format. of_engines: what the ranks of serving engines hold, without files."""
    return together(
        option(
            "--to",
            section=TARGET,
            metavar="FORMAT",
            shell_complete=format_names,
            callback=_check_target if required else None,
            help="Target format; `reshard formats` lists them.",
        ),
        keywords(TargetOptions, "tp", "pp", "ep", *(() if of_engines else ("dp",)), section=TARGET, type=Word("size", _parallel_size)),
        keywords(TargetOptions, *(name for name in TargetOptions.__annotations__ if len(name) > 2), section=TARGET),
        *_options_of_formats(of_engines=of_engines),
    )


full_every = click.option(
    "--full-every",
    type=click.IntRange(1),
    metavar="N",
    help="Of a run that is kept, every N-th step is a full checkpoint, and the others are deltas (default: 10).",
)
combining = keywords(CombiningOptions, section=help.COMBINING)


def _check_target(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    if given is None and not ctx.resilient_parsing:
        raise missing_target()
    return given


def missing_target(command: str = "") -> RequestError:
    """That no target format is given. command: what was asked for, to be repeated with a format."""
    example = f"The likeliest command is `{command} --to hf`. " if command else ""
    return RequestError(
        "the option --to is missing",
        why="It names the format of the target",
        do=f"{example}Give one, such as --to vllm, --to hf or --to megatron; `reshard formats` lists all",
    )


def _options_of_formats(*, of_engines: bool) -> Iterable[Decorator[Any]]:
    from reshard.adapter import registry
    from reshard.adapter.format import MAX_SHARD_SIZE

    shown = registry.serving_formats() if of_engines else registry.formats()
    for declared, every_user in registry.options().items():
        users = [name for name in every_user if name in shown]
        if not users or (of_engines and declared == MAX_SHARD_SIZE):
            continue
        title, flag = f"{OF_FORMATS}{', '.join(users)}", "--" + declared.name.replace("_", "-")
        if declared.type == "switch":
            off = f"/--{declared.opposite.replace('_', '-')}" if declared.opposite else ""
            yield option(f"{flag}{off}", declared.name, section=title, is_flag=True, default=None, help=declared.help)
        elif declared.type == "choice":
            yield option(flag, section=title, type=click.Choice(list(declared.choices)), help=declared.help)
        else:
            yield option(flag, section=title, metavar=_METAVARS[declared.type], help=declared.help)


_METAVARS: Mapping[str, str] = {"number": "N", "numbers": "N,N,..", "size": "SIZE", "path": "PATH", "text": "V"}

parts = together(
    option(
        "--part",
        section=PARTS,
        metavar="I/N|auto",
        multiple=True,
        is_eager=True,
        callback=_share_of_work,
        help="Part I of N of the work (auto: as the launcher says).",
    ),
    option("--parts", section=PARTS, type=click.IntRange(1), metavar="N", help="With --part auto: how many parts there are (Kubernetes)."),
    option(
        "--plan", "plan_path", section=PARTS, metavar="FILE", help="Run the plan in FILE, which `reshard plan` has written with --plan-out."
    ),
    switch("--ray", PARTS, "Convert with the tasks of a Ray cluster."),
    option("--ray-address", section=PARTS, metavar="ADDRESS", help="With --ray: the cluster (default: RAY_ADDRESS, or this machine)."),
    switch("--finish", PARTS, "Complete TARGET if all parts are done; otherwise name what is missing."),
)

fail_if_skipped = keywords(ConvertOptions, "fail_if_skipped", section=OUTPUT)
whole_pipeline = keywords(PartOptions, "whole_pipeline", section=OUTPUT)
effort = together(
    keywords(EffortOptions, "workers", "memory", "source_checksums", "verify_source", section=EFFORT),
    option(
        "--progress/--no-progress",
        "show_progress",
        section=OUTPUT,
        default=None,
        help="Show a progress bar (default: on a terminal; elsewhere one line every 30 s).",
    ),
)
