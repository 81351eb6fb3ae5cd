"""Arrangement: what source rank 0 answers to the ranks of a channel when they have said what they hold. Link: how they are connected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from reshard.geometry.value import value
from reshard.live.plan.beside import Beside
from reshard.live.plan.schedule import HeldTensor, Schedule
from reshard.live.wire.transport import SECONDS


@value
class Link:
    """How trainer and engines are connected."""

    backend: str = "gloo"
    """What carries the bytes: gloo, by way of the memory of the hosts, nccl, from one GPU's memory to another's, or shared: shared memory
    of one host."""
    host: str | None = None
    """The address at which the engines reach source rank 0; None: the one that this machine has on its way to the first engine."""
    seconds: float = SECONDS
    """The longest wait of a rank for another."""
    pause: str = "wait"
    """What becomes of requests that run when an update begins: wait for them, abort them, or keep them for later with what they have."""
    device: str = "cpu"
    """With nccl: this rank's GPU, such as "cuda:0"."""
    name: str = ""
    """How other senders call this one; empty: by the name of its program."""
    take_over: bool = False
    """Whether an engine that another sender has joined is taken over from it."""
    bind: str | None = None
    """The address of this machine at which source rank 0 listens; None: that of `host`. 0.0.0.0 and :: are all."""
    port: int = 0
    """The port; 0: a free one."""
    trust_network: bool = False
    """Whether the secret of the update may go over HTTP to an engine that is not asked at a loopback address."""


class Planned(Protocol):
    """A plan of a transfer: every target byte of a load form comes from one source rank, or is a constant."""

    def sends(self, rank: int) -> Schedule:
        """What a source rank sends."""

    def receives(self, rank: int, *, named: bool = True) -> Schedule:
        """What a target rank receives. named: whether the tensors of the sources are named, too."""

    def targets(self, rank: int) -> tuple[HeldTensor, ...]:
        """All tensors of the load form of a target rank, contiguous, also those that nothing is sent for."""

    def fills(self, rank: int) -> Mapping[str, float]:
        """The tensors of a target rank that are one constant, by name. Elements that nothing is sent for are zeros elsewhere."""

    def beside(self, rank: int) -> Beside:
        """What a target rank receives beside its load form."""


@value(eq=False)
class RankAnswer:
    """What a target rank must know of the plan."""

    targets: tuple[HeldTensor, ...]
    """The tensors of its load form, in the order in which its staging holds them."""
    fills: Mapping[str, float]
    """Those that are one constant, by name."""
    receives: Schedule | None
    """What it receives; None: a stream (stream.py)."""
    expected: int
    """The bytes that it receives."""
    verify: bool
    """Whether the digests of what it receives are compared."""
    beside: Beside = Beside()
    """What it receives beside its load form."""
    changes: bool = False
    """Whether it may receive changes to the update before."""
    since: str = ""
    """Of a stream with changes: the fingerprint of what they are changes of, which the rank has said that it holds; empty: nothing."""

    @property
    def fed(self) -> set[str]:
        """The tensors of its load form for which bytes come. The others are constants."""
        if self.receives is None:
            return {held.name for held in self.targets}
        made = {merged.tensor for merged in self.beside.merges}
        made |= {part.tensor for computed in self.beside.computes for part in computed.parts}
        sent = {i for way in self.receives.ways for i in np.unique(way.target_tensors).tolist()}
        return made | {self.receives.targets[i].name for i in sent}


@value(eq=False)
class Arrangement:
    """What source rank 0 answers to all ranks of the channel. Target ranks of several engines are numbered through."""

    answer: Callable[[int], RankAnswer]
    """What a target rank must know."""
    sends: Callable[[int], Schedule] | None = None
    """What a source rank sends; None: a stream, by a single source rank."""

    @staticmethod
    def of(plan: Planned, *, verify: bool = False, changes: bool = False) -> Arrangement:
        """The arrangement by which a plan is carried out."""

        def answer(rank: int) -> RankAnswer:
            receives = plan.receives(rank, named=False)
            return RankAnswer(plan.targets(rank), plan.fills(rank), receives, receives.nbytes, verify, plan.beside(rank), changes)

        return Arrangement(answer, plan.sends)
