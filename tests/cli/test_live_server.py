"""`reshard verify CKPT http://HOST:PORT` against a server that answers as vLLM's and SGLang's do, and against hostile ones. A really served
model is asked in tests/serving."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard
from helpers.weight_servers import LIES, SECONDS, SLOW_LIES, answering, held, lying, served_model, server, vllm
from safetensors.torch import load_file, save_file

import reshard as library
from reshard.errors import RequestError
from reshard.storage import server as server_module
from reshard.storage.server import Server
from reshard.storage.stores import http_answer

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def verified(model, answers, *options, folder=None):
    with server(answers) as (address, asked):
        return reshard("verify", folder or HF / model, address, *options), asked, address


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 3)])
def test_the_degrees_are_learned_from_the_answer(tp, pp, dp):
    result, asked, address = verified("llama", vllm(held("llama", dp, tp=tp, pp=pp)))
    assert result.code == 0 and result.out.startswith(f"{address} holds these weights"), result.out
    about = [("GET", "/server_info?config_format=json"), ("GET", "/weight_info")]
    assert asked == [("POST", "/weights_checker"), ("POST", "/weight_checker"), *about]


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


def with_linears_emptied(digests):
    """As on a CPU, where the kernel of a linear layer keeps the weight and leaves an empty parameter behind."""
    return {key: EMPTY if "_proj.weight" in key else digest for key, digest in digests.items()}


def test_what_is_repacked_is_not_comparable_and_never_equal():
    digests, view = held("llama"), library.open(HF / "llama").view(to="vllm", rank=0)
    sizes = {name: view[name].nbytes for name in (key.split(":")[-1] for key in digests)}
    whole, linear = sum(sizes.values()), sum(size for name, size in sizes.items() if "_proj" in name)
    result = verified("llama", vllm(with_linears_emptied(digests)), "--json")[0]
    about = result.document["server"]
    assert (result.code, result.document["equal"], about["equal"]) == (1, None, None)
    assert len(about["not_comparable"]) == 8 and about["matching"] == len(digests) - 8 == 7 and not about["different"] + about["missing"]
    assert (result.document["bytes"], about["compared_bytes"], about["bytes"]) == (whole - linear, whole - linear, whole)
    said = verified("llama", vllm(with_linears_emptied(digests)))[0].out
    assert said.startswith(
        f"cannot tell: 7 of 15 parameters, {100 * (whole - linear) // whole} % of the bytes, are equal; 8 were repacked by this server\n"
    )


def test_who_accepts_what_cannot_be_compared_gets_0_and_hears_it():
    answers = vllm(with_linears_emptied(held("llama")))
    result = verified("llama", answers, "--allow-not-comparable", "-q")[0]
    assert result.code == 0 and result.out.startswith("cannot tell: 7 of 15") and result.out.count("\n") == 1
    assert verified("llama", answers, "--allow-not-comparable", "--json")[0].document["equal"] is None
    other = {**with_linears_emptied(held("llama")), KEY: "0" * 64}
    assert verified("llama", vllm(other), "--allow-not-comparable")[0].code == 1
    nothing = verified("llama", vllm(dict.fromkeys(held("llama"), EMPTY)), "--allow-not-comparable")[0]
    assert nothing.code == 1 and nothing.out.startswith("cannot tell: 0 of 15 parameters, 0 % of the bytes")
    assert "is for a server" in reshard("verify", HF / "llama", HF / "llama", "--allow-not-comparable").err


def test_a_wrong_checkpoint_is_never_held_by_a_server_that_hides_its_linear_layers(tmp_path):
    """Gate and up of layer 1 exchanged, rows of a query matrix interleaved: nothing that this server shows tells it."""
    weights = load_file(HF / "llama" / "model.safetensors")
    shutil.copytree(HF / "llama", tmp_path / "wrong")
    gate, up, query = (f"model.layers.{name}.weight" for name in ("1.mlp.gate_proj", "1.mlp.up_proj", "0.self_attn.q_proj"))
    rows = weights[query].shape[0]
    interleaved = weights[query].reshape(2, rows // 2, -1).transpose(0, 1).reshape(weights[query].shape)
    wrong = {**weights, gate: weights[up], up: weights[gate], query: interleaved.contiguous()}
    save_file(wrong, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    for digests, verdict in ((with_linears_emptied(held("llama")), None), (held("llama"), False)):
        with server(vllm(digests)) as (address, _):
            result = reshard("verify", tmp_path / "wrong", address, "--json")
            assert result.code == 1 and result.document["equal"] is verdict
            with pytest.raises(library.DifferenceFound, match="Cannot tell" if verdict is None else "other weights"):
                library.verify(tmp_path / "wrong", address).raise_if_different()


def in_panels(matrix, rows, together):
    """The oracle, element by element: panel by panel, group of neighbours by group, row by row."""
    height, width = matrix.shape
    found = [
        matrix[row, column + i]
        for top in range(0, height, rows)
        for column in range(0, width, together)
        for row in range(top, min(top + rows, height))
        for i in range(together)
    ]
    return np.array(found, matrix.dtype)


@pytest.mark.parametrize("rows, together", [(16, 1), (16, 2), (32, 2)])
def test_experts_in_the_panels_of_a_cpu_are_equal_or_different(rows, together):
    """vLLM's prepack_moe_weight for "vec" and "amx", and convert_weight_packed, which tests/serving asks for the same."""
    digests, view = held("mixtral"), library.open(HF / "mixtral").view(to="vllm", rank=0)
    experts = {f"dp0:pp0:pcp0:tp0:{name}": tensor.words() for name, tensor in view.items() if "experts.w" in name}
    packed = {key: b"".join(in_panels(matrix, rows, together).tobytes() for matrix in words) for key, words in experts.items()}
    right = {**digests, **{key: hashlib.sha256(content).hexdigest() for key, content in packed.items()}}
    result = verified("mixtral", vllm(right), "--json")[0]
    assert result.code == 0 and result.document["server"]["matching"] == len(digests)
    first = next(iter(packed))
    result = verified("mixtral", vllm({**right, first: "0" * 64}), "--json")[0]
    assert result.code == 1 and result.document["server"]["different"] == [first], "others show the kernel's form"
    result = verified("mixtral", vllm({**right, **dict.fromkeys(packed, "0" * 64)}), "--json")[0]
    assert result.document["equal"] is None and sorted(result.document["server"]["not_comparable"]) == sorted(packed)
    # One that is held as loaded shows that this server does not arrange them.
    result = verified("mixtral", vllm({**right, first: digests[first]}), "--json")[0]
    assert result.code == 1 and result.document["equal"] is not True


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_what_a_real_server_of_a_mixture_answers_is_compared(model, tmp_path):
    """vLLM's checker has the router's gate and more under another name than its files, and on a CPU linear layers are empty parameters."""
    with server(served_model(model, tmp_path / "model")) as (address, _):
        result = reshard("verify", tmp_path / "model", address, "--json")
    about = result.document["server"]
    assert result.document["equal"] is None and not result.document["differences"] and not about["unknown"], about
    assert all(re.search(r"(_proj|\.gate)\.weight$", key) for key in about["not_comparable"]), about
    assert about["matching"] + len(about["renamed"]) == about["parameters"] - len(about["not_comparable"])
    names = {key.rpartition(".layers.")[2]: ours.rpartition(".layers.")[2] for key, ours in about["renamed"].items()}
    if model == "deepseek_v3":
        assert names["1.mlp.gate.e_score_correction_bias"] == "1.mlp.experts.gate.e_score_correction_bias"


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_experts_of_a_real_server_that_are_not_the_checkpoints_are_named(model, tmp_path):
    answers = served_model(model, tmp_path / "model")
    status, body, headers = answers["/weight_checker"]
    digests = json.loads(body)["checksums"]
    key = next(key for key in digests if "w2_weight" in key)
    answers["/weight_checker"] = status, json.dumps({"checksums": {**digests, key: "0" * 64}}).encode(), headers
    with server(answers) as (address, _):
        result = reshard("verify", tmp_path / "model", address, "--json")
    assert result.code == 1 and result.document["server"]["different"] == [key]


