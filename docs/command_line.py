"""reference/cli.md: the commands of click, with each option described once.

An option that several commands have, with one meaning, stands in a table before the commands; each command names it and links there. A
command's own table has only what no other command has. docs/generate.py writes the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from typing import NamedTuple

import click

INTRODUCTION = (
    "Every command has `-h`, which shows the options that people use, and `--help`, which shows all, or with `--to FORMAT` those that "
    "apply to one format. The names of vLLM and Megatron for parallel sizes also work, such as "
    "`--tensor-parallel-size` for `--tp`, and `ls` and `info` are `inspect`. Results go to stdout, messages to stderr. On a terminal, "
    "lines are wrapped and in colour; `NO_COLOR` turns colour off. An option that takes one value is refused when it is given twice; of a "
    "switch and its opposite, such as `--progress` and `--no-progress`, the last one counts. [Exit codes](exit-codes.md) tell "
    "success from failure, and `--json` prints one [JSON document](json.md).",
    "An option that several commands have is described here, once. Below, each command describes its own options and names these.",
    "Before the command stand `--debug`, which shows the traceback of an error, and `--version`. Every command has the options of the "
    "[log](logs.md); `--metrics-file` belongs to `convert`, `verify` and `doctor`.",
)
FILES = (
    "The file of `--html`, `--plan-out`, `--output`, `--log-file` and `--metrics-file` is checked before the command begins. A "
    "regular file is replaced when the new one is complete; the log is appended. A device or a FIFO is opened at once and written "
    "into, and `/dev/stdout`, `/dev/stderr` and `/dev/fd/N` are the open files of the process. Any other link, a directory and a disk "
    "are refused."
)
OF_FORMATS, OTHERS = "Of one format", "Others"
# The tables, in the order of --help.
TITLES = ("Target", OF_FORMATS, "Several sources", "Selection", "Source", "Effort", "Many machines", "Output", OTHERS)


class Option(NamedTuple):
    """An option as a command has it."""

    section: str
    """The title of its table: as in --help, but OF_FORMATS for all options of formats."""
    flags: str
    """Its names and its value, as Markdown."""
    text: str
    """What it does. A word for what the command does with tensors is "take" here."""
    formats: str = ""
    """The formats that have it, if it belongs to formats."""

    @property
    def name(self) -> str:
        """The first name, as Markdown."""
        return f"`{self.flags.strip('`').partition('`')[0].partition(' / ')[0]}`"


def parts() -> Iterator[str]:
    """The parts of the page, in order."""
    main, log = import_module("reshard.cli.main"), import_module("reshard.cli.options").LOG_OPTIONS
    context = click.Context(main.cli, info_name="reshard")
    commands = {name: main.cli.get_command(context, name) for name in main.COMMANDS}
    options = {name: list(_options_of(command)) for name, command in commands.items()}
    shared = shared_options(options)
    yield "# Command line"
    yield INTRODUCTION[0]
    yield table(("command", "what it does"), [(f"[`{name}`](#{name})", text) for name, (_, text) in main.COMMANDS.items()])
    yield "## Options of several commands"
    yield from INTRODUCTION[1:]
    yield table(("Log", ""), [(_flags(option), _help(option)) for option in log])
    yield FILES
    for title in dict.fromkeys(option.section for option in shared):
        rows = [option for option in shared if option.section == title]
        yield f"### {title}"
        if title == OF_FORMATS:
            yield table(("option", "formats", "what it does"), [(each.flags, each.formats, each.text) for each in rows])
        else:
            yield table(("option", "what it does"), [(each.flags, each.text) for each in rows])
    for name, command in commands.items():
        yield from _command(name, command, options[name], shared)


def shared_options(options: dict[str, list[Option]]) -> list[Option]:
    """The options of two commands or more, table by table; of texts that differ, that of most commands."""
    counts = Counter((option.flags, option.text) for each in options.values() for option in each)
    found: dict[tuple[str, str], Option] = {}
    for option in (option for each in options.values() for option in each):
        key = option.section, option.name
        if counts[option.flags, option.text] > 1 and (key not in found or _rank(option, counts) > _rank(found[key], counts)):
            found[key] = option
    # An option of a command alone may have the words of a table: `degrees` casts as `convert` does.
    titled = {(option.flags, option.text) for option in found.values() if option.section != "Options"}
    kept = [option for option in found.values() if option.section != "Options" or (option.flags, option.text) not in titled]
    ordered = [option if option.section != "Options" else option._replace(section=OTHERS) for option in kept]
    return sorted(ordered, key=lambda option: TITLES.index(option.section))


def _rank(option: Option, counts: Counter[tuple[str, str]]) -> tuple[int, int]:
    return counts[option.flags, option.text], len(option.formats)


def _command(name: str, command: click.Command, options: list[Option], shared: list[Option]) -> Iterator[str]:
    yield f"## {name}"
    yield f"`reshard {name} {' '.join(command.collect_usage_pieces(click.Context(command, info_name=name)))}`"
    yield unwrapped(command.help or "")
    links: dict[str, list[Option]] = {}
    own: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        if place := _shared_as(option, shared):
            links.setdefault(place.section, []).append(option)
        else:
            own.setdefault(option.section, []).append((option.flags, option.text))
    for title, rows in own.items():
        yield table((title, ""), rows)
    yield "\n".join(f"- [{title}](#{_anchor(title)}): {_named(title, links[title])}" for title in TITLES if title in links)
    if examples := getattr(command, "examples", ()):
        yield "<!-- not run: examples -->"
        yield "\n".join(("```console", *(f"$ {example}" for example in examples), "```"))


def _shared_as(option: Option, shared: list[Option]) -> Option | None:
    """The entry of a table that says what an option of a command does."""
    same = [each for each in shared if each.flags == option.flags and each.text == option.text]
    variants = [each for each in shared if (each.section, each.name) == (option.section, option.name)]
    return next(iter(same or variants), None)


def _named(title: str, options: list[Option]) -> str:
    """The options of a command in one table; of formats, which formats."""
    if title == OF_FORMATS:
        formats = sorted({each for option in options for each in option.formats.split(", ")})
        return "those of " + ", ".join(formats)
    return ", ".join(option.name for option in options)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _options_of(command: click.Command) -> Iterator[Option]:
    logged, of_formats = import_module("reshard.cli.options").LOG_OPTIONS, import_module("reshard.cli.help").OF_FORMATS
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden and param not in logged:
            section = getattr(param, "section", "Options")
            formats = section.removeprefix(of_formats) if section.startswith(of_formats) else ""
            yield Option(OF_FORMATS if formats else section, _flags(param), _with_take(param), formats)


def _with_take(option: click.Option) -> str:
    """What an option does, with "take" for what the command does with tensors."""
    text = _help(option)
    keywords = import_module("reshard.opening.keywords").SelectionOptions.__annotations__
    if keyword := keywords.get(option.name):
        template = keyword.__metadata__[0].help
        written = template.format(take="take", Take="Take")
        pattern = re.escape(written).replace("take", r"\w+").replace("Take", r"\w+")
        text = re.sub(rf"^{pattern}", written, text)
    return text


def _flags(option: click.Option) -> str:
    flags = " / ".join((*option.opts, *option.secondary_opts))
    if option.is_flag:
        return f"`{flags}`"
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    value = " or ".join(str(choice) for choice in choices) if len(choices) < 3 else ", ".join(map(str, choices))
    return f"`{flags}` {value or f'`{option.metavar or option.type.name.upper()}`'}"


def _help(option: click.Option) -> str:
    extra = [word for word, applies in (("Required.", option.required), ("Can be given several times.", option.multiple)) if applies]
    return " ".join((option.help or "", *extra))


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    escaped = [tuple(cell.replace("|", "\\|") for cell in cells) for cells in (headings, ("---",) * len(headings), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def unwrapped(text: str) -> str:
    """Each paragraph on one line; `\\b` of click and indented lines, which are drawn, stay as they are."""
    paragraphs = cleandoc(text.replace("\b", "")).split("\n\n")
    return "\n\n".join(p if any(line.startswith("    ") for line in p.split("\n")) else " ".join(p.split()) for p in paragraphs)
