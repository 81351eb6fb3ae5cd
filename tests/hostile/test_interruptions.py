"""Runs that clash, are stopped at every file operation, or meet a system that refuses: never a mixture, never a traceback.

tests/hostile/interruptions.py is the long form of the first tests.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, HF
from helpers.reshard_command import command
from helpers.reshard_command import reshard as run
from helpers.reshard_command import result_tree as tree
from helpers.sampled import sampled

import reshard
from reshard.engine.destinations.journal import Journal, read_journal
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, SystemRefusal, TargetError
from reshard.storage import lock
from reshard.storage.files import LocalFiles
from reshard.storage.staging import Staging
from reshard.verbs.convert import conversion

sys.path.insert(0, str(Path(__file__).resolve().parent))

from interruptions import Case, calls_of_an_overwrite, clash, killed, stopped_overwrite, visible


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {kind: Case(kind, tmp_path_factory.mktemp("cases")) for kind in ("hf", "vllm")}


@pytest.fixture
def plan():
    return reshard.plan(HF / "llama", to="vllm", tp=2)


@pytest.mark.parametrize("how", ["kill", pytest.param(errno.EIO, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pytest.param("hf", marks=pytest.mark.slow), "vllm"])
def test_an_overwrite_stopped_at_any_operation_leaves_no_mixture_and_can_be_finished(cases, kind, how, tmp_path):
    calls = calls_of_an_overwrite(cases[kind], tmp_path)
    start = 1 if how == "kill" else 2
    for k in [*range(start, calls - 44, 18), *range(calls - 45 + start, calls + 1, 3)]:  # the commit, and a sample of what precedes it
        problem, _ = stopped_overwrite(cases[kind], tmp_path / str(k), k, how)
        assert problem is None, f"operation {k} of {calls}: {problem}"


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_clashes_corrupt_nothing(cases, kind, kill, tmp_path):
    randomness = random.Random(f"{kind}{kill}")
    for i in range(6):
        problem, codes = clash(cases[kind], tmp_path / "out", randomness, kill=kill)
        assert problem is None, (i, codes)


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_killed_at_random_moments_it_resumes(cases, kind, tmp_path):
    randomness = random.Random(kind)
    for i in range(3):
        assert killed(cases[kind], tmp_path / str(i), randomness) is None


def begun(plan, target, after=5, **options):
    """A conversion that has written some blocks and goes on when it is asked to."""
    blocks = conversion(plan, target, effort=Effort(workers=1), **options).run()
    for _ in range(after):
        next(blocks)
    return blocks


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_a_second_run_is_told_who_writes_and_how_far_it_is(plan, tmp_path, options):
    first = begun(plan, tmp_path / "out")
    time.sleep(0.4)  # until the journal has noted the blocks
    before = tree(tmp_path / "out")
    other = reshard.plan(HF / "qwen2", to="hf")
    for second in (plan, other):
        with pytest.raises(
            TargetError, match=rf"another reshard is writing here: process {os.getpid()} on \S+, started .* UTC, \d+ % done"
        ):
            reshard.convert(second, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == before
    assert list(first)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal and not (tmp_path / "out" / ".reshard").exists()


def test_a_second_run_finds_what_the_first_has_made_before_it_got_the_lock(plan, tmp_path):
    """It is made before the first run begins, when the target is empty, and begins when the first has ended."""
    second = conversion(reshard.plan(HF / "qwen2", to="hf"), tmp_path / "out").run()
    overwriting = conversion(reshard.plan(HF / "qwen2", to="hf"), tmp_path / "out", existing="overwrite").run()
    reshard.convert(plan, tmp_path / "out")
    written = tree(tmp_path / "out")
    with pytest.raises(TargetError, match="the target exists"):
        list(second)
    assert tree(tmp_path / "out") == written
    list(overwriting)
    reshard.convert(reshard.plan(HF / "qwen2", to="hf"), tmp_path / "expected")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected"), "nothing of the first is left"


def test_a_run_whose_work_folder_was_replaced_commits_nothing(plan, tmp_path):
    first = begun(plan, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / ".reshard")
    second = begun(plan, tmp_path / "out")
    with pytest.raises((TargetError, SystemRefusal)):
        list(first)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".reshard"]
    list(second)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_the_lock_of_a_killed_run_is_free(plan, tmp_path):
    (tmp_path / "out" / ".reshard").mkdir(parents=True)
    (tmp_path / "out" / ".reshard" / "lock").write_text('{"pid": 1, "host": "elsewhere", "started": "now"}')
    reshard.convert(plan, tmp_path / "out")
    assert not (tmp_path / "out" / ".reshard").exists()


def test_many_threads_take_the_lock_one_at_a_time(tmp_path):
    """Each removes the work folder while others wait for it."""
    holders, most, taken = [0], [0], [0]

    def work():
        for _ in range(30):
            staging = Staging(tmp_path / "out")
            try:
                with staging.locked("plan", str):
                    holders[0] += 1
                    most[0] = max(most[0], holders[0])
                    taken[0] += 1
                    time.sleep(0.0005)
                    holders[0] -= 1
            except TargetError:
                pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and taken[0] > 60 and not (tmp_path / "out").exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    """Another run ends between opening the file and locking it, and a third begins."""
    real, removed = lock.fcntl.flock, []

    def flock(descriptor, operation):
        if not removed:
            removed.append(path.unlink())
            path.write_text('{"pid": 1, "host": "elsewhere", "started": "now"}')
        real(descriptor, operation)

    path = tmp_path / "out" / ".reshard" / "lock"
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with Staging(tmp_path / "out").locked("plan", str):
        assert removed and json.loads(path.read_text())["plan"] == "plan"
        with pytest.raises(TargetError), Staging(tmp_path / "out").locked("plan", str):
            pass


@pytest.mark.parametrize("after", range(4))
def test_a_stop_while_the_work_of_an_earlier_run_is_removed_leaves_nothing_to_trust(plan, tmp_path, monkeypatch, after):
    begun(plan, tmp_path / "out").close()
    expected, real, removed = tree_of(plan, tmp_path / "expected"), os.unlink, []

    def unlink(path, **options):
        removed.append(path)
        if len(removed) == after + 1:
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", unlink)
        reshard.convert(plan, tmp_path / "out", overwrite=True)
    reshard.convert(plan, tmp_path / "out", resume=True)
    assert tree(tmp_path / "out") == expected


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without flock, such as some network mounts."""

    def flock(descriptor, operation):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_BEATS", 0.05)


