"""The `reshard` command: a static table of commands, each loaded when it is called; and what an error looks like."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from importlib import import_module
from logging import ERROR, WARNING
from types import FrameType

import click

import reshard
from reshard.engine.events import LOGGER, event
from reshard.errors import ReshardError
from reshard.secrets import masked_arguments
from reshard.storage.system_calls import check_platform

from .help import Context
from .invocation import Invocation
from .logs import EPILOG, log_options, log_to_file, logging_to_stderr
from .metrics import Metrics
from .tables import discard_output, standard_output

# name -> (module, what `--help` says). Static, so that help and start-up load nothing else.
COMMANDS = {
    "inspect": (".commands.look.inspect", "Show what a checkpoint holds, and where each part lies."),
    "convert": (".commands.convert", "Convert a checkpoint for another engine, framework or parallel layout."),
    "delta": (".commands.delta", "Write what changed between two checkpoints: a percent of their size."),
    "apply": (".commands.apply", "Convert a checkpoint with the deltas of later steps."),
    "plan": (".commands.plan", "Show the proven plan of one conversion; write nothing."),
    "verify": (".commands.verify", "Check that two checkpoints hold the same weights, or one folder what reshard wrote."),
    "sign": (".commands.serve.sign", "Sign a checkpoint's files and the fingerprint of its weights with a key."),
    "diff": (".commands.look.diff", "Show in numbers what changed between two checkpoints."),
    "explain": (".commands.look.explain", "Name the mistake that made one checkpoint differ from another."),
    "log": (".commands.look.log", "Show the steps of a run, one line each, and how their weights changed."),
    "stats": (".commands.look.stats", "Show the distribution of every tensor's values: extremes, mean, NaN, histogram."),
    "cat": (".commands.look.cat", "Print the values of one tensor, or of a slice of it."),
    "export": (".commands.look.export", "Write single tensors to a .safetensors or .npy file."),
    "doctor": (".commands.look.doctor", "Check a checkpoint after every save: files, structure, optimizer and, with --deep, values."),
    "fingerprint": (".commands.look.fingerprint", "Digest a checkpoint's weights, whatever their layout."),
    "digests": (".commands.digests", "Digest what a serving engine's ranks hold, and compare with a live server."),
    "roundtrip": (".commands.roundtrip", "Prove that a conversion and its way back lose nothing."),
    "push": (".commands.push", "Send a checkpoint's weights to a running server, without a file."),
    "hub": (".commands.serve.hub", "Serve checkpoints as Hugging Face repositories, S3 buckets and pages, without a file."),
    "cache": (".commands.serve.cache", "Convert a model into a cache for an engine's start, or list and empty the cache."),
    "serve-check": (".commands.serve.serve_check", "Check that an engine will take a folder, before it starts."),
    "watch": (".commands.watch", "Convert every step of a run as soon as it is complete."),
    "degrees": (".commands.look.degrees", "List the valid TP/PP sizes and the memory each GPU needs."),
    "learn": (".commands.look.learn", "Learn how a serving engine lays out a model, from the engine's own loader."),
    "estimate": (".commands.look.estimate", "Estimate training memory per rank before you launch."),
    "formats": (".commands.formats", "List the formats that can be read and written."),
    "architectures": (".commands.architectures", "List supported architectures, or draft a file for a new one."),
    "versions": (".commands.look.versions", "List the releases of other software that reshard was compared with."),
    "env": (".commands.env", "Show versions and machine for a bug report."),
    "clean": (".commands.clean", "List and remove what interrupted conversions have left."),
    "completion": (".commands.completion", "Print the completion script for bash, zsh or fish."),
}


GROUPS = {
    "Look": ("inspect", "log", "stats", "cat", "export", "diff", "explain", "fingerprint"),
    "Convert": ("convert", "plan", "apply", "delta", "watch"),
    "Check": ("verify", "sign", "doctor", "roundtrip", "digests"),
    "Serve": ("push", "hub", "cache", "serve-check", "degrees", "learn"),
    "Train": ("estimate",),
    "Other": ("formats", "versions", "architectures", "clean", "env", "completion"),
}
"""How --help lists the commands."""
ALIASES = {"ls": "inspect", "info": "inspect"}
"""Names of commands that are understood, and that --help does not list."""


class LazyGroup(click.Group):
    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in ALIASES:
            args = [ALIASES[args[0]], *args[1:]]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from reshard.errors import nearest

            near = nearest(args[0], COMMANDS)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0], __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name][1]) for name in names])


@click.command(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="reshard")
def cli(debug: bool) -> None:
    """Convert training checkpoints into the layout serving engines load: bit-exact, in constant memory, without any framework."""


class _Stopped(BaseException):
    """A signal that asks the process to end: Ctrl-C, or Slurm's before it preempts a job. click does not know it and lets it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main() -> None:
    """Run the command line; exits with its code."""
    gc.set_threshold(100_000)  # the imports make many objects and no garbage; the collector would take a tenth of a start
    # Otherwise numpy's OpenBLAS starts a thread for each processor, and each waits in a busy loop for a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _open_standard_streams()
    _stop_cleanly_on_signals()
    code = run(sys.argv[1:])
    gc.freeze()  # the interpreter would look for garbage among a million objects before it ends
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed: otherwise the next opened file gets their number, and
    what is printed can end in it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _stop_cleanly_on_signals() -> None:
    """From now on, SIGINT, SIGTERM and SIGHUP raise _Stopped. A second SIGINT ends the process at once; the others are ignored then."""
    process, numbers = os.getpid(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a process that was forked to read a part of the files
            os._exit(128 + number)
        for later in numbers:
            signal.signal(later, signal.SIG_DFL if later == signal.SIGINT else signal.SIG_IGN)
        raise _Stopped(number)

    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)


