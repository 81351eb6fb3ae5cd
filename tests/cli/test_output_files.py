"""Output files, for every option that takes one, found from the commands: devices and FIFOs stay, links are refused, nothing is half."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import Result, command, reshard
from hostile.limits import ON_LINUX, limited

import reshard as library
from reshard.serving.learned.document import layout_of

COMMANDS, cli = (getattr(import_module("reshard.cli.main"), name) for name in ("COMMANDS", "cli"))
OutputFileParam = import_module("reshard.cli.options").OutputFileParam
LLAMA = HF / "llama"
# How each command is run; {new}: a path that does not exist yet.
RUNS: dict[str, tuple[object, ...]] = {
    "inspect": (LLAMA,),
    "convert": (LLAMA, "{new}", "--to", "hf"),
    "plan": (LLAMA, "--to", "hf"),
    "log": (FIXTURES / "delta",),
    "verify": (LLAMA, LLAMA),
    "sign": ("{signed}", "--key", "{signed}.key"),
    "diff": (LLAMA, LLAMA),
    "explain": (LLAMA, LLAMA),
    "stats": (LLAMA, "*norm.weight"),
    "cat": (LLAMA, "model.norm.weight"),
    "export": (LLAMA, "model.norm.weight"),
    "doctor": (LLAMA,),
    "fingerprint": (LLAMA,),
    "digests": (LLAMA, "--to", "vllm"),
    "roundtrip": (LLAMA, "--to", "dcp"),
    "push": (LLAMA, "http://127.0.0.1:9"),
    "cache": ("get", LLAMA, "--to", "hf", "--cache", "{new}"),
    "serve-check": (LLAMA,),
    "delta": (LLAMA, LLAMA, "{new}"),
    "apply": (LLAMA, LLAMA, "{new}", "--to", "hf"),
    "watch": (FIXTURES / "deepspeed" / "absent", "--to", "hf", "--into", "{new}/{step}", "--once"),
    "degrees": (LLAMA, "--to", "vllm"),
    "learn": (LLAMA, "--engine", "vllm"),
    "estimate": (LLAMA,),
    "hub": (FIXTURES / "deepspeed" / "absent",),  # one that serves does not end
    "versions": (),
    "formats": (),
    "architectures": (),
    "env": (),
    "clean": (FIXTURES / "learned",),
    "completion": ("bash",),
}
# Paths that are read, and directories that are made: every other option with such a placeholder is an output file.
READ = {
    "--adapter",
    "--adapter-config",
    "--architecture",
    "--compare",
    "--engine-python",
    "--layout",
    "--like",
    "--merge-adapter",
    "--model",
    "--plan",
    "--key",
    "--signature-file",
    "--signed-by",
}
# Commands whose own result needs room, too.
WRITING = ("convert", "cache", "delta", "apply", "sign")
DIRECTORIES = {"--cache", "--into", "--layout-dir", "--shared-dir", "--work"}


def options() -> list[tuple[str, str]]:
    """Each command with each of its options that take an output file."""
    found = []
    for name in COMMANDS:
        for param in cli.get_command(click.Context(cli), name).params:  # type: ignore[union-attr]
            if isinstance(param.type, OutputFileParam):
                found.append((name, param.opts[0]))
            elif isinstance(param, click.Option) and any(word in (param.metavar or "") for word in ("FILE", "PATH", "DIR", "OUT")):
                assert {*param.opts} & (READ | DIRECTORIES), f"{name} {param.opts[0]}: does it read, or write an output file?"
    return found


OPTIONS = options()
OF_THE_LOG = ("--log-file", "--metrics-file")
RESULTS = [(name, option) for name, option in OPTIONS if option not in OF_THE_LOG]


@pytest.fixture(autouse=True)
def _learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is there to be traced: what it would tell was recorded."""
    layout = layout_of((FIXTURES / "learned" / "olmo2" / "layout.json").read_text(), "layout.json")
    monkeypatch.setattr(library, "learn", lambda model, **options: layout)


def run(name: str, option: str, path: Path, new: Path) -> Result:
    return reshard(name, *words_of(name, new), option, path)


def words_of(name: str, new: Path) -> list[str]:
    """The arguments of a command. {signed} is a copy of a checkpoint, as its signature would be written into it."""
    words = [str(word).replace("{new}", str(new)) for word in RUNS[name]]
    if "{signed}" in words:
        signed = new.parent / "signed"
        shutil.copytree(LLAMA, signed, dirs_exist_ok=True)
        if not signed.with_suffix(".key").exists():
            key = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            signed.with_suffix(".key").write_bytes(key)
        words = [word.replace("{signed}", str(signed)) for word in words]
    return words


def place(tmp_path: Path) -> Path:
    """A name that every command takes: export looks at its suffix."""
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs" / "result.npy"


def node(path: Path, kind: int, major: int, minor: int) -> Path:
    """A device node of the test's own."""
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
        if kind == stat.S_IFCHR:
            os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"a device node can only be made by root, on a file system that allows it: {error.strerror}")
    return path


def usual(name: str, option: str, tmp_path: Path) -> int:
    """The exit code of the command when nothing is odd about the path."""
    return run(name, option, tmp_path / "usual.npy", tmp_path / "usual").code