def test_without_locks_a_heartbeat_keeps_others_away(plan, tmp_path, no_locks, monkeypatch):
    monkeypatch.setattr(lock, "SECONDS_UNTIL_STALE", 0.6)
    first = begun(plan, tmp_path / "out")
    time.sleep(1.0)  # it is alive, though its lock file is older than that
    with pytest.raises(TargetError, match="another reshard is writing here: process"):
        reshard.convert(plan, tmp_path / "out", resume=True)
    list(first)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal and not (tmp_path / "out" / ".reshard").exists()


def test_without_locks_a_run_that_has_died_is_recognised_by_its_age(plan, tmp_path, no_locks):
    file = tmp_path / "out" / ".reshard" / "lock"
    file.parent.mkdir(parents=True)
    file.write_text('{"pid": 1, "host": "elsewhere", "started": "now"}')
    with pytest.raises(TargetError, match="process 1 on elsewhere"):
        reshard.convert(plan, tmp_path / "out")
    os.utime(file, (0, time.time() - lock.SECONDS_UNTIL_STALE - 5))
    reshard.convert(plan, tmp_path / "out")
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def stopped_in_commit(plan, target, monkeypatch, **options):
    """A conversion that is stopped at the first rename of its commit."""

    def replace(source, to):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        reshard.convert(plan, target, **options)


def test_readers_refuse_a_target_whose_commit_was_stopped_and_name_the_command(plan, tmp_path, monkeypatch):
    target = tmp_path / "out"
    reshard.convert(reshard.plan(HF / "qwen2", to="vllm", tp=2), target)
    stopped_in_commit(plan, target, monkeypatch, overwrite=True)
    for verb in (("inspect", target), ("fingerprint", target), ("verify", HF / "llama", target), ("plan", target, "--to", "hf")):
        result = run(*verb)
        assert result.code and "an interrupted conversion to vllm, 100 % done" in result.err and "--resume" in result.err, result.err
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal


