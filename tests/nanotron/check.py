"""Real nanotron 0.4 loads the folders that reshard writes.

    python tests/nanotron/check.py [--reshard COMMAND] [--python INTERPRETER]

The models of fixtures/nanotron are converted to hf and from there to nanotron at several tensor-parallel sizes. nanotron loads each folder
on one rank, and then on the ranks that saved the fixture, which save it again: all weights are those of the fixture, every bit. An
environment with nanotron is made in .venv-nanotron.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.asked_process import Ask, asking
from helpers.framework_environments import ROOT, Environment, run_checks

ENVIRONMENT = Environment("nanotron", ROOT / "tests" / "nanotron" / "requirements.txt")
FIXTURES = ROOT / "fixtures" / "nanotron"
# Case -> the tensor-parallel sizes that divide its heads.
CASES = {"llama-tp2-pp2": (1, 2), "llama-tied-tp2": (1, 2, 4)}


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    with asking([python, "-W", "ignore", Path(__file__).parent / "run.py"]) as ask:
        yield from loaded(reshard, ask, work)


def loaded(reshard: Path, ask: Ask, work: Path) -> Iterator[tuple[str, bool, str]]:
    def ran(*words: object) -> str:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr[-2000:] or "failed"

    for case, sizes in CASES.items():
        saved = FIXTURES / case / "checkpoint"
        hf = work / case
        failed = ran(reshard, "convert", saved, hf, "--to", "hf")
        for tp in sizes:
            folder, truth, again = (work / f"{case}-{tp}-{word}" for word in ("out", "truth.json", "again"))
            failed = failed or ran(reshard, "convert", hf, folder, "--to", "nanotron", "--tp", tp)
            failed = failed or ask({"folder": str(folder), "truth": str(truth)})
            equal = not failed and _tensors(truth) == _tensors(FIXTURES / case / "truth.json")
            yield f"{case} at TP {tp}: loaded on one rank", equal, failed or "the weights differ"
            failed = failed or ask({"folder": str(folder), "target": str(again), "case": case})
            differ = [] if failed else [path for path in _weights(saved) if _tail(saved / path) != _tail(again / path)]
            yield f"{case} at TP {tp}: loaded by the ranks of the fixture", not failed and not differ, failed or f"{differ} differ"


def _tensors(truth: Path) -> object:
    return json.loads(truth.read_text())["tensors"]


def _weights(folder: Path) -> list[Path]:
    found = [path.relative_to(folder) for path in folder.rglob("*.safetensors")]
    assert found
    return found


def _tail(path: Path) -> bytes:
    """The bytes of the tensor. The metadata in the header are in an order that changes from run to run."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


if __name__ == "__main__":
    sys.exit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
