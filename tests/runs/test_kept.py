"""A run that is kept as full checkpoints and deltas: every step comes back bit for bit, whatever is killed, moved or saved again.

The oracle of a step is the bytes that were saved; that of the kept folder is tests/helpers/slime_deltas.py, which applies its deltas to its
full checkpoints and uses nothing of reshard.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import command, reshard, tree
from helpers.slime_deltas import applied, changed, folder_of, load_folder
from hostile.interruptions import CHANGES, child, ended, faulty

import reshard as library
from reshard.errors import RequestError, UnsupportedError
from reshard.runs.local_outputs import LocalOutputs
from reshard.runs.removal import discard
from reshard.storage.staging import Staging

LLAMA = HF / "llama"
INDEX = "model.safetensors.index.json"
EVENTS = {"full", "delta", "finished"}


def save(run, step, seed=None, share=0.01):
    """Save a step: the llama with other bits in some elements. Returns what was saved."""
    stored = changed_a_little(load_folder(LLAMA), share, step if seed is None else seed)
    shutil.rmtree(run / f"step-{step}", ignore_errors=True)
    folder_of(run / f"step-{step}", stored, LLAMA)
    os.utime(run / f"step-{step}" / "model.safetensors", (1.7e9 + step, 1.7e9 + step + (seed or 0)))  # no step is too new to be complete
    os.utime(run / f"step-{step}" / "config.json", (1.7e9, 1.7e9))
    return stored


def changed_a_little(stored, share, seed):
    """The tensors with another lowest bit in a share of their 16-bit words: numbers stay finite."""
    random_bits, result = np.random.default_rng(seed), {}
    for name, (dtype, shape, data) in stored.items():
        flips = (random_bits.random(len(data) // 2) < share).astype("<u2")
        result[name] = dtype, shape, (np.frombuffer(data, "<u2") ^ flips).tobytes()
    return result


@pytest.fixture
def run(tmp_path):
    for step in (100, 200, 300, 400, 500):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def keep(run, kept, *more, full_every=3):
    return reshard("delta", "--of", run, kept, "--full-every", full_every, "--json", *more)


def events(result):
    return [(each["step"], each["event"]) for each in map(json.loads, result.out.splitlines())]


def forms(kept):
    """Step -> whether it is a full checkpoint or a delta."""
    return {int(path.name[5:]): "full" if (path / "reshard.json").exists() else "delta" for path in kept.glob("step-*")}


def restored(kept, step):
    """The tensors of a kept step, by the oracle alone."""
    path = kept / f"step-{step}"
    if (path / "reshard.json").exists():
        return load_folder(path)
    base = int(json.loads((path / INDEX).read_text())["metadata"]["base_version"])
    return applied(path, restored(kept, base))


def check_kept(kept, run, steps):
    """Every step comes back, by the oracle and by reshard."""
    for step in steps:
        expected = load_folder(run / f"step-{step}")
        assert restored(kept, step) == expected, step
        found = library.open(kept, step=step).tensors()
        assert {name: each.words().tobytes() for name, each in found.items()} == {name: data for name, (_, _, data) in expected.items()}


@pytest.mark.parametrize("full_every", [1, 2, 3, 20])
def test_every_step_is_restored_bit_for_bit(run, tmp_path, full_every):
    kept = tmp_path / "kept"
    result = keep(run, kept, full_every=full_every)
    assert result.code == 0 and {name for _, name in events(result)} <= EVENTS
    assert forms(kept) == {step: "full" if i % full_every == 0 else "delta" for i, step in enumerate(range(100, 600, 100))}
    assert sorted(path.name for path in kept.iterdir()) == ["reshard.watch.jsonl", *(f"step-{step}" for step in range(100, 600, 100))]
    kept.rename(tmp_path / "elsewhere")
    check_kept(tmp_path / "elsewhere", run, range(100, 600, 100))
    assert events(keep(run, tmp_path / "elsewhere", full_every=full_every)) == []


def test_every_command_takes_a_step_that_is_a_delta(run, tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "out"
    keep(run, kept)
    for step, name in ((300, "300"), (500, "latest")):
        assert reshard("convert", kept, out / name, "--step", name, "--to", "hf").code == 0
        assert load_folder(out / name) == load_folder(run / f"step-{step}")
        assert reshard("verify", kept, run / f"step-{step}", "--step", name).out.startswith("equal")
        assert reshard("diff", kept, run / f"step-{step}", "--step", name).code == 0
        assert reshard("fingerprint", kept, "--step", name).out.split()[0] == reshard("fingerprint", run, "--step", step).out.split()[0]
        assert "complete" in reshard("inspect", kept, "--step", name).out
    assert reshard("apply", kept, out / "applied", "--step", 300, "--to", "vllm", "--tp", 2).code == 0
    assert reshard("verify", out / "applied", run / "step-300").code == 0
    library.convert(library.plan(kept, to="hf", average=True, last=3), out / "average")
    library.convert(library.plan(run, to="hf", average=True, last=3), out / "expected")
    assert load_folder(out / "average") == load_folder(out / "expected")
    backwards = [kept_at(kept, step) for step in (300, 200, 100)], [run / f"step-{step}" for step in (300, 200, 100)]
    for sources, name in zip(backwards, ("one-base", "expected-of-it"), strict=True):
        library.convert(library.plan(sources, to="hf", average=[0.5, 0.3, 0.2]), out / name)
    assert load_folder(out / "one-base") == load_folder(out / "expected-of-it")
    shown = reshard("inspect", kept, "--json").document["steps"]
    assert [(each["step"], each["format"], each["complete"]) for each in shown] == [
        (step, "hf" if step in (100, 400) else "delta", True) for step in range(100, 600, 100)
    ]


def test_what_to_inspect_next_is_what_the_newest_delta_makes(run, tmp_path):
    keep(run, tmp_path / "kept")
    lines = reshard("inspect", tmp_path / "kept").out.splitlines()
    assert lines[-1].strip() == f"next  reshard inspect {tmp_path / 'kept'} --step 500"
    assert reshard("inspect", tmp_path / "kept", "--step", 500).code == 0


def test_a_kept_run_is_watched_like_any_other(run, tmp_path):
    kept, served = tmp_path / "kept", tmp_path / "served"
    keep(run, kept)
    assert reshard("watch", kept, "--to", "vllm", "--tp", 2, "--into", served / "{step}", "--all").code == 0
    for step in range(100, 600, 100):
        assert reshard("verify", served / str(step), run / f"step-{step}").code == 0


# What every command says of a step that is a delta, beside those above.
LOOKS = [
    ("verify", "KEPT"), ("verify", "BASE", "KEPT"), ("explain", "KEPT", "BASE"), ("stats", "KEPT"), ("cat", "KEPT", "model.norm.weight"),
    ("digests", "KEPT", "--to", "vllm"), ("roundtrip", "KEPT", "--to", "hf"), ("plan", "KEPT", "--to", "hf"),
    ("degrees", "KEPT", "--tp", "1"), ("estimate", "KEPT"), ("architectures", "--start", "KEPT"), ("inspect", "KEPT"),
]  # fmt: skip


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_a_step_that_is_a_delta_is_looked_at(run, tmp_path, words):
    keep(run, tmp_path / "kept")
    places = {"KEPT": tmp_path / "kept", "BASE": run / "step-200"}
    result = reshard(*(places.get(word, word) for word in words), "--step", 200)
    assert result.code == 0, result.err


def test_a_step_that_is_a_delta_is_verified_alone(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    assert reshard("verify", kept, "--step", 300).out == "as written: 21 tensors, 148 kB, every bit\n"
    path = kept / "step-100" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged = reshard("verify", kept, "--step", 300)
    assert damaged.code == 1 and "1 difference from the last delta" in damaged.out
    assert not library.verify(library.open(kept, step=300)).equal
    refused_by_doctor = reshard("doctor", kept, "--step", 300)
    assert refused_by_doctor.code == 6 and "reshard verify" in refused_by_doctor.err


TRAINERS = {
    "dcp": ("dcp/fsdp2/checkpoint", "dcp/fsdp2/model"),
    "fsdp": ("fsdp/fsdp1-sharded/checkpoint", "fsdp/fsdp1-sharded/model"),
    "deepspeed": ("deepspeed/z3-bf16/checkpoint", "deepspeed/z3-bf16/model"),
    "megatron": ("megatron/llama-tp2/checkpoint", "megatron/llama-tp2/model"),
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("to", [("--to", "hf"), ("--to", "dcp")], ids=["hf", "dcp"])
def test_runs_of_any_trainer_are_kept(name, to, tmp_path):
    """A step that a trainer wrote follows one that differs from it, and one follows it."""
    path, model = (FIXTURES / each for each in TRAINERS[name])
    options = {"model": model} if model.is_dir() else {}
    library.convert(library.plan(path, to="hf", **options), tmp_path / "same")
    stored = load_folder(tmp_path / "same")
    for step, seed in ((10, 1), (30, 3)):
        folder_of(tmp_path / "run" / f"step-{step}", changed(stored, 0.02, seed), tmp_path / "same")
    shutil.copytree(path, tmp_path / "run" / "step-20")
    for each in (tmp_path / "run").rglob("*"):
        os.utime(each, (1.7e9, 1.7e9))
    kept = tmp_path / "kept"
    more = ("--model", model) if model.is_dir() else ()
    result = keep(tmp_path / "run", kept, *to, *more)
    assert result.code == 0, result.out
    assert [forms(kept).get(step) for step in (20, 30)] == ["delta", "delta"]
    for step, expected in ((10, changed(stored, 0.02, 1)), (20, stored), (30, changed(stored, 0.02, 3))):
        found = library.open(kept, step=step, **(options if to[1] == "dcp" else {})).content().tensors
        assert found.keys() == expected.keys()
        library.convert(library.plan(kept_at(kept, step), to="hf", **options), tmp_path / f"out-{step}")
        assert load_folder(tmp_path / f"out-{step}") == expected


def kept_at(kept, step):
    from reshard.opening.choice import Choice

    return Choice(step).path(str(kept))


def test_fp32_weights_are_kept_as_bf16(tmp_path):
    """As torch casts them: to nearest, ties to even."""
    random_values, expected = np.random.default_rng(1), {}
    values = {"a.weight": random_values.standard_normal((33, 7)).astype("f4"), "b.weight": random_values.standard_normal(50).astype("f4")}
    for step in (1, 2, 3):
        for each in values.values():
            each += np.float32(1e-6) * random_values.standard_normal(each.shape).astype("f4")
        folder_of(tmp_path / "run" / f"step-{step}", {name: ("F32", each.shape, each.tobytes()) for name, each in values.items()})
        os.utime(tmp_path / "run" / f"step-{step}" / "model.safetensors", (1.7e9, 1.7e9))
        words = {name: each.view("u4").astype("u8") for name, each in values.items()}
        expected[step] = {
            name: ("BF16", each.shape, (each + 0x7FFF + (each >> 16 & 1) >> 16).astype("<u2").tobytes()) for name, each in words.items()
        }
    kept = tmp_path / "kept"
    assert keep(tmp_path / "run", kept, "--dtype", "bf16").code == 0
    for step in (1, 2, 3):
        library.convert(library.plan(kept_at(kept, step), to="hf"), tmp_path / f"out-{step}")
        assert load_folder(tmp_path / f"out-{step}") == expected[step]
    assert (kept / "step-3" / INDEX).exists()


# ---- a run that changes ----


def test_a_run_that_goes_back_replaces_its_steps(run, tmp_path):
    """Training starts again from step 200 and overwrites 300; 400 and 500 are still those of the old branch."""
    kept = tmp_path / "kept"
    keep(run, kept, full_every=20)
    old = {step: load_folder(run / f"step-{step}") for step in (400, 500)}
    save(run, 300, seed=7)
    again = keep(run, kept, full_every=20)
    assert events(again) == [(300, "delta"), (300, "full"), (300, "finished")] and "step 300 was saved again" in again.out
    assert forms(kept) == {100: "full", 200: "delta", 300: "delta", 400: "full", 500: "delta"}
    check_kept(kept, run, range(100, 600, 100))
    assert {step: restored(kept, step) for step in (400, 500)} == old
    save(run, 100, seed=8)
    save(run, 600)
    assert keep(run, kept, full_every=20).code == 0
    check_kept(kept, run, range(100, 700, 100))


def test_a_step_that_is_saved_again_with_the_same_values_stays(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    before = without_record(kept)
    for step in (300, 400):
        os.utime(run / f"step-{step}" / "model.safetensors", (1.8e9, 1.7e9 + 1))
    assert {step for step, _ in events(keep(run, kept))} == {300, 400}
    assert without_record(kept) == before


def without_record(kept):
    return {path: data for path, data in tree(kept).items() if path != "reshard.watch.jsonl"}


def test_a_step_that_comes_late_gets_its_place(run, tmp_path):
    kept = tmp_path / "kept"
    shutil.move(run / "step-300", tmp_path / "late")
    keep(run, kept, full_every=20)
    shutil.move(tmp_path / "late", run / "step-300")
    assert events(keep(run, kept, full_every=20)) == [(300, "delta"), (300, "finished")]
    check_kept(kept, run, range(100, 600, 100))


@pytest.mark.parametrize(("number", "left"), [(1, {400, 500}), (2, {400, 500}), (3, {100, 200, 300, 400, 500})])
def test_the_newest_are_kept_with_what_they_need(run, tmp_path, number, left):
    kept = tmp_path / "kept"
    keep(run, kept)
    arguments = ("watch", run, "--delta", "--to", "hf", "--into", kept / "step-{step}", "--full-every", 3, "--all")
    save(run, 500, seed=9)
    assert reshard(*arguments, "--keep", number).code == 0
    assert forms(kept).keys() == left
    check_kept(kept, run, left)
    assert reshard(*arguments, "--keep", number).out == ""


def test_clean_removes_nothing_that_a_delta_needs(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    before = without_record(kept)
    # What a kill leaves: work that is not done, and a step that was set aside while it was replaced.
    if not os.fork():
        with Staging(kept).locked("0" * 64, str):
            shutil.copytree(kept / "step-300", kept / ".reshard" / "step-600")
            (kept / "step-100").rename(kept / ".replacing-step-100")
            os._exit(0)
    os.wait()
    assert "1 work folder removed" in reshard("clean", kept, "--yes").out and not (kept / ".reshard").exists()
    assert (kept / ".replacing-step-100" / "model.safetensors").exists()
    save(run, 600)
    assert events(keep(run, kept)) == [(600, "delta"), (600, "finished")], "and step 100 has its place again"
    check_kept(kept, run, range(100, 700, 100))
    assert without_record(kept).items() >= before.items()


# ---- what is refused ----


def refused(kept, message, step=300):
    found = reshard("convert", kept, kept.parent / "out", "--step", step, "--to", "hf")
    assert found.code not in (0, 1) and message in found.err and "Traceback" not in found.err, found.err
    assert not (kept.parent / "out").exists()


def test_a_base_that_was_moved_away_is_named(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    (kept / "step-100").rename(tmp_path / "gone")
    (run / "step-100").rename(tmp_path / "gone-from-run")
    refused(kept, "step 200 is a delta of step 100, and no step 100 lies in the run")
    save(run, 600)
    save(run, 700)
    assert keep(run, kept, full_every=20).code == 0 and forms(kept)[600] == "delta", "the chain of step 500 is whole"
    (tmp_path / "gone-from-run").rename(run / "step-100")
    assert events(keep(run, kept, full_every=20)) == [(100, "full"), (100, "finished")], "where the run has it, it is kept again"
    check_kept(kept, run, range(100, 800, 100))
    shutil.rmtree(kept / "step-100")
    (tmp_path / "gone").rename(kept / "step-100")
    check_kept(kept, run, range(100, 800, 100))


def test_a_hole_in_a_chain_is_named_and_the_next_step_is_full(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept, full_every=20)
    shutil.rmtree(kept / "step-400")
    refused(kept, "step 500 is a delta of step 400, and no step 400 lies in the run", step=500)
    (run / "step-400").rename(tmp_path / "gone")
    save(run, 600)
    again = keep(run, kept, full_every=20)
    assert events(again) == [(600, "full"), (600, "finished")] and "as step 500 is not whole" in again.out
    check_kept(kept, run, (100, 200, 300, 600))
    (tmp_path / "gone").rename(run / "step-400")
    assert events(keep(run, kept, full_every=20)) == [(400, "delta"), (400, "finished")], "it is kept again"
    check_kept(kept, run, range(100, 700, 100))


def test_a_delta_of_another_run_is_refused(run, tmp_path):
    kept, other = tmp_path / "kept", tmp_path / "other"
    for step in (100, 200, 300):
        save(other, step, seed=step + 5)
    keep(run, kept), keep(other, tmp_path / "kept-other")
    shutil.rmtree(kept / "step-300")
    shutil.copytree(tmp_path / "kept-other" / "step-300", kept / "step-300")
    refused(kept, "it changes the version 000200")
    shutil.rmtree(kept / "step-200")
    shutil.copytree(tmp_path / "kept-other" / "step-200", kept / "step-200")
    refused(kept, "it was made of the checkpoint")
    shutil.rmtree(kept / "step-300")
    shutil.copytree(kept / "step-500", kept / "step-300")
    refused(kept, "the folder is that of step 300, and the delta in it makes the version 000500")


def test_two_steps_of_one_number_are_refused(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    shutil.copytree(kept / "step-200", kept / "checkpoint-200")
    refused(kept, "step 200 lies in the run twice")
    refused(kept, "none is chosen", step=200)
    shutil.copytree(run / "step-300", run / "more" / "step-300")
    twice = keep(run, tmp_path / "new")
    assert twice.code == 2 and "the run has step 300 twice" in twice.err.lower() and not (tmp_path / "new").exists()


def test_a_chain_in_a_circle_ends(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    index = kept / "step-200" / INDEX
    document = json.loads(index.read_text())
    assert document["metadata"].pop("reshard_record") and document["metadata"]["base_version"] == "000100"
    document["metadata"]["base_version"] = "000300"
    index.write_text(json.dumps(document))
    refused(kept, "step 200 is a delta of step 300, and no step 300 lies in the run")


def test_a_flipped_bit_in_what_is_kept_is_found_and_nothing_is_made_of_it(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept, full_every=20)
    path = kept / "step-100" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    save(run, 600)
    again = keep(run, kept, full_every=20)
    assert again.code == 1 and events(again) == [(600, "failed")] and not (kept / "step-600").exists()
    data[-1] ^= 1
    path.write_bytes(data)
    assert events(keep(run, kept, full_every=20)) == [(600, "delta"), (600, "finished")]


def test_what_reshard_did_not_write_stays(run, tmp_path):
    kept = tmp_path / "kept"
    (kept / "step-300").mkdir(parents=True)
    (kept / "step-300" / "mine").write_text("x")
    (kept / ".replacing-step-200").mkdir()
    (kept / ".replacing-step-200" / "mine").write_text("x")
    result = keep(run, kept)
    assert result.code == 1 and (300, "failed") in events(result) and (500, "finished") in events(result)
    assert (kept / "step-300" / "mine").read_text() == (kept / ".replacing-step-200" / "mine").read_text() == "x"
    check_kept(kept, run, (100, 200, 400, 500))


def test_one_run_at_a_time_keeps(run, tmp_path):
    kept = tmp_path / "kept"
    first = library.watch(run, to="hf", into=f"{kept}/step-{{step}}", delta=True, once=True)
    assert next(first).event == "full"
    second = keep(run, kept)
    assert second.code == 1 and {name for _, name in events(second)} == {"failed"}
    assert [each.event for each in first][-1] == "finished"
    check_kept(kept, run, range(100, 600, 100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": "kept/{step}"}, "does not tell that it is a step"),
        ({"into": "run/kept/step-{step}"}, "in its own folder"),
        ({"into": "kept/step-{step}", "optimizer": True}, "`optimizer=` does not go with"),
        ({"into": "kept/step-{step}", "exclude": "*"}, "`exclude=` does not go with"),
        ({"into": "kept/step-{step}", "merge_adapter": "self"}, "`merge_adapter=` does not go with"),
        ({"into": "kept/step-{step}", "push": "http://127.0.0.1:9"}, "`push=` does not go with"),
        ({"into": "kept/step-{step}", "full_every": 0}, "1 or more"),
        ({"into": "kept/step-{step}", "encoding": "sparse"}, "encoding"),
        ({}, "`into=` is missing"),
        ({"into": "kept/step-{step}", "to": None}, "`to=` is missing"),
        ({"into": "served/{step}", "delta": False, "full_every": 3}, "only for `delta=True`"),
    ],
)
def test_what_does_not_go_with_deltas_is_refused(run, monkeypatch, options, message):
    monkeypatch.chdir(run.parent)
    with pytest.raises(RequestError, match=message):
        next(library.watch("run", **{"to": "hf", "delta": True, "once": True, **options}))
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def test_a_run_is_kept_on_a_disk(run):
    with pytest.raises(UnsupportedError, match="a local directory"):
        next(library.watch(run, to="hf", into="s3://bucket/step-{step}", delta=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("BASE", "NEW"), "2 paths are given, BASE NEW TARGET are expected"),
        (("--of", "RUN", "A", "B"), "2 paths are given, TARGET alone are expected"),
        (("A", "B", "C", "--full-every", "3"), "--full-every has a meaning only with --of"),
        (("A", "--of", "RUN", "--workers", "2"), "--workers has no meaning with --of"),
    ],
)
def test_delta_takes_two_checkpoints_or_a_run(words, message):
    result = reshard("delta", *words)
    assert result.code == 2 and message in result.err


# ---- kills ----


def test_an_output_that_was_set_aside_comes_back(run, tmp_path):
    """A kill between the two renames of a replacement, and one after them."""
    kept = tmp_path / "kept"
    keep(run, kept)
    for name in ("step-200", "step-400"):
        (kept / name).rename(kept / f".replacing-{name}")
    shutil.copytree(kept / ".replacing-step-400", kept / "step-400")
    LocalOutputs(kept).put_back()
    assert not list(kept.glob(".*"))
    check_kept(kept, run, range(100, 600, 100))


def test_what_does_not_read_back_as_the_step_is_not_kept(run, tmp_path, monkeypatch):
    from reshard.verbs.steps import kept as module

    other = library.fingerprint(run / "step-500")
    monkeypatch.setattr(module, "fingerprint", lambda source: other)
    result = keep(run, tmp_path / "kept")
    assert result.code == 1 and events(result)[2:4] == [(200, "failed"), (300, "failed")]
    assert forms(tmp_path / "kept") == {100: "full", 500: "delta"}, "what is said of step 500 is true"


@pytest.mark.parametrize(("calls", "every"), [(["rename", "replace"], 1), (CHANGES, 23)], ids=["renames", "all"])
def test_killed_at_any_operation_a_step_that_is_replaced_is_the_old_or_the_new_one(tmp_path, calls, every):
    """The run went back: step 200 is replaced, and step 300, the delta of the old one, becomes a full checkpoint before."""
    run, before = tmp_path / "run", tmp_path / "before"
    versions = {step: [save(run, step)] for step in (100, 200, 300)}
    keep(run, before)
    versions[200].append(save(run, 200, seed=5))

    def work(kept, at):
        count = faulty(calls, at, "kill")
        keep(run, kept)
        (tmp_path / "count").write_text(str(count[0]))

    shutil.copytree(before, tmp_path / "counted")
    assert ended(child(lambda: work(tmp_path / "counted", -1))) == 0
    number = int((tmp_path / "count").read_text())
    assert number > 4
    for at in range(1, number + 1, every):
        kept = tmp_path / f"kept-{at}"
        shutil.copytree(before, kept)
        assert ended(child(lambda kept=kept, at=at: work(kept, at))) == -signal.SIGKILL
        if (kept / "reshard.watch.jsonl").exists():
            LocalOutputs(kept).put_back()  # what the next run does first
        assert forms(kept).keys() == {100, 200, 300}, at
        for step in forms(kept):
            assert restored(kept, step) in versions[step], f"step {step} after a kill at operation {at}"
        assert keep(run, kept).code == 0
        check_kept(kept, run, (100, 200, 300))
        shutil.rmtree(kept)


# Each of these takes about a second; a campaign sets more.
KILLS = int(os.environ.get("RESHARD_KILLS", "6"))


def test_killed_at_random_moments_nothing_that_was_kept_is_lost(tmp_path):
    """Meanwhile the run goes on and goes back: steps are added, and saved again with other values."""
    run, kept, moment = tmp_path / "run", tmp_path / "kept", random.Random(3)
    for step in (100, 200, 300):
        save(run, step)
    arguments = command("delta", "--of", run, kept, "--full-every", 4)
    began = time.monotonic()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    versions = {step: [load_folder(run / f"step-{step}")] for step in (100, 200, 300)}
    for kill in range(KILLS):
        new, again = 400 + 100 * kill, 100 * moment.randint(1, 3 + kill)
        for step, seed in ((new, None), (again, 1000 + kill)):
            versions.setdefault(step, []).append(save(run, step, seed))
        there = sorted(forms(kept))
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment.uniform(0.3, 1.1) * seconds)
        process.kill()
        process.wait()
        LocalOutputs(kept).put_back()  # what the next run does first
        assert forms(kept).keys() >= {*there}
        for step in forms(kept):
            assert restored(kept, step) in versions[step], f"step {step} after kill {kill}"
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    assert not [path for path in kept.iterdir() if path.name.startswith(".")]
    check_kept(kept, run, versions)


def test_the_users_files_in_a_step_that_is_replaced_or_removed_stay(run, tmp_path):
    kept = tmp_path / "kept"
    keep(run, kept)
    for step in (200, 500):
        (kept / f"step-{step}" / "evaluation.txt").write_text(f"mine {step}")
    (kept / "step-200" / "plots").symlink_to(run)
    save(run, 200, seed=5)
    done = keep(run, kept)
    assert done.code == 0 and "step-200 held what reshard did not write: evaluation.txt, plots" in done.err, done.err
    assert (kept / ".replaced-step-200" / "evaluation.txt").read_text() == "mine 200" and run.exists()
    assert sorted(path.name for path in (kept / ".replaced-step-200").iterdir()) == ["evaluation.txt", "plots"]
    check_kept(kept, run, (100, 200, 300, 400, 500))
    save(run, 500, seed=6)
    assert keep(run, kept, full_every=1).code == 0
    (kept / "step-500" / "evaluation.txt").write_text("mine again")
    save(run, 500, seed=7)
    done = keep(run, kept, full_every=1)
    assert done.code == 0 and (kept / ".replaced-step-500" / "evaluation.txt").read_text() == "mine 500"
    assert (kept / ".replaced-step-500-2" / "evaluation.txt").read_text() == "mine again"


def test_a_listed_path_through_a_link_removes_nothing_elsewhere(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    library.convert(library.plan(HF / "llama", to="vllm", tp=1), out / "step-1")
    elsewhere.mkdir()
    (elsewhere / "model-00000-of-00001.safetensors").write_text("mine")
    (out / "delta").mkdir()
    index = {"metadata": {"reshard_base": "x"}, "weight_map": {"a": "sub/model-00000-of-00001.safetensors"}}
    (out / "delta" / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "delta" / "sub").symlink_to(elsewhere)
    discard(out / "delta", "delta")
    assert (elsewhere / "model-00000-of-00001.safetensors").read_text() == "mine"
    assert not (out / "delta").exists() and (out / ".replaced-delta" / "sub").is_symlink()


def test_a_step_that_may_still_be_written_is_not_kept_and_the_exit_code_says_so(run, tmp_path):
    assert keep(run, tmp_path / "kept").code == 0
    save(run, 600)
    os.utime(run / "step-600" / "model.safetensors")
    again = keep(run, tmp_path / "kept")
    assert again.code == 1 and events(again)[-1] == (600, "failed"), again.out
    assert "1 of 6 steps are not done. Step 600 waits: unchanged for 0 s, complete after 60 s" in again.out
    assert not (tmp_path / "kept" / "step-600").exists()
