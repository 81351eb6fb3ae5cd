"""Work folders and journals that are not what reshard left there: links, FIFOs, files without end, records that were changed.

A recipe is what lies in the folder, what is done to it, and a seed. A killed conversion leaves a real work folder; something in it is
exchanged; then a command reads, resumes, replaces or removes. Beside the target lies a folder of somebody else, to which links lead: not a
byte of it may change.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from helpers.reshard_command import reshard, tree
from hostile.interruptions import CHANGES, child, ended, faulty
from hostile.mutations import NUMBERS, VALUES, mutate_bytes, mutate_folder
from hostile.watched import FIXTURES, outcome_of

SOURCE = FIXTURES / "hf" / "llama"
CASES = ("killed", "killed", "overwriting", "part", "watch", "source")
WORDS = ["--to", "vllm", "--tp", "2"]

Change = Callable[[Path, Path, random.Random], None]


def _linked(path: Path, victim: Path, chance: random.Random) -> None:
    """A link to a file or folder of somebody else, or to nothing."""
    _removed(path)
    path.symlink_to(chance.choice((victim, victim / "precious", victim / "nowhere", Path(path.name))))


def _fifo(path: Path, victim: Path, chance: random.Random) -> None:
    _removed(path)
    os.mkfifo(path)


def _sparse(path: Path, victim: Path, chance: random.Random) -> None:
    """A file of 8 GB that takes no space; at its end, or at its start, something that looks right."""
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b"{}\n"
    _removed(path)
    with open(path, "wb") as file:
        file.write(chance.choice((content, b"")))
        file.truncate(8 << 30)


def _other_kind(path: Path, victim: Path, chance: random.Random) -> None:
    """A folder where a file was, or a file where a folder was."""
    was_folder = path.is_dir()
    _removed(path)
    path.write_bytes(chance.randbytes(100)) if was_folder else path.mkdir()


def _foreign(path: Path, victim: Path, chance: random.Random) -> None:
    """A file of another program beside it."""
    place = path if path.is_dir() else path.parent
    (place / chance.choice(("notes.txt", "journal.jsonl.bak", "x\n\x1b[2J"))).write_bytes(b"mine")


def _json_lines(path: Path, victim: Path, chance: random.Random) -> None:
    """Values of a journal's or lock's records."""
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        try:
            record = json.loads(lines[at])
        except (ValueError, RecursionError):
            record = {}
        if isinstance(record, dict) and record and chance.random() < 0.9:
            key = chance.choice([*record])
            record[key] = chance.choice((*VALUES, *NUMBERS, [record[key]], "../../victim/precious", "/etc/hostname"))
        else:
            record = chance.choice(VALUES)
        how = chance.choice(("set", "set", "double", "remove", "nested", "long"))
        text = json.dumps(record).encode("utf-8", "surrogatepass")
        new = {
            "set": [text],
            "double": [text, text],
            "remove": [],
            "nested": [b"[" * 100_000],
            "long": [b'{"x": "' + b"x" * (40 << 20) + b'"}'],
        }
        lines[at : at + 1] = new[how]
        lines = lines or [b""]
    path.write_bytes(b"\n".join(lines))


def _bytes(path: Path, victim: Path, chance: random.Random) -> None:
    mutate_bytes(path if path.is_dir() else path.parent, chance)


def _names(path: Path, victim: Path, chance: random.Random) -> None:
    mutate_folder(path if path.is_dir() else path.parent, chance)


KINDS: dict[str, Change] = {
    "link": _linked,
    "fifo": _fifo,
    "sparse": _sparse,
    "other kind": _other_kind,
    "foreign": _foreign,
    "records": _json_lines,
    "bytes": _bytes,
    "names": _names,
}


def _removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    cases = [case for case in CASES if only in ("*", case)]
    return chance.choice(cases), chance.choice((*KINDS, "records", "records"))


def run(case: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome of a command on a work folder that was tampered with."""
    chance = random.Random(f"{case}|{kind}|{seed}")
    target, victim = folder / "target", folder / "victim"
    victim.mkdir()
    (victim / "precious").write_bytes(b"precious\n" * 100)
    (victim / "journal.jsonl").write_bytes(b"")
    before = tree(victim)
    lines = _left(case, chance, target)
    places = [path for path in (target, *target.rglob("*")) if path.name == ".reshard" or ".reshard" in path.parts or "watch" in path.name]
    if not places:
        return "no such mutation", ""
    place = chance.choice(sorted(places))
    KINDS[kind](place, victim, chance)
    line = chance.choice(lines)
    outcome, text = outcome_of([str(word) for word in line], target)
    if tree(victim) != before:
        return "WROTE ELSEWHERE", f"{place.relative_to(folder)}: {text}"
    return outcome, f"[{kind} {place.relative_to(folder)}] {text}"


def _left(case: str, chance: random.Random, target: Path) -> list[list[object]]:
    """Leaves a work folder, and the commands that meet it."""
    look: list[list[object]] = [["inspect", target], ["fingerprint", target], ["doctor", target], ["clean", target]]
    convert: list[object] = ["convert", SOURCE, target, *WORDS]
    if case == "watch":
        run_folder = target.parent / "run"
        (run_folder / "step-1").parent.mkdir()
        shutil.copytree(SOURCE, run_folder / "step-1")
        watch: list[object] = ["watch", run_folder, "--to", "hf", "--into", f"{target}/{{step}}", "--all"]
        reshard(*watch)
        return [watch, [*watch, "--keep", 1]]
    if case == "overwriting":
        reshard("convert", FIXTURES / "hf" / "qwen2", target, *WORDS, "-q")
    more = {"overwriting": ["--overwrite"], "part": ["--part", "0/2"]}.get(case, [])
    at = chance.randrange(5, 80)
    ended(child(lambda: _killed([*convert, *more], at)))
    if case == "part":
        return [*look, [*convert, "--part", "1/2"], [*convert, "--part", "0/2"], [*convert, "--finish"], [*convert, "--overwrite"]]
    if case == "source":
        return [
            *look,
            ["convert", target, target.parent / "new", "--to", "hf"],
            ["verify", target],
            ["watch", target, "--all", "--to", "hf", "--into", target.parent / "new" / "{step}"],
        ]
    again = [[*convert, "--resume"], [*convert, "--overwrite"], convert]
    return [*again, *again, *look, ["clean", target, "--yes"], ["clean", target, "--yes"]]


def _killed(line: list[object], at: int) -> None:
    faulty(CHANGES, at, "kill")
    reshard(*line)
