"""What a sender asks of a server, and what it says when the server cannot take updates. The server is a stand-in that answers as told."""

import json

import pytest
from helpers.weight_servers import server

from reshard.errors import RequestError, SystemRefusal
from reshard.live.engines import HttpEngine, InProcessEngine, controls


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


def test_a_server_is_asked_by_its_routes_alone():
    with server(answering()) as (address, asked):
        engine = HttpEngine(address, 10)
        assert engine.ranks() == 2 and engine.version() == "7" and engine.own_address() == "127.0.0.1" and engine.name == address
        engine.init({"port": 1})
        engine.pause("abort")
        engine.start()
        engine.update()
        engine.finish()
        engine.set_version("8")
        engine.clear_cache()
        engine.resume()
        engine.leave()
    leave = "/shutdown_weight_transfer_engine"
    posts = [path for method, path in asked if method == "POST"]
    assert posts[:3] == ["/init_weight_transfer_engine", "/pause?mode=abort", "/start_weight_update"]
    assert posts[3:] == ["/update_weights", "/finish_weight_update", "/update_weight_version", "/reset_prefix_cache", "/resume", leave]


def test_a_server_without_development_mode_is_told_how_to_start():
    with server({}) as (address, _), pytest.raises(RequestError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        HttpEngine(address, 10).ranks()
    assert caught.value.where == address


@pytest.mark.parametrize("backend, what", [(None, "has no weight-transfer backend"), ("nccl", "backend is 'nccl'")])
def test_a_server_with_another_backend_is_told_how_to_start(backend, what):
    with server(answering(backend)) as (address, _), pytest.raises(RequestError, match=what) as caught:
        HttpEngine(address, 10).ranks()
    assert '{"backend": "reshard"}' in caught.value.do


def test_what_the_server_says_of_a_failure_is_in_the_message():
    answers = {**answering(), "/finish_weight_update": (500, b'{"error": "no such worker"}', {})}
    with server(answers) as (address, _), pytest.raises(SystemRefusal, match=r"answered 500 .* to /finish_weight_update: .*no such worker"):
        HttpEngine(address, 10).finish()


def test_a_cache_that_was_not_cleared_is_said():
    with (
        server(answering(**{"/reset_prefix_cache": {"success": False}})) as (address, _),
        pytest.raises(SystemRefusal, match="prefix cache"),
    ):
        HttpEngine(address, 10).clear_cache()


class LLM:
    """vLLM's LLM, as far as it is asked."""

    def __init__(self, backend):
        transfer = type("Transfer", (), {"backend": backend}) if backend else None
        parallel = type("Parallel", (), {"world_size_across_dp": 4})
        config = type("Config", (), {"weight_transfer_config": transfer, "parallel_config": parallel})
        self.llm_engine = type("Engine", (), {"vllm_config": config})


def test_engines_are_addresses_processes_own_and_lists_of_both():
    engines = controls(["http://a:1", [LLM("reshard")], "http://b:2"], 10)
    assert [type(engine) for engine in engines] == [HttpEngine, InProcessEngine, HttpEngine]
    assert engines[1].ranks() == 4 and engines[2].name == "http://b:2"
    assert controls(engines[1], 10) == [engines[1]]
    with pytest.raises(RequestError, match="weight_transfer_config"):
        InProcessEngine(LLM(None)).ranks()
