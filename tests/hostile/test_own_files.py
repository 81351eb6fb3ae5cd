"""Nothing is trusted where reshard keeps its own files: links are not followed, nobody is waited for, nothing foreign is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import Result, reshard, tree
from hostile.limits import ON_LINUX, limited

import reshard as library
from reshard.engine.pool import Effort
from reshard.storage.staging import Staging
from reshard.verbs.convert import conversion

pytestmark = pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")
TO = ("--to", "vllm", "--tp", "2")
WRITERS = {
    "convert": ("convert", HF / "llama", "{out}", *TO),
    "overwrite": ("convert", HF / "llama", "{out}", *TO, "--overwrite"),
    "resume": ("convert", HF / "llama", "{out}", *TO, "--resume"),
    "if-changed": ("convert", HF / "llama", "{out}", *TO, "--if-changed"),
    "part": ("convert", HF / "llama", "{out}", *TO, "--part", "0/2"),
    "finish": ("convert", HF / "llama", "{out}", *TO, "--finish"),
    "clean": ("clean", "{out}", "--yes"),
}


def run(name: str, out: Path) -> Result:
    return reshard(*(out if word == "{out}" else word for word in WRITERS[name]))


def bounded(*words: object) -> str:
    """The exit code and stderr of a command that may not wait, nor take much memory or time."""

    def work() -> str:
        found = reshard(*words)
        return f"{found.code} {found.err}"

    return limited(work)


def interrupted(target: Path) -> Path:
    """The work folder of a conversion that was stopped after a block."""
    blocks = conversion(library.plan(HF / "llama", to="vllm", tp=2), target, effort=Effort(workers=1)).run()
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    return target / ".reshard"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else."""
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "thesis.txt").write_text("three years of work")
    (tmp_path / "outside" / "deep" / "data.bin").write_bytes(bytes(1000))
    return tmp_path / "outside"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("name", WRITERS)
def test_a_work_folder_that_is_a_link_is_not_followed(outside: Path, out: Path, name: str) -> None:
    (out / ".reshard").symlink_to(outside)
    before = tree(outside)
    found = run(name, out)
    assert tree(outside) == before and (out / ".reshard").is_symlink() and os.listdir(out) == [".reshard"]
    assert found.code == (0 if name == "clean" else 4), found.err
    assert name == "clean" or (f"{out}/.reshard" in found.err and "link" in found.err)


@pytest.mark.parametrize("name", WRITERS)
def test_a_work_folder_that_leads_to_an_interrupted_run_elsewhere_is_not_followed(tmp_path: Path, out: Path, name: str) -> None:
    work = interrupted(tmp_path / "elsewhere")
    (out / ".reshard").symlink_to(work)
    before = tree(work)
    assert run(name, out).code == (0 if name == "clean" else 4) and tree(work) == before


@pytest.mark.parametrize(
    "content", [{"state.db": b"mine", "cache/a": b"b"}, {"lock": b"mine"}, {"journal.jsonl": b"mine\n"}, {"lock": b"{}", "x": b""}]
)
@pytest.mark.parametrize("name", WRITERS)
def test_the_work_folder_of_another_program_stays(out: Path, name: str, content: dict[str, bytes]) -> None:
    for path, data in content.items():
        (out / ".reshard" / path).parent.mkdir(parents=True, exist_ok=True)
        (out / ".reshard" / path).write_bytes(data)
    before = tree(out)
    found = run(name, out)
    assert tree(out) == before and found.code == (0 if name == "clean" else 4), found.err
    assert name in ("clean", "finish") or "neither a lock file nor a journal of reshard" in found.err


