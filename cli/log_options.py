"""The options of the log, which every command has and which are read before it runs; and what ends every --help."""

from __future__ import annotations

from typing import Any

import click

from .spelling import with_flags

LOG = "Log"
"""The section of --help in which they stand."""


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
