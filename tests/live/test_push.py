"""`reshard push CKPT http://HOST:PORT` against a server whose ranks are real and whose engine is not: every rank gets the bytes of the
files that `convert` writes for it. Real vLLM is asked in tests/live/push.py."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.fixture_places import FIXTURES, HF, stored
from helpers.push_server import serving
from helpers.reshard_command import reshard

import reshard as library
from reshard.errors import CheckpointError, RequestError, SystemRefusal
from reshard.geometry import boxes

pytest.importorskip("torch")
FSDP2 = FIXTURES / "dcp" / "fsdp2"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def written(source, folder, **options):
    """The files of the ranks, by `convert`, whose bytes are compared with real vLLM elsewhere; they are read here without reshard."""
    library.convert(library.plan(source, to="vllm", **options), folder)
    return folder


def expected(folder, pp_rank, tp_rank, pp=1):
    name = f"pp-{pp_rank}-tp-{tp_rank}" if pp > 1 else f"rank-{tp_rank}"
    return {key: data for key, (_, _, data) in stored(folder / f"model-{name}-part-0.safetensors").items() if not key.endswith("_scale")}


def check_held(server, folder):
    for rank in server.ranks:
        assert rank.tensors == expected(folder, rank.pp_rank, rank.tp_rank, server.pp)


CASES = {
    "FSDP2": (FSDP2 / "checkpoint", FSDP2 / "model", {"tp": 2}),
    "FSDP2 to 4 ranks, with padding": (FSDP2 / "checkpoint", FSDP2 / "model", {"tp": 4}),
    "ZeRO-3": (FIXTURES / "deepspeed" / "z3-bf16" / "checkpoint", FIXTURES / "deepspeed" / "z3-bf16" / "model", {"tp": 2}),
    "Megatron to stages": (FIXTURES / "megatron" / "llama-tied-pp2" / "checkpoint", FIXTURES / "megatron" / "llama-tied-pp2" / "model",
                           {"tp": 2, "pp": 2}),
    "experts": (HF / "mixtral", HF / "mixtral", {"tp": 2, "ep": 2}),
    "experts cut": (HF / "qwen3_moe", HF / "qwen3_moe", {"tp": 2}),
    "a correction bias in fp32": (HF / "deepseek_v3", HF / "deepseek_v3", {"tp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("source, model, sizes", CASES.values(), ids=CASES)
def test_every_rank_gets_the_bytes_of_its_files(source, model, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 1 << 10)
    about = {} if source == model else {"model": model}
    folder = written(source, tmp_path / "files", dtype="bf16", **sizes, **about)
    served = {**sizes, "ep": sizes.get("ep", 1) > 1}
    with serving(folder, config_of(model), **served) as (server, address):
        result = library.push(source, address, **about)
        check_held(server, folder)
        assert server.version == result.version == library.fingerprint(folder).root
        assert not server.is_paused and not server.is_open
        weights = sum(len(data) for rank in server.ranks for data in rank.tensors.values())
        assert 0.9 * weights < result.nbytes <= weights


def test_in_steps_the_server_is_paused_updated_and_cleared(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        result = reshard("push", HF / "llama", address, "--json")
        assert result.code == 0, result.err
        asked = [path for path in server.asked if not path.startswith(("/server_info", "/get_world_size", "/weight_info", "/model_info"))]
    assert asked == [
        "/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/update_weight_version", "/reset_prefix_cache", "/resume", "/is_paused", "/shutdown_weight_transfer_engine",
    ]  # fmt: skip
    document = result.document
    assert document["version"] == library.fingerprint(HF / "llama").root and document["servers"] == [address]
    assert document["parallel"] == {"tp": 2, "pp": 1, "ep": 1} and document["bytes"] > 0


def test_what_a_server_serves_is_verified_by_its_version(tmp_path):
    """push sets what verify expects."""
    folder = written(HF / "llama", tmp_path / "files")
    with serving(folder, config_of(HF / "llama"), tp=1) as (server, address):
        assert library.push(HF / "llama", address).version == library.fingerprint(HF / "llama").root == server.version


def test_a_dry_run_sends_nothing(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        said, document = reshard("push", HF / "llama", address, "--dry-run"), reshard("push", HF / "llama", address, "--dry-run", "--json")
        assert {*server.asked} == {"/server_info", "/get_world_size", "/model_info"}
    assert said.code == document.code == 0 and f"{address}: vllm on TP 2, bfloat16\n  read      148 kB, 21 tensors" in said.out, said.out
    assert document.document["target"]["tp"] == 2


@pytest.mark.parametrize("key, value, named", [
    ("vocab_size", 300, "vocab_size 300 -> 250"),
    ("num_hidden_layers", 3, "num_hidden_layers 3 -> 2"),
    ("head_dim", 16, "head_dim 16 -> 32"),
    ("model_type", "qwen3", "model_type qwen3 -> llama"),
])  # fmt: skip
def test_another_model_is_refused_by_name_before_a_byte(key, value, named, tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, {**config_of(HF / "llama"), key: value}, tp=2) as (server, address):
        result = reshard("push", HF / "llama", address)
        assert result.code == 2 and named in result.err and result.err.count("\n") == 1, result.err
        assert "/pause" not in server.asked and not server.held(0) and server.version == "default"
        # The server goes on, and takes the right one.
        server.ranks[0]._config = server.ranks[1]._config = config_of(HF / "llama")
        assert reshard("push", HF / "llama", address).code == 0


def test_another_model_is_refused_before_the_ranks_are_asked_where_its_folder_is_here(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, config_of(HF / "llama"), tp=2, model=str(HF / "qwen3")) as (server, address):
        result = reshard("push", HF / "llama", address, "--dry-run")
        assert result.code == 2 and "qwen3 -> llama" in result.err and "/init_weight_transfer_engine" not in server.asked


def test_a_tensor_of_another_type_is_refused(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2, dtype="fp16")
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address), pytest.raises(RequestError, match="F16") as refusal:
        library.push(HF / "llama", address)
    assert "/pause" not in server.asked and "BF16" in str(refusal.value)


def test_a_server_that_casts_gets_the_cast(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2, dtype="fp16")
    with serving(folder, config_of(HF / "llama"), tp=2, dtype="float16") as (server, address):
        library.push(HF / "llama", address)
        check_held(server, folder)


@pytest.mark.parametrize("backend, sentence", [(None, "no weight-transfer backend"), ("nccl", "'nccl'")])
def test_a_server_without_the_backend_is_told_how_to_have_it(backend, sentence, tmp_path):
    folder = written(HF / "llama", tmp_path / "files")
    with serving(folder, config_of(HF / "llama"), tp=1, backend=backend) as (_, address):
        result = reshard("push", HF / "llama", address)
    assert result.code == 2 and sentence in result.err and "--weight-transfer-config" in result.err


def test_a_server_without_development_mode_is_told_how_to_have_it():
    from helpers.weight_servers import server

    with server({}) as (address, _):
        result = reshard("push", HF / "llama", address)
    assert result.code == 3 and "VLLM_SERVER_DEV_MODE=1" in result.err and result.err.count("\n") == 1
    assert reshard("push", HF / "llama", "http://127.0.0.1:9").code == 5
    assert reshard("push", HF / "llama", "out").code == 2


def test_replicas_and_several_servers_get_the_same(tmp_path):
    folder, config = written(HF / "llama", tmp_path / "files", tp=2), config_of(HF / "llama")
    with serving(folder, config, tp=2, dp=2) as (one, first), serving(folder, config, tp=2) as (two, second):
        with pytest.raises(RequestError, match="no server"):
            library.push(HF / "llama", [])
        result = library.push(HF / "llama", [first, second], version="7")
        check_held(one, folder)
        check_held(two, folder)
    assert one.version == two.version == result.version == "7" and len(one.ranks) == 4
    single = written(HF / "llama", tmp_path / "one")
    two, one = serving(folder, config, tp=2), serving(single, config, tp=1)
    with two as (_, first), one as (_, second), pytest.raises(RequestError, match="TP 2"):
        library.push(HF / "llama", [first, second])


def test_a_source_that_breaks_on_the_way_leaves_the_server_as_it_was(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    broken = tmp_path / "broken"
    shutil.copytree(HF / "llama", broken)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        library.push(HF / "llama", address)
        before = [rank.tensors for rank in server.ranks]
        planned = library.open(broken)
        path = broken / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointError):
            library.push(planned, address, version="new")
        assert [rank.tensors for rank in server.ranks] == before and server.version != "new"
        assert not server.is_paused and not server.is_open
        library.push(HF / "llama", address, version="newer")
        assert server.version == "newer"


def test_an_interrupted_push_leaves_the_server_as_it_was(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)

    def stop(nbytes):
        raise KeyboardInterrupt

    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        with pytest.raises(KeyboardInterrupt):
            library.push(HF / "llama", address, progress=stop)
        assert not server.held(0) and not server.is_paused and not server.is_open and server.version == "default"
        library.push(HF / "llama", address)
        check_held(server, folder)


def test_a_rank_that_cannot_install_is_told(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        server.ranks[1].fails = True
        with pytest.raises(SystemRefusal, match="no memory to install"):
            library.push(HF / "llama", address)
        assert server.version == "default" and server.is_paused
        library.push(HF / "llama", address)
        check_held(server, folder)
        assert not server.is_paused


def saved(run, step, source=HF / "llama"):
    """A step of a run, with a mark that it is complete."""
    shutil.copytree(source, run / f"step-{step}")


def happened(result):
    return [(each["step"], each["event"]) for each in map(json.loads, result.out.splitlines())]


def test_watch_pushes_the_newest_step_alone(tmp_path):
    folder, run = written(HF / "llama", tmp_path / "files", tp=2), tmp_path / "run"
    for step in (10, 20):
        saved(run, step)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        result = reshard("watch", run, "--push", address, "--all", "--json", "--quiet-for", 0)
        assert result.code == 0 and happened(result) == [(20, "pushed"), (20, "finished")], result.out + result.err
        check_held(server, folder)
        assert json.loads(result.out.splitlines()[0])["target"] == address


def test_watch_converts_and_pushes(tmp_path):
    folder, run = written(HF / "llama", tmp_path / "files", tp=2), tmp_path / "run"
    saved(run, 10)
    arguments = ("watch", run, "--to", "vllm", "--tp", 2, "--into", tmp_path / "out" / "{step}", "--all", "--json", "--quiet-for", 0)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        first = reshard(*arguments, "--push", address)
        assert happened(first) == [(10, name) for name in ("converted", "latest", "pushed", "finished")], first.err
        check_held(server, folder)
        assert happened(reshard(*arguments, "--push", address)) == []
        asked = len(server.asked)
        saved(run, 5)
        assert happened(reshard(*arguments, "--push", address)) == [(5, "converted"), (5, "finished")] and len(server.asked) == asked


def test_a_server_that_is_away_is_tried_again(tmp_path):
    saved(tmp_path / "run", 10)
    result = reshard("watch", tmp_path / "run", "--push", "http://127.0.0.1:9", "--all", "--json", "--quiet-for", 0)
    assert result.code == 1 and happened(result) == [(10, "failed")]


def test_a_watch_that_only_pushes_has_no_sizes(tmp_path):
    saved(tmp_path / "run", 10)
    for more in (["--tp", 2], ["--to", "vllm"], ["--keep", 3]):
        result = reshard("watch", tmp_path / "run", "--push", "http://127.0.0.1:9", "--all", *more)
        assert result.code == 2 and more[0] in result.err, result.err
    assert reshard("watch", tmp_path / "run", "--all").code == 2


DIES = """
import os, sys, reshard
reshard.push(sys.argv[1], sys.argv[2], progress=lambda nbytes: os._exit(9))
"""


def test_a_push_that_is_killed_leaves_the_old_weights_and_the_next_one_continues(tmp_path):
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        library.push(HF / "llama", address, version="first")
        before = [rank.tensors for rank in server.ranks]
        assert subprocess.run([sys.executable, "-c", DIES, HF / "llama", address]).returncode == 9
        assert [rank.tensors for rank in server.ranks] == before and server.version == "first" and server.is_open and server.is_paused
        library.push(HF / "llama", address, version="second")
        check_held(server, folder)
        assert server.version == "second" and not server.is_open and not server.is_paused


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_lets_the_server_go_on(number, tmp_path):
    """The reader waits until the signal comes, so that it always comes while weights are sent."""
    folder = written(HF / "llama", tmp_path / "files", tp=2)
    stopped = f"""