@pytest.mark.parametrize("place", ["lock", "journal.jsonl", "parts", "parts/x.jsonl", "{weights}", "config.json"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_link_inside_of_the_work_folder_is_not_followed(outside: Path, out: Path, name: str, place: str) -> None:
    work = interrupted(out)
    weights = next(work.glob("*.safetensors"))
    link = work / place.format(weights=weights.name)
    victim = outside / "thesis.txt" if place != "parts" else outside / "deep"
    if victim.is_file():
        os.truncate(victim, weights.stat().st_size)
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    before = tree(outside)
    found = run(name, out)
    assert tree(outside) == before and found.code in (0, 4), found.err


@pytest.mark.parametrize("place", ["lock", "journal.jsonl", "parts/x.jsonl"])
@pytest.mark.parametrize("name", [*WRITERS, "inspect", "fingerprint"])
def test_a_fifo_in_the_work_folder_is_not_waited_for(tmp_path: Path, name: str, place: str) -> None:
    reads = name in ("inspect", "fingerprint")
    if reads:
        library.convert(library.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    work = tmp_path / "out" / ".reshard"
    interrupted(tmp_path / "run")
    os.rename(tmp_path / "run" / ".reshard", work) if reads else os.rename(tmp_path / "run", tmp_path / "out")
    (work / place).parent.mkdir(exist_ok=True)
    (work / place).unlink(missing_ok=True)
    os.mkfifo(work / place)
    words = (name, tmp_path / "out") if reads else [tmp_path / "out" if word == "{out}" else word for word in WRITERS[name]]
    found = bounded(*words)
    assert found[:1] in "034" and "Traceback" not in found, found
    assert "not a regular file" in found or "it is a FIFO" in found or name == "clean" or place == "lock", found


@pytest.mark.parametrize("created", range(3))
def test_a_run_that_was_stopped_before_its_journal_leaves_a_folder_that_is_known(
    out: Path, monkeypatch: pytest.MonkeyPatch, created: int
) -> None:
    """Its lock file stays, because nothing else tells whose the staged files are."""
    real, count = Staging._create, []

    def create(self: Staging, path: str, size: int) -> None:
        if len(count) == created:
            raise KeyboardInterrupt
        count.append(path)
        real(self, path, size)

    monkeypatch.setattr(Staging, "_create", create)
    plan = library.plan(HF / "llama", to="vllm", tp=4)
    with pytest.raises(KeyboardInterrupt):
        library.convert(plan, out)
    assert {path.name for path in (out / ".reshard").glob("*.safetensors")} == {*count}
    monkeypatch.setattr(Staging, "_create", real)
    library.convert(plan, out)
    library.verify(out).raise_if_different()


def journal_of(tmp_path: Path) -> tuple[Path, bytes]:
    """The journal of an interrupted run, and its first line."""
    path = interrupted(tmp_path / "out") / "journal.jsonl"
    return path, path.read_bytes().split(b"\n")[0] + b"\n"


ENDLESS = {
    "a sparse line": lambda file, first: (file.write(first), file.truncate(8 << 30)),
    "a sparse first line": lambda file, first: file.truncate(8 << 30),
    "a sparse line below the limit of the file": lambda file, first: (file.write(first), file.truncate(200 << 20)),
    "lists in a line": lambda file, first: file.write(first + b'{"blocks":[' + b"[]," * (30 << 18) + b"[]]}\n"),
    "nested lists": lambda file, first: file.write(first + b'{"blocks":' + b"[" * 1_000_000 + b"\n"),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", ["inspect", "convert", "resume", "part", "clean"])
@pytest.mark.parametrize("place", ["journal.jsonl", "parts/x.jsonl", "lock"])
def test_a_journal_without_end_takes_neither_memory_nor_time(tmp_path: Path, kind: str, name: str, place: str) -> None:
    path, first = journal_of(tmp_path)
    (path.parent / place).parent.mkdir(exist_ok=True)
    with open(path.parent / place, "wb") as file:
        ENDLESS[kind](file, first)
    words = (
        ("inspect", tmp_path / "out") if name == "inspect" else [tmp_path / "out" if word == "{out}" else word for word in WRITERS[name]]
    )
    found = bounded(*words)
    assert found[:1] in "034" and found[1] == " ", found


VALUES = [
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "9" * 5000,
    '"text"',
    "-1",
    "null",
    "[]",
    '[[0, 0, "zz"]]',
    '[[0, Infinity, "00"]]',
    "{}",
    "true",
    "0.5",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", ["nbytes", "replaces", "arguments", "to", "identity", "blocks"])
def test_a_journal_with_values_of_other_types_is_one_clear_paragraph(tmp_path: Path, key: str, value: str) -> None:
    path, first = journal_of(tmp_path)
    header = json.loads(first)
    given = {**{name: json.dumps(old) for name, old in header.items()}, key: value}
    path.write_text("{" + ",".join(f'"{name}":{text}' for name, text in given.items()) + "}\n")
    inspected = reshard("inspect", tmp_path / "out")
    assert inspected.code in (2, 3) and (inspected.err.count("\n") == 1 and "[defect]" not in inspected.err), inspected.err
    for name in ("convert", "resume", "part", "finish", "clean"):
        found = run(name, tmp_path / "out")
        assert found.code in (0, 4) and "[defect]" not in found.err, (name, found.err)
