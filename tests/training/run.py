"""Real DeepSpeed trains a small llama on gloo, asked line by line (helpers/asked_process.py). Run in an environment that has it.

    {"world": 2, "stage": 3, "save": "folder"}                          two steps, saved, then three more
    {"world": 4, "stage": 1, "load": "folder", "universal": true}       three steps from what is there

An answer has, of each rank, the losses of the last steps and the counts of steps that the optimizer had before them:
{"losses": [[..], ..], "counts": [[2.0], ..]}; or says why there are none: {"failed": "why"}.
All ranks see the same tokens, so that the mean gradient is the same at any power of two of ranks, and losses can be compared by their bits.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS.parent / "fixtures"))
sys.path.append(str(TESTS))

import free_ports  # noqa: E402
import models  # noqa: E402
from helpers import asked_process as questions  # noqa: E402

SIZES = {"num_hidden_layers": 1, "intermediate_size": 24, "hidden_size": 16, "head_dim": 8, "vocab_size": 50}
BEFORE, AFTER = 2, 3


def worker(rank: int, asked: dict, port: int, results: list) -> None:
    torch.set_num_threads(1)
    world = asked["world"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    model = build(asked)
    with torch.no_grad():
        for parameter in model.parameters() if "load" in asked else ():
            parameter.fill_(0.5)  # what was loaded must have replaced it
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model, asked), config=config(asked))
    if "load" in asked:
        path, _ = engine.load_checkpoint(asked["load"], load_lr_scheduler_states=asked.get("schedule", True))
        assert path is not None, "DeepSpeed found nothing to load"
    else:
        for step in range(BEFORE):
            train(engine, step)
        engine.save_checkpoint(asked["save"])
    counts = sorted({float(state["step"]) for state in engine.optimizer.optimizer.state.values()})
    results[rank] = [train(engine, BEFORE + step) for step in range(AFTER)], counts
    dist.barrier()
    sys.stdout.flush()


def build(asked: dict) -> torch.nn.Module:
    if "config" in asked:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(asked["config"]), dtype=torch.float32)
    return models.build(asked.get("model", "llama"), dtype=torch.float32, **SIZES)


def groups(model: torch.nn.Module, asked: dict) -> list:
    if not asked.get("groups"):
        return list(model.parameters())
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def config(asked: dict) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": asked["stage"], **asked.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": bool(asked.get("universal"))},
        "bf16": {"enabled": asked.get("bf16", True)},
    }


def train(engine: object, step: int) -> str:
    """The loss of one step, exactly."""
    ids = models.tokens(100 * step) % SIZES["vocab_size"]  # within every vocabulary
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach()).hex()


def answered(asked: dict) -> dict[str, object]:
    port = free_ports.free_port()
    with torch.multiprocessing.Manager() as manager:
        results = manager.list([None] * asked["world"])
        try:
            # Forked: DeepSpeed is imported once.
            torch.multiprocessing.start_processes(worker, (asked, port, results), nprocs=asked["world"], start_method="fork")
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            return {"failed": str(error)[-3000:]}
        return {"losses": [losses for losses, _ in results], "counts": [counts for _, counts in results]}


if __name__ == "__main__":
    questions.answer(answered)
