"""Ranks of a trainer, each a process that holds rows of each weight of a Hugging Face folder. A request goes to all of them at once.

A request has `do` and its arguments; the answer is a document, with `error` where a ReshardError was raised:
    load     files: hold the rows of the weights in this safetensors file; as F32 where `wide`; all rows where `copies`
    stand_in tp, port, extra, served: make one more engine that is none (stand_in_engine.py), on rank 0. extra: tensors that no plan knows.
             served: a config; the engine says that it is vLLM, and serves the model of this config. quantize: it holds this form
    stand_in_held, stand_in_asked, stand_in_fails
    open     engine (an address, or "stand-in"), tp, options: make a Sender with a plan made by hand
    join     engine (an address; the stand-ins by default), fallback: make a Sender that plans itself
    update   version, spoil, who, slow: a report. spoil: what goes wrong on rank `who`: it sends a wrong byte, a wrong last one
             (heads are left alone), or it dies. slow: seconds before each tensor
    reshape  name, who: give a weight of rank `who`, or of each rank, another shape
    close    leave the engine
    memory   bytes of this process in memory
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from live.hand_plan import HandPlan, shard_rows
from live.stand_in_engine import StandInEngine
from safetensors.torch import load_file

from reshard.errors import ReshardError
from reshard.geometry.dtypes import BF16, F32
from reshard.live.arrangement import Link
from reshard.live.memory.describe import describe
from reshard.live.sender import Sender
from reshard.verbs.transfers import transfers


class SourceRank:
    """What this process holds, and its Sender."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.weights: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.config: dict[str, Any] = {}
        self.sender: Sender | None = None
        self.stand_ins: list[StandInEngine] = []

    def answered(self, request: dict[str, Any]) -> Any:
        try:
            return getattr(self, request.pop("do"))(**request)
        except ReshardError as error:
            return {"error": str(error)}

    def load(self, files: str, wide: bool = False, copies: bool = False) -> None:
        whole = load_file(Path(files) / "model.safetensors")
        self.config = json.loads((Path(files) / "config.json").read_text())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        for name, tensor in whole.items():
            start, stop = (0, len(tensor)) if copies else shard_rows(len(tensor), self.size, self.rank)
            own = tensor[start:stop].to(torch.float32 if wide else tensor.dtype).clone()
            if name in self.weights:
                self.weights[name].copy_(own)
            else:
                self.weights[name] = own

    def open(
        self,
        engine: str,
        tp: int,
        verify: bool = False,
        config: dict[str, Any] | None = None,
        exchange: bool = False,
        transport: str = "gloo",
        replicas: int = 1,
        changes: bool = False,
        reach: dict[str, Any] | None = None,
    ) -> Any:
        engines: Any = self.stand_ins if engine == "stand-in" else engine
        plan = self.plan(tp, config, exchange, replicas)
        link = Link(transport, seconds=60.0)
        self.sender = Sender(self.weights, engines, plan=plan, transport=link, verify=verify, changes=changes, **(reach or {}))
        return {"nbytes": plan.nbytes}

    def plan(self, tp: int, config: dict[str, Any] | None = None, exchange: bool = False, replicas: int = 1) -> HandPlan:
        dtype = F32 if next(iter(self.weights.values())).dtype == torch.float32 else BF16
        return HandPlan({**self.config, **(config or {})}, self.shapes, self.size, tp, dtype, exchange=exchange, replicas=replicas)

    def join(self, engine: Any = None, fallback: str | None = None, take_over: bool = False) -> Any:
        link = Link(seconds=60.0)
        self.sender = Sender(self.weights, engine or self.stand_ins, transport=link, fallback=fallback, take_over=take_over)
        plan: Any = self.sender.plan
        return {"fallbacks": list(plan.fallbacks), "lines": str(plan).splitlines(), "nbytes": plan.nbytes} if plan else {}

    def stand_in(
        self,
        tp: int,
        port: int,
        extra: dict[str, list[int]] | None = None,
        served: dict[str, Any] | None = None,
        quantize: str | None = None,
    ) -> None:
        if self.rank:
            return
        plan: Any = (
            self.plan(tp)
            if quantize is None
            else transfers([describe(self.weights, rank=0)], config=self.config, to="vllm", tp=tp, quantize=quantize)
        )
        about: dict[str, Any] = {"engine": "vllm 0.32.0", "config": served} if served else {}
        if served:
            layers = range(served["num_hidden_layers"])
            scales = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "q_zero_point", "k_zero_point", "v_zero_point")
            about["others"] = [f"model.layers.{i}.self_attn.attn.{name}" for i in layers for name in scales]
        self.stand_ins.append(StandInEngine(plan, tp, port, extra, about))

    def stand_in_held(self) -> Any:
        """SHA-256 of each tensor of each rank of each engine."""
        ranks = [held for engine in self.stand_ins for held in engine.held()]
        return [{name: hashlib.sha256(data).hexdigest() for name, data in held.items()} for held in ranks]

    def stand_in_asked(self, engine: int = 0) -> Any:
        return self.stand_ins[engine].asked if self.stand_ins else None

    def stand_in_fails(self, what: str) -> None:
        if self.stand_ins:
            self.stand_ins[-1].fail_next(what)

    def update(self, version: str | None = None, spoil: str | None = None, who: int = -1, slow: float = 0.0) -> Any:
        assert self.sender is not None
        transport, sent = self.sender.transport, 0
        send, spoil = transport.send, spoil if self.rank == who % self.size else None

        def spoiled(peer: int, tensor: torch.Tensor) -> Any:
            nonlocal sent
            sent += 1
            time.sleep(slow)
            return send(peer, tensor) if spoil is None else self._spoiled(send, peer, tensor, spoil)

        if spoil or slow:
            transport.send = spoiled
        try:
            report = self.sender.update(version)
        finally:
            if spoil or slow:
                transport.send = send
        about = {"nbytes": report.nbytes, "seconds": report.seconds, "version": report.version, "sent": transport.nbytes_sent}
        return {**about, "fallbacks": list(report.fallbacks), "tensors": sent}

    def _spoiled(self, send: Any, peer: int, tensor: torch.Tensor, spoil: str) -> Any:
        if spoil == "dies":
            os._exit(1)
        wrong = tensor.clone()
        if spoil != "last":
            wrong[0] += 1
        elif wrong.nbytes > 8:
            wrong[-1] += 1
        return send(peer, wrong)

    def reshape(self, name: str, who: int | None = None) -> None:
        if who in (None, self.rank):
            self.weights[name] = self.weights[name].reshape(-1, 2)

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def run(rank: int, size: int, port: int, pipe: Any) -> None:
    """A process that answers what comes through a pipe."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if size > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    own = SourceRank(rank, size)
    with suppress(EOFError):
        while True:
            pipe.send(own.answered(pipe.recv()))


class SourceRanks:
    """The processes. They are forked by a server that has imported torch once."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "safetensors.torch", "reshard.live.sender", "reshard.live.target_rank"])
        port = free_port()
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(rank, size, port, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """The answer of each rank; None of one that has ended."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send({"do": do, **arguments})
        return [_received(pipe) for pipe in self._pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def source_ranks(size: int) -> Iterator[SourceRanks]:
    """Source ranks, as long as they are needed."""
    ranks = SourceRanks(size)
    try:
        yield ranks
    finally:
        ranks.end()


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
