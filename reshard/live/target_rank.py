"""TargetRank: one rank of an engine, from joining a channel to installing an update. It knows no engine; Served is what an engine adds.

    join       init_weight_transfer_engine   join the channel, say what is held, hear the plan or a refusal, make the staging
    start      start_weight_update           nothing but a note
    receive    update_weights                fill the staging, tell the verdict to source rank 0, hear its decision
    finish     finish_weight_update          the engine's ranks agree among themselves; install the staging, or drop it

No method raises: a worker of vLLM that raises leaves replies of other workers in a queue. What failed is logged, told to source rank 0 if
it can be told, and the live weights stay as they are. They change in `finish` alone, and only if every rank of the engine has received a
whole update and has heard that all other ranks of the channel have, too. If source rank 0 ends before, a new `join` drops the update.

The staging is given back with the channel, unless a stream with changes has filled it and it was installed: then it is kept for the changes
of the next one, until an update fails or another one needs the memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import RequestError, printable
from reshard.live.engines.watch import requested
from reshard.live.hello import held_from_json
from reshard.live.plan.beside import Beside
from reshard.live.plan.schedule import HeldTensor, Schedule
from reshard.live.wire.channel import Joining, channel_of, joined
from reshard.live.wire.computing import compute, merge
from reshard.live.wire.exchange import Exchange, Members
from reshard.live.wire.meeting import Guest, turn_of
from reshard.live.wire.secret import SECRET, Secret
from reshard.live.wire.staging import Staged
from reshard.live.wire.stream import receive_stream
from reshard.live.wire.transport import Message, Transport, reason

if TYPE_CHECKING:
    import torch

SOURCE = 0
"""The rank of the channel that leads."""
_FOR_OWNER = 5.0
"""Seconds in which an owner answers that is not stopped."""


class Served(Protocol):
    """A rank's model in its engine."""

    device: str
    """Where its weights lie, such as "cpu" or "cuda:0"."""

    def rank(self) -> int:
        """The number of this rank among those of its engine."""

    def described(self) -> Mapping[str, Any]:
        """What the rank holds, as the fields of `Hello`. Raises a ReshardError if it takes no updates."""

    def check_whole(self, whole: Sequence[HeldTensor], planned: Collection[str]) -> None:
        """Raises RequestError unless the engine's own loader takes these tensors, and fills from them what is not planned. Changes nothing.

        planned: the names of the load form that a plan brings.
        """

    def install(self, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor] = ...) -> None:
        """Make these tensors of the load form, and what the engine's own loader makes of whole ones, the weights that answer."""

    def all_agree(self, own: bool) -> bool:
        """Whether all ranks of the engine say yes. All ranks ask at the same time."""