def run(arguments: list[str]) -> int:
    """The exit code of a command line. Errors become one paragraph on stderr; with --debug, a traceback."""
    log = log_options(arguments)
    metrics = Metrics(next((word for word in arguments if word in COMMANDS), ""), log.metrics_file)
    with logging_to_stderr(log):
        code = _exit_code(Invocation(masked_arguments(arguments), log, metrics), arguments)
        _log_stores()
        event("finished", f"ended with exit code {code} after {metrics.seconds:.1f} s", exit_code=code, seconds=round(metrics.seconds, 3))
        try:
            metrics.write(code)
        except ReshardError as error:  # Before the work it was possible. Now the result counts.
            event("metrics-lost", f"the metrics were not written: {error}", level=WARNING)
    return code


def _log_stores() -> None:
    """Log what each store was asked for. Without a URL, the module of stores was never loaded."""
    urls = sys.modules.get("reshard.storage.stores.urls")
    for url, traffic in urls.opened if urls else ():
        if traffic.requests:
            event("store", f"{url}: {traffic}", url=url, **traffic.to_json())
    if urls:
        urls.opened.clear()


def _exit_code(invocation: Invocation, arguments: list[str]) -> int:
    """Run the command, report its error, and return its exit code."""
    try:
        check_platform()
        log_to_file(invocation.log)
        invocation.metrics.open()
        event(
            "started",
            f"reshard {reshard.__version__}: {shlex.join(invocation.arguments)}",
            version=reshard.__version__,
            arguments=invocation.arguments,
        )
        code = cli.main(arguments, prog_name="reshard", standalone_mode=False, obj=invocation)
        with standard_output():
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(arguments, 130)
    except _Stopped as stopped:
        return _interrupted(arguments, stopped.exit_code)
    except SystemExit:
        # How click ends when the reader of --help has gone, as with `| head`.
        discard_output()
        return 0
    except Exception as error:
        return _report(error, "--debug" in arguments, "--json" in arguments)


def _is_resumable(arguments: list[str]) -> bool:
    """Whether a command line that was interrupted leaves work that --resume continues."""
    return "convert" in arguments and not {"--dry-run", "--help", "-h"} & set(arguments)


def _interrupted(arguments: list[str], code: int) -> int:
    kept = "; finished work is kept, and --resume continues from there" if _is_resumable(arguments) else ""
    message = f"interrupted{kept} [interrupted]"
    event("interrupted", message, level=ERROR, id="interrupted", exit_code=code)
    return code


def _report(error: Exception, debug: bool, as_json: bool) -> int:
    """Log an error as one paragraph, and with --json print it as a document; returns its exit code."""
    explained = _explained(error)
    if not as_json:
        _list_checkpoints(explained)
    cause = error if explained.id == "defect" else explained if debug else None
    LOGGER.error(f"{explained} [{explained.id}]", exc_info=cause, extra={"event": "error", "fields": explained.to_json()})
    if as_json:
        from .replies import show_json

        show_json({"error": explained.to_json()})
    return explained.exit_code


def _list_checkpoints(error: ReshardError) -> None:
    """If the error is that none of several checkpoints is chosen, list them on stderr."""
    choice = sys.modules.get("reshard.opening.choice")
    if choice and isinstance(error, choice.SeveralCheckpoints):
        from reshard.pages.folders import run_sections
        from reshard.requests.lost_files import with_lost_files

        from .replies import show_sections

        show_sections(run_sections(error.root, with_lost_files(error.steps)), on_stderr=True)


def _explained(error: Exception) -> ReshardError:
    """Any exception as an error of reshard."""
    from reshard.errors import RequestError, UnsupportedError, nearest
    from reshard.storage.system_calls import memory_refusal, system_refusal

    if isinstance(error, ReshardError):
        return error
    if no_memory := memory_refusal(error):
        no_memory.__cause__ = error
        return no_memory
    if isinstance(error, click.ClickException):
        if isinstance(error, click.NoSuchOption):
            by_word = {name.lstrip("-"): name for name in error.possibilities or ()}
            near = nearest(error.option_name.lstrip("-"), by_word)
            error = click.NoSuchOption(error.option_name, possibilities=[by_word[near]] if near else None, ctx=error.ctx)
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "reshard"
        return RequestError(" ".join(error.format_message().split()), do=f"`{name} --help` shows how to use it")
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return UnsupportedError("this needs torch, which is not installed", do="Install it with `pip install 'reshard[torch]'`")
    if isinstance(error, OSError) and error.errno:
        # The system refuses, which is not a defect. An error without a file name is that of a print, such as that of --help.
        if error.filename is None:
            discard_output()
        refusal = system_refusal(error, "read or written", "standard output")
        refusal.__cause__ = error
        return refusal
    return ReshardError(
        f"{type(error).__name__}: {error}",
        why="This is a defect of reshard, not of your input",
        do="Please report it with its traceback",
        id="defect",
    )


if __name__ == "__main__":
    main()
