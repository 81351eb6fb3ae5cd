"""A push of an adapter alone: what is written, loaded and unloaded, and what is refused before the server is asked to load.

The server is a stand-in with the routes, answers and refusals of vLLM 0.32 (entrypoints/openai/models/serving.py), which was also run.
"""

import base64
import io
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, RequestError, ReshardError, SystemRefusal, UnsupportedError
from reshard.live import Sender
from reshard.live.engines.adapters import AdapterServer

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": 50, "intermediate_size": 28, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
RANK = 2


class Vllm(ThreadingHTTPServer):
    """Routes of vLLM for adapters. asked: the paths of all requests."""

    def __init__(self, folder, most_rank=8, key=None, is_vllm=True, answers=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.most_rank, self.key, self.is_vllm, self.answers = folder, most_rank, key, is_vllm, answers
        self.adapters, self.asked, self.refusal, self.keeps = {}, [], None, set()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def say(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self.say(401, {"error": "Unauthorized"})
        if self.path == "/version":
            return self.say(200, {"version": "0.32.0"}) if self.server.is_vllm else self.say(404, {})
        if self.path != "/v1/models":
            return self.say(404, {})
        base = {"id": "base", "root": str(self.server.folder), "parent": None}
        loras = [{"id": name, "root": path, "parent": "base"} for name, path in self.server.adapters.items()]
        return self.say(200, {"object": "list", "data": [base, *loras]})

    def do_POST(self):
        server = self.server
        server.asked.append(self.path)
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.say(401, {"error": "Unauthorized"})
        name = question.get("lora_name")
        if server.refusal and server.refusal.exists():
            return self.say(500, {"error": {"message": "refused on purpose"}})
        if self.path == "/v1/load_lora_adapter":
            config = json.loads((Path(question["lora_path"]) / "adapter_config.json").read_text())
            if config["r"] > server.most_rank:
                return self.say(500, {"error": {"message": f"LoRA rank {config['r']} is greater than max_lora_rank {server.most_rank}."}})
            if name in server.adapters:
                return self.say(400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}})
            server.adapters[name] = question["lora_path"]
        elif self.path == "/v1/unload_lora_adapter":
            if name in server.keeps or name not in server.adapters:
                return self.say(404, {"error": {"message": f"The lora adapter '{name}' cannot be found.", "type": "NotFoundError"}})
            del server.adapters[name]
        elif self.path == "/v1/completions":
            assert question["model"] in server.adapters
            return self.say(200, {"choices": [{"text": "x"}]}) if server.answers else self.say(500, {"error": "stopped"})
        return self.say(200, {})


@pytest.fixture
def serving(tmp_path):
    servers = []

    def start(engine=Vllm, **settings):
        folder = tmp_path / "base"
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(CONFIG))
        server = engine(folder, **settings)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Sglang(ThreadingHTTPServer):
    """Routes of SGLang 0.5.23 for adapters (srt/entrypoints/http_server.py): bodies are checked as by LoadLoRAAdapterReqInput and
    UnloadLoRAAdapterReqInput (srt/managers/io_struct.py), names as by LoRARegistry, tensors as by TpModelWorker. got: of each rank."""

    def __init__(self, folder, most_rank=8, tp=2):
        super().__init__(("127.0.0.1", 0), SglangHandler)
        self.folder, self.most_rank, self.adapters, self.asked, self.is_enabled = folder, most_rank, {}, [], True
        self.tp, self.got = tp, {}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class SafeUnpickler(pickle.Unpickler):
    """What SGLang's class of this name allows (srt/utils/common.py), as far as tensors on a CPU need it."""

    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        assert (module, name) in {
            ("torch._utils", "_rebuild_tensor_v3"),
            ("collections", "OrderedDict"),
            ("torch", "float32"),
            ("torch", "bfloat16"),
        }
        return super().find_class(module, name)


