"""What a sender asks of a server, and what it says when the server cannot take updates. The server is a stand-in that answers as told."""

import json
import time

import pytest
from helpers.weight_servers import sending, server

from reshard.errors import CheckpointError, RequestError, SystemRefusal, UnsupportedError
from reshard.live.engines.choice import controls
from reshard.live.engines.sglang import MARK, SglangServer, step_of, step_text
from reshard.live.engines.vllm import VllmInProcess, VllmServer


def answering(backend="reshard", **others):
    """The answers of a server of vLLM with 2 workers."""
    config = {"vllm_config": {"weight_transfer_config": backend and {"backend": backend}}}
    documents = {"/get_world_size": {"world_size": 2}, "/server_info": config, "/weight_info": {"weight_version": "7"}, **others}
    posts = ("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")
    documents |= {
        path: {}
        for path in (*posts, "/update_weight_version", "/reset_prefix_cache", "/shutdown_weight_transfer_engine")
        if path not in documents
    }
    return {path: (200, json.dumps(document).encode(), {}) for path, document in documents.items()}


def update(engine, info, mode):
    """All steps of an update, in their order."""
    engine.init(info)
    engine.pause(mode)
    engine.start()
    engine.update()
    engine.finish()
    engine.set_version("8")
    engine.clear_cache()
    engine.resume()
    engine.leave()


def test_a_server_is_asked_by_its_routes_alone():
    with server(answering()) as (address, asked):
        engine = VllmServer(address, 10)
        assert engine.ranks() == 2 and engine.version() == "7" and engine.own_address() == "127.0.0.1" and engine.name == address
        update(engine, {"port": 1}, "abort")
    leave = "/shutdown_weight_transfer_engine"
    posts = [path for method, path in asked if method == "POST"]
    assert posts[:3] == ["/init_weight_transfer_engine", "/pause?mode=abort", "/start_weight_update"]
    assert posts[3:] == ["/update_weights", "/finish_weight_update", "/update_weight_version", "/reset_prefix_cache", "/resume", leave]