def test_the_options_that_exist_are_known() -> None:
    assert {*RUNS} == {*COMMANDS}
    assert {option for _, option in OPTIONS} == {"--html", "--output", "--plan-out", "--signature-file", *OF_THE_LOG}


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_link_a_directory_a_disk_and_a_lost_folder_are_refused_before_the_work(tmp_path: Path, name: str, option: str) -> None:
    path, new = place(tmp_path), tmp_path / "new"
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "victim", tmp_path / "folder", tmp_path / "absent"):
        path.symlink_to(target)
        found = run(name, option, path, new)
        assert found.code == 2 and "symbolic link" in found.err and str(path) in found.err and option in found.err, found.err
        assert os.readlink(path) == str(target) and (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "absent").exists()
        path.unlink()
    path.mkdir()
    assert "is a directory" in (found := run(name, option, path, new)).err and found.code == 2
    path.rmdir()
    found = run(name, option, path / "deep" / path.name, new)
    assert found.code == 2 and "does not exist" in found.err
    node(path, stat.S_IFBLK, 7, 250)
    assert "is a disk" in (found := run(name, option, path, new)).err and found.code == 2
    assert not new.exists() and os.listdir(path.parent) == [path.name] and stat.S_ISBLK(path.stat().st_mode)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_device_is_written_into_and_stays(tmp_path: Path, name: str, option: str) -> None:
    path = node(place(tmp_path), stat.S_IFCHR, 1, 3)  # as /dev/null
    found = run(name, option, path, tmp_path / "new")
    assert found.code == usual(name, option, tmp_path), found.err
    assert stat.S_ISCHR(path.lstat().st_mode) and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_fifo_is_written_into_and_stays(tmp_path: Path, name: str, option: str) -> None:
    path, read = place(tmp_path), []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    found = run(name, option, path, tmp_path / "new")
    reader.join(60)
    usual_code, plain = usual(name, option, tmp_path), (tmp_path / "usual.npy").read_bytes()
    assert found.code == usual_code and stat.S_ISFIFO(path.lstat().st_mode) and os.listdir(path.parent) == [path.name]
    assert read[0] == plain if option in ("--html", "--output") else read[0], "logs, metrics and plans hold times"


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_full_device_is_told(tmp_path: Path, name: str, option: str) -> None:
    path = node(place(tmp_path), stat.S_IFCHR, 1, 7)  # as /dev/full
    found = run(name, option, path, tmp_path / "new")
    expect_no_room(found.code, found.err, usual(name, option, tmp_path), option)
    assert stat.S_ISCHR(path.lstat().st_mode) and os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")
@pytest.mark.parametrize("old", [None, b"the old content"])
@pytest.mark.parametrize(
    ("name", "option"), [pair for pair in OPTIONS if pair[0] not in WRITING or pair[1] in ("--plan-out", "--signature-file")]
)
def test_without_room_nothing_half_written_has_the_name(tmp_path: Path, name: str, option: str, old: bytes | None) -> None:
    """Room ends after 20 bytes: a limit of the process (RLIMIT_FSIZE), which needs no mount."""
    path = place(tmp_path)
    if old is not None:
        path.write_bytes(old)

    words = [*words_of(name, tmp_path / "new"), *(["--overwrite"] if name == "export" else [])]

    def work() -> str:
        sys.dont_write_bytecode = True  # Python does not see that a .pyc is cut, and every later process would read it
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        found = reshard(name, *words, option, path)
        return f"{found.code}|{found.err}"

    code, _, err = limited(work).partition("|")
    expect_no_room(int(code), err, usual(name, option, tmp_path), option)
    if option != "--log-file":
        assert (path.read_bytes() if path.exists() else None) == old and os.listdir(path.parent) == ([path.name] if old else [])


def expect_no_room(code: int, err: str, usual_code: int, option: str) -> None:
    """The log and the metrics do not stop a run whose result is more than they are: it says that they are lost."""
    if option in OF_THE_LOG:
        assert code == usual_code and len([line for line in err.splitlines() if "warning" in line and "written" in line]) == 1, err
    else:
        assert code == 5 and "cannot be written" in err, err


# Export wants a suffix, learn an engine; and the log does not know which command runs.
@pytest.mark.parametrize(
    ("name", "option"),
    [pair for pair in OPTIONS if pair[0] not in ("export", "learn") and (pair[1] != "--log-file" or pair[0] == "inspect")],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr", "fd"])
def test_the_open_files_of_the_process_are_themselves(tmp_path: Path, name: str, option: str, stream: str) -> None:
    words: list[Any] = words_of(name, tmp_path / "new")
    with (tmp_path / "third").open("wb") as third:
        path = f"/dev/fd/{third.fileno()}" if stream == "fd" else f"/dev/{stream}"
        found = subprocess.run(command(name, *words, option, path), capture_output=True, pass_fds=[third.fileno()], check=False)
    written = {"stdout": found.stdout, "stderr": found.stderr, "fd": (tmp_path / "third").read_bytes()}[stream]
    signs = {
        "--signature-file": b"mediaType",
        "--html": b"</html>",
        "--plan-out": b"plan",
        "--log-file": b"ended with exit code",
        "--metrics-file": b"reshard_last_run",
    }
    assert found.returncode == usual(name, option, tmp_path) and signs[option] in written, found.stderr


def test_a_file_descriptor_that_is_not_open_is_refused(tmp_path: Path) -> None:
    found = reshard("inspect", LLAMA, "--html", "/dev/fd/987")
    assert found.code == 5 and "/dev/fd/987" in found.err


def test_python_functions_take_the_same_care(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(library.RequestError, match="symbolic link"):
        library.save_plan(library.plan(LLAMA, to="hf"), tmp_path / "link")
    assert not (tmp_path / "victim").exists()
