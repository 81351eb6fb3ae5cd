"""The `reshard` command: a static table of commands, each loaded when it is called; and what an error looks like."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from reshard.storage.system_calls import check_platform

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
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "reshard"
        message = error.format_message().replace("\n", " ").strip().rstrip(".")
        print(f"reshard: {message}. `{name} --help` shows how to use it.", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("reshard: interrupted; finished work is kept, and --resume continues from there", file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone, as with `| head` (click turns that into an exit of its own). This is not an error; keep
        # Python from complaining when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, "--debug" in arguments, "--json" in arguments)


def _report(error: Exception, debug: bool, as_json: bool) -> int:
    """Print an error, and return its exit code."""
    from reshard.errors import ReshardError, UnsupportedError

    without_torch = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    if debug or not (without_torch or isinstance(error, ReshardError)):
        import traceback

        traceback.print_exception(error)
    if without_torch:
        error = UnsupportedError("this needs torch, which is not installed", do="Install it with `pip install 'reshard[torch]'`")
    if isinstance(error, ReshardError):
        print(f"reshard: {error} [{error.id}]", file=sys.stderr)
        if as_json:
            from .json_output import show_json

            show_json({"error": error.to_json()})
        return error.exit_code
    print("reshard: this is a defect of reshard, not of your input; please report it with the lines above", file=sys.stderr)
    return 70


if __name__ == "__main__":
    main()
