"""What reshard keeps and reads again: deltas, kept runs, the cache, learned layouts; something in them is exchanged, then a command reads.

A recipe is what lies there, what is done to it (work_folders.py: links, FIFOs, devices, files without end, records and bytes that were
changed, files of somebody else), and a seed. Beside it lies a folder of somebody else, and in it a file of the user: of both not a byte
may change or go. Where a delta or a layout still makes a checkpoint, it makes the right one: its fingerprint is that of the step.

More surfaces of this kind, such as Senders and ranks that lie, and servers that refuse, stop or die, are modules with `recipes` and `run`
and a row in campaign.py.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
from pathlib import Path

from helpers.learned_models import write_weights
from helpers.reshard_command import reshard, tree
from hostile.watched import FIXTURES, outcome_of
from hostile.work_folders import KINDS

from reshard.adapter.serving_format.learned import read_layout

LLAMA, LEARNED = FIXTURES / "hf" / "llama", FIXTURES / "learned" / "olmo2"
CASES = ("delta", "kept", "cache", "layout")
MINE = b"mine"
Lines = list[list[object]]


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    cases = [case for case in CASES if only in ("*", case)]
    return chance.choice(cases), chance.choice((*KINDS, "records", "bytes"))


def run(case: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome of a command on records that were tampered with."""
    chance = random.Random(f"{case}|{kind}|{seed}")
    folder = folder.parent / f"{os.getpid()}-{case}"  # records name absolute paths, so that each recipe of a case lies at one place
    target, victim = folder / "target", folder / "victim"
    place, lines = _laid_out(case, folder)
    mine = _with_a_file_of_the_user(target, chance)
    before = tree(victim)
    changed = chance.choice(sorted(path for path in (place, *place.rglob("*")) if path != mine))
    KINDS[kind](changed, victim, chance)
    is_there = _holds(mine)  # in some kinds, its folder is changed
    words = [str(word) for word in chance.choice(lines)]
    outcome, text = outcome_of(words, target)
    text = f"[{kind} {changed.relative_to(folder)}] {text}"
    if tree(victim) != before or (is_there and not any(map(_holds, target.rglob(mine.name)))):
        return "REMOVED ELSEWHERE", text
    return ("WRONG", text) if outcome == "done" and not _is_right(words, target) else (outcome, text)


_LINES: dict[str, tuple[Path, Lines]] = {}


def _laid_out(case: str, folder: Path) -> tuple[Path, Lines]:
    """A case's files in the folder, and the commands for them. The commands that make the files run once in a process."""
    original = folder.with_name(f"{folder.name}-original")
    if not original.exists():
        for place in (folder / "target", folder / "victim"):
            place.mkdir(parents=True)
        (folder / "victim" / "precious").write_bytes(b"precious\n" * 100)
        _LINES[case] = globals()[f"_{case}"](folder, folder / "target")
        gc.collect()  # a forked child would remove the temporary folders of what this process no longer needs
        shutil.copytree(folder, original, symlinks=True)
    shutil.rmtree(folder)
    shutil.copytree(original, folder, symlinks=True)
    return _LINES[case]


def _with_a_file_of_the_user(target: Path, chance: random.Random) -> Path:
    mine = chance.choice(sorted(path for path in target.rglob("*") if path.is_dir()) or [target]) / "evaluation-of-mine.txt"
    mine.write_bytes(MINE)
    return mine


def _holds(path: Path) -> bool:
    """Whether the file of the user is there, as it was. Other files, such as those of /proc, are not read."""
    return path.is_file() and path.stat().st_size == len(MINE) and path.read_bytes() == MINE


def _is_right(words: list[str], target: Path) -> bool:
    """Whether what a command has made of a delta or of a kept step has the values of the step."""
    out = target / "out"
    if words[0] not in ("apply", "convert") or not (out / "reshard.json").exists():
        return True
    source = target.parent / ("new" if words[0] == "apply" else "base" if "--step" in words else "model")
    return reshard("verify", source, out, "-q").code == 0


def _steps(folder: Path) -> tuple[Path, Path]:
    """Two steps of a run, of which the second differs in one byte."""
    base, new = folder / "base", folder / "new"
    for place in (base, new):
        shutil.copytree(LLAMA, place)
    content = bytearray((new / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (new / "model.safetensors").write_bytes(content)
    return base, new


def _delta(folder: Path, target: Path) -> tuple[Path, Lines]:
    base, new = _steps(folder)
    delta, out = target / "delta", target / "out"
    reshard("delta", base, new, delta, "-q")
    return delta, [
        ["apply", base, delta, out, "--to", "hf", "-q"],
        ["inspect", delta],
        ["verify", new, f"{base}+{delta}"],
        ["doctor", delta],
    ]


def _kept(folder: Path, target: Path) -> tuple[Path, Lines]:
    """Two kept steps, of which the run has saved the second again with other values."""
    base, new = _steps(folder)
    run_folder, kept = folder / "run", target / "kept"
    for step, source in ((1, base), (2, base)):
        shutil.copytree(source, run_folder / f"step-{step}")
    keep: list[object] = ["delta", "--of", run_folder, kept]
    for number in range(2):
        for path in run_folder.rglob("*"):
            os.utime(path, (1_000_000 + number, 1_000_000 + number))
        if not number:
            reshard(*keep)
            shutil.rmtree(run_folder / "step-2")
            shutil.copytree(new, run_folder / "step-2")
    return kept, [
        keep,
        keep,
        ["inspect", kept],
        ["convert", kept, target / "out", "--to", "hf", "--step", 1, "-q"],
        ["clean", kept, "--yes"],
    ]


def _cache(folder: Path, target: Path) -> tuple[Path, Lines]:
    cache = target / "cache"
    get: list[object] = ["cache", "get", LLAMA, "--to", "vllm", "--tp", 2, "--cache", cache]
    reshard(*get)
    (cache / "entries" / "somebody").mkdir()
    return cache, [
        get,
        get,
        [*get, "--max-size", "200kB"],
        ["cache", "list", "--cache", cache],
        ["cache", "clean", "--yes", "--cache", cache],
    ]


def _layout(folder: Path, target: Path) -> tuple[Path, Lines]:
    model, layouts = folder / "model", target / "layouts"
    for place in (model, layouts):
        place.mkdir()
    shutil.copy(LEARNED / "config.json", model)
    shutil.copy(LEARNED / "layout.json", layouts / "a.json")
    write_weights(read_layout(str(LEARNED / "layout.json")), model)
    convert: list[object] = ["convert", model, target / "out", "--to", "vllm", "--tp", 2, "-q"]
    return layouts, [[*convert, "--layout", layouts / "a.json"], [*convert, "--layout-dir", layouts]]
