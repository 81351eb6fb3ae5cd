"""Campaigns of hostile input: whatever comes from outside is changed at random but reproducibly, and met by a command in a limited process.

    .venv/bin/python tests/hostile/campaign.py --seconds 300                       as CI does; --inputs N, --seed N, --jobs N
    .venv/bin/python tests/hostile/campaign.py --surface chains --inputs 1000      one surface; --only PATTERN of its first words
    .venv/bin/python tests/hostile/campaign.py --surface checkpoints --replay dcp/fsdp2 pickle 17

    checkpoints    files of every fixture (checkpoints.py)
    chains         no lies: models of random numbers through many conversions, compared with the numbers (chains.py)
    work-folders   what interrupted conversions and watches keep for themselves (work_folders.py)
    stores         S3 servers, and servers that are asked for their weights: both lie (lying_servers.py)
    plan-files     forged ones with right digests (plan_files.py)
    records        deltas, kept runs, the cache, learned layouts (own_records.py)
    hub            strangers at `reshard hub` (strangers.py)

Each input is a recipe of two words and a seed, which also chooses the command. Outcomes:

    refused           exit code 1 to 6, and one paragraph
    unforeseen        the same, from the one place that catches what no reader checks
    done              exit code 0
    TRACEBACK, CRASH, HANG (10 s of processor time, or 60 s), MEMORY (more than 1 GB), EXECUTED (code of the checkpoint, a process, a
    socket), WROTE ELSEWHERE (outside of the target folder), REMOVED ELSEWHERE (what is somebody else's or the user's),
    CONNECTED ELSEWHERE (a redirect that was followed), WRONG (other bytes than the oracle's): defects; exit code 1, and the recipes
    that show them
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hostile.checkpoints import warm_up  # noqa: E402
from hostile.watched import GOOD  # noqa: E402

CORPUS = Path(__file__).parent / "corpus" / "recipes.json"
# surface -> its module, and its share of the time when all are run. A module has `recipes` and `run`.
SURFACES = {
    "checkpoints": ("checkpoints", 50),
    "chains": ("chains", 25),
    "work-folders": ("work_folders", 10),
    "stores": ("lying_servers", 10),
    "plan-files": ("plan_files", 5),
    "records": ("own_records", 15),
    "hub": ("strangers", 5),
}
OUTCOMES = (
    "refused",
    "unforeseen",
    "done",
    "TRACEBACK",
    "CRASH",
    "HANG",
    "MEMORY",
    "EXECUTED",
    "WROTE ELSEWHERE",
    "REMOVED ELSEWHERE",
    "CONNECTED ELSEWHERE",
    "WRONG",
)


class Recipe(NamedTuple):
    surface: str
    """A key of SURFACES."""
    case: str
    """What is changed, such as a folder below fixtures/."""
    kind: str
    """The kind of the change."""
    seed: int
    """The seed of the change, and of the choice of the command."""


def module_of(surface: str) -> ModuleType:
    return import_module(f"hostile.{SURFACES[surface][0]}")


def run_recipe(recipe: Recipe, folder: Path) -> tuple[str, str]:
    """The outcome, and what was done and printed. folder: an empty one."""
    outcome, text = module_of(recipe.surface).run(*recipe[1:], folder)
    return outcome, text


def recipes(surface: str, seed: int, only: str, job: int, jobs: int) -> Iterator[Recipe]:
    """An endless sequence of recipes, of which each job takes its share."""
    number, choose = job, module_of(surface).recipes
    while True:
        chance = random.Random(f"{seed}|{number}")
        yield Recipe(surface, *choose(chance, only), seed * 10_000_000 + number)
        number += jobs


class Tally:
    """The numbers of outcomes by surface, and the recipes that show defects."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.defects: list[Recipe] = []

    def add(self, recipe: Recipe, outcome: str) -> None:
        self.outcomes.setdefault(recipe.surface, Counter())[outcome] += 1
        if outcome not in GOOD:
            self.defects.append(recipe)

    def merge(self, path: Path) -> None:
        counts, found = json.loads(path.read_text())
        for surface, counter in counts.items():
            self.outcomes.setdefault(surface, Counter()).update(counter)
        self.defects += [Recipe(*recipe) for recipe in found]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([self.outcomes, self.defects]))


def campaign(args: argparse.Namespace, surface: str, job: int, folder: Path, tally: Tally) -> None:
    """One job's share of the inputs of a surface."""
    share = SURFACES[surface][1] / sum(SURFACES[each][1] for each in args.surfaces)
    ends = time.monotonic() + args.seconds * share if args.seconds else float("inf")
    most, done = args.inputs // args.jobs if args.inputs else float("inf"), 0
    for recipe in recipes(surface, args.seed, args.only, job, args.jobs):
        if time.monotonic() > ends or done >= most:
            return
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
            outcome, text = run_recipe(recipe, Path(place))
        if outcome == "no such mutation":
            continue
        done += 1
        tally.add(recipe, outcome)
        if outcome not in GOOD or (outcome == "unforeseen" and args.verbose):
            _show(recipe, outcome, text[-args.show :])


def _show(recipe: Recipe, outcome: str, text: str) -> None:
    print(f"{outcome}: --surface {recipe.surface} --replay {recipe.case!r} {recipe.kind!r} {recipe.seed}\n  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--surface", dest="surfaces", action="append", choices=SURFACES, help="one or several; without it, all")
    parser.add_argument("--seconds", type=float, help="of all surfaces together")
    parser.add_argument("--inputs", type=int, help="of each surface")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="*", help="pattern of cases, such as fixtures")
    parser.add_argument("--show", type=int, default=1500, help="characters printed of each defect")
    parser.add_argument("--verbose", action="store_true", help="print unforeseen ones too")
    parser.add_argument("--replay", nargs=3, metavar=("CASE", "KIND", "SEED"))
    args = parser.parse_args()
    args.surfaces = args.surfaces or [*SURFACES]
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=shared, ignore_cleanup_errors=True) as place:
        folder = Path(place)
        warm_up(folder)
        if args.replay:
            (folder / "replay").mkdir()
            print(*run_recipe(Recipe(args.surfaces[0], args.replay[0], args.replay[1], int(args.replay[2])), folder / "replay"))
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
                tally = Tally()
                for surface in args.surfaces:
                    campaign(args, surface, job, folder, tally)
                tally.write(folder / f"job{job}.json")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    tally = Tally()
    for path in sorted(folder.glob("job*.json")):
        tally.merge(path)
    if failed:
        print(f"{len(failed)} of {args.jobs} jobs died: see the traceback above")
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    for surface, counter in tally.outcomes.items():
        counts = ", ".join(f"{counter[outcome]:,} {outcome}" for outcome in OUTCOMES if counter[outcome] or outcome in OUTCOMES[:3])
        print(f"  {surface:14}{counter.total():9,} inputs: {counts}")
    for recipe in tally.defects:
        print(json.dumps(recipe))
    return int(bool(failed or tally.defects))


if __name__ == "__main__":
    sys.exit(main())