def test_until_the_commit_the_old_checkpoint_is_read(plan, tmp_path):
    reshard.convert(reshard.plan(HF / "qwen2", to="vllm", tp=2), tmp_path / "out")
    blocks = begun(plan, tmp_path / "out", existing="overwrite")
    assert reshard.verify(HF / "qwen2", tmp_path / "out").equal
    blocks.close()
    assert reshard.verify(HF / "qwen2", tmp_path / "out").equal


def test_a_target_with_nothing_but_unfinished_work_names_the_command_that_finishes_it(tmp_path, monkeypatch):
    target = tmp_path / "my out"
    arguments = ["convert", HF / "llama", target, "--to", "vllm", "--tp", 2, "--workers", 1, "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "begin_commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*arguments).code == 130
    message = run("inspect", target).err
    assert "an interrupted conversion to vllm, 100 % done" in message
    command_line = message.split("`")[1]
    assert command_line == f"reshard convert {HF / 'llama'} '{target}' --to vllm --tp 2 --workers 1 --resume"
    import shlex

    assert run(*shlex.split(command_line)[1:]).code == 0
    assert reshard.verify(HF / "llama", target).equal


def test_a_target_that_is_being_written_is_not_read(plan, tmp_path):
    blocks = begun(plan, tmp_path / "out")
    with pytest.raises(CheckpointError, match="a conversion is running here to vllm"):
        reshard.open(tmp_path / "out")
    blocks.close()


@pytest.mark.parametrize(
    "record",
    ["{}", '{"identity": 1, "nbytes": "x"}', '{"identity": "a"}\n{"blocks": [[1]]}', '{"identity":"a","replaces":["../../x"]}', "\xff"],
)
def test_a_journal_of_somebody_else_is_refused_and_removes_nothing(plan, tmp_path, record):
    work = tmp_path / "a" / "b" / ".reshard"
    work.mkdir(parents=True)
    (tmp_path / "x").write_text("mine")
    (work / "journal.jsonl").write_text(record + "\n" + '{"commit": "begun"}\n')
    for options in ({"resume": True}, {"overwrite": True}):
        with suppress(RequestError, CheckpointError):
            reshard.convert(plan, work.parent, **options)
        assert (tmp_path / "x").read_text() == "mine"


def test_the_command_of_a_journal_is_only_ever_a_conversion(plan, tmp_path):
    begun(plan, tmp_path / "out").close()
    journal = tmp_path / "out" / ".reshard" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    for arguments, expected in ((["convert", "a", "$(rm -rf ~)"], "'$(rm -rf ~)'"), (["x; rm -rf ~"], "resume=True")):
        journal.write_text("\n".join([json.dumps({**json.loads(lines[0]), "arguments": arguments}), *lines[1:]]) + "\n")
        with pytest.raises(CheckpointError) as caught:
            reshard.open(tmp_path / "out")
        assert expected in str(caught.value)


def test_overwriting_a_checkpoint_by_the_same_plan_is_resumed_and_not_taken_for_finished(plan, tmp_path):
    """The old files have the right names and sizes, and yet another content: that is why somebody overwrites them."""
    target = tmp_path / "out"
    reshard.convert(plan, target)
    expected = tree(target)
    damaged = target / "model-rank-0-part-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\1\2\3")
    begun(plan, target, existing="overwrite").close()
    reshard.convert(plan, target, resume=True)
    assert tree(target) == expected