import os, sys
from reshard.cli import main
from reshard.engine import blocks
copied = blocks.copied_blocks
def waiting(*given, **more):
    for i, each in enumerate(copied(*given, **more)):
        yield each
        if i == 3:
            os.kill(os.getpid(), {int(number)})
from reshard.live.from_files import running_engines
running_engines.copied_blocks = waiting
sys.argv = ["reshard", "push", *sys.argv[1:]]
main.main()
"""
    with serving(folder, config_of(HF / "llama"), tp=2) as (server, address):
        found = subprocess.run([sys.executable, "-c", stopped, HF / "llama", address], capture_output=True, text=True)
        assert found.returncode == 128 + number and "Traceback" not in found.stderr, found.stderr
        assert not server.held(0) and not server.is_open and not server.is_paused
        library.push(HF / "llama", address)
        check_held(server, folder)


def test_a_checkpoint_without_a_config_has_that_of_the_server_on_this_machine(tmp_path):
    folder = written(FSDP2 / "checkpoint", tmp_path / "files", tp=2, model=FSDP2 / "model")
    model = str(FSDP2 / "model")
    with serving(folder, config_of(FSDP2 / "model"), tp=2, model=model) as (server, address):
        result = reshard("push", FSDP2 / "checkpoint", address)
        assert result.code == 0 and f"the config is that of the server's model, {model}" in result.out, result.out + result.err
        check_held(server, folder)
    with serving(folder, config_of(FSDP2 / "model"), tp=2, model="org/name") as (server, address):
        result = reshard("push", FSDP2 / "checkpoint", address)
        assert result.code == 2 and "--model" in result.err and "/pause" not in server.asked, result.err


INFO = {
    "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
                        "enable_expert_parallel": False},
    "model_config": {"dtype": "torch.bfloat16", "model": "m"},
    "weight_transfer_config": {"backend": "reshard"},
}  # fmt: skip


@pytest.mark.parametrize("path", ["/server_info", "/get_world_size", "/init_weight_transfer_engine"])
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"world_size": "many"}', b'{"world_size": -1}', b'{"vllm_config": 3}', b"<html>"]
)
def test_a_server_that_answers_something_else_is_refused_in_one_sentence(path, body, monkeypatch):
    from helpers.weight_servers import server

    from reshard.live.from_files import pushing, running_server

    for module in (pushing, running_server):
        monkeypatch.setattr(module, "SECONDS", 1.0)
    right = {"/server_info": {"vllm_config": INFO}, "/get_world_size": {"world_size": 1}, "/init_weight_transfer_engine": {}}
    answers = {name: (200, json.dumps(document).encode(), {}) for name, document in right.items()}
    with server({**answers, path: (200, body, {})}) as (address, _):
        result = reshard("push", HF / "llama", address)
    assert result.code in (2, 3, 5) and result.err.count("\n") == 1 and "Traceback" not in result.err, result.err
