"""The program that traces an engine's loader (plugins/loader_tracer), run in the engine's Python; and the version of the engine there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.value import value
from reshard.serving.learned.layout import LearnedLayout
from reshard.serving.learned.learn import learned_layout, traced_rank

# The version by the metadata of the package that brings the module, so that the engine is not imported.
_VERSION = "import importlib.metadata as m; print(m.version(m.packages_distributions()[{!r}][0]))"


@value
class Tracer:
    """Traces the loader of one engine."""

    package: str
    """The package with the program."""
    engine: str
    """The name of the engine's module, which is that of the format."""
    python: str = sys.executable
    """The Python that has the engine."""

    def version(self) -> str:
        """The version of the engine. Raises RequestError if that Python does not have it."""
        done = self._run("-c", _VERSION.format(self.engine))
        if done.returncode:
            raise RequestError(
                f"there is no {self.engine} in this Python",
                where=self.python,
                why="Its own loader is traced",
                do="Name the Python that has it with `engine_python=PATH`",
                id="not-found",
            )
        return done.stdout.strip()

    def layout(
        self, model: str, cases: Sequence[Mapping[str, int]], config: Mapping[str, Any], *, trust_remote_code: bool
    ) -> LearnedLayout:
        """The layout of a model at these choices of tp, pp and ep. model: a folder with config.json and headers of safetensors files.

        Raises: UnsupportedError if the engine does not load the model at these sizes, or a tensor cannot be followed.
        """
        request = {"model": model, "cases": [*cases], "ranks": None, "trust_remote_code": trust_remote_code}
        lines = self.answers([request])
        about = next(lines)
        return learned_layout(about, map(traced_rank, lines), config)

    def answers(self, requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The lines of the answer to several requests (plugins/loader_tracer/__main__.py)."""
        spec = find_spec(self.package)
        assert spec is not None and spec.origin is not None, f"{self.package} is a package of reshard"
        with tempfile.TemporaryDirectory() as work:
            asked, answer = Path(work, "requests.json"), Path(work, "answer.jsonl")
            asked.write_text(json.dumps(requests))
            done = self._run(os.path.dirname(spec.origin), self.engine, str(asked), str(answer))
            if done.returncode or not answer.exists():
                raise UnsupportedError(
                    f"the tracer did not finish (exit code {done.returncode}): {_last_line(done.stderr)}",
                    where=self.python,
                    why="It runs inside the engine's Python, which must have the engine and torch",
                    do="Name that Python with `engine_python=PATH`",
                )
            with answer.open() as lines:
                yield from map(json.loads, lines)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self.python, *arguments], capture_output=True, text=True)
        except OSError as error:
            raise RequestError(f"`engine_python={self.python}`: {error.strerror}", do="Give the path of a Python interpreter") from error


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no message")
