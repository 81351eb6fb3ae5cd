"""The `reshard` command as a user calls it: in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def reshard(*arguments: object) -> Result:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = import_module("reshard.cli.main").run([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def command(*arguments: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "reshard", *map(str, arguments)]


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder and what they hold; empty if it is not there."""
    return (
        {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        if folder.exists()
        else {}
    )


def result_tree(folder: Path) -> dict[str, bytes]:
    """All files of a conversion's result. The content of reshard.json is left out: it holds the time and the command."""
    return {path: b"" if path == "reshard.json" else content for path, content in tree(folder).items()}
