"""The drift alarm: what an installed release of a framework asks for and writes, compared with the release that reshard was compared with.

    python tests/drift/check.py FRAMEWORK --python PATH [--path FOLDER] [--record]

FRAMEWORK is one of those of facts.py. PATH is a Python that has it; FOLDER is put in front of its packages, such as an unpacked wheel.
Prints every name that came, went or changed, and ends with 1 if there is one. `--record` writes what it found to recorded/FRAMEWORK.json
instead, which says that reshard was compared with this release: run the framework's other checks and makers first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FRAMEWORKS = ("transformers", "torch", "megatron-core", "vllm", "sglang")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--python", required=True)
    parser.add_argument("--path", default="")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    found = facts(options.python, options.framework, options.path)
    recorded = HERE / "recorded" / f"{options.framework}.json"
    if options.record:
        recorded.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
        return 0
    known = json.loads(recorded.read_text())
    lines = list(changes(known["facts"], found["facts"]))
    print(f"{options.framework} {found['version']} against {known['version']}: {len(lines) or 'no'} changes", *lines, sep="\n")
    return bool(lines)


def facts(python: str, framework: str, path: str = "") -> dict[str, Any]:
    """What facts.py prints in that environment."""
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, HERE / "facts.py", framework]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{framework} does not tell its facts:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def changes(known: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """A line for every group and name that came, went or has another value."""
    for group in sorted(known.keys() | found.keys()):
        if group not in found or group not in known:
            yield f"{'gone' if group in known else 'new'}      {group}"
            continue
        before, now = known[group], found[group]
        for name in sorted(before.keys() | now.keys()):
            if name not in now or name not in before:
                yield f"{'gone' if name in before else 'new'}      {group}: {name}"
            elif before[name] != now[name]:
                yield f"changed  {group}: {name}: {_short(before[name])} -> {_short(now[name])}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


if __name__ == "__main__":
    sys.exit(main())
