"""The pages of the documentation, and the commands in them.

A page is Markdown. Its commands stand in fenced blocks of the language `console`, one per line after `$ `; the lines that follow are what
the command prints. Three comments, which readers do not see, steer the tests:

    <!-- files: step-1000 = dcp/fsdp2/checkpoint, big = config llama-3-70b -->   what lies in the folder where the page's commands run:
                                                                              copies of fixtures, a published model's config,
                                                                              or what a function of MADE writes: `= made verl-lora`
    <!-- not run: needs vLLM -->                                              the next block is checked, but not run, for this reason
    <!-- columns: 120 -->                                                     the next block is run on a terminal of that width
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from helpers import published_configs as published
from helpers.verl_lora import write_verl_lora

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PROMPT = "$ "

_FENCE = re.compile(r"```(?P<language>\w*)")
_COMMENT = re.compile(r"<!-- (?P<word>files|not run|columns): (?P<text>.+) -->")
# Configs of published models, by the word after `config`.
_CONFIGS = {
    "llama-3-8b": {**published.LLAMA_8B, "torch_dtype": "bfloat16"},
    "llama-3-70b": {**published.LLAMA_70B, "torch_dtype": "bfloat16"},
    "mixtral-8x7b": {**published.MIXTRAL, "torch_dtype": "bfloat16"},
    "deepseek-v3": {
        **published.DEEPSEEK_V3,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    },
}
# What a fixture would repeat, by the word after `made`.
MADE = {"verl-lora": write_verl_lora}
# What differs from run to run and from machine to machine.
_MASKS = ((re.compile(r"\bin [\d.]+ s\b"), "in # s"), (re.compile(r"\([\d.]+ [kMGT]?B/s\)"), "(# B/s)"))
# A command line with one of these, outside quotes, needs a shell.
_SHELL = re.compile(r"[|<>&;$`*?]")


@dataclass
class Command:
    """A command of a page, and what the page says that it prints."""

    text: str
    """The command line, without the prompt."""
    line: int
    """The number of its line in the page, from 0."""
    output: list[str] = field(default_factory=list)
    """The lines that follow it."""


@dataclass
class Block:
    """A fenced block of a page."""

    language: str
    """The word after the fence."""
    start: int
    """The number of the line after the opening fence, from 0."""
    stop: int
    """The number of the closing fence's line."""
    lines: list[str]
    """What stands between the fences."""
    reason: str | None = None
    """Why it is not run; None if it is."""
    columns: str | None = None
    """The width of the terminal on which it is run; None: lines are as long as they are."""

    def commands(self) -> list[Command]:
        """The commands of a `console` block, in order."""
        commands: list[Command] = []
        for number, line in enumerate(self.lines, self.start):
            if line.startswith(PROMPT):
                commands.append(Command(line.removeprefix(PROMPT), number))
            elif commands:
                commands[-1].output.append(line)
        for command in commands:  # an empty line may separate it from the next one
            while command.output and not command.output[-1]:
                command.output.pop()
        return commands


@dataclass
class Page:
    """A page of the documentation."""

    path: Path
    """Where it lies."""
    files: dict[str, str]
    """What its commands find in their folder: the name there, and the fixture or config that it is."""
    blocks: list[Block]
    """Its fenced blocks, in order."""

    @property
    def name(self) -> str:
        """The path as a reader of the repository writes it."""
        return str(self.path.relative_to(ROOT))

    def runnable(self) -> list[Block]:
        """The blocks that are run: commands, and Python on pages that have files."""
        languages = ("console", "python") if self.files else ("console",)
        return [block for block in self.blocks if block.language in languages and block.reason is None]


def read_page(path: Path) -> Page:
    """The page at a path."""
    files: dict[str, str] = {}
    blocks: list[Block] = []
    opened: Block | None = None
    reason: str | None = None
    columns: str | None = None
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        assert fence or not line.lstrip().startswith("```"), f"{path}:{number + 1}: a fence is not indented, and has one word"
        if opened and fence and not fence["language"]:
            opened.stop, opened.lines = number, lines[opened.start : number]
            blocks.append(opened)
            opened = None
        elif opened:
            continue
        elif fence:
            opened, reason, columns = Block(fence["language"], number + 1, number + 1, [], reason, columns), None, None
        elif comment := _COMMENT.fullmatch(line.strip()):
            if comment["word"] == "files":
                files.update(tuple(part.strip() for part in entry.split("=")) for entry in comment["text"].split(","))  # type: ignore[misc]
            elif comment["word"] == "columns":
                columns = comment["text"]
            else:
                reason = comment["text"]
    assert opened is None, f"{path}: the block that starts in line {opened.start if opened else 0} does not end"
    return Page(path, files, blocks)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


class Session:
    """A folder with the files of a page, in which its commands run one after the other."""

    def __init__(self, page: Page, folder: Path) -> None:
        self._folder = folder
        self._code = 0
        for name, what in page.files.items():
            self._place(name, what)

    def run(self, command: str) -> tuple[int, str]:
        """The exit code and the output of a command, stdout and stderr together, as on a terminal."""
        if command == "echo $?":
            return 0, f"{self._code}\n"
        words = shlex.split(command, comments=True)
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
        if words[0] == "reshard" and not _SHELL.search(unquoted):
            self._code, output = self._in_process(words[1:])
        else:
            self._code, output = self._in_shell(command)
        return self._code, output.replace(f"{self._folder}/", "")

    def python(self, code: str) -> None:
        """Run Python code in the folder."""
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(io.StringIO()):
            logger = logging.getLogger("reshard")
            level, handlers = logger.level, list(logger.handlers)
            try:
                exec(compile(code, "page", "exec"), {"__name__": "page"})
            finally:  # what a page listens to must not be heard in other tests
                logger.setLevel(level)
                logger.handlers[:] = handlers

    def _place(self, name: str, what: str) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if what.startswith("config "):
            target.mkdir()
            (target / "config.json").write_text(json.dumps(_CONFIGS[what.removeprefix("config ")]))
        elif what.startswith("made "):
            MADE[what.removeprefix("made ")](target)
        elif (FIXTURES / what).is_dir():
            shutil.copytree(FIXTURES / what, target)
        else:
            shutil.copyfile(FIXTURES / what, target)
        # The fixtures have no tokenizer, and the checkpoints of users have one.
        for config in target.rglob("config.json") if target.is_dir() else [target] if target.name == "config.json" else []:
            config.with_name("tokenizer.json").write_text("{}")

    def _in_process(self, words: list[str]) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = import_module("reshard.cli.main").run(words)
        return code, output.getvalue()

    def _in_shell(self, command: str) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self._folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout


# pytest-xdist sets it, which shortens tables; a page shows whole ones.
os.environ.pop("COLUMNS", None)


def run_page(page: Page, folder: Path) -> Iterator[tuple[Command, int, list[str]]]:
    """Every command that is run, with its exit code and the lines that it prints. Python blocks run in their place."""
    session = Session(page, folder)
    for block in page.runnable():
        if block.language == "python":
            session.python("\n".join(block.lines))
            continue
        for command in block.commands():
            with _columns(block.columns):
                code, output = session.run(command.text)
            yield command, code, [line.rstrip() for line in output.rstrip("\n").split("\n")] if output else []


@contextlib.contextmanager
def _columns(width: str | None) -> Iterator[None]:
    """A terminal of that width, inside this context."""
    if width is not None:
        os.environ["COLUMNS"] = width
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