class SglangHandler(Handler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == "/model_info":
            return self.say(200, {"model_path": str(self.server.folder), "served_model_name": "base", "weight_version": "default"})
        if self.path == "/server_info":
            return self.say(200, {"tp_size": self.server.tp, "version": "0.5.23"})
        if self.path == "/load_lora_adapter_from_tensors":
            return self.say(405, {"detail": "Method Not Allowed"})
        if self.path != "/v1/models":
            return self.say(404, {"detail": "Not Found"})
        cards = [{"id": "base", "root": "base", "parent": None}]
        cards += [{"id": name, "root": path, "parent": "base"} for name, path in self.server.adapters.items()]
        return self.say(200, {"object": "list", "data": cards})

    def do_POST(self):
        server = self.server
        server.asked.append(self.path)
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            is_known = question["lora_path"] in server.adapters and isinstance(question["input_ids"], list)
            return self.say(200, {"output_ids": [1], "meta_info": {"id": "x"}}) if is_known else self.say(400, {"error": {"message": "no"}})
        if self.path == "/load_lora_adapter_from_tensors":
            assert question.keys() == {"lora_name", "config_dict", "serialized_named_tensors"}
            copies = [base64.b64decode(text, validate=True) for text in question["serialized_named_tensors"]]
            server.got[question["lora_name"]] = [SafeUnpickler(io.BytesIO(copies[rank])).load() for rank in range(server.tp)]
            config, question["lora_path"] = question["config_dict"], "__tensor__"
        fields = {"/load_lora_adapter": {"lora_name", "lora_path", "pinned", "lora_id"}, "/unload_lora_adapter": {"lora_name", "lora_id"}}
        needed = {"/load_lora_adapter": {"lora_name", "lora_path"}, "/unload_lora_adapter": {"lora_name"}}
        if self.path in needed and not needed[self.path] <= question.keys() <= fields[self.path]:
            return self.say(400, {"message": "wrong fields"})
        problem = None if server.is_enabled else "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        if self.path == "/unload_lora_adapter":
            del server.adapters[question["lora_name"]]
        elif problem is None:
            if question["lora_path"] != "__tensor__":
                config = json.loads((Path(question["lora_path"]) / "adapter_config.json").read_text())
            problem = f"rank {config['r']} is incompatible with the current LoRA memory pool" if config["r"] > server.most_rank else None
            if problem is None and question["lora_name"] in server.adapters:
                problem = "it is already loaded"
        if problem is None and self.path != "/unload_lora_adapter":
            server.adapters[question["lora_name"]] = question["lora_path"]
        loaded = {"success": problem is None, "error_message": problem, "loaded_adapters": server.adapters}
        return self.say(400 if problem else 200, loaded)


def adapter(folder, seed=0, rank=RANK, experts=range(3), hidden=20):
    random = np.random.default_rng(seed)
    sizes = {"self_attn.q_proj": (16, hidden), "self_attn.v_proj": (8, hidden)}
    sizes |= {f"mlp.experts.{e}.{name}": size for e in experts for name, size in
              {"gate_proj": (12, hidden), "up_proj": (12, hidden), "down_proj": (hidden, 12)}.items()}  # fmt: skip
    tensors = {}
    for name, (out, into) in sizes.items():
        for which, shape in (("A", (rank, into)), ("B", (out, rank))):
            tensors[f"base_model.model.model.layers.0.{name}.lora_{which}.weight"] = random.normal(size=shape).astype(np.float32)
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_versions_are_loaded_under_their_fingerprints_and_older_ones_are_unloaded(tmp_path, serving):
    server, shared = serving(), tmp_path / "shared"
    first = reshard.push_adapter(adapter(tmp_path / "1", 1), server.address, name="tutor", shared_dir=shared)
    assert first.adapter == f"tutor@{first.fingerprint.rpartition(':')[2][:12]}" and first.unloaded == ()
    assert set(safetensors.numpy.load_file(Path(first.folder) / "adapter_model.safetensors")) == set(
        safetensors.numpy.load_file(tmp_path / "1" / "adapter_model.safetensors")
    )
    second = reshard.push_adapter(adapter(tmp_path / "2", 2), server.address, name="tutor", shared_dir=shared, keep=2)
    assert list(server.adapters) == [first.adapter, second.adapter]
    third = run("push", adapter(tmp_path / "3", 3), server.address, "--adapter", "--name", "tutor", "--shared-dir", shared, "--json")
    made = json.loads(third.out)
    assert list(server.adapters) == [made["adapter"]] and made["unloaded"] == [first.adapter, second.adapter]
    kept = {first.adapter, second.adapter, made["adapter"]}
    assert {path.name for path in shared.iterdir()} == kept, "requests that still run may need them"
    again = reshard.push_adapter(tmp_path / "3", server.address, name="tutor", shared_dir=shared)
    assert again.adapter == made["adapter"] and server.asked.count("/v1/load_lora_adapter") == 3
    assert [path.name for path in shared.iterdir()] == [made["adapter"]]
    other = reshard.push_adapter(adapter(tmp_path / "4", 4), server.address, shared_dir=shared)
    assert list(server.adapters) == [made["adapter"], other.adapter]
    path = tmp_path / "4" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    with pytest.raises(RequestError, match=rf"these tensors and another scale.*{other.adapter}.*`name=`"):
        reshard.push_adapter(tmp_path / "4", server.address, shared_dir=shared)


def test_experts_are_written_in_the_form_that_the_engine_reads(tmp_path, serving):
    server = serving()
    source = adapter(tmp_path / "split")
    reshard.convert(reshard.plan(source, to="peft", experts="tinker", model=tmp_path / "base", base_model="x"), tmp_path / "stacked")
    pushed = reshard.push_adapter(tmp_path / "stacked", server.address, shared_dir=tmp_path / "shared")
    written, wanted = (safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in (Path(pushed.folder), source))
    assert written.keys() == wanted.keys() and all(np.array_equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "made, message",
    [
        ({"experts": (0, 2)}, r"it changes 2 experts, and not expert 1.*nothing was sent"),
        ({"hidden": 24}, r"its update has the shape \[24, 12\], the base weight \[20, 12\].*nothing was sent"),
    ],
)
def test_an_adapter_of_another_base_or_without_an_expert_is_refused_before_the_server_is_asked(made, message, tmp_path, serving):
    server = serving()
    with pytest.raises(CheckpointError, match=message):
        reshard.push_adapter(adapter(tmp_path / "a", **made), server.address, shared_dir=tmp_path / "shared")
    assert not [path for path in server.asked if path.startswith("/v1/load")] and not list((tmp_path / "shared").iterdir())


@pytest.mark.parametrize("settings, message", [({"most_rank": 1}, "greater than max_lora_rank 1"), ({"answers": False}, "stopped")])
def test_what_the_server_refuses_leaves_the_version_before(settings, message, tmp_path, serving):
    server, shared = serving(), tmp_path / "shared"
    first = reshard.push_adapter(adapter(tmp_path / "1", 1), server.address, shared_dir=shared)
    vars(server).update(settings)
    with pytest.raises(SystemRefusal, match=rf"{message}.*goes on with the adapters that it had"):
        reshard.push_adapter(adapter(tmp_path / "2", 2), server.address, shared_dir=shared)
    assert list(server.adapters) == [first.adapter] and [path.name for path in shared.iterdir()] == [first.adapter]


def test_a_server_that_asks_for_a_key_and_one_of_another_engine_are_named(tmp_path, serving, monkeypatch):
    server, source = serving(key="secret"), adapter(tmp_path / "a")
    with pytest.raises(RequestError, match=r"asks for a key.*RESHARD_SERVER_KEY"):
        reshard.push_adapter(source, server.address, shared_dir=tmp_path / "shared")
    monkeypatch.setenv("RESHARD_SERVER_KEY", "secret")
    assert reshard.push_adapter(source, server.address, shared_dir=tmp_path / "shared").adapter in server.adapters
    with pytest.raises(UnsupportedError, match=r"no server of vLLM or SGLang"):
        reshard.push_adapter(source, serving(is_vllm=False).address, shared_dir=tmp_path / "shared")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--name", "x"), "--name has a meaning only with --adapter"),
        (("--adapter", "--dtype", "bf16"), "--dtype has no meaning with --adapter"),
        (("--adapter", "--dry-run"), "--dry-run has no meaning with --adapter"),
        (("--adapter", "http://localhost:2"), "With --adapter one server is given"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, tmp_path):
    done = run("push", adapter(tmp_path / "a"), "http://localhost:1", *words)
    assert done.code == 2 and message in done.err


def test_sglang_takes_an_adapter_by_its_own_routes(tmp_path, serving):
    server, shared = serving(Sglang), tmp_path / "shared"
    first = reshard.push_adapter(adapter(tmp_path / "1", 1), server.address, name="tutor", shared_dir=shared)
    posted = [path for path in server.asked if path.startswith(("/load", "/v1/load", "/generate"))]
    assert posted == ["/load_lora_adapter_from_tensors", "/load_lora_adapter", "/generate"][1:]
    second = reshard.push_adapter(adapter(tmp_path / "2", 2), server.address, name="tutor", shared_dir=shared)
    assert list(server.adapters) == [second.adapter] and second.unloaded == (first.adapter,)
    written = safetensors.numpy.load_file(Path(second.folder) / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight" in written
    with pytest.raises(SystemRefusal, match=r"rank 16 is incompatible.*goes on with the adapters that it had"):
        reshard.push_adapter(adapter(tmp_path / "3", 3, rank=16), server.address, name="tutor", shared_dir=shared)
    server.is_enabled = False
    with pytest.raises(SystemRefusal, match=r"--enable-lora"):
        reshard.push_adapter(adapter(tmp_path / "4", 4), server.address, name="tutor", shared_dir=shared)
    assert list(server.adapters) == [second.adapter] and {path.name for path in shared.iterdir()} == {first.adapter, second.adapter}


def test_sglang_gets_the_tensors_by_http_if_no_folder_is_named(tmp_path, serving):
    server, source = serving(Sglang), adapter(tmp_path / "a", 1)
    tensors = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(source / "adapter_model.safetensors").items()}
    tensors = {name: tensor.bfloat16() if "q_proj" in name else tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, source / "adapter_model.safetensors")
    pushed = reshard.push_adapter(source, server.address, name="tutor")
    assert pushed.folder is None and json.loads(json.dumps(pushed.to_json()))["folder"] is None
    first, second = server.got[pushed.adapter]
    assert first.keys() == second.keys() == tensors.keys()
    for rank in (first, second):
        assert all(rank[name].dtype == tensors[name].dtype and rank[name].equal(tensors[name]) for name in tensors)
    again = reshard.push_adapter(adapter(tmp_path / "b", 2), server.address, name="tutor")
    assert again.unloaded == (pushed.adapter,) and list(server.adapters) == [again.adapter]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"use_dora": True}, r"SGLang has no DoRA.*Nothing was sent"),
        ({"rank_pattern": {"q_proj": 3}}, "does not read rank_pattern: its server stops"),
        ({"alpha_pattern": {"q_proj": 8}}, "does not read alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({}, "q_proj is adapted without v_proj: SGLang joins them"),
    ],
)
def test_an_adapter_that_stops_sglang_or_is_scaled_wrong_is_refused_before_it_is_sent(settings, message, tmp_path, serving):
    server, source = serving(Sglang), adapter(tmp_path / "a")
    if settings:
        path = source / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    else:
        tensors = safetensors.numpy.load_file(source / "adapter_model.safetensors")
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if "v_proj" not in name}, source / "adapter_model.safetensors")
    with pytest.raises(ReshardError, match=message):
        reshard.push_adapter(source, server.address)
    assert not [path for path in server.asked if "load_lora_adapter" in path and "from_tensors" not in path] and not server.got


