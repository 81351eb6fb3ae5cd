"""Updates that fail, and engines that have two senders: servers refuse, end, fall silent or lie; who is told, when, and is it true?

The servers are stand-ins of vLLM whose ranks are real (helpers/push_server.py); trainers are processes. The same with real vLLM is
tests/live/failures.py.
"""

import json
import logging
import os
import threading
import time

import pytest
import torch
from helpers.fixture_places import HF
from helpers.push_server import PushServer, serving
from helpers.reshard_command import reshard
from live.source_rank import source_ranks
from safetensors.torch import load_file

import reshard as library
from reshard.errors import RequestError, SystemRefusal
from reshard.live.arrangement import Link
from reshard.live.engines import watch
from reshard.live.sender import Sender

LLAMA = HF / "llama"
CONFIG = json.loads((LLAMA / "config.json").read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What a server of TP 2 holds."""
    folder = tmp_path_factory.mktemp("files")
    library.convert(library.plan(LLAMA, to="vllm", tp=2, dtype="bf16"), folder)
    return folder


@pytest.fixture
def server(files):
    with serving(files, CONFIG, tp=2) as (server, address):
        server.address = address
        yield server


@pytest.fixture
def trainer():
    with source_ranks(2) as ranks:
        ranks.ask("load", files=str(LLAMA), copies=True)
        yield ranks


def sender(server, **options):
    """A Sender in this process."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(LLAMA / "model.safetensors").items()}
    return Sender(weights, server.address, **options)


def is_held(server):
    """Whether the ranks hold the weights of the llama, by the files that `convert` writes; they hold nothing at first."""
    from helpers.fixture_places import stored

    names = [server.folder / f"model-rank-{rank}-part-0.safetensors" for rank in range(2)]
    forms = [{key: data for key, (_, _, data) in stored(name).items() if not key.endswith("_scale")} for name in names]
    return [{key: data for key, data in rank.tensors.items() if not key.endswith("_scale")} for rank in server.ranks] == forms


def told(server, do):
    """How the update of a trainer ended on every rank, and the seconds until all knew it."""
    began = time.monotonic()
    answers = do()
    return [answer["error"] for answer in answers], time.monotonic() - began


def test_a_server_that_refuses_to_receive_is_resumed_at_once_and_every_rank_is_told(server, trainer):
    trainer.ask("join", engine=server.address)
    server.refuses.add("/update_weights")
    errors, seconds = told(server, lambda: trainer.ask("update"))
    assert seconds < 10 and not server.is_paused and not server.is_open
    assert len(errors) == 2 and len(set(errors)) == 1
    assert "answered 500" in errors[0] and "/update_weights" in errors[0] and "holds the old weights and answers" in errors[0]
    # Nobody owns the server any more.
    server.refuses.clear()
    trainer.ask("join", engine=server.address)
    assert trainer.ask("update")[0]["version"] == "1" and is_held(server)


def test_a_push_that_is_refused_resumes_the_server_at_once(server):
    server.refuses.add("/update_weights")
    began = time.monotonic()
    result = reshard("push", LLAMA, server.address)
    assert time.monotonic() - began < 15 and result.code == 5 and not server.is_paused
    assert "answered 500" in result.err and "holds the old weights and answers" in result.err, result.err


def test_ranks_that_do_not_receive_end_the_update(server, trainer):
    """The server says that it has received, and its ranks have done nothing."""
    trainer.ask("join", engine=server.address)
    server.ignores.add("/update_weights")
    errors, seconds = told(server, lambda: trainer.ask("update"))
    assert seconds < 15 and len(set(errors)) == 1 and "do not take part in the update any more" in errors[0]
    assert not server.is_paused and "holds the old weights and answers" in errors[0]


def test_an_install_that_is_not_carried_out_leaves_the_server_in_doubt(server, trainer):
    trainer.ask("join", engine=server.address)
    server.ignores.add("/finish_weight_update")
    errors, seconds = told(server, lambda: trainer.ask("update"))
    assert seconds < 15 and "may hold old and new weights, and stays paused" in errors[0] and server.is_paused, errors


def test_a_server_that_ends_while_its_ranks_sleep_is_told_on_every_rank(server, trainer):
    trainer.ask("join", engine=server.address)
    server.hangs.add("/update_weights")
    threading.Timer(1.0, server.end).start()
    errors, seconds = told(server, lambda: trainer.ask("update"))
    assert seconds < 11 and len(set(errors)) == 1, (seconds, errors)
    assert "could not be asked what it holds" in errors[0] and "refused" in errors[0] and "and answers" not in errors[0]


def test_a_server_that_is_silent_is_waited_for_and_that_is_said(server, monkeypatch, caplog):
    monkeypatch.setattr(watch, "_TOLD_EVERY", 2.0)
    own = sender(server, transport=Link(seconds=6.0))
    server.hangs |= {"/update_weights", "/health", "/resume", "/is_paused", "/finish_weight_update"}
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "reshard"), pytest.raises(SystemRefusal, match="has not answered for") as refusal:
        own.update()
    assert 5 < time.monotonic() - began < 25
    assert "could not be asked what it holds" in str(refusal.value)
    lines = [record.fields["seconds"] for record in caplog.records if getattr(record, "event", "") == "silent"]
    assert len(lines) >= 2 and lines == sorted(lines), lines


def test_a_server_that_answers_again_in_time_is_updated(server, monkeypatch, caplog):
    monkeypatch.setattr(watch, "_TOLD_EVERY", 1.0)
    own = sender(server, transport=Link(seconds=60.0))
    server.hangs |= {"/health", "/pause"}
    threading.Timer(3.0, server.go_on).start()
    with caplog.at_level(logging.WARNING, "reshard"):
        report = own.update()
    assert is_held(server) and any(getattr(record, "event", "") == "silent" for record in caplog.records)
    assert 2.5 < report.waiting_seconds <= report.seconds and report.sending_seconds < 2.0


