"""Forged plan files with right digests: each is refused, or its conversion writes the same bytes as the honest plan.

    python tests/hostile/plan_files.py [--count 1000] [--seed 0]

A forger changes what a real plan file holds, at one to three places: values and keywords of the order, names, the small files, what is said
of the source, the digests of other plans; then it computes the digest of the file as whoever reads it does. tests/parts/test_plan_files.py
runs a small sample.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from blake3 import blake3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.fixture_places import DCP, FIXTURES, HF
from helpers.reshard_command import result_tree
from hostile.limits import limited

import reshard
from reshard.errors import ReshardError

FSDP2 = FIXTURES / "dcp" / "fsdp2" / "checkpoint"
CASES = [
    (HF / "llama", {}, {"to": "vllm", "tp": 4}),
    (FSDP2, {"model": DCP / "fsdp2" / "model"}, {"to": "vllm", "tp": 2}),
    (HF / "qwen2", {}, {"to": "hf", "dtype": "fp16", "max_shard_size": 100_000}),
    (FSDP2, {}, {"to": "fsdp", "dp": 2, "optimizer": True}),
    (HF / "llama", {"model": HF / "llama"}, {"to": "megatron", "tp": 2, "pp": 2, "vp": 1}),
]
VALUES = [None, True, False, 0, 1, 2, 3, 4, 8, -1, 1 << 31, 1 << 70, 0.5, float("nan"), "", "x", "*", "fp16", "fp32", "bf16", "hf", "dcp",
          "vllm", "sglang", "../x", "/etc/passwd", "s3://bucket/x", "a\0b", "\ud800", [], ["*"], {}, [[]]]  # fmt: skip
KEYWORDS = ["to", "tp", "pp", "ep", "dp", "dtype", "keep_dtype", "include", "exclude", "strip_prefix", "optimizer", "weights", "root",
            "keep_unknown", "dequantize", "quantize", "max_shard_size", "engine_version", "only", "like", "layout",
            "merge_adapter", "names", "format", "model", "vocab_size", "architecture", "stored_layout",
            "vocab_multiple", "stage_layers", "nothing"]  # fmt: skip
NAMES = ["../x", "/tmp/x", "", "model", "model/", "model/../../x", "model/a/b", "a\0b", "layout/x", "architecture/x.yaml",
         "model/tokenizer.json", "model/" + "x" * 300]  # fmt: skip


def taken_apart(content):
    """The metadata of a plan file, its order, and the small files by name."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    attached = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return metadata, json.loads(metadata["order"]), attached


def put_together(metadata, order, attached):
    """A plan file with the right digest, as somebody who means harm writes it."""
    text = order if isinstance(order, str) else json.dumps(order)
    each = {name: "blake3:" + blake3(content).hexdigest() for name, content in attached.items()}
    digest = "blake3:" + blake3(json.dumps([text, each]).encode()).hexdigest()
    header, at = {"__metadata__": {"digest": digest, **metadata, "order": text} | {"digest": digest}}, 0
    for name, content in attached.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + b"".join(attached.values())


