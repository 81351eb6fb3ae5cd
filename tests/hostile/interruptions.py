"""Interrupted and concurrent conversions: one experiment each for clashes of two runs, for stopped overwrites and for random kills.

    python tests/hostile/interruptions.py [--clashes 200] [--kills 200] [--seed 0]

Every run is a forked child of this process. The judge of a target is plain: the bytes of its files, compared with those of undisturbed
conversions, and a reader of two formats that knows nothing of reshard. tests/hostile/test_interruptions.py runs the same with small counts.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.fixture_places import HF
from helpers.reshard_command import result_tree as tree

import reshard
from reshard.errors import CheckpointError, ReshardError, SystemRefusal, TargetError

# Every call that changes a file system or opens a file; and the one that reads a source.
CHANGES = ["open", "pwrite", "truncate", "ftruncate", "fdatasync", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "scandir"]
READS = ["preadv"]
DONE, REFUSED, SYSTEM, DEFECT = 0, 10, 11, 12
"""How a child ends: finished, refused because of the target, refused by the system, or with any other exception."""


def plans(kind):
    """Two plans into one format that write files of the same names: of other bytes, and of another number."""
    options = {"to": "hf", "max_shard_size": "60kB"} if kind == "hf" else {"to": "vllm", "tp": 2}
    other = {"to": "hf", "max_shard_size": "50kB"} if kind == "hf" else {"to": "vllm", "tp": 4}
    return reshard.plan(HF / "llama", **options), reshard.plan(HF / "qwen2", **other)


class Case:
    """The two plans of a format, and what each of them writes when nothing disturbs it."""

    def __init__(self, kind, work):
        self.kind, self.plans = kind, plans(kind)
        self.trees = []
        for i, plan in enumerate(self.plans):
            reshard.convert(plan, work / f"{kind}-{i}")
            self.trees.append(tree(work / f"{kind}-{i}"))
        assert self.trees[0] != self.trees[1]

    def old(self, target):
        """Write the older checkpoint, which every overwrite replaces."""
        reshard.convert(self.plans[0], target)

    def is_one_of_them(self, target):
        return visible(target) in self.trees

    def check(self, target):
        """What nobody may see in a target, whatever happened; None if all is well."""
        loaded = loadable(target, self.kind)
        if loaded is not None and loaded not in [loadable_tree(each, self.kind) for each in self.trees]:
            return "an engine would load a mixture"
        try:
            reshard.open(target)
        except ReshardError:
            return None
        return None if loaded is not None else "reshard opens what is not a checkpoint"


def visible(target):
    return {path: data for path, data in tree(target).items() if not path.startswith(".reshard/")}


def loadable(target, kind):
    return loadable_tree(visible(target), kind)


def loadable_tree(files, kind):
    """The weight files that an engine would load from these files; None if it would refuse, for want of a config, an index or a shard."""
    if "config.json" not in files:
        return None
    if kind == "vllm":  # loads what a glob finds
        return {path: data for path, data in files.items() if path.endswith(".safetensors")} or None
    if "model.safetensors.index.json" not in files:
        return {"model.safetensors": files["model.safetensors"]} if "model.safetensors" in files else None
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    for name, path in weight_map.items():
        data = files.get(path)
        if data is None or name not in json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]):
            return None
    return {path: files[path] for path in sorted(set(weight_map.values()))}


def child(action):
    """Run an action in a forked process; returns its pid. The process ends as DONE, REFUSED, SYSTEM or DEFECT."""
    pid = os.fork()
    if pid:
        return pid
    code = DEFECT
    try:
        action()
        code = DONE
    except SystemRefusal:
        code = SYSTEM
    except (TargetError, CheckpointError):
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid):
    """How a child ended: its exit status, or minus the number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def faulty(calls, at, how):
    """Make the `at`-th of these calls of the operating system fail with an errno, or kill the process; returns the counter of calls."""
    count = [0]

    def wrapped(real):
        def call(*arguments, **options):
            count[0] += 1
            if count[0] == at:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(how, os.strerror(how))
            return real(*arguments, **options)

        return call

    for name in calls:
        setattr(os, name, wrapped(getattr(os, name)))
    if "open" in calls:
        builtins.open = wrapped(builtins.open)
    return count


def slow(randomness, most):
    """Let every write take up to `most` seconds, so that runs overlap and a kill meets every phase."""

    def slowed(real):
        def call(*arguments, **options):
            time.sleep(randomness.random() * most)
            return real(*arguments, **options)

        return call

    for name in ("pwrite", "replace", "unlink", "fsync"):
        setattr(os, name, slowed(getattr(os, name)))