@pytest.mark.parametrize("path, what", [
    ("/update_weight_version", "it tells the version 'default' after"),
    ("/resume", "it is still paused after it was resumed"),
])  # fmt: skip
def test_a_push_says_what_the_server_tells_and_not_what_it_was_asked(path, what, server):
    server.ignores.add(path)
    result = reshard("push", LLAMA, server.address)
    assert result.code == 5 and what in result.err and result.out == "", result.err
    assert "holds the new weights and " + ("stays paused" if path == "/resume" else "answers") in result.err


def test_what_cannot_be_asked_is_not_said(server):
    """The server refuses to receive, and then whatever it is asked."""
    server.refuses |= {"/update_weights", "/resume", "/is_paused"}
    with pytest.raises(SystemRefusal) as refusal:
        sender(server).update()
    assert "could not be asked what it holds" in str(refusal.value) and "and answers" not in str(refusal.value)
    assert server.is_paused


def test_a_second_sender_is_refused_by_the_name_of_the_first_and_may_take_over(server, trainer):
    trainer.ask("join", engine=server.address)
    owner = f"(host {os.uname().nodename}, process {trainer.processes[0].pid})"
    with pytest.raises(RequestError) as refusal:
        sender(server)
    assert owner in str(refusal.value) and "take_over=True" in str(refusal.value) and refusal.value.exit_code == 4
    # Refused, it has disturbed nothing.
    assert [report["version"] for report in trainer.ask("update")] == ["1", "1"] and is_held(server)
    own = sender(server, take_over=True)
    assert own.update().version == "2"
    errors = [answer["error"] for answer in trainer.ask("update")]
    assert all("was taken over by" in error and f"(host {os.uname().nodename}, process {os.getpid()}), at 20" in error for error in errors)
    assert all("take_over=True" in error and "Nothing was sent" in error for error in errors)
    assert own.update().version == "3" and not server.is_paused and server.asked.count("/start_weight_update") == 3
    own.close()
    trainer.ask("join", engine=server.address)
    assert trainer.ask("update")[1]["version"] == "4"


def test_a_push_is_refused_by_the_name_of_the_sender_and_may_take_over(server, trainer):
    trainer.ask("join", engine=server.address)
    result = reshard("push", LLAMA, server.address)
    assert result.code == 4 and f"process {trainer.processes[0].pid})" in result.err and "--take-over" in result.err, result.err
    assert "/pause" not in server.asked
    assert reshard("push", LLAMA, server.address, "--take-over").code == 0 and is_held(server)
    assert all("was taken over by reshard push (host" in answer["error"] for answer in trainer.ask("update"))


def test_a_push_is_refused_by_the_name_of_another_push(server):
    """The first one is slow; a second one comes while it sends."""
    import subprocess
    import sys

    code = "seen = []\ndef slow(n):\n    if not seen:\n        seen.append(n)\n        print(n, flush=True)\n        time.sleep(4)\n"
    code = f"import sys, time, reshard\n{code}reshard.push(sys.argv[1], sys.argv[2], progress=slow)"
    with subprocess.Popen([sys.executable, "-c", code, str(LLAMA), server.address], stdout=subprocess.PIPE) as first:
        try:
            first.stdout.readline()
            second = []
            asking = threading.Thread(target=lambda: second.append(reshard("push", LLAMA, server.address, "--take-over")))
            asking.start()
            asking.join(60)
            assert second and second[0].code == 4 and f"reshard push (host {os.uname().nodename}, process {first.pid})" in second[0].err
            assert "in the middle of an update" in second[0].err and server.asked.count("/start_weight_update") == 1
            assert first.wait(60) == 0 and is_held(server) and not server.is_paused
        finally:
            first.kill()
    assert reshard("push", LLAMA, server.address).code == 0


def test_an_owner_that_has_ended_is_replaced_and_that_is_said(server, trainer, caplog):
    trainer.ask("join", engine=server.address)
    trainer.end()
    with caplog.at_level(logging.INFO, "reshard"):
        assert sender(server).update().version == "1"
    said = [record.fields["owner"] for record in caplog.records if getattr(record, "event", "") == "replaced"]
    assert said and f"process {trainer.processes[0].pid})" in said[0]


def test_a_sender_of_the_same_process_replaces_the_one_before(server):
    first, second = sender(server), sender(server)
    assert second.update().version == "1"
    with pytest.raises(SystemRefusal, match="was taken over by"):
        first.update()
    assert second.update().version == "2"


def test_no_number_is_a_version_twice(server):
    first = sender(server)
    versions = [first.update().version, first.update().version, first.update("step-2").version, first.update().version]
    assert versions == ["1", "2", "step-2", "3"]
    assert [first.update("40").version, first.update("step-3").version] == ["40", "step-3"]
    first.close()
    second = sender(server)
    assert second.update().version == "41" == server.version
    library.push(LLAMA, server.address, take_over=True)
    assert sender(server).update().version == "42"


def test_every_step_is_timed(server):
    server.slow["/pause"] = 1.0
    report = sender(server).update()
    assert 1.0 <= report.waiting_seconds < report.seconds and 0 < report.sending_seconds < report.seconds
    assert report.waiting_seconds + report.sending_seconds <= report.seconds


def test_the_stand_in_can_tell_new_from_old(server):
    assert isinstance(server, PushServer) and not is_held(server)
