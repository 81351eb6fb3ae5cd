"""`reshard push --since`: ranks that keep what they got get what differs, and hold the bytes of the files that `convert` writes.

The ranks are real and their engine is not, as in test_push.py. How many words differ is counted by numpy in those files.
"""

import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.push_server import serving
from helpers.reshard_command import reshard
from live.test_push import check_held, config_of, expected, happened, written

import reshard as library
from reshard.errors import SystemRefusal
from reshard.geometry import boxes

pytest.importorskip("torch")
FSDP2 = FIXTURES / "dcp" / "fsdp2"


def changed(source, folder, seed, share=0.01):
    """A copy of Hugging Face files in which some bits of the weights are others."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("reshard.*"))
    for path in folder.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        made, data = np.random.default_rng(seed), np.frombuffer(raw, np.uint8)[start:]
        data[made.choice(len(data), int(len(data) * share), replace=False)] ^= 1
        path.write_bytes(raw)
    return folder


def travelling(server, before, after):
    """The bytes that travel to all ranks, of which each gets one message: 8 of a head, 4 for 65,536 words, 4 for a word that differs."""
    total = 0
    for rank in server.ranks:
        old, new = (expected(folder, rank.pp_rank, rank.tp_rank, server.pp) for folder in (before, after))
        words = {name: [np.frombuffer(each[name], "<u2") for each in (old, new)] for name in new}
        sent = [name for name in words if name in rank.tensors]
        count = sum(np.count_nonzero(words[name][0] != words[name][1]) for name in sent)
        total += 8 + 4 * count + 4 * -(-sum(len(words[name][1]) for name in sent) // 65536)
    return total


CASES = {
    "cut rows and columns": ("llama", {"tp": 2}),
    "replicated heads": ("llama", {"tp": 4}),
    "stages": ("llama", {"tp": 2, "pp": 2}),
    "whole experts": ("mixtral", {"tp": 2, "ep": 2}),
    "cut experts": ("qwen3_moe", {"tp": 2}),
    "a correction bias in fp32": ("deepseek_v3", {"tp": 2}),
}


@pytest.mark.parametrize("name, sizes", CASES.values(), ids=CASES)
def test_only_what_differs_travels(name, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 1 << 10)
    steps = [HF / name, changed(HF / name, tmp_path / "2", 2)]
    steps.append(changed(steps[1], tmp_path / "3", 3))
    folders = [written(step, tmp_path / f"files-{i}", dtype="bf16", **sizes) for i, step in enumerate(steps)]
    with serving(folders[0], config_of(HF / name), **{**sizes, "ep": sizes.get("ep", 1) > 1}) as (server, address):
        first = library.push(steps[0], address, changes=True)
        assert first.since is None and not first.notes
        # By what was returned of the step before, and by its folder, which is read to know its fingerprint.
        for folder, before, after, since in ((folders[1], folders[0], steps[1], first), (folders[2], folders[1], steps[2], steps[1])):
            result = library.push(after, address, since=since)
            check_held(server, folder)
            assert server.version == result.version == result.fingerprint == library.fingerprint(folder).root
            at_most = travelling(server, before, folder)
            assert result.since and at_most - 8 * len(server.ranks) <= result.nbytes <= at_most < result.full_nbytes // 4
            assert not server.is_paused and not server.is_open


def test_all_replicas_of_all_servers_get_what_differs(tmp_path):
    new = changed(HF / "llama", tmp_path / "new", 1)
    folders = written(HF / "llama", tmp_path / "old", tp=2), written(new, tmp_path / "files", tp=2)
    config = config_of(HF / "llama")
    with serving(folders[0], config, tp=2, dp=2) as (one, first), serving(folders[0], config, tp=2) as (two, second):
        last = library.push(HF / "llama", [first, second], changes=True)
        result = library.push(new, [first, second], since=last)
        check_held(one, folders[1])
        check_held(two, folders[1])
        assert result.nbytes == travelling(one, *folders) + travelling(two, *folders)
        # One of them gets other weights: they no longer hold one checkpoint.
        library.push(HF / "llama", second, changes=True)
        again = library.push(HF / "llama", [first, second], since=result)
        assert again.since is None and "not the fingerprint of one checkpoint" in again.notes[0]
        check_held(one, folders[0])


def test_the_base_of_a_chain_of_deltas_needs_no_name(tmp_path):
    steps = [changed(HF / "llama", tmp_path / f"step-{i}", i) for i in (1, 2, 3)]
    library.delta(steps[0], steps[1], tmp_path / "d2")
    library.delta(f"{steps[0]}+{tmp_path / 'd2'}", steps[2], tmp_path / "d3")
    folders = [written(step, tmp_path / f"files-{i}", tp=2) for i, step in enumerate(steps)]
    chain = f"{steps[0]}+{tmp_path / 'd2'}+{tmp_path / 'd3'}"
    with serving(folders[0], config_of(HF / "llama"), tp=2) as (server, address):
        assert reshard("push", steps[0], address, "--changes").code == 0
        dry = reshard("push", chain, address, "--dry-run", "--changes")
        assert f"since {steps[0]}, if the ranks have kept it" in dry.out and "cheaper" not in dry.out, dry.out + dry.err
        # From the base over two deltas, and from the first delta.
        result = reshard("push", chain, address, "--changes", "--json")
        check_held(server, folders[2])
        assert result.document["since"] == str(steps[0]) and result.document["bytes"] == travelling(server, folders[0], folders[2])
        library.push(f"{steps[0]}+{tmp_path / 'd2'}", address, changes=True)
        result = reshard("push", chain, address, "--changes", "--json")
        assert result.document["since"] == f"{steps[0]}+{tmp_path / 'd2'}"
        assert result.document["bytes"] == travelling(server, folders[1], folders[2]) < result.document["full_bytes"]
        check_held(server, folders[2])


def test_a_step_of_a_kept_run_is_a_chain(tmp_path):
    run, steps = tmp_path / "run", (100, 200, 300)
    for step in steps:
        changed(HF / "llama", run / f"step-{step}", step)
    into = tmp_path / "kept" / "step-{step}"
    assert reshard("watch", run, "--delta", "--to", "hf", "--into", into, "--all", "--quiet-for", 0).code == 0
    files = written(run / "step-300", tmp_path / "files", tp=2)
    with serving(files, config_of(HF / "llama"), tp=2) as (server, address):
        assert reshard("push", tmp_path / "kept", address, "--step", 200, "--changes").code == 0
        result = reshard("push", tmp_path / "kept", address, "--step", 300, "--changes", "--json")
        assert result.document["since"].endswith("step-200") and result.document["bytes"] < result.document["full_bytes"] // 4, result.err
        check_held(server, files)


def test_any_format_is_a_base(tmp_path):
    """FSDP files of 4 ranks are the base, Megatron's are new: the plans bring both into the ranks' coordinates."""
    hf = tmp_path / "hf"
    library.convert(library.plan(FSDP2 / "checkpoint", to="hf", model=FSDP2 / "model"), hf)
    new = changed(hf, tmp_path / "new", 1)
    library.convert(library.plan(new, to="megatron", tp=2, pp=2), tmp_path / "megatron")
    folders = [written(each, tmp_path / f"files-{each.name}", tp=2) for each in (hf, new)]
    with serving(folders[0], config_of(FSDP2 / "model"), tp=2) as (server, address):
        library.push(FSDP2 / "checkpoint", address, model=FSDP2 / "model", changes=True)
        result = library.push(tmp_path / "megatron", address, since=hf)
        check_held(server, folders[1])
        assert result.nbytes == travelling(server, *folders)


@pytest.fixture
def pushed(tmp_path):
    """A server that keeps what it got, a new checkpoint, and the rank files of both."""
    new = changed(HF / "llama", tmp_path / "new", 1)
    folders = written(HF / "llama", tmp_path / "old", tp=2), written(new, tmp_path / "files", tp=2)
    with serving(folders[0], config_of(HF / "llama"), tp=2) as (server, address):
        library.push(HF / "llama", address, changes=True)
        yield server, address, new, folders


def check_full(result, sentence):
    """All weights were sent, and one sentence says why."""
    assert result.code == 0 and result.document["since"] is None and result.document["bytes"] >= result.document["full_bytes"], result.err
    assert len(result.document["notes"]) == 1 and sentence in result.document["notes"][0], result.document["notes"]


def test_what_the_servers_do_not_hold_is_no_base(pushed, tmp_path):
    server, address, new, (_, files) = pushed
    wrong = changed(HF / "llama", tmp_path / "wrong", 5)
    check_full(reshard("push", new, address, "--since", wrong, "--json"), f"and {wrong} is {library.fingerprint(wrong).root}")
    check_held(server, files)


def test_a_version_of_your_own_is_no_fingerprint(pushed):
    server, address, new, (_, files) = pushed
    library.push(HF / "llama", address, since=HF / "llama", version="7")
    check_full(
        reshard("push", new, address, "--since", HF / "llama", "--json"), "the servers tell the version 7, which is not the fingerprint"
    )
    check_held(server, files)


def test_ranks_that_have_kept_nothing_get_all(pushed):
    server, address, new, (old, files) = pushed
    library.push(HF / "llama", address)
    check_full(reshard("push", new, address, "--since", HF / "llama", "--json"), "have kept no copy of")
    check_held(server, files)
    assert library.push(HF / "llama", address, since=new).since == str(new)
    check_held(server, old)


def test_after_an_update_that_failed_all_travels(pushed):
    server, address, new, (_, files) = pushed
    server.ranks[1].fails = True
    with pytest.raises(SystemRefusal, match="no memory to install"):
        library.push(new, address, since=HF / "llama")
    check_full(reshard("push", new, address, "--since", HF / "llama", "--json"), "have kept no copy of")
    check_held(server, files)


def test_a_base_that_is_not_what_was_pushed_leaves_the_old_weights(pushed, tmp_path):
    """The remembered fingerprint is that of the servers, and the files have been saved again since."""
    server, address, new, (old, files) = pushed
    moved = tmp_path / "moved"
    shutil.copytree(HF / "llama", moved)
    last = library.push(moved, address, changes=True)
    shutil.rmtree(moved)
    changed(HF / "llama", moved, 9)
    with pytest.raises(SystemRefusal, match="digest of the bytes that arrived"):
        library.push(new, address, since=last)
    check_held(server, old)
    assert not server.is_paused and server.version == last.version
    shutil.rmtree(moved)
    again = library.push(new, address, since=last)
    assert again.since is None
    check_held(server, files)


DIES = """
import os, sys, reshard
reshard.push(sys.argv[1], sys.argv[2], since=sys.argv[3], progress=lambda nbytes: os._exit(9))
"""


def test_a_push_of_changes_that_is_killed_leaves_the_old_weights(pushed):
    server, address, new, (old, files) = pushed
    assert subprocess.run([sys.executable, "-c", DIES, new, address, HF / "llama"]).returncode == 9
    check_held(server, old)
    check_full(reshard("push", new, address, "--since", HF / "llama", "--json"), "have kept no copy of")
    check_held(server, files)


def test_an_interrupted_push_of_changes_leaves_the_old_weights(pushed):
    server, address, new, (old, files) = pushed

    def stop(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.push(new, address, since=HF / "llama", progress=stop)
    check_held(server, old)
    assert not server.is_paused and library.push(new, address, since=HF / "llama").since is None
    check_held(server, files)


def test_a_dry_run_says_when_all_is_cheaper(pushed, tmp_path):
    server, address, new, _ = pushed
    asked = len(server.asked)
    said = reshard("push", new, address, "--dry-run", "--since", HF / "llama")
    assert said.code == 0 and f"of 148 kB since {HF / 'llama'}, if the ranks have kept it" in said.out and "cheaper" not in said.out, (
        said.out
    )
    other = changed(HF / "llama", tmp_path / "other", 6, share=0.9)
    said = reshard("push", other, address, "--dry-run", "--since", HF / "llama")
    assert "a full update is cheaper" in said.out, said.out
    assert not {"/pause", "/init_weight_transfer_engine"} & {*server.asked[asked:]}
    result = library.push(other, address, since=HF / "llama")
    # Where most differs, the parcels travel as they are.
    assert result.full_nbytes < result.nbytes < result.full_nbytes + 100


def test_watch_sends_what_changed_since_the_step_before(tmp_path):
    """The first step brings the second one into the run."""
    run, files = tmp_path / "run", written(changed(HF / "llama", tmp_path / "new", 1), tmp_path / "files", tp=2)
    shutil.copytree(HF / "llama", run / "step-10")
    with serving(files, config_of(HF / "llama"), tp=2) as (server, address):
        events = library.watch(run, push=address, changes=True, quiet=0, poll=0.01)
        assert [next(events).event for _ in range(2)] == ["pushed", "finished"]
        shutil.copytree(tmp_path / "new", run / "step-20")
        event = next(event for event in events if event.event == "pushed")
        assert event.step == 20 and f"changed since {run / 'step-10'}" in event.detail
        check_held(server, files)
        events.close()
    assert reshard("watch", run, "--to", "hf", "--into", tmp_path / "{step}", "--changes", "--all").code == 2
    result = reshard("watch", run, "--push", "http://127.0.0.1:9", "--changes", "--all", "--json", "--quiet-for", 0)
    assert result.code == 1 and happened(result) == [(20, "failed")]
