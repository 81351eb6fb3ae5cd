"""A campaign of hostile checkpoints: every fixture, changed at random but reproducibly, read and converted in limited processes.

    .venv/bin/python tests/hostile/campaign.py --seconds 300          as CI does; --inputs N, --seed N, --jobs N, --only PATTERN
    .venv/bin/python tests/hostile/campaign.py --replay dcp/fsdp2 pickle 17

Each input is a recipe: a fixture, a kind of mutation (mutations.py) and a seed, which also chooses the command. Outcomes:

    refused           exit code 1 to 6, and one paragraph
    unforeseen        the same, from the one place that catches what no reader checks
    done              exit code 0
    TRACEBACK, CRASH, HANG (10 s of processor time, or 60 s), MEMORY (more than 1 GB), EXECUTED (code of the checkpoint, a process, a
    socket), WROTE ELSEWHERE (outside of the target folder): defects; exit code 1, and the recipes that show them
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hostile.limits import limited  # noqa: E402
from hostile.mutations import KINDS  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CORPUS = Path(__file__).parent / "corpus" / "recipes.json"
_UNFORESEEN = "has a form that reshard does not expect"
GOOD = ("refused", "unforeseen", "done", "no such mutation")
TARGETS = [
    *[("hf",)] * 2,
    *[(name,) for name in ("dcp", "universal", "deepspeed", "megatron-dist", "fsdp", "sglang", "trtllm")],
    *[(name, "--tp", "2") for name in ("vllm", "megatron")],
]


class Recipe(NamedTuple):
    fixture: str
    """A folder below fixtures/."""
    kind: str
    """The kind of mutation, a key of KINDS."""
    seed: int
    """The seed of the mutation, and of the choice of the command."""


def fixtures() -> list[str]:
    """The folders below fixtures/ that hold a checkpoint: those called "checkpoint", models of the Hugging Face kind, and adapters."""
    folders = {path.parent for path in FIXTURES.rglob("checkpoint") if path.is_dir()}
    configs = (*FIXTURES.rglob("config.json"), *FIXTURES.rglob("adapter_config.json"))
    folders |= {path.parent for path in configs if not any(parent in folders for parent in path.parents)}
    return sorted(str(path.relative_to(FIXTURES)) for path in folders)


def commands(source: Path, pristine: Path, target: Path) -> list[list[list[str]]]:
    """The command lines that read the checkpoint, in groups: the campaign chooses a group, and one of it."""
    model = pristine.parent / "model"
    models = [["--model", str(model)]] * 2 + [[]] if model.is_dir() else [[]]

    def each(*words: str) -> list[list[str]]:
        return [[*words, *options] for options in models]

    def convert(*words: str) -> list[list[str]]:
        return each("convert", str(source), str(target), *words)

    name = str(source)
    truth = pristine.parent / "truth.json"
    base = FIXTURES / "hf" / (json.loads(truth.read_text())["base"] if pristine.name == "adapter" else "llama")
    return [
        each("inspect", name),
        each("fingerprint", name),
        each("verify", str(pristine), name),
        each("diff", str(pristine), name) + each("explain", name, str(pristine)) + each("stats", name),
        each("doctor", name, "--deep"),
        each("digests", name, "--to", "vllm", "--tp", "2") + each("inspect", name, "--json", "--full"),
        [line for to in TARGETS for line in each("plan", name, "--to", *to)],
        [["degrees", name, "--to", "vllm"]],
        [["estimate", name, "--gpus", "8"]],
        *[[line for to in TARGETS for line in convert("--to", *to)]] * 5,
        convert("--to", "hf", "--dequantize") + convert("--to", "hf", "--quantize", "mxfp4") + convert("--to", "peft"),
        [["convert", str(base), str(target), "--to", "hf", "--merge-adapter", name], *convert("--to", "hf", "--keep-unknown")],
    ]


def run_recipe(recipe: Recipe, folder: Path) -> tuple[str, str]:
    """The outcome, and what was done and printed. folder: an empty folder for the changed checkpoint and the target."""
    pristine, done, chance = changed(recipe, folder)
    if done is None:
        return "no such mutation", ""
    source, target = folder / "source", folder / "target"
    outcome, text = outcome_of(chance.choice(chance.choice(commands(source, pristine, target))), target)
    return outcome, f"[{done}] {text}"


def changed(recipe: Recipe, folder: Path) -> tuple[Path, str | None, random.Random]:
    """Writes the changed checkpoint into folder/source. Returns the fixture's checkpoint, what was done to it, and the generator."""
    chance = random.Random("|".join(map(str, recipe)))
    pristine = FIXTURES / recipe.fixture
    pristine = pristine / "checkpoint" if (pristine / "checkpoint").is_dir() else pristine
    shutil.copytree(pristine, folder / "source")
    return pristine, KINDS[recipe.kind](folder / "source", chance), chance


