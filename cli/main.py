"""The `reshard` command: a static table of commands, each loaded when it is called; and what an error looks like."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import FrameType

import click

from reshard.storage.system_calls import check_platform

from .tables import discard_output, standard_output

# name -> (module, what `--help` says). Static, so that help and start-up load nothing else.
COMMANDS = {
    "inspect": (".commands.inspect", "Show what a checkpoint holds, and where each part lies."),
    "convert": (".commands.convert", "Convert a checkpoint for another engine, framework or parallel layout."),
    "plan": (".commands.plan", "Show the proven plan of one conversion; write nothing."),
    "verify": (".commands.verify", "Check that two checkpoints hold the same weights, whatever their layouts."),
    "fingerprint": (".commands.fingerprint", "Digest a checkpoint's weights, whatever their layout."),
    "roundtrip": (".commands.roundtrip", "Prove that a conversion and its way back lose nothing."),
    "degrees": (".commands.degrees", "List the valid TP/PP sizes and the memory each GPU needs."),
    "estimate": (".commands.estimate", "Estimate training memory per rank before you launch."),
    "formats": (".commands.formats", "List the formats that can be read and written."),
    "architectures": (".commands.architectures", "List supported architectures, or draft a file for a new one."),
    "completion": (".commands.completion", "Print the completion script for bash, zsh or fish."),
}

EPILOG = "Exit codes: 0 success; 1 the check found differences; 2 bad input or usage; 70 defect of reshard; 130, 143 interrupted."


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0], __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


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
    _stop_cleanly_on_signals()
    sys.exit(run(sys.argv[1:]))


def _stop_cleanly_on_signals() -> None:
    """From now on, SIGINT, SIGTERM and SIGHUP raise _Stopped. A second SIGINT ends the process at once; the others are ignored then."""
    process, numbers = os.getpid(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a process that was forked to read a part of the files
            os._exit(128 + number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL if each == signal.SIGINT else signal.SIG_IGN)
        raise _Stopped(number)

    for each in numbers:
        if signal.getsignal(each) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(each, stop)


def run(arguments: list[str]) -> int:
    """The exit code of a command line. Errors become one paragraph on stderr; with --debug, a traceback."""
    try:
        check_platform()
        code = cli.main(arguments, prog_name="reshard", standalone_mode=False, obj=arguments)
        with standard_output():
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "reshard"
        message = error.format_message().replace("\n", " ").strip().rstrip(".")
        print(f"reshard: {message}. `{name} --help` shows how to use it.", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(130)
    except _Stopped as stopped:
        return _interrupted(stopped.exit_code)
    except SystemExit:
        # How click ends when the reader of --help has gone, as with `| head`.
        discard_output()
        return 0
    except Exception as error:
        return _report(error, "--debug" in arguments)


def _interrupted(code: int) -> int:
    print("reshard: interrupted; finished work is kept, and --resume continues from there", file=sys.stderr)
    return code


def _report(error: Exception, debug: bool) -> int:
    from reshard.errors import RequestError, ReshardError
    from reshard.storage.system_calls import system_refusal

    without_torch = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    if isinstance(error, OSError) and error.errno:
        # The system refuses, which is not a defect. An error without a file name is that of a print, such as that of --help.
        if error.filename is None:
            discard_output()
        refusal = system_refusal(error, "read or written", "standard output")
        refusal.__cause__, error = error, refusal
    if debug or not (without_torch or isinstance(error, ReshardError)):
        import traceback

        traceback.print_exception(error)
    if without_torch:
        error = RequestError("this conversion needs torch, which is not installed", do="Install it with `pip install torch`")
    if isinstance(error, ReshardError):
        print(f"reshard: {error}", file=sys.stderr)
        return error.exit_code
    print("reshard: this is a defect of reshard, not of your input; please report it with the lines above", file=sys.stderr)
    return 70


if __name__ == "__main__":
    main()