def test_a_bias_that_a_cpu_made_wider_is_compared():
    layer = "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj."
    digests, view = held("qwen2"), library.open(HF / "qwen2").view(to="vllm", rank=0)
    wide = (view["model.layers.0.self_attn.qkv_proj.bias"].words().astype("<u4") << 16).tobytes()
    biased = {**digests, layer + "weight": EMPTY, layer + "bias": hashlib.sha256(wide).hexdigest()}
    assert verified("qwen2", vllm(biased), "--json")[0].document["server"]["not_comparable"] == [layer + "weight"]
    biased[layer + "bias"] = "1" * 64
    assert verified("qwen2", vllm(biased), "--json")[0].document["server"]["not_comparable"] == [layer + "weight", layer + "bias"]


def with_version(version):
    return {"/weight_info": (200, json.dumps({"weight_version": version}).encode(), {})}


def test_the_version_of_a_server_is_compared():
    own = library.fingerprint(HF / "llama").root
    result = verified("llama", vllm(held("llama", tp=2), **with_version(own)), "--json")[0]
    about = result.document["server"]
    assert (result.code, about["version"], about["fingerprint"], about["same_version"]) == (0, own, own, True)
    other = own[:-1] + ("0" if own[-1] != "0" else "1")
    result = verified("llama", vllm(held("llama", tp=2), **with_version(other)), "--json")[0]
    about = result.document["server"]
    assert (result.code, about["equal"], about["fingerprint"], about["same_version"]) == (1, False, own, False)
    assert [(each["name"], each["kind"]) for each in result.document["differences"]] == [("weight_version", "version")]
    said = verified("llama", vllm(held("llama", tp=2), **with_version(other)))[0].out
    assert "holds these weights under the version of other weights: 30 of 30 parameters equal" in said and other in said and own in said
    hidden = verified("llama", vllm(with_linears_emptied(held("llama")), **with_version(other)))[0]
    assert hidden.code == 1 and "has the version of other weights: 7 of 15" in hidden.out


