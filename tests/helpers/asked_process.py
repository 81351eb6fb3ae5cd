"""A process that is asked line by line, each request and each answer a line of JSON. Both ends of it: importing a framework takes longer
than what it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Ask = Callable[[dict[str, Any]], Any]


@contextmanager
def asking(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Iterator[Ask]:
    """A command that answers (see `answer`), as long as it is needed. What it prints else is of no use: answers tell what fails."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:

        def ask(request: dict[str, Any]) -> Any:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{command[-1]} ended when asked {request}")
            return json.loads(line)

        yield ask
        process.stdin.close()


def answer(answered: Ask) -> None:
    """Answer what is asked on stdin until it ends; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), file=answers, flush=True)
