"""Checkpoints changed at random: every fixture, and a command that reads or converts it. mutations.py says how one is changed."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import io
import itertools
import json
import random
import shutil
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

from helpers.reshard_command import reshard
from helpers.slime_deltas import load_folder, write_delta
from hostile.mutations import KINDS
from hostile.watched import FIXTURES, outcome_of

TARGETS = [
    *[("hf",)] * 2,
    *[(name,) for name in ("dcp", "universal", "deepspeed", "megatron-dist", "fsdp", "sglang", "trtllm")],
    *[(name, "--tp", "2") for name in ("vllm", "megatron", "nanotron", "consolidated")],
]
# Format -> the fixture of hf that it is written from.
WRITTEN = {"vllm": "mixtral", "sglang": "qwen3", "trtllm": "llama"}
DELTAS = ("xor", "overwrite")


@cache
def fixtures() -> tuple[str, ...]:
    """The folders below fixtures/ that hold a checkpoint: those called "checkpoint", and those with a config, an index or settings of a
    model, an adapter or Meta's files."""
    folders = {path.parent for path in FIXTURES.rglob("checkpoint") if path.is_dir()}
    marks = ("config.json", "adapter_config.json", "params.json")
    configs = itertools.chain.from_iterable(FIXTURES.rglob(mark) for mark in marks)
    folders |= {path.parent for path in configs if not any(parent in folders for parent in path.parents)}
    folders -= {FIXTURES / "delta"}  # the steps of a run
    return (*sorted(str(path.relative_to(FIXTURES)) for path in folders), *(f"written/{name}" for name in (*WRITTEN, *DELTAS)))


