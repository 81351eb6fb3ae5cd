"""`reshard verify CKPT http://HOST:PORT` against a server that answers as vLLM's and SGLang's do, and against hostile ones. A really served
model is asked in tests/serving."""

import json
import subprocess
import sys

import pytest
from command import reshard
from places import HF
from weight_servers import held, server, vllm

import reshard as library
from reshard.errors import RequestError

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def verified(model, answers, *options):
    with server(answers) as (address, asked):
        return reshard("verify", HF / model, address, *options), asked, address


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 3)])
def test_the_degrees_are_learned_from_the_answer(tp, pp, dp):
    result, asked, address = verified("llama", vllm(held("llama", dp, tp=tp, pp=pp)))
    assert result.code == 0 and result.out.startswith(f"{address} holds these weights"), result.out
    assert asked == [("POST", "/weights_checker"), ("POST", "/weight_checker"), ("GET", "/server_info?config_format=json")]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_are_laid_out_as_the_server_says(expert_parallel):
    digests = held("mixtral", tp=2, ep=2 if expert_parallel else 1)
    assert verified("mixtral", vllm(digests, expert_parallel=expert_parallel))[0].code == 0
    wrong = verified("mixtral", vllm(digests, expert_parallel=not expert_parallel))[0]
    assert wrong.code == 1 and "w13_weight" in wrong.out


def test_a_cast_of_the_server_is_made_too():
    result = verified("llama", vllm(held("llama", dtype="fp16"), dtype="torch.float16"))[0]
    assert result.code == 0 and "from BF16 to F16" in result.out
    assert verified("llama", vllm(held("llama"), dtype="torch.float16"))[0].code == 1


def test_a_difference_on_one_rank_of_one_replica_is_named():
    key = "dp1:pp0:pcp0:tp1:model.layers.1.mlp.down_proj.weight"
    digests = held("llama", 2, tp=2)
    result = verified("llama", vllm({**digests, key: "0" * 64}), "--json")[0]
    assert result.code == 1 and [each["name"] for each in result.document["differences"]] == [key]
    del digests[key]
    result = verified("llama", vllm(digests), "--json")[0]
    assert result.code == 1 and result.document["server"]["missing"] == [key]


def test_what_is_repacked_is_not_comparable_and_never_equal():
    digests = held("llama")
    repacked = {key: EMPTY if "_proj" in key else digest for key, digest in digests.items()}
    result = verified("llama", vllm(repacked), "--json")[0]
    about = result.document["server"]
    assert result.code == 0 and len(about["not_comparable"]) == 8 and about["matching"] == len(digests) - 8
    layer = "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj."
    biased = {**held("qwen2"), layer + "weight": EMPTY, layer + "bias": "1" * 64}
    result = verified("qwen2", vllm(biased), "--json")[0]
    assert result.code == 0 and result.document["server"]["not_comparable"] == [layer + "weight", layer + "bias"]
    nothing = verified("llama", vllm(dict.fromkeys(digests, EMPTY)))[0]
    assert nothing.code == 1 and "0 parameters equal" in nothing.out


def test_sglang_is_asked_likewise():
    digests = library.digests(HF / "qwen3", to="sglang", tp=2)
    ranks = [
        {
            "checksums": {key.split(":")[-1]: digest for key, digest in digests.items() if f":tp{tp}:" in key},
            "parallelism_info": {"tp_rank": tp, "pp_rank": 0, "dp_rank": 0, "role": "target"},
        }
        for tp in (0, 1)
    ]
    answers = {
        "/weights_checker": (200, json.dumps({"success": True, "ranks": ranks}).encode(), {}),
        "/server_info": (200, b'{"ep_size": 1, "dtype": "auto"}', {}),
    }
    result = verified("qwen3", answers)[0]
    assert result.code == 0 and "the server runs sglang on TP 2" in result.out
    ranks[1]["checksums"]["model.norm.weight"] = "1" * 16
    answers["/weights_checker"] = (200, json.dumps({"success": True, "ranks": ranks}).encode(), {})
    assert verified("qwen3", answers)[0].code == 1


def test_in_python():
    with server(vllm(held("llama", tp=2))) as (address, _):
        result = library.verify(HF / "llama", address)
        assert result.equal and result.matching == result.tensors == 30 and "TP 2" in result.notes[0]
        other = library.verify(HF / "qwen3", address)
    with pytest.raises(library.DifferenceFound):
        other.raise_if_different()


def test_a_server_without_the_endpoint_is_told_how_to_have_it():
    result = verified("llama", {})[0]
    assert result.code == 3 and "VLLM_SERVER_DEV_MODE=1" in result.err and "Traceback" not in result.err
    closed = reshard("verify", HF / "llama", "http://127.0.0.1:9")
    assert closed.code == 5 and "refused" in closed.err


def test_no_redirect_is_followed():
    with server(vllm(held("llama"))) as (other, asked_other):
        for status in (301, 302, 303, 307, 308):
            answers = {path: (status, b"", {"Location": other + path}) for path in ("/weight_checker", "/weights_checker")}
            result = verified("llama", answers)[0]
            assert result.code == 3 and "follows no redirect" in result.err
        assert not asked_other