def test_a_work_folder_that_was_removed_by_halves_is_not_trusted(plan, tmp_path):
    begun(plan, tmp_path / "out").close()
    (tmp_path / "out" / ".reshard" / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(TargetError, match=r"model-rank-1-part-0.safetensors: the file is missing"):
        reshard.convert(plan, tmp_path / "out", resume=True)


def test_after_a_torn_line_the_journal_is_continued_on_a_line_of_its_own(plan, tmp_path, monkeypatch):
    blocks = begun(plan, tmp_path / "out", after=len(plan.routes))
    blocks.close()
    journal = tmp_path / "out" / ".reshard" / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"blocks":[[0,')
    stopped_in_commit(plan, tmp_path / "out", monkeypatch, resume=True)
    assert read_journal(tmp_path / "out").committing


def test_an_error_of_the_last_sync_is_raised(plan, tmp_path, monkeypatch):
    """It happens in the journal's thread, after the last block was added. A second sync would succeed: the system has dropped the bytes."""
    target, failed = tmp_path / "out", threading.Event()
    sync = Staging.sync

    def failing(self):
        if threading.current_thread().name == "reshard-journal" and not failed.is_set():
            failed.set()
            raise SystemRefusal("cannot be written: Input/output error")
        sync(self)

    monkeypatch.setattr(Staging, "sync", failing)
    blocks = conversion(plan, target, effort=Effort(workers=1)).run()
    for _ in range(len(plan.routes)):
        next(blocks)
    assert failed.wait(5)
    time.sleep(0.05)
    with pytest.raises(SystemRefusal, match="Input/output error"):
        list(blocks)
    assert [path.name for path in target.iterdir()] == [".reshard"]
    assert not read_journal(target).blocks, "what was not synced is not noted"
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES])
def test_a_source_that_cannot_be_read_for_a_moment_keeps_finished_work(plan, tmp_path, monkeypatch, number):
    target, real, reads = tmp_path / "out", os.preadv, []

    def failing(*arguments):
        reads.append(1)
        if len(reads) > 8:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(SystemRefusal, match=rf"cannot be read: {os.strerror(number)}.*`resume=True`"):
            reshard.convert(plan, target, workers=1)
    assert len(read_journal(target).blocks) >= 5
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal


CALLS = ["mkdir", "open", "pwrite", "truncate", "fdatasync", "fsync", "replace", "unlink", "scandir"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", sampled([errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.EFBIG], 3))
def test_a_system_that_refuses_is_a_sentence(cases, tmp_path, monkeypatch, call, number):
    """The calls from a certain one on fail, in an overwrite."""
    for at in (0, 2):
        target, real, count = tmp_path / f"out-{at}", getattr(os, call), []
        cases["vllm"].old(target)
        checkpoint = reshard.plan(HF / "qwen2", to="vllm", tp=4)
        expected = tree_of(checkpoint, tmp_path / f"expected-{at}")

        def failing(*arguments, count=count, real=real, at=at, **options):
            count.append(1)
            if len(count) > at and "fixtures" not in str(arguments[0]):
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                reshard.convert(checkpoint, target, overwrite=True, workers=1)
            except SystemRefusal as error:
                assert len(count) > at and str(target) in str(error)
                refused = True
            else:
                refused = False
        assert refused or visible(target) == expected, "what it did not need may fail"
        reshard.convert(checkpoint, target, overwrite=True)
        assert tree(target) == expected


def tree_of(plan, target):
    reshard.convert(plan, target)
    return tree(target)


def place(kind, tmp_path):
    if kind == "a link to nowhere":
        (tmp_path / "link").symlink_to("nowhere")
        return tmp_path / "link"
    if kind == "a link to itself":
        (tmp_path / "loop").symlink_to("loop")
        return tmp_path / "loop" / "out"
    if kind == "below a file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file" / "out"
    if kind == "too long a name":
        return tmp_path / ("a" * 300)
    return Path("/proc/out")


@pytest.mark.parametrize("kind", ["a link to nowhere", "a link to itself", "below a file", "too long a name", "not a disk"])
def test_a_place_where_nothing_can_be_written_is_named_as_such(kind, tmp_path):
    target = place(kind, tmp_path)
    result = run("convert", HF / "llama", target, "--to", "hf")
    assert result.code and "Traceback" not in result.err and "cannot be " in result.err and "are free" not in result.err, result.err
    assert target.name in result.err


def test_a_name_with_nul_is_refused(plan):
    with pytest.raises(RequestError, match="NUL"):
        reshard.convert(plan, "out\0")


def test_source_and_target_do_not_contain_each_other(tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "runs" / "source")
    plan, before = reshard.plan(source, to="hf"), tree(tmp_path)
    (tmp_path / "link").symlink_to(source)
    for target, expected in (
        (source / "hf", "the target is inside of the source"),
        (tmp_path / "link" / "hf", "the target is inside of the source"),
        (tmp_path / "runs", "is inside of the target"),
        (source, "the same directory"),
    ):
        with pytest.raises(TargetError, match=expected):
            reshard.convert(plan, target, overwrite=True)
    (tmp_path / "link").unlink()
    assert tree(tmp_path) == before
    # A single file is the source, and not its directory.
    shutil.copytree(HF / "llama", tmp_path / "one")
    reshard.convert(reshard.plan(tmp_path / "one" / "model.safetensors", to="hf"), tmp_path / "one" / "out")


@pytest.mark.parametrize("how", ["rewritten", "removed"])
def test_a_source_that_changes_while_it_is_read_is_an_error_and_nothing_appears(tmp_path, how):
    source = shutil.copytree(HF / "llama", tmp_path / "source")
    blocks = begun(reshard.plan(source, to="vllm", tp=2), tmp_path / "out")
    file = source / "model.safetensors"
    data = file.read_bytes()
    if how == "rewritten":
        with open(file, "r+b") as stream:
            stream.write(data)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: the file was written while it was converted"):
        list(blocks)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changed_between_opening_and_converting_is_an_error(tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "source")
    plan = reshard.plan(source, to="vllm", tp=2)
    os.utime(source / "model.safetensors")
    with pytest.raises(CheckpointError, match="was written while"):
        reshard.convert(plan, tmp_path / "out")


def test_a_folder_of_a_source_that_the_system_does_not_list_is_a_sentence(monkeypatch):
    def refusing(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(SystemRefusal, match="cannot be listed: Permission denied"):
        reshard.open(HF / "llama")


def test_links_in_a_circle_are_not_followed(tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "source")
    (tmp_path / "source" / "loop").symlink_to("loop")
    files = LocalFiles(tmp_path / "source")
    assert "loop" in files.list() and files.list("loop") == ()
    for path in ("loop", "a" * 5000):
        with pytest.raises(CheckpointError, match="cannot be read"):
            files.size(path)
    assert reshard.open(tmp_path / "source").format == "hf"


@pytest.mark.parametrize("most", [64, 30])
def test_few_descriptors_are_enough(most, tmp_path):
    """There are more files than that, and the entries of the source are compressed, so that they are read through temporary files."""

    def limited(*arguments):
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # noqa: E731
        return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, preexec_fn=limit)

    source, model = DCP / "zstd" / "checkpoint", DCP / "zstd" / "model"
    made = limited("convert", source, tmp_path / "many", "--to", "dcp", "--dp", most + 1, "--model", model, "--workers", 8)
    assert made.returncode == 0, made.stderr
    compared = limited("verify", source, tmp_path / "many", "--model", model, "--workers", 8)
    assert compared.returncode == 0, compared.stderr


def test_a_limit_of_the_length_of_files_is_told_as_what_it_is(tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    arguments = command("convert", HF / "llama", tmp_path / "out", "--to", "hf")
    whole = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # the .pyc of a module would be cut, and stay so
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, preexec_fn=limit, env=whole)
    assert result.returncode and "ulimit -f" in result.stderr and "disk is full" not in result.stderr
    assert not (tmp_path / "out").exists()


# The command line in a process of its own, in which every write takes a moment: so a signal meets it at work.
SLOW = """
import os, signal, sys, time
# Whoever runs the tests in the background, or with nohup, ignores these; a child inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
real = os.pwrite
def pwrite(*arguments):
    time.sleep(0.05)
    return real(*arguments)
os.pwrite = pwrite
from importlib import import_module
import_module("reshard.cli.main").main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_stop_cleanly(number, tmp_path, plan):
    target = tmp_path / "out"
    arguments = [sys.executable, "-c", SLOW, "convert", HF / "llama", target, "--to", "vllm", "--tp", "2", "--workers", "1"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not (found := read_journal(target)) or not found.blocks):
        time.sleep(0.005)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + number, messages
    assert messages == "reshard: interrupted; finished work is kept, and --resume continues from there [interrupted]\n"
    assert [path.name for path in target.iterdir()] == [".reshard"]
    assert run("convert", HF / "llama", target, "--to", "vllm", "--tp", 2).code, "without --resume nothing is touched"
    reshard.convert(plan, target, resume=True)
    assert tree(target) == tree_of(plan, tmp_path / "expected")


@pytest.mark.parametrize("arguments", [("inspect", HF / "llama"), ("formats",), ("--help",), ("completion", "bash")], ids=lambda a: a[0])
def test_a_full_output_is_a_sentence(arguments):
    with open("/dev/full", "w") as full:
        result = subprocess.run(command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode not in (0, 70, 120) and result.stderr.count("\n") == 1 and "standard output" in result.stderr.lower()


@pytest.mark.parametrize("arguments, code", [(("verify", HF / "llama", HF / "qwen2"), 1), (("verify", HF / "llama", HF / "llama"), 0)])
def test_a_closed_pipe_keeps_the_exit_code(arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command(*arguments), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (code, "")
