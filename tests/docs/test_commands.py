"""The commands in README.md and docs/: they run, and print what is printed there; those that are not run have options that exist.

After a change of messages `python tests/docs/refresh.py` writes the new output into the pages.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from helpers.doc_pages import PAGES, PROMPT, ROOT, Page, masked, read_page, run_page

from reshard.adapter import registry
from reshard.errors import RequestError

ALL = [read_page(path) for path in PAGES]
WITH_COMMANDS = [page for page in ALL if page.runnable()]
# A command in running text or in a table; a bare name such as `reshard inspect` only mentions it.
_INLINE = re.compile(r"`(reshard [a-z]+(?: [^`]+)?)`")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name == "README.md" else pytest.mark.slow) for page in WITH_COMMANDS],
    ids=lambda page: page.name,
)
def test_commands_print_what_the_page_shows(page: Page, tmp_path):
    if any(needs in page.path.read_text() for needs in (".torch()", "--to fsdp", "= made verl-lora")):
        pytest.importorskip("torch", reason="the page reads a view as a torch tensor, or writes the files of FSDP ranks")
    commands = list(run_page(page, tmp_path))
    for i, (command, code, lines) in enumerate(commands):
        shown = "\n".join(command.output)
        assert masked("\n".join(lines)) == masked(shown), f"{page.name}:{command.line + 1}: {command.text}"
        code_is_shown = i + 1 < len(commands) and commands[i + 1][0].text == "echo $?"
        assert code == 0 or code_is_shown, f"{page.name}:{command.line + 1}: {command.text} ends with the exit code {code}"


@pytest.mark.parametrize("page", [*ALL, read_page(ROOT / "CONTRIBUTING.md"), read_page(ROOT / "SECURITY.md")], ids=lambda page: page.name)
def test_commands_that_are_not_run_have_options_that_exist(page: Page):
    for text in _unrun_commands(page):
        for part in re.split(r"\s[|>&]+\s", text):
            if part.startswith("reshard "):
                _parse(part, page.name)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_command_of_a_page_is_in_a_block_that_is_checked(page: Page):
    commands = "|".join(import_module("reshard.cli.main").COMMANDS)
    for block in page.blocks:
        stray = [line for line in block.lines if re.match(rf"\s*({re.escape(PROMPT)})?reshard ({commands})\b", line)]
        assert block.language == "console" or not stray, f"{page.name}:{block.start}: {stray[0]}"
        if block.language == "console":
            assert block.lines[0].startswith(PROMPT), f"{page.name}:{block.start}: a console block starts with a command"


def test_the_marked_lines_of_the_readme_run_in_examples_as_printed(tmp_path):
    folder = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    marked = re.findall(r"\| ▶ `(reshard [^`]+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(marked) >= 6
    command = Path(sys.executable).with_name("reshard")
    for line in marked:
        done = subprocess.run([command, *shlex.split(line)[1:]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def _unrun_commands(page: Page):
    """The reshard commands that only stand there: in blocks with a reason not to run, and in running text."""
    for block in page.blocks:
        if block.language == "console" and block.reason is not None:
            yield from (command.text for command in block.commands())
    fenced = {number for block in page.blocks for number in range(block.start - 1, block.stop + 1)}
    for number, line in enumerate(page.path.read_text().split("\n")):
        if number not in fenced:
            yield from (command for command in _INLINE.findall(line) if "[OPTIONS]" not in command)


def _parse(command: str, where: str) -> None:
    """Raises unless a command line can be parsed, and its target format understands its options."""
    cli = import_module("reshard.cli.main").cli
    _, name, *words = shlex.split(command, comments=True)
    context = click.Context(cli, info_name="reshard")
    subcommand = cli.get_command(context, name)
    assert subcommand is not None, f"{where}: there is no command {name}"
    if not words:
        return
    try:
        parsed = subcommand.make_context(name, list(words), parent=context).params
    except click.exceptions.Exit:
        return  # --help
    except RequestError as error:  # --step looks into the run, which no reader has
        assert error.id == "not-found", f"{where}: {command}: {error}"
        return
    except click.ClickException as error:
        raise AssertionError(f"{where}: {command}: {error.format_message()}") from error
    if parsed.get("to", "") is None and name in ("cache", "delta"):
        return  # list and clean take no target, and a kept run is hf without one
    if "to" in parsed and name != "degrees" and not parsed.get("plan_path") and (parsed["to"] or not parsed.get("push")):
        # `hub` takes several targets, and without one it is hf.
        targets = (parsed["to"] or "hf").split(",") if name == "hub" else [parsed["to"]]
        known = {option.name for target in targets for option in registry.target(target).options}
        for option in registry.options():
            assert parsed.get(option.name) is None or option.name in known, f"{where}: {command}: --{option.name} is not of {parsed['to']}"
