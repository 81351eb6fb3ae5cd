"""Parts of a conversion into a store that are killed at random moments: one experiment, and a campaign of them.

    python tests/cloud/store_kills.py [--kills 200] [--seed 0]

A round starts the parts of one plan as processes of their own, some of them twice, and kills some with SIGKILL. After every round, each
object under a final name is compared byte by byte with the file that one undisturbed process writes. Now and then `clean` removes
everything, and the parts start anew. At last a round without kills completes the target, `clean` aborts the uploads that are left, and
everything is compared. tests/cloud/test_parts.py runs the same with a few kills.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cloud.models import content, write_hf
from cloud.s3_server import S3Server

import reshard
from reshard.plans.manifest import MANIFEST
from reshard.verbs.leftovers import leftovers, remove

COUNTS = (4, 4, 3, 6, 2, 1)
# Forked from a process without threads: a client of a store has some, and does not survive a fork.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["reshard.verbs.convert", "reshard.engine.destinations.store"])


class Work:
    """A plan in a file, and the files that one process writes."""

    def __init__(self, folder, **options):
        self.source, self.plan_file = folder / "hf", folder / "plan.reshard"
        write_hf(self.source, layers=2, hidden=512, feed_forward=2048, vocabulary=4096)
        plan = reshard.plan(self.source, **options)
        reshard.save_plan(plan, self.plan_file)
        reshard.convert(plan, folder / "whole")
        self.weights = {file.path for file in plan.layout.files}
        self.expected = content(folder / "whole")


def experiment(work, server, randomness, *, kills):
    """Run rounds until so many parts were killed or the target is complete, and one round without kills. Returns the kills by phase."""
    phases = Counter()
    while phases.total() < kills and phase_of(work, server) != "complete":
        phases += killed_round(work, server, randomness, min(kills - phases.total(), 3))
        check_names(work, server)
        if randomness.random() < 0.1 and phase_of(work, server) != "complete":
            clean(server)
            assert keys(server) == [] and not server.uploads, "clean leaves nothing of a conversion that has not ended"
    parts = start_parts(work, randomness)
    codes = [ended(part) for part in parts]
    assert codes == [0] * len(parts), codes
    clean(server)
    check_names(work, server)
    assert set(keys(server)) == {*work.expected, MANIFEST}, "the result is not what one process writes"
    assert not server.uploads, "an upload is pending after clean"
    return phases


def killed_round(work, server, randomness, most):
    """Start the parts and kill some of them, at most `most`; returns the phases in which they were killed."""
    server.latency = randomness.choice((0.01, 0.03, 0.06))
    parts, phases = start_parts(work, randomness), Counter()
    for part in randomness.sample(parts, randomness.randint(1, min(most, len(parts)))):
        time.sleep(randomness.random() * 0.4)
        if randomness.random() < 0.3:
            wait_for_commit(work, server, part)
        if part.is_alive():
            phases[phase_of(work, server)] += 1
            part.kill()
    codes = {ended(part) for part in parts}
    assert codes <= {0, -signal.SIGKILL}, codes
    return phases


def wait_for_commit(work, server, part):
    """Wait until all files have their records, or the part has ended."""
    while part.is_alive() and phase_of(work, server) in ("preparing", "copying"):
        time.sleep(0.001)


def start_parts(work, randomness):
    """The parts of the plan as processes; about every fifth part runs twice."""
    of = randomness.choice(COUNTS)
    numbers = [i for i in range(of) for _ in range(1 + (randomness.random() < 0.2))]
    parts = [_PROCESSES.Process(target=convert_part, args=(work.plan_file, work.source, f"{i}/{of}", dict(os.environ))) for i in numbers]
    for part in parts:
        part.start()
    return parts


def convert_part(plan_file, source, part, environment):
    os.environ.update(environment)
    reshard.convert_part(reshard.load_plan(plan_file, source), "s3://bucket/out", part, workers=2)


def ended(part):
    """The exit code of a process."""
    part.join(120)
    if part.is_alive():
        part.kill()
        raise AssertionError("a part does not end")
    return part.exitcode


def phase_of(work, server):
    names = set(keys(server))
    if MANIFEST in names:
        return "complete"
    if all(f".reshard/files/{path}.json" in names for path in work.weights):
        return "committing"
    return "copying" if names or server.uploads else "preparing"


def keys(server):
    return [key.removeprefix("out/") for key in server.keys("bucket", "out/")]


def check_names(work, server):
    """Every object under a final name is whole."""
    for path in keys(server):
        if path != MANIFEST and not path.startswith(".reshard/"):
            assert server.content("bucket", f"out/{path}") == work.expected[path], f"{path} is not what one process writes"


def clean(server):
    """What `reshard clean s3://bucket --yes` does."""
    server.latency = 0
    for leftover in list(leftovers("s3://bucket", print)):
        remove(leftover)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    randomness, phases, done = random.Random(options.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        # Files of two parts each, of several ranks; small files that are sent in one request; a file for each rank.
        plans = ({"to": "vllm", "tp": 2, "max_shard_size": "12MB"}, {"to": "hf", "max_shard_size": "7MB"}, {"to": "sglang", "tp": 4})
        works = [Work(Path(folder, plan["to"]), **plan) for plan in plans]
        while phases.total() < options.kills:
            work = works[done % len(works)]
            with tempfile.TemporaryDirectory() as objects:
                server = S3Server(objects)
                os.environ.update(server.environment())
                phases += experiment(work, server, randomness, kills=min(options.kills - phases.total(), randomness.randint(3, 12)))
                server.close()
            done += 1
            print(f"{phases.total()} kills, {done} targets: {dict(phases)}", flush=True)
    print(f"{phases.total()} kills of parts: every target is what one process writes")


if __name__ == "__main__":
    main()
