"""The `reshard` command: a static table of commands, each loaded when it is called; and what an error looks like."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from reshard.storage.system_calls import check_platform

if TYPE_CHECKING:
    from reshard.errors import ReshardError

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

EPILOG = (
    "Exit codes: 0 success; 1 difference or finding; 2 usage; 3 source broken or incomplete; 4 target exists or in use; "
    "5 no space or permission; 6 unsupported; 70 defect of reshard; 130 interrupted, 143 by SIGTERM."
)


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


def main() -> None:
    """Run the command line; exits with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command line. Errors become one paragraph on stderr; with --debug, a traceback."""
    try:
        check_platform()
        code = cli.main(arguments, prog_name="reshard", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print("reshard: interrupted; finished work is kept, and --resume continues from there [interrupted]", file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone, as with `| head` (click turns that into an exit of its own). This is not an error; keep
        # Python from complaining when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, "--debug" in arguments, "--json" in arguments)


def _report(error: Exception, debug: bool, as_json: bool) -> int:
    """Print an error as one paragraph, and with --json as a document; returns its exit code."""
    found = _explained(error)
    if debug or found.id == "defect":
        import traceback

        traceback.print_exception(error)
    print(f"reshard: {found} [{found.id}]", file=sys.stderr)
    if as_json:
        from .json_output import show_json

        show_json({"error": found.to_json()})
    return found.exit_code


def _explained(error: Exception) -> ReshardError:
    """Any exception as an error of reshard."""
    from reshard.errors import RequestError, ReshardError, UnsupportedError

    if isinstance(error, ReshardError):
        return error
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "reshard"
        return RequestError(error.format_message().replace("\n", " "), do=f"`{name} --help` shows how to use it")
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return UnsupportedError("this needs torch, which is not installed", do="Install it with `pip install 'reshard[torch]'`")
    return ReshardError(
        f"{type(error).__name__}: {error}",
        why="This is a defect of reshard, not of your input",
        do="Please report it with its traceback",
        id="defect",
    )


if __name__ == "__main__":
    main()
