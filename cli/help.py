"""What -h and --help print. -h: the options that people use, on one screen. --help: all options in sections; with --to X, those of X alone.

reshard convert -h                 a dozen options
reshard convert --help             all options
reshard convert --to vllm --help   all options that apply to vllm
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from .console import BOLD, CYAN, has_colour, painted, width_of
from .logs import LOG

# The sections of --help, in order; formats' own sections come between the target and the selection.
TARGET, COMBINING, SELECTION, SOURCE, EFFORT = "Target", "Several sources", "Selection", "Source", "Effort"
PARTS, OUTPUT = "Many machines", "Output"
OF_FORMATS = "Only for "
"""The title of a section of options begins so, if they belong to formats; their names follow."""

COMMON = (
    "to", "tp", "pp", "ep", "dtype", "optimizer", "into", "push", "all", "compare", "step", "component", "part", "model", "include",
    "dry_run", "plan_out", "resume", "overwrite", "materialize", "quiet", "as_json",
)  # fmt: skip
"""The options of -h, by parameter, where a command has many."""
SHORT = {
    "component": "Which checkpoint of a step, such as actor.",
    "overwrite": "Replace what is in TARGET once the new one is there.",
    "model": "Folder with config.json, if the checkpoint has none.",
    "architecture": "Architecture, if config.json names none that is known.",
    "depth": "Show N levels of the tree.",
    "storage_option": "Setting of a store, such as endpoint=http://minio.",
    "push": "Send the newest weights to this running server.",
    "plan_out": "Also write the plan to FILE, for `convert --plan`.",
}
"""What -h says of an option whose first sentence is too long for a line, by parameter."""
# A command with fewer options shows all of them with -h; where that is more than a screen, its own and the common ones.
_MANY, _SCREEN = 24, 40
_WIDEST, _IN_FILES = 100, 78

OTHER_NAMES = {
    "--tensor-parallel-size": "--tp", "--tensor-parallel": "--tp", "--tensor-model-parallel-size": "--tp", "-tp": "--tp",
    "--pipeline-parallel-size": "--pp", "--pipeline-parallel": "--pp", "--pipeline-model-parallel-size": "--pp", "-pp": "--pp",
    "--expert-parallel-size": "--ep", "--expert-parallel": "--ep", "--expert-model-parallel-size": "--ep", "-ep": "--ep",
    "--data-parallel-size": "--dp", "--data-parallel": "--dp", "-dp": "--dp",
    "-o": "--plan-out", "--out": "--plan-out", "--output": "--plan-out",
    "--expert-tensor-parallel-size": "--etp", "--num-virtual-stages-per-pipeline-rank": "--vp",
}  # fmt: skip
"""What vLLM, SGLang and Megatron call options of reshard. They are understood, and --help does not list them."""
OLD_NAMES = {"--part": "--component"}
"""Options that had another name. The old one is understood with a warning, for one minor version."""


# Stands for a hyphen while lines are broken.
_JOINT = "\u2011"


class Help(click.HelpFormatter):
    """The text of --help: in colour on a terminal, as wide as that, up to 100 characters."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        # Where nothing limits the width, click would ask shutil for it, which loads every compression module.
        super().__init__(indent_increment, width or (None if width_of(sys.stdout) else _IN_FILES), max_width or _WIDEST)
        self._in_colour = has_colour(sys.stdout)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{self._painted(heading + ':', BOLD)}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        start = len(self.buffer)
        super().write_dl([(self._painted(first, CYAN), _whole(second)) for first, second in rows], col_max, col_spacing)
        self.buffer[start:] = [text.replace(_JOINT, "-") for text in self.buffer[start:]]

    def _painted(self, text: str, style: str) -> str:
        return painted(text, style) if self._in_colour else text


def _whole(text: str) -> str:
    """A text in which no line ends within an option that fits a line."""
    return re.sub(r"--[\w-]{1,20}(?![\w-])", lambda match: match[0].replace("-", _JOINT), text)


class Context(click.Context):
    formatter_class = Help