def test_sglang_gets_the_scale_of_rslora_as_lora_alpha(tmp_path, serving):
    server, source = serving(Sglang), adapter(tmp_path / "a")
    path = source / "adapter_config.json"
    config = json.loads(path.read_text()) | {"use_rslora": True}
    path.write_text(json.dumps(config))
    pushed = reshard.push_adapter(source, server.address, shared_dir=tmp_path / "shared")
    sent = json.loads((Path(pushed.folder) / "adapter_config.json").read_text())
    assert not sent["use_rslora"] and sent["lora_alpha"] == config["lora_alpha"] * config["r"] ** 0.5


def test_what_goes_on_at_the_server_meanwhile_breaks_no_push(tmp_path, serving, monkeypatch):
    server, shared = serving(), tmp_path / "shared"
    server.adapters |= {"tutor@v1": "/a", "tutor@b@0123456789ab": "/b"}
    first = reshard.push_adapter(adapter(tmp_path / "1", 1), server.address, name="tutor", shared_dir=shared)
    server.keeps.add(first.adapter)
    second = reshard.push_adapter(adapter(tmp_path / "2", 2), server.address, name="tutor", shared_dir=shared)
    assert second.unloaded == () and f"{first.adapter} stays loaded" in second.notes[-1] and "cannot be found" in second.notes[-1]
    assert "tutor@v1" in server.adapters and "tutor@b@0123456789ab" in server.adapters and Path(first.folder).is_dir()
    loaded, models = dict(server.adapters), AdapterServer.models
    server.adapters.pop(second.adapter)
    asked = []

    def another_push_meanwhile(control):
        asked.append(models(control))
        server.adapters |= loaded
        return asked[-1]

    monkeypatch.setattr(AdapterServer, "models", another_push_meanwhile)
    third = reshard.push_adapter(tmp_path / "2", server.address, name="tutor", shared_dir=shared)
    assert third.adapter == second.adapter and Path(third.folder, "adapter_config.json").exists()
    monkeypatch.undo()
    server.keeps.clear()
    unload = AdapterServer.unload
    monkeypatch.setattr(AdapterServer, "unload", lambda control, name: [unload(control, name) for _ in range(2)])
    fourth = reshard.push_adapter(adapter(tmp_path / "4", 4), server.address, name="tutor", shared_dir=shared)
    assert fourth.adapter in server.adapters and not [note for note in fourth.notes if "stays loaded" in note]


