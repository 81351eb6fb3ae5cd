"""The log of a command line: which events go to stderr and to --log-file, and what a line of them looks like.

The events come from Python's logger `reshard` (reshard/engine/events.py). By default stderr shows errors and progress alone; the file, and
stderr with --log-format json, get all events; with --verbose the details, too.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from reshard.engine.events import LOGGER
from reshard.errors import RequestError, printable
from reshard.geometry.value import value
from reshard.secrets import masked
from reshard.storage.output_file import OutputFile

from .console import shown_on
from .spelling import with_flags

LOG = "Log"
"""The section of --help in which the options of the log stand. Every command has them, and they are read before it runs."""
NOTICE = 25
"""The level of progress, between INFO and WARNING: stderr shows it by default."""
_NEVER = logging.CRITICAL + 1


@value
class LogOptions:
    """What the command line says about the log."""

    quiet: bool = False
    """Only errors go to stderr, and the result is one line."""
    verbose: bool = False
    """Details are logged, too."""
    log_format: str = "text"
    """"json": a line of the log is a JSON object."""
    log_file: str | None = None
    """A copy of the log is appended to this file."""
    metrics_file: str | None = None
    """Metrics are written to this file at the end."""

    @property
    def as_json(self) -> bool:
        """Whether a line of the log is a JSON object."""
        return self.log_format == "json"

    @property
    def on_stderr(self) -> int:
        """The level from which on events go to stderr."""
        if self.quiet:
            return logging.ERROR
        return logging.DEBUG if self.verbose else logging.INFO if self.as_json else NOTICE


class OutputFileParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """An output file (storage/output_file.py), which is checked before the command begins. is_of_log: the log opens it itself."""

    name = "file"

    def __init__(self, *, is_of_log: bool = False) -> None:
        self._is_of_log = is_of_log

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
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
        super().__init__(*args, **kwargs | {"help": with_flags(kwargs.get("help") or "")})
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


def log_options(arguments: Sequence[str]) -> LogOptions:
    """The options of the log in a command line, wherever they stand and whatever else is wrong with it: errors of usage are logged, too."""
    reader = click.Command("log", params=list(LOG_OPTIONS), add_help_option=False)
    context = click.Context(reader, ignore_unknown_options=True, allow_extra_args=True, resilient_parsing=True)
    given: dict[str, Any] = {}
    with suppress(click.ClickException):  # The command itself says what is wrong.
        given, _, _ = reader.make_parser(context).parse_args(list(arguments))
    return LogOptions(**given)


@contextmanager
def logging_to_stderr(log: LogOptions) -> Iterator[None]:
    """Inside this context events go to stderr. Afterwards the logger has the handlers and the level that it had before."""
    handlers, level = list(LOGGER.handlers), LOGGER.level
    LOGGER.setLevel(logging.DEBUG if log.verbose else logging.INFO)
    _add(_Handler(sys.stderr), _json_line if log.as_json else partial(_terminal_line, time.time()), log.on_stderr)
    try:
        yield
    finally:
        for handler in [handler for handler in LOGGER.handlers if handler not in handlers]:
            LOGGER.removeHandler(handler)
            if isinstance(handler, _FileHandler):
                handler.close()
        LOGGER.setLevel(level)


def log_to_file(log: LogOptions) -> None:
    """From now on, until `logging_to_stderr` ends, events also go to --log-file.

    Raises: RequestError or SystemRefusal if the file cannot be written.
    """
    if log.quiet and log.verbose:
        raise RequestError("--quiet and --verbose contradict each other", do="Give one of them")
    if log.log_file is not None:
        _add(_FileHandler(log.log_file), _json_line if log.as_json else _file_line, logging.DEBUG)


def _add(handler: logging.Handler, line: Callable[[logging.LogRecord], str], level: int) -> None:
    """From now on, a handler gets events of this level and above. line: makes the text of one."""
    handler.setFormatter(_Lines(line))
    handler.setLevel(level)
    LOGGER.addHandler(handler)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of Python's stubs
    """Writes lines. A stream that cannot be written any more does not stop the run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self.setLevel(_NEVER)


class _FileHandler(_Handler):
    """Appends lines to the log file, and says once on stderr when that is not possible any more."""

    def __init__(self, path: str) -> None:
        super().__init__(OutputFile(path, option="--log-file", append=True).lines())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        super().handleError(record)
        LOGGER.warning(f"the log file cannot be written any more: {sys.exception()}", extra={"event": "log-file-lost", "fields": {}})

    def close(self) -> None:
        with suppress(OSError):
            self.stream.close()
        super().close()


class _Lines(logging.Formatter):
    """The text of each event, which a function makes."""

    def __init__(self, line: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        return self._line(record)


def _terminal_line(began: float, record: logging.LogRecord) -> str:
    """A line for people who watch, after the traceback of an error. Only details have a time: the seconds since the start."""
    text = printable(with_flags(record.getMessage()))
    if record.levelno >= logging.WARNING:
        text = f"reshard: {text}" if record.levelno >= logging.ERROR else f"reshard: warning: {text}"
    elif record.levelno != NOTICE:
        text = f"[{max(record.created - began, 0):.2f} s] {text}"
    return _traceback(record) + shown_on(sys.stderr, text)


def _file_line(record: logging.LogRecord) -> str:
    """A line for a file, after the traceback of an error: time in UTC, level, message."""
    return f"{_traceback(record)}{_time(record)} {_level(record):<7} {printable(with_flags(record.getMessage()))}"


def _json_line(record: logging.LogRecord) -> str:
    """One JSON object."""
    import json

    fields = dict(record.__dict__.get("fields", {}))
    if text := _traceback(record):
        fields["traceback"] = text
    name = record.__dict__.get("event", "log")
    line = {"time": _time(record), "level": _level(record), "event": name, "message": record.getMessage(), "fields": fields}
    return with_flags(json.dumps(line, default=str))


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return masked("".join(traceback.format_exception(record.exc_info[1])))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    names = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (logging.INFO, "info"))
    return next((name for level, name in names if record.levelno >= level), "debug")