def test_a_server_without_development_mode_is_told_how_to_start():
    with server({}) as (address, _), pytest.raises(RequestError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        VllmServer(address, 10).ranks()
    assert caught.value.where == address


@pytest.mark.parametrize("backend, what", [(None, "has no weight-transfer backend"), ("nccl", "backend is 'nccl'")])
def test_a_server_with_another_backend_is_told_how_to_start(backend, what):
    with server(answering(backend)) as (address, _), pytest.raises(RequestError, match=what) as caught:
        VllmServer(address, 10).ranks()
    assert '{"backend": "reshard"}' in caught.value.do


def test_what_the_server_says_of_a_failure_is_in_the_message():
    answers = {**answering(), "/finish_weight_update": (500, b'{"error": "no such worker"}', {})}
    with server(answers) as (address, _), pytest.raises(SystemRefusal, match=r"answered 500 .* to /finish_weight_update: .*no such worker"):
        VllmServer(address, 10).finish()


def test_a_cache_that_was_not_cleared_is_said():
    with (
        server(answering(**{"/reset_prefix_cache": {"success": False}})) as (address, _),
        pytest.raises(SystemRefusal, match="prefix cache"),
    ):
        VllmServer(address, 10).clear_cache()


class LLM:
    """vLLM's LLM, as far as it is asked."""

    def __init__(self, backend):
        transfer = type("Transfer", (), {"backend": backend}) if backend else None
        parallel = type("Parallel", (), {"world_size_across_dp": 4})
        config = type("Config", (), {"weight_transfer_config": transfer, "parallel_config": parallel})
        self.llm_engine = type("Engine", (), {"vllm_config": config})


def test_engines_are_addresses_processes_own_and_lists_of_both():
    with server(answering()) as (vllm, _), server(sglang()) as (other, _):
        engines = controls([vllm, [LLM("reshard")], other], 10)
        assert [type(engine) for engine in engines] == [VllmServer, VllmInProcess, SglangServer]
        assert engines[1].ranks() == 4 and engines[2].name == other
    assert controls(engines[1], 10) == [engines[1]]
    with pytest.raises(RequestError, match="weight_transfer_config"):
        VllmInProcess(LLM(None)).ranks()


@pytest.mark.parametrize(
    "others", [{"/get_world_size": {"world_size": "many"}}, {"/server_info": {"vllm_config": []}}, {"/server_info": []}]
)
def test_an_answer_that_tells_no_ranks_is_refused(others):
    with server(answering(**others)) as (address, _), pytest.raises(CheckpointError, match="how many ranks"):
        VllmServer(address, 10).ranks()


def sglang(state=MARK, **sizes):
    """The answers of a server of SGLang with 2 schedulers."""
    about = {"tp_size": 2, "pp_size": 1, "dp_size": 1, **sizes, "internal_states": [{state: True}]}
    done = {"success": True, "message": ""}
    documents = {"/server_info": about, "/model_info": {"weight_version": "7"}, "/update_weight_version": done}
    documents |= dict.fromkeys(("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"), done)
    texts = {path: (200, json.dumps(document).encode(), {}) for path, document in documents.items()}
    return texts | {path: (200, b"Cache flushed.", {}) for path in ("/flush_cache", "/pause_generation", "/continue_generation")}


def test_a_server_of_sglang_is_asked_by_its_routes_alone():
    with server(sglang()) as (address, asked):
        engine = SglangServer(address, 10)
        assert engine.ranks() == 2 and engine.version() == "7" and engine.own_address() == "127.0.0.1"
        update(engine, {"host": "127.0.0.1", "port": 1, "offset": 0, "targets": 2}, "wait")
    posts = [path for method, path in asked if method == "POST"]
    step, leave = "/update_weights_from_distributed", "/destroy_weights_update_group"
    assert posts[:4] == ["/init_weights_update_group", "/pause_generation", step, step]
    assert posts[4:] == ["/update_weight_version", "/flush_cache", "/continue_generation", leave]


def test_a_step_is_told_from_names_of_sglang_itself():
    assert step_of(step_text("join", {"port": 1})) == ("join", {"port": 1})
    assert [step_of(name) for name in ("weight_update_group", "7", "[]", '{"a": 1}', "")] == [None] * 5


@pytest.mark.parametrize(
    "answers, what",
    [(sglang("other"), "does not know reshard"), (sglang(pp_size=2), "2 pipeline stages"), (sglang(dp_size=4), "4 data-parallel")],
)
def test_a_server_of_sglang_that_takes_no_updates_is_told_why(answers, what):
    with server(answers) as (address, _), pytest.raises((RequestError, UnsupportedError), match=what) as caught:
        SglangServer(address, 10).ranks()
    assert caught.value.where == address and caught.value.do


def test_sglang_keeps_a_cache_while_requests_run_and_that_is_said():
    answers = {**sglang(), "/flush_cache": (400, b"Flush cache failed.", {})}
    with server(answers) as (address, _), pytest.raises(SystemRefusal, match=r"400 .*flush_cache: Flush cache failed"):
        SglangServer(address, 10).clear_cache()


def test_a_look_tells_a_server_that_has_ended_from_one_that_does_not_answer():
    with server(answering(**{"/health": {}, "/is_paused": {"is_paused": True}})) as (address, _):
        engine = VllmServer(address, 10)
        assert engine.look() and engine.is_paused() is True
    with pytest.raises(SystemRefusal, match="refused"):
        engine.look()
    with server({**answering(), "/health": (503, b"", {})}) as (address, _), pytest.raises(SystemRefusal, match="engine has ended"):
        VllmServer(address, 10).look()
    with sending(lambda: _pausing()) as (address, _):
        assert VllmServer(address, 0.5).look() is False
    with server(sglang()) as (address, _):
        assert SglangServer(address, 10).look() and SglangServer(address, 10).is_paused() is None


def _pausing():
    """An answer that does not come in time."""
    yield b""
    time.sleep(3)
