"""The slow check of updates: real vLLM on the CPU serves a model, and running ranks change its weights.

    python tests/live/check.py [--reshard PATH] [--python PATH] [--long]

Makes the vLLM environment (.venv-vllm) where there is none. Then, each as a check that is counted:
1. ranks that hold rows of a llama update a server at TP 2, by a plan made by hand: its tokens and log-probabilities are those of a server
   that was started from the new weights, also for prompts longer than a cache block; bytes on the wire are those of the plan;
2. two query heads exchanged in the plan change the tokens: the first check can fail;
3. what is refused or fails leaves the old weights, and the next update succeeds: another vocabulary, another head size, a wrong byte, a
   rank of the trainer that is killed in the middle, rank 0 too;
4. 20 updates do not grow memory; where one element of 50 has changed, an update of changes takes a part of the bytes, and the answers are
   those of a server that was started from these weights;
5. models with a tied head and with experts are updated by the stream, from the files of `convert --to vllm`;
6. a server without development mode, or without the backend: one sentence says how to start one (--long);
7. vLLM's LLM in the trainer's process is updated (--long).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import LONG, Environment, installed, run_checks  # noqa: E402
from live.served import served  # noqa: E402
from live.source_rank import source_ranks  # noqa: E402
from live.streamed import update  # noqa: E402
from serving import sessions  # noqa: E402

VLLM = Environment("vLLM", ROOT / "tests" / "serving" / "requirements.txt", options=("--no-deps",))
BACKEND = ("--weight-transfer-config", '{"backend": "reshard"}')
TP = 2
Check = tuple[str, bool, str]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    with served_llama(python, site, work) as (server, old, new, expected):
        yield from updated(server, old, new, expected)
        yield from refused(server, old, new, expected)
        yield from killed(server, old, new, expected)
        yield from repeated(server, old, new)
    near = nudged(python, old, work / "near")
    with served(python, near, TP, site, work / "reference.log") as server:
        expected = server.answers()
    with served(python, old, TP, site, work / "changed.log", *BACKEND) as server:
        yield from changed(server, old, near, expected)
    for model in ("llama-tied", "qwen3_moe", "mixtral", "deepseek_v3") if LONG else ("llama-tied", "qwen3_moe"):
        yield from streamed(model, reshard, python, site, work)
    if LONG:
        yield from explained(python, old, site, work)
        yield from in_process(python, old, new, site, work)


@contextmanager
def served_llama(python: Path, site: Path, work: Path) -> Iterator[tuple[Any, Path, Path, object]]:
    """A server of a llama with old weights; folders of the old and the new ones; the answers of a server that started with the new ones."""
    old, new = (made(python, ROOT / "fixtures" / "hf" / "llama", work / name, turns) for name, turns in (("old", 0), ("new", 1)))
    with served(python, new, TP, site, work / "reference.log") as server:
        expected = server.answers()
    with served(python, old, TP, site, work / "llama.log", *BACKEND) as server:
        yield server, old, new, expected


def updated(server: Any, old: Path, new: Path, expected: object) -> Iterator[Check]:
    """Updates by plans, and that the comparison can fail."""
    before = server.answers()
    yield "the new weights give other answers", before != expected, str(before)
    for size, wide in ((2, False), (4, True)):
        with source_ranks(size) as trainer:
            name = f"{size} ranks that hold {'F32' if wide else 'BF16'}"
            trainer.ask("load", files=str(new), wide=wide)
            planned = trainer.ask("open", engine=server.address, tp=TP)
            reports = trainer.ask("update", version=f"step-{size}")
            yield f"{name} update the server: it answers as one that was started from the new weights", *same(server, expected)
            sent = sum(report.get("sent", 0) for report in reports)
            told = {sent, *(report.get("nbytes") for report in reports), *(plan.get("nbytes") for plan in planned)}
            yield f"{name}: the bytes on the wire are those of the plan", len(told) == 1, f"{reports} {planned}"
            version, paused = server.asked("/weight_info")["weight_version"], server.asked("/is_paused")["is_paused"]
            yield f"{name}: the server has the version, and goes on", (version, paused) == (f"step-{size}", False), f"{version} {paused}"
            trainer.ask("open", engine=server.address, tp=TP, exchange=True)
            trainer.ask("update")
            found = server.answers()
            yield f"{name}: two query heads exchanged in the plan change the answers", found != expected, str(found)
            trainer.ask("load", files=str(old), wide=wide)
            trainer.ask("open", engine=server.address, tp=TP)
            trainer.ask("update")
            yield f"{name}: the old weights give the old answers again", *same(server, before)


def refused(server: Any, old: Path, new: Path, expected: object) -> Iterator[Check]:
    """What a Sender refuses or drops while all ranks live."""
    before = server.answers()
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        others = {"vocabulary": {"vocab_size": 300}, "head size": {"head_dim": 16}, "number of layers": {"num_hidden_layers": 1}}
        for what, config in others.items():
            said = trainer.ask("open", engine=server.address, tp=TP, config=config)
            everywhere = all("Nothing was sent" in each.get("error", "") for each in said)
            yield f"a trainer with another {what} is refused on every rank", everywhere, str(said)
            yield f"a trainer with another {what}: the server answers with the old weights", *same(server, before)
        trainer.ask("open", engine=server.address, tp=TP, verify=True)
        said = trainer.ask("update", spoil="digest")
        yield "a wrong byte is noticed by its digest", all("digest" in each.get("error", "") for each in said), str(said)
        yield "a wrong byte: the server answers with the old weights", *same(server, before)
        said = trainer.ask("update")
        yield "after a wrong byte the same ranks update the server", *same(server, expected, said)
        trainer.ask("load", files=str(old))
        trainer.ask("update")


def killed(server: Any, old: Path, new: Path, expected: object) -> Iterator[Check]:
    """Ranks of the trainer that end in the middle of an update."""
    before = server.answers()
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        said = trainer.ask("update", spoil="dies", who=1)
        yield "a rank that is killed ends the update", said[1] is None and "old weights" in said[0].get("error", ""), str(said)
        yield "a rank that is killed: the server answers with the old weights", *same(server, before)
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        said = trainer.ask("update", spoil="dies", who=0)
        yield "rank 0 that is killed ends the update", said[0] is None and "error" in said[1], str(said)
        yield "rank 0 that is killed: the server waits for an update", server.asked("/is_paused")["is_paused"], ""
        server.asked("/resume", {})
        yield "rank 0 that is killed: resumed by hand, the server answers with the old weights", *same(server, before)
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        said = trainer.ask("update")
        yield "new ranks continue after an update that was left open", *same(server, expected, said)
        trainer.ask("load", files=str(old))
        trainer.ask("update")


def repeated(server: Any, old: Path, new: Path) -> Iterator[Check]:
    """Many updates in a row."""
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(new))
        trainer.ask("open", engine=server.address, tp=TP)
        for _ in range(3):
            trainer.ask("update")
        start, ours = server.memory(), trainer.ask("memory")
        began = time.monotonic()
        for _ in range(20):
            trainer.ask("update")
        seconds, growth = time.monotonic() - began, server.memory() - start
        own = max(after - earlier for after, earlier in both(trainer.ask("memory"), ours))
        most = 4 << 20
        yield f"20 updates in {seconds:.1f} s do not grow memory", growth < most and own < most, f"server {growth:,}, trainer {own:,} bytes"


def changed(server: Any, old: Path, near: Path, expected: object) -> Iterator[Check]:
    """Updates of which only the changes travel."""
    before = server.answers()
    yield "one element of 50 gives other answers", before != expected, str(before)
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(old))
        planned = trainer.ask("open", engine=server.address, tp=TP, changes=True, verify=True)[0]["nbytes"]
        trainer.ask("update")
        yield "the first update with changes sends all, and the answers stay", *same(server, before)
        trainer.ask("load", files=str(near))
        sent = trainer.ask("update")[0]["nbytes"]
        yield "an update of changes: the server answers as one that was started from the new weights", *same(server, expected)
        yield f"an update of changes takes {sent:,} bytes instead of {planned:,}", sent < planned / 8, ""
        trainer.ask("load", files=str(old))
        trainer.ask("update")
        yield "changed back, the server answers as before", *same(server, before)


def streamed(model: str, reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """Models that reloading treats in a special way: a tied head; experts, which a CPU repacks; a gate of two names (qwen3_moe); a bias
    that is written live (deepseek_v3)."""
    source, ranks = ROOT / "fixtures" / "hf" / model, work / f"{model}-ranks"
    if model in ("qwen3_moe", "deepseek_v3"):
        source = work / model
        subprocess.run([python, ROOT / "fixtures" / "models.py", model, source], check=True, stderr=subprocess.DEVNULL)
    old, new = (made(python, source, work / f"{model}-{turns}", turns) for turns in (0, 1))
    subprocess.run([reshard, "convert", new, ranks, "--to", "vllm", "--tp", str(TP)], check=True, stdout=subprocess.DEVNULL)
    with served(python, new, TP, site, work / "reference.log") as server:
        expected = server.answers()
    with served(python, old, TP, site, work / f"{model}.log", *BACKEND) as server:
        before = server.answers()
        yield f"{model}: the new weights give other answers", before != expected, str(before)
        for version in ("1", "2"):
            report = update(server.address, ranks, TP, version)
            what = f"{model}, update {version} by the stream: the server answers as one that was started from the new weights"
            yield what, *same(server, expected, report)


def explained(python: Path, model: Path, site: Path, work: Path) -> Iterator[Check]:
    """Servers that take no updates by reshard."""
    with source_ranks(1) as trainer:
        trainer.ask("load", files=str(model))
        for what, word, options, development in (
            ("development mode", "VLLM_SERVER_DEV_MODE=1", BACKEND, "0"),
            ("a backend", "--weight-transfer-config", (), "1"),
        ):
            with served(python, model, 1, site, work / "explained.log", *options, development=development) as server:
                said = trainer.ask("open", engine=server.address, tp=1)[0].get("error", "")
                yield f"a server without {what}: one sentence says how to start one", word in said, said


def in_process(python: Path, old: Path, new: Path, site: Path, work: Path) -> Iterator[Check]:
    """vLLM's LLM in a process that also trains."""
    path = os.pathsep.join([str(ROOT / "tests" / "serving" / "startup"), str(HERE.parent), str(site)])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}

    def answer(*folders: Path) -> Any:
        command = [python, HERE / "in_process.py", *folders]
        output, messages = alone([*map(str, command)], {**os.environ, **own, "TMPDIR": str(work)}, work)
        found = [line for line in output.splitlines() if line.startswith("ANSWER ")]
        return json.loads(found[0].removeprefix("ANSWER ")) if found else messages[-2000:]

    found, expected = answer(old, new), answer(new)
    same = isinstance(found, dict) and found["answers"] == expected["answers"]
    yield "an LLM in the trainer's process answers as one that was started from the new weights", same, f"{found} {expected}"
    yield "an LLM in the trainer's process has the version", same and found["version"] == ["new", "new"], str(found)


def alone(command: list[str], environment: dict[str, str], folder: Path) -> tuple[str, str]:
    """stdout and stderr of a command in a session of its own, of which nothing is left running."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=messages, start_new_session=True)
        try:
            process.wait(timeout=1200)
        finally:
            sessions.end(process.pid)
        output.seek(0), messages.seek(0)
        return output.read(), messages.read()


def made(python: Path, source: Path, target: Path, turns: int) -> Path:
    """A folder that vLLM serves (tiny_models.py)."""
    subprocess.run([python, HERE / "tiny_models.py", source, target, str(turns)], check=True)
    return target


def nudged(python: Path, source: Path, target: Path) -> Path:
    """A folder that vLLM serves, of which every 50th element of each weight is another one."""
    subprocess.run([python, HERE / "tiny_models.py", source, target, "0", "50"], check=True)
    return target


def same(server: Any, expected: object, detail: object = "") -> tuple[bool, str]:
    """Whether the server answers as expected, tokens and log-probabilities."""
    found = server.answers()
    return found == expected, f"{found} against {expected} {detail}"


def both(left: list[Any], right: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(left, right, strict=True)


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
