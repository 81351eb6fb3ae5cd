"""An engine without an engine: rank processes with real TargetRanks on gloo, whose model is a dictionary of tensors.

Its control is reshard's EngineControl, over pipes. As in vLLM, a request runs on all ranks at once; the ranks have their own group.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from datetime import timedelta

from reshard.errors import RequestError
from reshard.geometry.dtypes import from_torch
from reshard.live.target_rank import TargetRank

# torch is imported already.
FORK = multiprocessing.get_context("fork")


class StandInEngine:
    """Ranks that hold zeros under the names, shapes and types of a plan's targets."""

    name = "the stand-in"

    def __init__(self, plan, size: int, port: int, extra=None, about=None) -> None:
        """extra: name -> shape of tensors that no plan knows. Its loader takes whole ones of these names, and keeps the rows of the rank.
        about: what the ranks say of themselves, instead of what a stand-in would."""
        self._number, self.asked = size, []
        self._pipes, self._processes, self._version = [], [], "default"
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            # Scales are computed by the engine itself.
            held = [(each.name, each.dtype.torch, each.shape) for each in plan.targets(rank)]
            process = FORK.Process(target=_rank, args=(rank, size, port, held, theirs, extra or {}, about or {}), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def ranks(self) -> int:
        return self._number

    def own_address(self) -> str:
        return "127.0.0.1"

    def init(self, info) -> None:
        self._all("join", info)

    def pause(self, mode: str) -> None:
        self.asked.append(f"pause {mode}")

    def start(self) -> None:
        self._all("start")

    def update(self) -> None:
        self._all("receive")

    def finish(self) -> None:
        self._all("finish")

    def version(self) -> str:
        return self._version

    def set_version(self, version: str) -> None:
        self._version = version

    def clear_cache(self) -> None:
        self.asked.append("clear cache")

    def resume(self) -> None:
        self.asked.append("resume")

    def leave(self) -> None:
        self._all("close")

    def look(self) -> bool:
        return True

    def is_paused(self) -> bool:
        said = [each for each in self.asked if each == "resume" or each.startswith("pause")]
        return bool(said) and said[-1] != "resume"

    def held(self) -> list[dict[str, bytes]]:
        """Name -> bytes of the tensor, of each rank."""
        return self._all("held")

    def fail_next(self, what: str) -> None:
        """Let the last rank fail once: "install"."""
        self._pipes[-1].send(("fail", (what,)))
        self._pipes[-1].recv()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _all(self, method: str, *arguments) -> list:
        if method not in ("held",):
            self.asked.append(method)
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return [pipe.recv() for pipe in self._pipes]


class _Model:
    """What TargetRank asks of an engine."""

    device = "cpu"

    def __init__(self, rank: int, group, held, extra, about) -> None:
        import torch

        self._rank, self._group, self.fails, self._extra, self._about = rank, group, "", extra, about
        held = [*held, *((name, "bfloat16", (shape[0] // group.size(), *shape[1:])) for name, shape in extra.items())]
        self.tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in held}

    def rank(self) -> int:
        return self._rank

    def described(self):
        others = self._about.get("others", [name for name in self.tensors if name.endswith("_scale")])
        own = {name: tensor for name, tensor in self.tensors.items() if name not in others}
        return {
            "engine": "stand-in 1",
            "rank": self._rank,
            "degrees": {"tp": self._group.size(), "tp_rank": self._rank},
            "config": {},
            "model": "",
            "tensors": [[[name], from_torch(str(tensor.dtype), where=name).name, list(tensor.shape)] for name, tensor in own.items()],
            "others": sorted(self.tensors.keys() - own.keys()),
            **self._about,
        }

    def check_whole(self, whole, planned) -> None:
        if others := [each.name for each in whole if self._extra.get(each.name) != list(each.shape)]:
            raise RequestError("the stand-in's loader does not take it", where=others[0])
        if lacking := self._extra.keys() - {each.name for each in whole}:
            raise RequestError("the plan does not bring it", where=min(lacking))

    def install(self, tensors, whole=None) -> None:
        if self.fails == "install":
            self.fails = ""
            raise RuntimeError("no memory to install")
        for name, tensor in tensors.items():
            if name in self.tensors or name not in self._about.get("others", ()):
                self.tensors[name].copy_(tensor)
        for name, tensor in (whole or {}).items():
            self.tensors[name].copy_(tensor.chunk(self._group.size())[self._rank])

    def all_agree(self, own: bool) -> bool:
        import torch
        import torch.distributed as dist

        votes = torch.tensor([int(own)])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([votes], options).wait()
        return bool(votes.item())


def _bytes(tensor) -> bytes:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _rank(rank: int, size: int, port: int, held, pipe, extra, about) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    model = _Model(rank, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)), held, extra, about)
    own = TargetRank(model, logging.getLogger("stand-in"))
    parent = os.getppid()
    while True:
        # The process that asks may be killed.
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        method, arguments = pipe.recv()
        if method == "held":
            pipe.send({name: _bytes(tensor) for name, tensor in model.tensors.items()})
        elif method == "fail":
            model.fails = arguments[0]
            pipe.send(None)
        else:
            pipe.send(getattr(own, method)(*arguments))
