"""Ranks of FSDP2 save a model with the adapters of its experts by torch.distributed.checkpoint; check.py compares what reshard writes.

    torchrun --nproc-per-node 2 dcp_ranks.py BASE SETTINGS FOLDER

They also send the adapter alone, from their memory (`Sender(model, adapter=True)`).

BASE: a folder. SETTINGS: the JSON of LoraConfig's. FOLDER gets checkpoint/ (the model, DCP), gathered/ (PEFT's own save of the same
values, gathered in this process) and pushed/ (what the sender writes for a server). Environment: that of requirements.txt, and reshard.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from reshard.live import Sender


class Vllm(BaseHTTPRequestHandler):
    """A server of a base, which takes every adapter."""

    base: str

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.say({"data": [{"id": "base", "root": self.base, "parent": None}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say({"choices": [{"text": "x"}]})

    def say(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def adapted(base: str, settings: str) -> PeftModel:
    """The model of a folder with an adapter of random values, the same on every rank."""
    torch.manual_seed(7)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", **json.loads(settings))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def main(base: str, settings: str, folder: str) -> None:
    dist.init_process_group("gloo")
    model = adapted(base, settings)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=Path(folder) / "checkpoint")
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    if dist.get_rank() == 0:
        model.save_pretrained(Path(folder) / "gathered", state_dict=whole)
        Vllm.base = base
        server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    address = [f"http://127.0.0.1:{server.server_port}" if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(address)
    Sender(model, engine=address[0], adapter=True, shared_dir=Path(folder) / "pushed").update()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