def outcome_of(arguments: list[str], target: Path) -> tuple[str, str]:
    """The outcome of a command line in a limited process, and what it printed."""
    answer = limited(lambda: _watched(arguments, target))
    outcome, _, text = (
        answer.partition(" ") if not answer.startswith(("CRASH", "WROTE")) else (answer.split(" by ")[0].split(":")[0], "", answer)
    )
    return outcome, f"reshard {' '.join(arguments)}\n{text}"


def _watched(arguments: list[str], target: Path) -> str:
    """In the child: the outcome of a command line, with an audit hook that watches what it does to the machine."""
    seen: list[str] = []
    roots = tuple({str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, FIXTURES.parent, *filter(os.path.isabs, sys.path))})

    def is_ours(path: object) -> bool:
        return str(path).startswith((*roots, "<frozen", "<__array_function__", "<string>", "<unknown>"))

    def watch(event: str, args: tuple[Any, ...]) -> None:
        code = {"exec": lambda: args[0].co_filename, "compile": lambda: args[1], "import": lambda: args[1]}.get(event, lambda: None)()
        if event in _FOREIGN or event.startswith("socket.") or (code and not is_ours(code)):
            seen.append(f"EXECUTED {event} {args!r}"[:300])
        elif (event == "open" and _writes(args)) or event in _CHANGES:
            paths, folders = _CHANGES.get(event, (1, None))
            for i in range(paths):
                within = args[folders + i] if folders is not None and isinstance(args[folders + i], int) else -1
                if isinstance(args[i], str | bytes | os.PathLike) and not _inside(args[i], within, target):
                    seen.append(f"WROTE ELSEWHERE: {event} {os.fsdecode(args[i])[:200]}")

    out, err = io.StringIO(), io.StringIO()
    run = import_module("reshard.cli.main").run
    tempfile.tempdir = str(target.parent)
    sys.addaudithook(watch)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    message = err.getvalue()
    if seen:
        return seen[0]
    if "MemoryError" in message:
        return f"MEMORY {message[-3000:]}"
    if code == 0:
        return f"done {out.getvalue()[-200:]}"
    if code in range(1, 7) and message.startswith("reshard: ") and message.count("\n") == 1 and message.isprintable is not None:
        return f"{'unforeseen' if _UNFORESEEN in message else 'refused'} {message}"
    if code == 1 and not message:
        return f"refused {out.getvalue()[-300:]}"
    return f"TRACEBACK exit code {code}\n{message[-6000:]}"


_FOREIGN = {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "ctypes.dlopen",
    "pty.spawn",
    "os.kill",
}
# Events that change files: how many of their arguments are paths, and at which place the descriptors of those paths' folders start.
_CHANGES: dict[str, tuple[int, int | None]] = {
    "os.remove": (1, 1),
    "os.rmdir": (1, 1),
    "os.mkdir": (1, 2),
    "os.rename": (2, 2),
    "os.link": (2, 2),
    "os.symlink": (2, None),
    "os.truncate": (1, None),
    "os.chmod": (1, 2),
    "shutil.rmtree": (1, 1),
}


