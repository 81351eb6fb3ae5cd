"""reshard completion: the shell script that completes commands, options, formats and architectures."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .. import options
from ..tables import standard_output

_INSTALL = {
    "bash": "reshard completion bash > ~/.local/share/bash-completion/completions/reshard",
    "zsh": "reshard completion zsh > ~/.zfunc/_reshard    # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc",
    "fish": "reshard completion fish > ~/.config/fish/completions/reshard.fish",
}


@options.command("completion", *_INSTALL.values(), has_json=False)
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def command(shell: str) -> None:
    """Print the completion script for a shell."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    root = click.get_current_context().find_root().command
    with standard_output():
        click.echo(shell_class(root, {}, "reshard", "_RESHARD_COMPLETE").source())