def calls_of_an_overwrite(case, work):
    """The number of file operations of an overwrite that nothing disturbs."""
    target, counted = work / f"counted-{case.kind}", work / "count"
    case.old(target)

    def overwrite():
        count = faulty(CHANGES, -1, "kill")
        reshard.convert(case.plans[1], target, overwrite=True, workers=1)
        total = count[0]
        counted.write_text(str(total))

    assert ended(child(overwrite)) == DONE
    return int(counted.read_text())


def stopped_overwrite(case, target, k, how):
    """Stop an overwrite at its k-th file operation, then finish it. Returns what is wrong or None, and how the child ended."""
    case.old(target)

    def overwrite():
        faulty(CHANGES, k, how)
        reshard.convert(case.plans[1], target, overwrite=True, workers=1)

    status = ended(child(overwrite))
    problem = case.check(target)
    if status not in (DONE, SYSTEM, -signal.SIGKILL):
        problem = f"the child ended as {status}"
    if status == DONE and visible(target) != case.trees[1]:
        problem = "done, and not what it should be"
    try:
        reshard.convert(case.plans[1], target, resume=True)
    except TargetError:  # stopped before there was anything to resume
        if visible(target) != case.trees[0]:
            problem = "neither the old checkpoint nor one that can be resumed"
        reshard.convert(case.plans[1], target, overwrite=True)
    return problem if tree(target) == case.trees[1] else "cannot be finished", status


def clash(case, target, randomness, *, kill):
    """Two runs of one or two plans into one target at once; returns what is wrong, or None, and how the two ended."""
    for name in tree(target):
        (target / name).unlink()
    if randomness.random() < 0.5:
        case.old(target)
    children = []
    for plan in (case.plans[1], randomness.choice(case.plans)):
        options = randomness.choice([{}, {"overwrite": True}, {"overwrite": True}, {"resume": True}])
        seed = randomness.random()

        def run(plan=plan, options=options, seed=seed):
            own = random.Random(seed)
            slow(own, 0.002)
            time.sleep(own.random() * 0.02)
            reshard.convert(plan, target, workers=2, **options)

        children.append(child(run))
    if kill:
        time.sleep(randomness.random() * 0.15)
        os.kill(randomness.choice(children), signal.SIGKILL)
    codes = [ended(pid) for pid in children]
    problem = case.check(target)
    if DEFECT in codes or SYSTEM in codes:
        problem = f"a child ended as {codes}"
    if DONE in codes and not case.is_one_of_them(target) and -signal.SIGKILL not in codes:
        problem = f"ended as {codes}, and the target is no conversion's"
    reshard.convert(case.plans[1], target, overwrite=True)
    if tree(target) != case.trees[1]:
        problem = "an overwrite afterwards is not what it should be"
    return problem, tuple(codes)


def killed(case, target, randomness):
    """A conversion that is killed up to four times at random moments and resumed each time; returns what is wrong, or None."""
    plan, problem = case.plans[1], None
    for _ in range(4):
        seed = randomness.random()

        def run(seed=seed):
            slow(random.Random(seed), 0.004)
            reshard.convert(plan, target, resume=True, workers=2)

        pid = child(run)
        time.sleep(randomness.random() * 0.2)
        os.kill(pid, signal.SIGKILL)
        if ended(pid) in (DEFECT, REFUSED, SYSTEM):
            problem = "the run was refused"
        problem = case.check(target) or problem
    reshard.convert(plan, target, resume=True)
    return problem if tree(target) == case.trees[1] else "the result is not that of an undisturbed run"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clashes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    randomness, wrong = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        work = Path(folder)
        cases = [Case(kind, work) for kind in ("hf", "vllm")]
        for case in cases:
            calls = calls_of_an_overwrite(case, work)
            for how in ("kill", errno.EIO, errno.ENOSPC):
                ends = Counter()
                for k in range(1, calls + 1):
                    problem, status = stopped_overwrite(case, work / f"{case.kind}-{how}-{k}", k, how)
                    ends[status] += 1
                    wrong += [(case.kind, how, k, problem)] if problem else []
                print(f"overwrite to {case.kind} stopped by {how}: {calls} runs, ends {dict(ends)}", flush=True)
        ends = Counter()
        for i in range(options.clashes):
            problem, codes = clash(cases[i % 2], work / f"clash-{i % 2}", randomness, kill=i % 4 >= 2)
            ends[tuple(sorted(codes))] += 1
            wrong += [("clash", i, problem)] if problem else []
        print(f"clashes: {options.clashes}, ends {dict(ends)}", flush=True)
        for i in range(options.kills):
            problem = killed(cases[i % 2], work / f"kill-{i}", randomness)
            wrong += [("kill", i, problem)] if problem else []
        print(f"killed and resumed: {options.kills} conversions, 4 kills each")
    for item in wrong:
        print("WRONG", *item)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