def _writes(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return (
        bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if isinstance(flags, int) and mode is None
        else any(c in str(mode) for c in "wax+")
    )


def _inside(path: Any, within: int, target: Path) -> bool:
    """Whether the path lies beside or in the target, and not in the source. within: a descriptor of its folder, or -1."""
    text = os.path.abspath(os.path.join(os.readlink(f"/proc/self/fd/{within}") if within >= 0 else "", os.fsdecode(path)))
    return text == os.devnull or (Path(text).is_relative_to(target.parent) and not Path(text).is_relative_to(target.parent / "source"))


def warm_up(folder: Path) -> None:
    """Import what commands import, so that children start with it and imports in a child are noticed."""
    for i, to in enumerate(dict.fromkeys(TARGETS)):
        recipe = FIXTURES / "hf" / "llama"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run = import_module("reshard.cli.main").run
            run(["convert", str(recipe), str(folder / f"warm{i}"), "--to", *to])
            run(["verify", str(recipe), str(folder / f"warm{i}")])
            if to in (("hf",), ("dcp",)):
                for line in itertools.chain.from_iterable(commands(folder / f"warm{i}", recipe, folder / "warm")):
                    run(line)
                    shutil.rmtree(folder / "warm", ignore_errors=True)
        shutil.rmtree(folder / f"warm{i}", ignore_errors=True)


def recipes(seed: int, only: str, job: int, jobs: int) -> Any:
    """An endless sequence of recipes, of which each job takes its share."""
    cases = [case for case in fixtures() if fnmatch.fnmatch(case, only)]
    number = job
    while True:
        chance = random.Random(f"{seed}|{number}")
        yield Recipe(chance.choice(cases), chance.choice((*KINDS, "pickle", "pickle")), seed * 10_000_000 + number)
        number += jobs


def campaign(args: argparse.Namespace, job: int, folder: Path) -> tuple[Counter[str], list[tuple[Recipe, str, str]]]:
    """The numbers of outcomes, and the recipes that show defects, of one job."""
    outcomes: Counter[str] = Counter()
    defects = []
    ends = time.monotonic() + args.seconds if args.seconds else float("inf")
    share = args.inputs // args.jobs if args.inputs else float("inf")
    for recipe in recipes(args.seed, args.only, job, args.jobs):
        if time.monotonic() > ends or sum(outcomes.values()) >= share:
            return outcomes, defects
        with tempfile.TemporaryDirectory(dir=folder) as place:
            outcome, text = run_recipe(recipe, Path(place))
        if outcome == "no such mutation":
            continue
        outcomes[outcome] += 1
        if outcome == "unforeseen" and args.verbose:
            print(f"{outcome}: --replay {recipe.fixture} {recipe.kind} {recipe.seed}\n  {text}", flush=True)
        if outcome not in GOOD:
            defects.append((recipe, outcome, text))
            print(f"{outcome}: --replay {recipe.fixture} {recipe.kind} {recipe.seed}\n  {text[-args.show :]}", flush=True)
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="*", help="pattern of fixtures")
    parser.add_argument("--show", type=int, default=1500, help="characters printed of each defect")
    parser.add_argument("--verbose", action="store_true", help="print unforeseen ones too")
    parser.add_argument("--replay", nargs=3, metavar=("FIXTURE", "KIND", "SEED"))
    args = parser.parse_args()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=shared) as place:
        folder = Path(place)
        warm_up(folder)
        if args.replay:
            (folder / "replay").mkdir()
            print(*run_recipe(Recipe(args.replay[0], args.replay[1], int(args.replay[2])), folder / "replay"))
            return 0
        if not args.seconds and not args.inputs:
            parser.error("give --seconds or --inputs")
        return _all_jobs(args, folder)


def _all_jobs(args: argparse.Namespace, folder: Path) -> int:
    """Runs the jobs in processes of their own and prints the table."""
    began, children = time.monotonic(), []
    for job in range(args.jobs):
        child = os.fork()
        if not child:
            code = 70
            try:
                outcomes, defects = campaign(args, job, folder)
                (folder / f"job{job}.json").write_text(json.dumps([outcomes, [[*recipe, outcome] for recipe, outcome, _ in defects]]))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    outcomes: Counter[str] = Counter()
    defects = []
    for path in sorted(folder.glob("job*.json")):
        counts, found = json.loads(path.read_text())
        outcomes.update(counts)
        defects += found
    total = sum(count for outcome, count in outcomes.items())
    if failed:
        print(f"{len(failed)} of {args.jobs} jobs died: see the traceback above")
    print(f"{total:,} inputs of {len(fixtures())} fixtures in {time.monotonic() - began:.0f} s, seed {args.seed}")
    for outcome in ("refused", "unforeseen", "done", "TRACEBACK", "CRASH", "HANG", "MEMORY", "EXECUTED", "WROTE ELSEWHERE"):
        print(f"  {outcome:16}{outcomes[outcome]:9,}")
    for recipe in defects:
        print(json.dumps(recipe))
    return int(bool(failed or defects))


if __name__ == "__main__":
    sys.exit(main())