@pytest.mark.parametrize("name", ["a/b", "../a", "a b", "a:b", "a@b", "", ".a", "\u00e4"])
def test_a_name_that_is_no_folder_or_no_model_of_a_request_is_refused(name, tmp_path):
    with pytest.raises(RequestError, match=r"letters, digits"):
        reshard.push_adapter(tmp_path, "http://127.0.0.1:9", name=name)


def test_a_server_on_another_machine_that_takes_no_tensors_needs_a_folder(tmp_path, serving, monkeypatch):
    monkeypatch.setattr(AdapterServer, "is_on_this_machine", property(lambda _: False))
    with pytest.raises(RequestError, match=r"No release up to 0\.33 takes the tensors by HTTP.*shared_dir=DIR"):
        reshard.push_adapter(adapter(tmp_path / "a"), serving().address)


@pytest.mark.distinct
@pytest.mark.parametrize("engine", [Vllm, Sglang])
def test_verify_compares_the_fingerprint_with_the_names_of_the_servers_adapters(engine, tmp_path, serving):
    server, source = serving(engine), adapter(tmp_path / "a", 1)
    reshard.convert(reshard.plan(source, to="peft", experts="tinker", model=tmp_path / "base", base_model="x"), tmp_path / "stacked")
    none = reshard.verify(source, server.address)
    assert none.equal is False and "the server's adapters: none" in none.verdict()
    pushed = reshard.push_adapter(source, server.address, name="tutor", shared_dir=tmp_path / "shared")
    for form in (source, tmp_path / "stacked", Path(pushed.folder)):
        result = reshard.verify(form, server.address)
        assert result.equal and result.version == pushed.adapter and result.fingerprint == pushed.fingerprint
    other = run("verify", adapter(tmp_path / "b", 2), server.address)
    assert other.code == 1 and "does not list this adapter: its fingerprint begins with" in other.out and pushed.adapter in other.out
    server.adapters["sql"] = "/loras/sql"
    told = run("verify", adapter(tmp_path / "c", 3), server.address, "--json")
    assert told.code == 1 and told.document["server"]["equal"] is None and told.document["server"]["not_comparable"] == ["sql"]
    assert "cannot tell: 1 name of its adapters, such as sql" in run("verify", tmp_path / "c", server.address).out
    assert reshard.verify(source, server.address).equal