class Forger:
    """Forges plan files. others: the orders of other plans, whose values are mixed in."""

    def __init__(self, others, randomness):
        self.others, self.random = others, randomness

    def forged(self, content):
        metadata, order, attached = taken_apart(content)
        for _ in range(self.random.randint(1, 3)):
            change = self.random.choice(
                [self.value, self.value, self.keyword, self.keyword, self.mixed, self.file, self.config, self.source]
            )
            change(order, attached)
        return put_together(metadata, order, attached)

    def value(self, order, attached):
        """One value of the order becomes another one."""
        holder, key = self.random.choice(list(places(order)))
        old = holder[key]
        near = []
        if isinstance(old, int):
            near = [old + 1, old * 2, old - 1]
        elif isinstance(old, str | list):
            near = [old[::-1], old + old, old[:-1]]
        holder[key] = self.random.choice([*near, self.random.choice(VALUES)])

    def keyword(self, order, attached):
        """A keyword appears, or goes."""
        keywords = order[self.random.choice(["open", "plan"])] if isinstance(order.get("plan"), dict) else order
        if isinstance(keywords, dict) and keywords and self.random.random() < 0.3:
            del keywords[self.random.choice(list(keywords))]
        elif isinstance(keywords, dict):
            keywords[self.random.choice(KEYWORDS)] = self.random.choice(VALUES)

    def mixed(self, order, attached):
        """A part of the order of another plan."""
        key = self.random.choice(list(order))
        order[key] = json.loads(json.dumps(self.random.choice(self.others).get(key)))

    def file(self, order, attached):
        """A small file is flipped, cut, renamed, exchanged, removed or added."""
        if not attached or self.random.random() < 0.2:
            attached[self.random.choice(NAMES)] = self.random.randbytes(self.random.choice([0, 1, 1000]))
            return
        name, other = self.random.choice(list(attached)), self.random.choice(list(attached))
        content = bytearray(attached[name])
        what = self.random.randrange(5)
        if what == 0 and content:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            attached[name] = bytes(content)
        elif what == 1:
            attached[name] = bytes(content[: len(content) // 2])
        elif what == 2:
            attached[self.random.choice(NAMES)] = attached.pop(name)
        elif what == 3:
            attached[name], attached[other] = attached[other], attached[name]
        else:
            del attached[name]

    def config(self, order, attached):
        """A value of the model's config becomes another one."""
        try:
            config = json.loads(attached["model/config.json"])
        except (KeyError, ValueError):
            return self.value(order, attached)
        holder, key = self.random.choice(list(places(config)))
        old = holder[key]
        holder[key] = old * 2 if isinstance(old, int | float) and self.random.random() < 0.6 else self.random.choice(VALUES)
        attached["model/config.json"] = json.dumps(config, indent=2).encode()
        return None

    def source(self, order, attached):
        """What is said of the source's files: rows exchanged, removed or doubled, and values in them."""
        rows = order.get("files")
        if not isinstance(rows, list) or not rows:
            return
        row = self.random.choice(rows)
        what = self.random.randrange(4)
        if what == 0:
            rows.remove(row)
        elif what == 1:
            rows.append(row)
        elif isinstance(row, list) and row:
            row[self.random.randrange(len(row))] = self.random.choice([*VALUES, "config.json", ".metadata"])


def places(value):
    """Every (dictionary or list, key) in a JSON value."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


class Experiment:
    """The honest plan files and what they write."""

    def __init__(self, work):
        self.work, self.honest = Path(work), []
        for i, (source, opened, asked) in enumerate(CASES):
            path, target = self.work / f"honest-{i}", self.work / f"whole-{i}"
            reshard.save_plan(reshard.plan(reshard.open(source, **opened), **asked), path)
            reshard.convert(reshard.load_plan(path, source), target, workers=1)
            self.honest.append((path.read_bytes(), source, result_tree(target)))

    def forger(self, randomness):
        return Forger([taken_apart(content)[1] for content, _, _ in self.honest], randomness)

    def outcome(self, forged, source, expected):
        """Load and run a forged plan: "refused", "same bytes", or what must not be."""
        room = Path(tempfile.mkdtemp(dir=self.work))
        path, target = room / "plan", room / "out"
        path.write_bytes(forged)
        try:
            reshard.convert(reshard.load_plan(path, source), target, workers=1)
            return "same bytes" if result_tree(target) == expected else "OTHER BYTES"
        except ReshardError as error:
            return "DEFECT" if error.id == "defect" or "\n" in str(error) else "refused"
        except Exception as error:
            return f"TRACEBACK {type(error).__name__}: {error}"
        finally:
            outside = {found.name for found in room.iterdir()} - {"plan", "out"}
            shutil.rmtree(room)
            assert not outside, outside


def recipes(chance, only):
    """The number of an honest plan, and the kind of the forgery, for campaign.py."""
    return str(chance.randrange(len(CASES))), "forged"


def run(case, kind, seed, folder):
    """The outcome of one forged plan file, and what was forged, for campaign.py."""
    experiment, randomness = the_experiment(), random.Random(f"{case}|{kind}|{seed}")
    content, source, expected = experiment.honest[int(case)]
    forged = experiment.forger(randomness).forged(content)
    found = limited(lambda: experiment.outcome(forged, source, expected))
    names = {"same bytes": "done", "OTHER BYTES": "WRONG", "DEFECT": "TRACEBACK"}
    return names.get(found, found.split()[0]), f"{found}\n{taken_apart(forged)[1]}"


@cache
def the_experiment():
    """One for all inputs of this process."""
    work = tempfile.mkdtemp(prefix="plan-files-")
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    return Experiment(work)


def campaign(count, seed, work):
    """How many of so many forged plans had each outcome; and the first forgery of each bad one."""
    experiment, randomness = Experiment(work), random.Random(seed)
    forger, seen, bad = experiment.forger(randomness), Counter(), {}
    for _ in range(count):
        content, source, expected = randomness.choice(experiment.honest)
        forged = forger.forged(content)
        found = experiment.outcome(forged, source, expected)
        seen[found] += 1
        if found not in ("refused", "same bytes"):
            bad.setdefault(found, forged)
    return seen, bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        seen, bad = campaign(options.count, options.seed, work)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{options.count} forged plan files, seed {options.seed}: {dict(seen)}; at most {peak} MB of memory")
    for what, forged in bad.items():
        print(what, taken_apart(forged)[1])
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