def test_no_proxy_is_used(monkeypatch):
    with server({}) as (proxy, asked_proxy):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert verified("llama", vllm(held("llama")))[0].code == 0
        assert not asked_proxy


KEY = "dp0:pp0:pcp0:tp0:model.norm.weight"
HOSTILE = {
    "not JSON": b"<h1>hello</h1>",
    "not text": b"\xff\xfe\x00",
    "empty": b"",
    "null": b"null",
    "a list": b"[1]",
    "too deep": b"[" * 100_000,
    "no digests": b'{"checksums": {}}',
    "a number as a digest": json.dumps({"checksums": {KEY: 1}}).encode(),
    "a list of digests": json.dumps({"checksums": [KEY]}).encode(),
    "no rank": b'{"checksums": {"model.norm.weight": "00"}}',
    "many ranks": json.dumps({"checksums": {KEY.replace("tp0", "tp999999"): "00"}}).encode(),
    "a huge number": json.dumps({"checksums": {KEY.replace("tp0", "tp" + "9" * 5000): "00"}}).encode(),
    "many replicas": json.dumps({"checksums": {KEY.replace("dp0", f"dp{i}"): "00" for i in range(20_000)}}).encode(),
    "ranks without numbers": b'{"ranks": [{"checksums": {}, "parallelism_info": {}}]}',
    "ranks of another type": b'{"ranks": 7}',
    "a negative rank": b'{"ranks": [{"checksums": {"x": "0"}, "parallelism_info": {"tp_rank": -1, "pp_rank": 0, "dp_rank": 0}}]}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_one_sentence(body):
    for path in ("/weight_checker", "/weights_checker"):
        result = verified("llama", {path: (200, body, {})})[0]
        assert result.code == 3 and result.err.count("\n") == 1 and "Traceback" not in result.err, result.err


def test_hostile_names_do_not_reach_the_terminal():
    digests = held("llama")
    digests["dp0:pp0:pcp0:tp0:\x1b[2Jmodel"] = "00"
    result = verified("llama", vllm(digests))[0]
    assert result.code == 0 and "\x1b" not in result.out and "\\x1b[2Jmodel" in result.out


@pytest.mark.parametrize("info", [b"[]", b"{}", b'{"vllm_config": 3}', b"<html>"])
def test_what_a_server_says_about_itself_is_not_needed(info):
    answers = vllm(held("llama", tp=2), **{"/server_info": (200, info, {})})
    assert verified("llama", answers)[0].code == 0


def test_an_answer_without_end_is_refused(monkeypatch):
    from reshard.storage import server as module

    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    result = verified("llama", vllm(held("llama")))[0]
    assert result.code == 3 and "longer than" in result.err


@pytest.mark.parametrize("answer", ["short", "reset"])
def test_an_answer_that_breaks_off_is_refused(answer):
    body = json.dumps({"checksums": held("llama")}).encode()
    length = {"Content-Length": str(len(body) + 100)} if answer == "short" else {"Transfer-Encoding": "chunked"}
    result = verified("llama", {"/weights_checker": (200, body, length)})[0]
    assert result.code in (3, 5) and "Traceback" not in result.err, result.err


@pytest.mark.parametrize("address", ["http://host:port", "http://user:secret@host", "https://host:0x1"])
def test_what_is_no_address_is_refused(address):
    result = reshard("verify", HF / "llama", address)
    assert result.code == 2 and "Traceback" not in result.err


def test_options_that_need_a_second_checkpoint_are_refused():
    assert "second checkpoint" in reshard("verify", HF / "llama", "http://127.0.0.1:9", "--cast").err


def test_a_server_of_another_model_is_refused_or_different():
    with server(vllm(held("llama", tp=2))) as (address, _):
        assert reshard("verify", HF / "qwen3", address).code == 1
        with pytest.raises(RequestError):
            library.verify(HF / "none", address)


CONNECTIONS = """
import sys, importlib
addresses = []
def hook(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"):
        addresses.append((event, str(arguments[1:] if event == "socket.connect" else arguments)))
sys.addaudithook(hook)
assert importlib.import_module("reshard.cli.main").run(sys.argv[1:]) == 0
print(repr(addresses), file=sys.stderr)
print("socket" in sys.modules, file=sys.stderr)
"""


def connections(*arguments):
    """What a command connects to or asks the name of, and whether it has loaded what could."""
    found = subprocess.run([sys.executable, "-c", CONNECTIONS, *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    *_, addresses, loaded = found.stderr.strip().split("\n")
    return eval(addresses), loaded


def test_a_command_connects_to_the_given_address_only(tmp_path):
    """SECURITY.md promises it."""
    with server(vllm(held("llama"))) as (address, _):
        addresses, loaded = connections("verify", HF / "llama", address)
    port = address.rpartition(":")[2]
    assert loaded == "True" and addresses and all(port in text and "127.0.0.1" in text for _, text in addresses), addresses
    commands = (
        ("inspect", HF / "llama"),
        ("verify", HF / "llama", HF / "llama-sharded"),
        ("convert", HF / "llama", tmp_path / "out", "--to", "vllm"),
        ("doctor", HF / "llama"),
        ("digests", HF / "llama", "--to", "vllm"),
    )
    for command in commands:
        assert connections(*command) == ([], "False"), command
