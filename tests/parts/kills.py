"""Parts of a conversion that are killed at random moments: one experiment, and a campaign of them.

    python tests/parts/kills.py [--kills 200] [--seed 0]

A round starts 8 parts of one plan, or another number of them, as forked children, and kills some with SIGKILL. After every round, each file
that has its final name is compared byte by byte with what one undisturbed process writes. At last a round without kills completes the
target, and everything is compared. tests/parts/test_parts.py runs the same with a few kills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hostile"))

from helpers.fixture_places import HF
from helpers.reshard_command import result_tree
from interruptions import DONE, child, ended, slow, visible

import reshard
from reshard.engine.destinations.journal import read_journal
from reshard.errors import ReshardError

COUNTS = (8, 8, 8, 3, 5, 2, 13)


def experiment(plan, expected, target, randomness, *, kills, old=None):
    """Run rounds until so many parts were killed or the target is complete, and one round without kills. Returns the kills by phase.

    expected: what one process writes. old: the plan of a checkpoint that is replaced.
    """
    phases = Counter()
    older = {}
    if old is not None:
        reshard.convert(old, target)
        older = visible(target)
    while phases.total() < kills and visible_result(target) != expected:
        phases += killed_round(plan, target, randomness, min(kills - phases.total(), 4))
        check_names(target, expected, older)
    parts = randomness.choice(COUNTS)
    children = [start(plan, target, f"{i}/{parts}", randomness) for i in range(parts)]
    statuses = [ended(pid) for pid in children]
    assert statuses == [DONE] * parts, statuses
    assert visible_result(target) == expected, "the result is not what one process writes"
    assert not (target / ".reshard").exists(), "the work folder is gone"
    return phases


def killed_round(plan, target, randomness, most):
    """Start the parts and kill some of them, at most `most`; returns the phases in which they were killed."""
    parts, phases = randomness.choice(COUNTS), Counter()
    children = [start(plan, target, f"{i}/{parts}", randomness) for i in range(parts)]
    for pid in randomness.sample(children, randomness.randint(1, min(most, parts))):
        time.sleep(randomness.random() ** 2 * 0.2)
        phase = phase_of(target)
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.remove(pid)  # It has ended already.
            continue
        os.kill(pid, signal.SIGKILL)
        phases[phase] += 1
    statuses = [ended(pid) for pid in children]
    assert set(statuses) <= {DONE, -signal.SIGKILL}, statuses
    return phases


def start(plan, target, part, randomness):
    seed = randomness.random()

    def run():
        own = random.Random(seed)
        slow(own, 0.1)
        try:
            reshard.convert_part(plan, target, part, workers=1, overwrite=True)
        except ReshardError as error:
            print(f"part {part}: {error}", file=sys.stderr, flush=True)
            raise

    return child(run)


def phase_of(target):
    unfinished = read_journal(target)
    if unfinished is None:
        return "complete" if (target / "reshard.json").exists() else "preparing"
    return "committing" if unfinished.committing else "copying"


def visible_result(target):
    return {path: b"" if path == "reshard.json" else data for path, data in visible(target).items()}


def check_names(target, expected, older):
    """Every file under its final name is whole: of the new checkpoint, or of the old one."""
    for path, data in visible_result(target).items():
        assert data in (expected.get(path), older.get(path)) or path == "reshard.json", f"{path} is neither new nor old"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    randomness, phases, done = random.Random(options.seed), Counter(), 0
    plans = [reshard.plan(HF / "llama", to="vllm", tp=2), reshard.plan(HF / "qwen2", to="hf", max_shard_size="50kB")]
    with tempfile.TemporaryDirectory() as work:
        whole = []
        for i, plan in enumerate(plans):
            reshard.convert(plan, Path(work, f"whole-{i}"))
            whole.append(result_tree(Path(work, f"whole-{i}")))
        while phases.total() < options.kills:
            i, old = done % 2, plans[1 - done % 2] if randomness.random() < 0.3 else None
            kills = min(options.kills - phases.total(), randomness.randint(4, 16))
            phases += experiment(plans[i], whole[i], Path(work, str(done)), randomness, kills=kills, old=old)
            done += 1
            print(f"{phases.total()} kills, {done} targets: {dict(phases)}", flush=True)
    print(f"{phases.total()} kills of parts: every target is what one process writes")


if __name__ == "__main__":
    main()