class TargetRank:
    """One rank of an engine."""

    def __init__(self, served: Served, log: logging.Logger) -> None:
        self._served, self._log = served, log
        self._is_open = self._is_ready = self._verify = self._changes = False
        self._transport: Transport | None = None
        self._exchange: Exchange | None = None
        self._staged: Staged | None = None
        self._beside = Beside()
        self._values: dict[str, torch.Tensor] = {}
        self._expected = self._number = 0
        self._joining: Joining | None = None
        self._guest: Guest | None = None
        self._fingerprint = self._holds = self._since = ""

    def join(self, info: Mapping[str, Any]) -> None:
        """Join the channel that the sender names, and leave the one before; stay in that one if the sender is refused."""
        transport, guest = None, None
        try:
            joining = Joining.of(info)
            # Source rank 0 waits for all ranks of the channel; it hears at once which of them cannot come.
            rank = joining.sources + joining.offset + self._served.rank()
            key = joining.key(Secret.heard(info.get(SECRET)))
            transport, guest = joined(joining, rank, key, self._served.device if joining.backend == "nccl" else "cpu")
            owner, is_owned = self._joining, self._guest is not None and self._guest.is_heard()
            ended = owner.owner if owner is not None and not is_owned else ""
            transport.tell(SOURCE, (is_owned and self._refusal(joining)) or self._described(ended))
            if refusal := (answer := transport.hear(SOURCE)).document.get("refused"):
                raise RequestError(refusal)
            if owner is not None:
                what = "takes over from" if is_owned else "comes after an owner that has ended,"
                self._log.warning("reshard: %s %s %s", printable(joining.owner), what, printable(owner.owner))
            self.close()
            self._transport, self._guest, self._joining, self._since = transport, guest, joining, _now()
            self._prepare(answer, transport, Members(joining.sources, joining.targets))
        except Exception as error:
            self._log.warning("reshard: the channel of an update was not joined: %s", reason(error))
            if transport is not None and self._transport is transport:
                self.close()
            else:
                _closed(transport, guest)

    def start(self) -> None:
        """Begin an update."""
        self._is_open, self._is_ready = True, False

    def receive(self, channel: Mapping[str, Any] | None = None) -> None:
        """Receive an update, and hear whether it is to be installed. channel: that of the sender; None: the one that was joined."""
        self._is_ready = False
        if self._transport is None or self._joining is None or channel not in (None, channel_of(asdict(self._joining))):
            self._log.warning("reshard: the update is dropped: this rank is not in the sender's channel, another sender may have come")
            return
        self._holds = ""
        failures = self._received()
        for failure in failures:
            self._log.warning("reshard: the update failed: %s", failure)
        try:
            self._transport.tell(SOURCE, {"failures": failures})
            decision = self._transport.hear(SOURCE).document
            self._fingerprint, self._number = str(decision["fingerprint"]), max(self._number, int(decision["number"]))
            self._is_ready = bool(decision["install"]) and not failures
            if not self._is_ready:
                self._log.warning("reshard: the update is dropped, the weights stay as they were: %s", decision.get("reason"))
        except Exception as error:
            self._log.warning("reshard: the update is dropped, the weights stay as they were: %s", reason(error))

    def finish(self) -> None:
        """Install what was received, or drop it."""
        is_ready, self._is_ready, self._is_open = self._is_ready, False, False
        result = {"installed": False, "reason": "another rank of the engine has dropped the update"}
        try:
            # Every rank asks, ready or not, or the others would wait.
            if self._served.all_agree(is_ready) and self._staged is not None:
                whole = {tensor.name: self._values[tensor.name] for tensor in self._beside.whole}
                self._served.install(self._staged, **({"whole": whole} if whole else {}))
                self._holds = self._fingerprint if self._changes else ""
                result = {"installed": True}
        except Exception as error:
            self._log.exception("reshard: the weights were not installed completely")
            result = {"installed": False, "broken": True, "reason": reason(error)}
        # Source rank 0 waits for an answer only where it has said that the update is to be installed.
        if is_ready and self._transport is not None:
            with suppress(Exception):
                self._transport.tell(SOURCE, result)

    def close(self) -> None:
        """Leave the channel, and give the staging back, unless it is kept."""
        _closed(self._transport, self._guest)
        self._transport = self._exchange = self._joining = self._guest = None
        if not self._holds:
            self._staged = None
        self._beside, self._values = Beside(), {}
        self._is_ready = False

    def _refusal(self, joining: Joining) -> Mapping[str, Any] | None:
        """Why a sender may not join while the owner of this rank is there; None: it takes over, and the owner begins no other update."""
        assert self._joining is not None and self._guest is not None
        what = "updates this engine"
        if joining.take_over or joining.process == self._joining.process:
            taker = f"{joining.owner}, at {_now()}"
            turning = requested(self._guest.ask, turn_of(self._joining.offset), taker, before="")
            # An owner that is stopped is not waited for. All ranks of the engine ask: the first one turns the note.
            turn = turning.result() if wait([turning], _FOR_OWNER).done else taker
            if not self._is_open and (turn or "").startswith(joining.owner):
                return None
            what = "is in the middle of an update of this engine, and another one can begin once it has ended"
        return {"refused": f"{self._joining.owner}, joined at {self._since}, {what}", "in_use": True}

    def _described(self, before: str) -> Mapping[str, Any]:
        """What source rank 0 is told; or why this rank takes no update: it waits for an answer. before: an owner that has ended."""
        try:
            own = {"is_open": self._is_open, "holds": self._holds, "number": self._number, "before": before}
            return {**self._served.described(), **own}
        except Exception as error:
            return {"refused": reason(error)}

    def _prepare(self, answer: Message, transport: Transport, members: Members) -> None:
        """Make place for what the plan brings."""
        about = answer.document
        self._verify, self._expected, self._changes = bool(about["verify"]), int(about["expected"]), bool(about["changes"])
        try:
            self._staged = self._room_for(held_from_json(about["targets"]), about["fills"], str(about["since"]))
            self._beside = Beside.of(about["beside"])
            self._values = dict(Staged(self._beside.tensors, {}))
            if both := self._values.keys() & self._staged.keys():
                raise RequestError("the plan brings it for the load form, and whole", where=min(both))
            if self._beside.whole:
                self._served.check_whole(self._beside.whole, self._staged)
            if answer.content:
                receives = Schedule.from_bytes(answer.content)
                self._exchange = Exchange(transport, members, receives, verify=self._verify, changes=self._changes)
        except Exception as error:
            transport.tell(SOURCE, {"failures": [reason(error)]})
            raise
        transport.tell(SOURCE, {"failures": []})

    def _room_for(self, targets: Sequence[HeldTensor], fills: Mapping[str, float], since: str) -> Staged:
        """A staging for these tensors: the one that is kept, if changes of what it holds will come."""
        kept = self._staged
        if not since:
            self._holds, self._staged, kept = "", None, None  # its memory is free before the new one takes as much
            return Staged(targets, fills)
        if kept is None or self._holds != since or kept.targets != tuple(targets):
            raise RequestError(f"the sender knows changes since {since}, and this rank does not hold it", do="Update again")
        return kept

    def _received(self) -> list[str]:
        assert self._transport is not None and self._staged is not None
        try:
            if self._exchange is not None:
                if failures := self._exchange.receive({**self._staged, **self._values}).failures:
                    return failures
                compute(self._beside.computes, self._values, self._staged)
                merge(self._beside.merges, self._values, self._staged)
                return []
            staging, how = self._staged.buffer, {"verify": self._verify, "changes": self._changes}
            receive_stream(self._transport, SOURCE, staging, expected=self._expected, **how)
        except Exception as error:
            return [reason(error)]
        return []


def _closed(*ends: Transport | Guest | None) -> None:
    """Leave a channel."""
    for end in ends:
        with suppress(Exception):
            if end is not None:
                end.close()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