@cache
def pristine_of(fixture: str) -> Path:
    """The folder of the unchanged checkpoint. What engines load, and no framework writes, is written here, without the manifest."""
    if not fixture.startswith("written/"):
        folder = FIXTURES / fixture
        return folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    name = fixture.removeprefix("written/")
    place = Path(tempfile.mkdtemp(prefix="delta-" if name in DELTAS else "written-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = place / "checkpoint"
    if name in DELTAS:
        old = load_folder(FIXTURES / "hf" / "llama")
        new = {key: (dtype, shape, bytes(byte ^ (not i % 50) for i, byte in enumerate(data))) for key, (dtype, shape, data) in old.items()}
        write_delta(folder, old, new, name, "blake3", 2, 1)
        return folder
    assert reshard("convert", FIXTURES / "hf" / WRITTEN[name], folder, "--to", name, "--tp", 2, "-q").code == 0
    for path in folder.glob("reshard.*"):
        path.unlink()
    return folder


MOE = str(FIXTURES / "hf" / "qwen3_moe")


def commands(source: Path, pristine: Path, target: Path) -> list[list[list[str]]]:
    """The command lines that read the checkpoint, in groups: the campaign chooses a group, and one of it."""
    if pristine.parent.name.startswith("delta-"):
        return _of_delta(str(FIXTURES / "hf" / "llama"), str(source), target)
    model = pristine.parent / "model"
    models = [["--model", str(model)]] * 2 + [[]] if model.is_dir() else [[]]

    def each(*words: str) -> list[list[str]]:
        return [[*words, *options] for options in models]

    def convert(*words: str) -> list[list[str]]:
        return each("convert", str(source), str(target), *words)

    name, page, file = str(source), str(target.parent / "page.html"), str(target.parent / "tensor.npy")
    truth = pristine.parent / "truth.json"
    base = (
        FIXTURES / "hf" / (json.loads(truth.read_text()).get("base", "llama") if pristine.name == "adapter" and truth.exists() else "llama")
    )
    tensor = "model.norm.weight"
    shown = [["inspect", name, "--json", "--full"], ["inspect", name, "--tensor", "*norm*"], ["inspect", name, "--html", page]]
    return [
        each("inspect", name),
        each("fingerprint", name),
        each("verify", str(pristine), name) + each("verify", name),
        each("diff", str(pristine), name) + each("explain", name, str(pristine)) + each("stats", name),
        each("diff", str(pristine), name, "--html", page) + each("stats", name, "--optimizer", "--html", page),
        each("doctor", name, "--deep"),
        each("digests", name, "--to", "vllm", "--tp", "2") + [[*line, *options] for line in shown for options in models],
        each("cat", name, tensor) + each("export", name, tensor, "-o", file) + [["architectures", "--start", name], ["clean", name]],
        [line for to in TARGETS for line in each("plan", name, "--to", *to)] + each("plan", name, "--to", "hf", "--html", page),
        [line for to in TARGETS for line in each("roundtrip", name, "--to", *to)],
        [["degrees", name, "--to", "vllm"]],
        [["estimate", name, "--gpus", "8"]],
        *[[line for to in TARGETS for line in convert("--to", *to)]] * 5,
        [line for to in TARGETS for line in convert("--to", *to, "--optimizer")],
        convert("--to", "hf", "--dequantize") + convert("--to", "hf", "--quantize", "mxfp4") + convert("--to", "peft"),
        convert("--to", "hf", "--quantize", "fp8-block") + convert("--to", "hf", "--requantize", "fp8-block"),
        convert("--to", "hf", "--dtype", "fp32") + convert("--to", "hf", "--names", "torchtitan") + convert("--to", "hf", "--part", "0/2"),
        [["convert", str(base), str(target), "--to", "hf", "--merge-adapter", name], *convert("--to", "hf", "--keep-unknown")],
        [line for form in ("fused", "split", "shared", "tinker") for line in convert("--to", "peft", "--experts", form, "--model", MOE)]
        + [
            [*convert("--to", "peft", "--combine", how, "--model", MOE)[0], "--merge-adapter", "self", "--merge-adapter", str(pristine)]
            for how in ("cat", "linear")
        ]
        + [["serve-check", name, "--model", MOE], ["convert", MOE, str(target), "--to", "hf", "--merge-adapter", name]],
        [["watch", str(source.parent), "--to", "hf", "--all", "--into", f"{target}/{{step}}"], *convert("--to", "hf", "--checksums")],
    ]


def _of_delta(base: str, delta: str, target: Path) -> list[list[list[str]]]:
    """The command lines that read a delta, and a base with it."""
    both = f"{base}+{delta}"
    return [
        [["inspect", delta], ["inspect", both], ["convert", delta, str(target), "--to", "hf"], ["doctor", delta, "--deep"]],
        [["fingerprint", both], ["verify", base, both], ["diff", base, both], ["stats", both], ["cat", both, "model.norm.weight"]],
        [["verify", delta, both], ["diff", delta, both], ["delta", base, both, str(target)], ["delta", both, base, str(target)]],
        *[[["apply", base, delta, str(target), "--to", *to] for to in TARGETS if to[0] in ("hf", "dcp", "vllm", "megatron")]] * 3,
        [["apply", base, delta, delta, str(target), "--to", "hf"], ["apply", base, delta, str(target), "--to", "hf", "--dtype", "fp32"]],
    ]


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    """A fixture and a kind of mutation."""
    cases = [case for case in fixtures() if fnmatch.fnmatch(case, only)]
    return chance.choice(cases), chance.choice((*KINDS, "pickle", "pickle"))


def run(fixture: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome, and what was done and printed. folder: an empty folder for the changed checkpoint and the target."""
    pristine, done, chance = changed(fixture, kind, seed, folder)
    if done is None:
        return "no such mutation", ""
    source, target = folder / "source", folder / "target"
    outcome, text = outcome_of(chance.choice(chance.choice(commands(source, pristine, target))), target)
    return outcome, f"[{done}] {text}"


def changed(fixture: str, kind: str, seed: int, folder: Path) -> tuple[Path, str | None, random.Random]:
    """Writes the changed checkpoint into folder/source. Returns the fixture's checkpoint, what was done to it, and the generator."""
    chance = random.Random(f"{fixture}|{kind}|{seed}")
    pristine = pristine_of(fixture)
    shutil.copytree(pristine, folder / "source")
    return pristine, KINDS[kind](folder / "source", chance), chance


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
    for name in WRITTEN:
        pristine_of(f"written/{name}")