class HelpfulCommand(click.Command):
    """A command with the options of the log, whose help is short with -h and in sections with --help, with examples at the end."""

    context_class = Context

    def __init__(self, *args: Any, examples: Sequence[str] = (), epilog: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "add_help_option": False, "epilog": epilog})
        self.examples = tuple(examples)
        self.params += [
            click.Option(["-h"], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_short_help),
            click.Option(["--help"], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_full_help),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["reshard.to"] = _format_of(_value_of("--to", args))
        words = self._with_own_names(ctx, args)
        if not ctx.resilient_parsing:
            self._check_given_once(ctx, words)
        return super().parse_args(ctx, words)

    def _check_given_once(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Raises click.UsageError if an option that takes one value is given twice: click would take the last one, and say nothing. Of a
        switch and its opposite, such as --progress and --no-progress, the last one counts."""
        parser = self.make_parser(ctx)
        takes_one = {parsed for parsed in (*parser._long_opt.values(), *parser._short_opt.values()) if parsed.action == "store"}
        for option in takes_one:
            option.action = "append"
        given, _, _ = parser.parse_args(list(words))
        for option in () if {"h", "help"} & given.keys() else takes_one:
            if len(values := [value if isinstance(value, str) else "no value" for value in given.get(str(option.dest), ())]) > 1:
                named = f"Option '{option.obj.opts[0]}' takes one value, and is given {len(values)} times: {', '.join(values)}."
                raise click.UsageError(f"{named} Nothing says which one counts. Give it once.", ctx)

    def _with_own_names(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words of a command line, in which options have our names."""
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        renamed, is_rest = [], False
        for word in args:
            name, equals, given = word.partition("=")
            is_rest = is_rest or word == "--"
            own = OTHER_NAMES.get(name) or OLD_NAMES.get(name)
            is_other = own in known and name not in known and not is_rest
            if is_other and name in OLD_NAMES and not ctx.resilient_parsing:
                warn_of_old_name(name)
            renamed.append(f"{own}{equals}{given}" if is_other else word)
        return renamed

    def sections(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """The options that are shown, by section, in order; with --to, without those of other formats."""
        target, sections = ctx.meta.get("reshard.to"), dict[str, list[click.Option]]()
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                title = vars(param).get("section", "Options")
                if not title.startswith(OF_FORMATS) or target is None or target in title.removeprefix(OF_FORMATS).split(", "):
                    sections.setdefault(title, []).append(param)
        first = [title for title in ("Options", TARGET) if title in sections]
        last = [title for title in (COMBINING, SELECTION, SOURCE, EFFORT, PARTS, OUTPUT, LOG) if title in sections]
        return {title: sections[title] for title in (*first, *(set_apart(sections, first, last)), *last)}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl([_record(option, ctx) for option in options])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._write_examples(formatter)
        formatter.write_paragraph()
        formatter.write_text(self.epilog or "")

    def _write_examples(self, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}$ {example}\n")

    def short_help_text(self, ctx: click.Context) -> str:
        """What -h prints: one screen; for a command with many options no more than fits 24 lines of 80 characters."""
        sections = self.sections(ctx)
        every = [option for options in sections.values() for option in options]
        has_few = len(every) < _MANY
        if has_few and (whole := ctx.get_help()).count("\n") < _SCREEN:
            return whole
        own = next(iter(sections.values())) if has_few else []
        listed = [option for option in every if option in own or option.name in COMMON]
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text((self.help or "").split("\n\n")[0].replace("\n", " "))
        with formatter.section("Options"):
            records = [(option, *_record(option, ctx)) for option in listed]
            room = formatter.width - 4 - max((len(first) for _, first, _ in records), default=0)
            formatter.write_dl([(first, _in_a_line(option, text, room)) for option, first, text in records])
        if has_few:
            self._write_examples(formatter)
        formatter.write_paragraph()
        formatter.write_text(f"--help shows all {len(every)} options." + self._about_formats(ctx))
        return formatter.getvalue().rstrip("\n")

    def _about_formats(self, ctx: click.Context) -> str:
        has_formats = any(title.startswith(OF_FORMATS) for title in self.sections(ctx))
        return " --to FORMAT --help shows those of one format." if has_formats and not ctx.meta.get("reshard.to") else ""


def warn_of_old_name(flag: str) -> None:
    """Log that an option has been given by the name that it had before."""
    from reshard.engine.events import event

    own = OLD_NAMES[flag]
    event("old-name", f"{flag} NAME chooses a checkpoint: write {own} NAME; 0.4 does not understand {flag} NAME", level=30, option=own)


def set_apart(sections: Mapping[str, object], *others: Sequence[str]) -> list[str]:
    """The sections that are in none of the others."""
    return [title for title in sections if not any(title in other for other in others)]


def _record(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    record = option.get_help_record(ctx)
    assert record is not None
    return record


def _in_a_line(option: click.Option, text: str, room: int) -> str:
    """The text of an option, as short as it can be if a line has no room for it: its short text, or its first sentence without what stands
    in brackets."""
    if len(text) <= room:
        return text
    return SHORT.get(str(option.name)) or re.sub(r" \([^()]*\)|  \[.*\]$", "", text.partition(". ")[0]).rstrip(".") + "."


def _short_help(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        assert isinstance(ctx.command, HelpfulCommand)
        click.echo(ctx.command.short_help_text(ctx), color=True)
        ctx.exit()


def _full_help(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(ctx.get_help(), color=True)
        ctx.exit()


def _format_of(name: str | None) -> str | None:
    """The format that --to names, whatever it is called; None if it is no format, which the command itself says."""
    if name is None:
        return None
    from reshard.adapter import registry
    from reshard.errors import RequestError

    try:
        return registry.named(name).name
    except RequestError:
        return None


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """The value of an option in a command line that may be wrong otherwise; None if it is not there."""
    for word, following in zip(args, [*args[1:], None], strict=False):
        if word == flag:
            return following
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None