def test_verify_cannot_tell_where_the_form_of_the_experts_follows_from_a_base_that_is_not_here(tmp_path, serving):
    server, source = serving(), adapter(tmp_path / "a", 1)
    reshard.push_adapter(source, server.address, shared_dir=tmp_path / "shared")
    reshard.convert(reshard.plan(source, to="peft", experts="tinker", model=tmp_path / "base", base_model="x"), tmp_path / "stacked")
    server.folder = Path("/elsewhere")
    assert reshard.verify(tmp_path / "stacked", server.address).equal is None
    assert reshard.verify(reshard.open(tmp_path / "stacked", model=tmp_path / "base"), server.address).equal


@pytest.mark.parametrize("mesh", ["2", pytest.param("2,2", marks=pytest.mark.slow), pytest.param("1,2", marks=pytest.mark.slow)])
def test_the_ranks_of_a_trainer_send_the_adapter_alone(mesh, tmp_path, serving):
    """FSDP2 and HSDP on 2 and 4 ranks (gloo), and replicas: what the server reads is the gathered adapter, in the form of the engine, bit
    by bit. One rank asks the server."""
    server, shared = serving(), tmp_path / "shared"
    server.refusal = tmp_path / "refuse"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, Path(__file__).with_name("adapter_ranks.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, server.address, shared, tmp_path, mesh], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(math.prod(map(int, mesh.split(","))))
    ]
    try:
        said = [[json.loads(line) for line in rank.communicate(timeout=120)[0].splitlines()] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks) and all(of_rank[:2] == said[0][:2] for of_rank in said)
    assert server.asked.count("/v1/load_lora_adapter") == 3
    (first, nbytes), (second, _), refused = said[0]
    assert list(server.adapters) == [second] and first != second
    assert "refused on purpose" in refused and "rank 0 could not send the adapter" in said[1][2] and "refused on purpose" in said[1][2]
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "peft_version": "0.21.2", "base_model_name_or_path": "x", "task_type": "CAUSAL_LM",
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["q_proj"],
    }  # fmt: skip
    gathered = tmp_path / "gathered"
    gathered.mkdir()
    (gathered / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "1.safetensors").rename(gathered / "adapter_model.safetensors")
    reshard.convert(reshard.plan(gathered, to="peft", experts="split", model=tmp_path / "base"), tmp_path / "split")
    written, wanted = (
        safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in (shared / second, tmp_path / "split")
    )
    assert written.keys() == wanted.keys() and all(written[name].tobytes() == wanted[name].tobytes() for name in wanted)
    settings = {"model": tmp_path / "base", "adapter_config": gathered / "adapter_config.json"}
    reshard.convert(reshard.plan(tmp_path / "step", to="peft", **settings), tmp_path / "of-step")
    of_step, fused = (safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "of-step", gathered))
    assert of_step.keys() == fused.keys() and all(of_step[name].tobytes() == fused[name].tobytes() for name in fused)
    assert nbytes == sum(tensor.nbytes for tensor in wanted.values())
    assert json.loads((shared / second / "adapter_config.json").read_text())["lora_alpha"] == 6


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"adapter": True, "verify": True}, "sends no weights"),
        ({"name": "x"}, "only with `adapter=True`"),
        ({"adapter": True}, "no single LoRA"),
    ],
)
def test_a_sender_of_an_adapter_refuses_what_it_cannot_do(keywords, message):
    with pytest.raises(RequestError, match=message):
        Sender({}, engine="http://127.0.0.1:1", **keywords)


def test_a_sender_refuses_parameters_that_zero_3_has_divided():
    model = torch.nn.Linear(2, 2)
    model.peft_config = {"default": SimpleNamespace(to_dict=lambda: {"bias": "none"})}
    model.weight.ds_tensor = torch.zeros(2)  # as deepspeed.zero.Init leaves it
    with pytest.raises(UnsupportedError, match=r"ZeRO-3 has divided.*push_adapter"):
        Sender(model, engine="http://127.0.0.1:1", adapter=True)


def test_a_server_that_ends_in_the_middle_is_not_said_to_go_on(tmp_path, serving, monkeypatch):
    server, shared = serving(), tmp_path / "shared"

    def ends(handler):
        monkeypatch.setattr(Handler, "do_GET", ends)
        handler.connection.close()

    monkeypatch.setattr(Handler, "do_POST", ends)
    with pytest.raises(SystemRefusal, match="does not answer any more"):
        reshard.push_adapter(adapter(tmp_path / "a"), server.address, shared_dir=shared)
    assert not list(shared.iterdir())