def test_the_version_is_of_the_weights_as_the_server_casts_them(tmp_path):
    library.convert(library.plan(HF / "llama", to="hf", dtype="fp16"), tmp_path / "cast")
    version = library.fingerprint(tmp_path / "cast").root
    result = verified("llama", vllm(held("llama", dtype="fp16"), dtype="torch.float16", **with_version(version)), "--json")[0]
    assert result.code == 0 and result.document["server"]["same_version"] is True


@pytest.mark.parametrize("version", ["default", "120", "a" * 500 + "\x1b[2J", 7, None, ["x"]])
def test_a_version_that_is_no_fingerprint_is_told_and_not_compared(version):
    answers = vllm(held("llama"), **with_version(version))
    result, said = verified("llama", answers, "--json")[0], verified("llama", answers)[0]
    about = result.document["server"]
    expected = version if isinstance(version, str) and version != "default" else None
    assert (result.code, about["version"], about["fingerprint"], about["same_version"]) == (0, expected, None, None)
    assert ("the server's version is" in said.out) == (expected is not None) and "\x1b" not in said.out


@pytest.mark.parametrize(
    ("version", "hidden", "code", "said"),
    [
        ("step-300", False, 0, "the server's version is step-300, and this checkpoint is of step 300"),
        ("300", False, 0, "the server's version is 300, and this checkpoint is of step 300"),
        ("global_step_200", False, 0, "and this checkpoint, whose weights it holds, is of step 300"),
        ("global_step_200", True, 1, "has the version of other weights: 7 of 15"),
        ("step-300", True, 1, "cannot tell: 7 of 15"),
        ("2", False, 0, "the server's version is 2, a number that may count updates: it says nothing"),
        ("mine", False, 0, "the server's version is mine, which names no step"),
        ("default", False, 0, "no update has set a version since the server started"),
    ],
)
def test_the_step_that_a_version_names_decides_where_bytes_do_not(version, hidden, code, said, tmp_path):
    (tmp_path / "step-300").symlink_to(HF / "llama")
    digests = with_linears_emptied(held("llama")) if hidden else held("llama")
    result = verified("llama", vllm(digests, **with_version(version)), folder=tmp_path / "step-300")[0]
    assert result.code == code and said in result.out, result.out
    accepted = verified("llama", vllm(digests, **with_version(version)), "--allow-not-comparable", folder=tmp_path / "step-300")[0]
    assert accepted.code == (1 if "other weights" in said else 0)


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
    assert result.code == 1 and "\x1b" not in result.out and "\\x1b[2Jmodel" in result.out


@pytest.mark.parametrize("info", [b"[]", b"{}", b'{"vllm_config": 3}', b"<html>"])
def test_what_a_server_says_about_itself_is_not_needed(info):
    answers = vllm(held("llama", tp=2), **{"/server_info": (200, info, {})})
    assert verified("llama", answers)[0].code == 0


ASKS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000, 1_500_000_000))
from reshard.cli.main import run
sys.exit(run(["verify", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_lies_is_refused_in_one_sentence_within_its_limits(name):
    """In a process of its own, whose address space is limited."""
    with lying(name) as (address, sent):
        words = [sys.executable, "-c", ASKS, HF / "llama", address]
        # The environment is given as a whole: GNU readline, which pytest loads, puts COLUMNS where os.environ does not see it.
        found = subprocess.run(words, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert found.returncode in (3, 5) and found.stderr.count("\n") == 1 and "Traceback" not in found.stderr, found.stderr
    assert sum(sent) < 210 << 20


@pytest.mark.parametrize("name", SLOW_LIES)
def test_a_server_that_keeps_a_client_waiting_is_given_up(name, monkeypatch):
    """The limits in seconds are those of minutes, made short: the clock is asked wherever a server can drip."""
    monkeypatch.setattr(server_module, "_SECONDS", 1.5)
    monkeypatch.setattr(http_answer, "SECONDS_WITHOUT_PROGRESS", 0.7)
    began = time.monotonic()
    with lying(name) as (address, _):
        result = reshard("verify", HF / "llama", address)
    assert time.monotonic() - began < SECONDS / 2, "the server had to end its lie"
    assert result.code in (3, 5) and result.err.count("\n") == 1 and "Traceback" not in result.err, result.err


def test_headers_and_informational_answers_within_the_limits_are_read():
    """A proxy may add some; a chunked answer may have trailers."""
    body = json.dumps({"checksums": held("llama")}).encode()
    head = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 16 + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: " + b"x" * 60_000
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in (body[:10], body[10:]))
    with answering(head + b"\r\n\r\n" + chunks + b"0\r\nTrailer: 1\r\n\r\n") as (address, _):
        # The one answer is that of the weight checker, and nothing about the server.
        assert Server.at(address).ask("/weight_checker") == json.loads(body)


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
