"""`reshard watch`: every step is converted once, whatever is killed, and the newest output is always whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import command, reshard, result_tree, tree
from hostile.limits import ON_LINUX, limited

import reshard as library
from reshard.errors import RequestError

DCP, MODEL = FIXTURES / "dcp" / "fsdp2" / "checkpoint", FIXTURES / "dcp" / "fsdp2" / "model"
MEGATRON = FIXTURES / "megatron" / "llama-tied-pp2" / "checkpoint" / "iter_0000002"
TO = ("--to", "vllm", "--tp", 2, "--model", MODEL)


@pytest.fixture
def run(tmp_path):
    for step in (10, 20):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def save(run, step):
    shutil.copytree(DCP, run / f"step-{step}")


def watch(run, out, *more, pattern="{step}"):
    return reshard("watch", run, *TO, "--into", out / pattern, "--all", "--json", *more)


def events(result):
    return [(each["step"], each["event"]) for each in map(json.loads, result.out.splitlines())]


def test_every_step_is_converted_once_and_verified(run, tmp_path):
    out = tmp_path / "out"
    first = watch(run, out)
    assert first.code == 0
    assert events(first) == [(step, name) for step in (10, 20) for name in ("converted", "latest", "finished")]
    library.convert(library.plan(DCP, to="vllm", tp=2, model=MODEL), tmp_path / "alone")
    for step in ("10", "20", "latest"):
        assert result_tree(out / step) == result_tree(tmp_path / "alone")
    assert events(watch(run, out)) == []
    save(run, 30)
    assert events(watch(run, out))[0] == (30, "converted") and os.readlink(out / "latest") == "30"
    os.utime(run / "step-20" / ".metadata")  # saved again
    assert [name for step, name in events(watch(run, out)) if step == 20] == ["converted", "finished"]
    assert os.readlink(out / "latest") == "30"


def test_an_unfinished_step_is_waited_for(run, tmp_path):
    save(run, 30)
    (run / "step-30" / ".metadata").rename(tmp_path / "later")
    assert events(watch(run, tmp_path / "out"))[-1] == (30, "waiting") and not (tmp_path / "out" / "30").exists()
    (tmp_path / "later").rename(run / "step-30" / ".metadata")
    assert events(watch(run, tmp_path / "out")) == [(30, "converted"), (30, "latest"), (30, "finished")]


def test_if_all_steps_wait_nothing_was_done_and_the_exit_code_says_so(tmp_path):
    for step in (10, 20):
        shutil.copytree(FIXTURES / "hf" / "llama", tmp_path / "run" / f"step-{step}", copy_function=shutil.copyfile)
    done = reshard("watch", tmp_path / "run", "--to", "hf", "--into", tmp_path / "out" / "{step}", "--all")
    assert done.code == 1 and "2 of 2 steps are not done. Step 10 waits: unchanged for 0 s, complete after 60 s" in done.out
    assert not (tmp_path / "out" / "10").exists()
    for path in (tmp_path / "run" / "step-10").iterdir():
        os.utime(path, (1, 1))
    done = reshard("watch", tmp_path / "run", "--to", "hf", "--into", tmp_path / "out" / "{step}", "--all")
    assert done.code == 0 and (tmp_path / "out" / "10").is_dir(), "a step that waits beside one that is done is usual"


def test_the_newest_are_kept_and_no_older_one_is_made(run, tmp_path):
    out = tmp_path / "out"
    assert {step for step, _ in events(watch(run, out, "--keep", 1))} == {20}
    save(run, 30)
    (out / "strange").mkdir()
    assert (30, "removed") in events(watch(run, out, "--keep", 1))
    assert sorted(path.name for path in out.iterdir()) == ["30", "latest", "reshard.watch.jsonl", "strange"]
    assert events(watch(run, out, "--keep", 1)) == []


def test_what_reshard_did_not_write_is_neither_replaced_nor_removed(run, tmp_path):
    out = tmp_path / "out"
    (out / "10").mkdir(parents=True)
    (out / "10" / "mine").write_text("x")
    result = watch(run, out)
    assert result.code == 1 and events(result)[0] == (10, "failed") and (20, "finished") in events(result)
    assert (out / "10" / "mine").read_text() == "x"
    (out / "latest").unlink()
    (out / "latest").mkdir()
    save(run, 30)
    assert (30, "failed") in events(watch(run, out)) and (out / "latest").is_dir()


def test_folders_of_the_user_that_are_called_like_removed_outputs_stay(run, tmp_path):
    out = tmp_path / "out"
    watch(run, out, "--keep", 1)
    shutil.copytree(out / "20", out / ".removing-copy")
    for name in ("notes", "20"):
        (out / f".removing-{name}").mkdir()
        (out / f".removing-{name}" / "mine").write_text("x")
    before = tree(out)
    save(run, 30)
    assert (30, "finished") in events(watch(run, out, "--keep", 1)), "that 20 cannot be moved away does not matter to 30"
    assert {path: data for path, data in tree(out).items() if ".removing-" in path} == {
        path: data for path, data in before.items() if ".removing-" in path
    }


def test_a_removal_that_was_stopped_is_ended(run, tmp_path):
    out = tmp_path / "out"
    watch(run, out)
    (out / "10").rename(out / ".removing-10")
    (out / ".removing-10" / "config.json").unlink()
    save(run, 30)
    watch(run, out)
    assert not (out / ".removing-10").exists()


@pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")
@pytest.mark.parametrize("kind", ["link", "fifo", "sparse", "nul in a name", "long line"])
def test_a_record_that_is_not_reshards_is_neither_followed_nor_waited_for(run, tmp_path, kind):
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("mine\n")
    out.mkdir()
    record = out / "reshard.watch.jsonl"
    if kind == "link":
        record.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(record)
    elif kind == "sparse":
        with record.open("wb") as file:
            file.truncate(8 << 30)
    elif kind == "long line":
        record.write_bytes(b'{"source":[' + b"[]," * (16 << 20) + b"[]]}\n")
    else:
        line = {"source": "x", "written": 1, "bytes": 1, "step": 1, "target": "OUT/a\0b"}
        record.write_text(json.dumps(line) + "\n")

    def work():
        found = watch(run, out)
        return f"{found.code} {found.out.count('finished')} {found.err}"

    answer = limited(work)
    assert victim.read_text() == "mine\n"
    assert answer.startswith("0 2") if kind in ("nul in a name", "long line") else answer.startswith("4 0") and str(record) in answer, (
        answer
    )


def test_a_command_runs_after_each_step(run, tmp_path):
    out, said = tmp_path / "out", tmp_path / "said"
    assert watch(run, out, "--then", f'echo "$RESHARD_STEP $RESHARD_TARGET" >> {said}').code == 0
    assert said.read_text().split() == ["10", str(out / "10"), "20", str(out / "20")]
    save(run, 30)
    failing = watch(run, out, "--then", "exit 3")
    assert failing.code == 1 and (30, "failed") in events(failing) and "exit code 3" in failing.out
    assert (30, "ran") in events(watch(run, out, "--then", "true"))


def test_files_that_have_not_changed_are_one_file(run, tmp_path):
    out = tmp_path / "out"
    raw = bytearray((run / "step-20" / "__1_0.distcp").read_bytes())
    assert watch(run, out, "--link-unchanged").code == 0
    for name in os.listdir(out / "10"):
        linked = (out / "10" / name).samefile(out / "20" / name)
        assert linked == (name not in ("reshard.json", "reshard.digests")), name
    assert reshard("verify", out / "10").code == reshard("verify", out / "20").code == 0
    assert raw  # the source is untouched
    # Removing the older one leaves the newer one whole.
    shutil.rmtree(out / "10")
    assert reshard("verify", out / "20").code == 0


def test_a_file_that_differs_is_not_linked(tmp_path):
    from reshard.runs.local_outputs import LocalOutputs

    for name, content in (("a", b"same"), ("b", b"same")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(content)
        (tmp_path / name / "y").write_bytes(b"1" if name == "a" else b"2")
        (tmp_path / name / "reshard.json").write_bytes(b"{}")
    assert LocalOutputs(tmp_path).link_unchanged("b", "a") == (1, 4)
    assert (tmp_path / "b" / "y").read_bytes() == b"2" and not (tmp_path / "b" / "reshard.json").samefile(tmp_path / "a" / "reshard.json")
    assert LocalOutputs(tmp_path).link_unchanged("b", "a") == (0, 0)


def test_parts_must_be_told_apart(tmp_path):
    for part in ("actor", "critic"):
        shutil.copytree(DCP, tmp_path / "run" / "global_step_5" / part)
    out = tmp_path / "out"
    refused = watch(tmp_path / "run", out)
    assert refused.code == 2 and "--component" in refused.err
    assert events(watch(tmp_path / "run", out, "--component", "actor"))[-1] == (5, "finished")
    assert watch(tmp_path / "run", out, pattern="{part}-{step}").code == 0 and (out / "critic-5" / "config.json").exists()


@pytest.mark.parametrize("into", ["out", "{step}/out", "{x}/{step}"])
def test_into_needs_the_step_in_its_last_part(run, into):
    with pytest.raises(RequestError, match="`into="):
        next(library.watch(run, to="vllm", into=into))


def test_a_torn_record_is_read(run, tmp_path):
    out = tmp_path / "out"
    watch(run, out)
    record = out / "reshard.watch.jsonl"
    record.write_bytes(record.read_bytes()[:-20])
    assert events(watch(run, out)) == [(20, "converted"), (20, "finished")]
    assert events(watch(run, out)) == []
    record.write_text('[1]\n{"step": 1}\nnot JSON\n' + "[" * 100_000 + "\n")
    assert {step for step, _ in events(watch(run, out))} == {10, 20}


def test_it_goes_on_until_it_is_interrupted(run, tmp_path):
    out = tmp_path / "out"
    arguments = command("watch", run, *TO, "--into", out / "{step}", "--json", "--poll", 0.1)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if json.loads(line)["event"] == "finished" and json.loads(line)["step"] == 20:
                save(tmp_path / "incoming", 30)
                (tmp_path / "incoming" / "step-30").rename(run / "step-30")
            if json.loads(line)["event"] == "finished" and json.loads(line)["step"] == 30:
                process.send_signal(signal.SIGINT)
                break
        assert process.wait(timeout=60) == 130
    assert reshard("verify", out / "latest").code == 0


# Each of these takes about a second; a campaign sets more.
KILLS = int(os.environ.get("RESHARD_KILLS", "6"))


def test_killed_at_random_moments_it_ends_with_the_same_outputs(tmp_path):
    run, out, random_moment = tmp_path / "run", tmp_path / "out", random.Random(7)
    for step in range(10, 60, 10):
        save(run, step)
    library.convert(library.plan(DCP, to="vllm", tp=2, model=MODEL), tmp_path / "alone")
    expected = result_tree(tmp_path / "alone")
    arguments = command("watch", run, *TO, "--into", out / "{step}", "--all", "--link-unchanged", "--keep", 3)
    began = time.monotonic()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    for kill in range(KILLS):
        if kill % 3 == 0:
            shutil.rmtree(out, ignore_errors=True)  # killed early, it was not made
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random_moment.uniform(0.2, 1.0) * seconds)
        process.kill()
        process.wait()
        # What has its final name is whole; the link points at such a one.
        for path in out.glob("[0-9]*") if out.exists() else ():
            if (path / "reshard.json").exists() and not (path / ".reshard").exists():
                assert result_tree(path) == expected
        if (out / "latest").is_symlink():
            assert result_tree(out / "latest") == expected
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in out.iterdir()) == ["30", "40", "50", "latest", "reshard.watch.jsonl"]
    for step in ("30", "40", "50", "latest"):
        assert result_tree(out / step) == expected
        assert reshard("verify", out / step).code == 0


def test_the_users_files_in_an_output_that_is_too_old_stay(run, tmp_path):
    out = tmp_path / "out"
    watch(run, out)
    (out / "10" / "evaluation.txt").write_text("mine")
    save(run, 30)
    done = watch(run, out, "--keep", 2)
    assert (30, "removed") in events(done) and f"{out / '10'}, which is older than the newest 2" in done.out
    assert "10 held what reshard did not write: evaluation.txt" in done.err
    assert tree(out / ".replaced-10") == {"evaluation.txt": b"mine"} and not (out / "10").exists()
