"""Lead: what source rank 0 does in an update, while the other source ranks follow (session.py).

While ranks wait for each other, the requests to the engines and the engines themselves are watched. If one ends, the connections of this
rank are broken, so that nobody waits for what does not come, and the other source ranks are told in the meeting (wire/meeting.py).

If anything fails before the decision, the engines drop the update and go on with their old weights. A rank that fails while it installs, or
whose result is not heard, leaves its engine in doubt: it may hold old and new weights, and stays paused. The next whole update mends it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from threading import Event, Lock
from typing import Any, TypeVar

from reshard.errors import SystemRefusal, printable
from reshard.geometry.value import value
from reshard.live.arrangement import Link
from reshard.live.engines.control import EngineControl
from reshard.live.engines.watch import EVERY, Watch, requested
from reshard.live.wire.exchange import Members
from reshard.live.wire.line import Outcome
from reshard.live.wire.meeting import BUSY, Guest, turn_of
from reshard.live.wire.transport import Message, Transport, reason

_LOG = "The engine's log says why, in a line that begins with reshard:"
_PAUSED = "stays paused until an update succeeds"
_FOR_READERS = 5.0
"""Seconds in which the other source ranks read how an update ended that has lost its connections."""
INSTALLED, KEPT, IN_DOUBT = "installed", "kept", "in doubt"
OfRank = TypeVar("OfRank")
Version = str | Callable[[], str] | None
"""What engines call new weights; a function tells it once they were sent; None: a number, one more than the first engine's."""


@value
class UpdateReport:
    """What an update was."""

    nbytes: int
    """Bytes of weights on the wire, of all source ranks."""
    seconds: float
    """From the pause to the end, with the engines' own processing."""
    waiting_seconds: float
    """The part of it in which the engines waited for requests that ran, until they were paused."""
    sending_seconds: float
    """The part of it in which weights were sent."""
    version: str
    """The version that the engines have now."""
    fallbacks: tuple[str, ...] = ()
    """Weights that were sent whole, because no plan cuts them."""


class Lead:
    """Source rank 0's part of updates."""

    def __init__(
        self,
        transport: Transport,
        guest: Guest,
        members: Members,
        engines: Sequence[EngineControl],
        sizes: Sequence[int],
        link: Link,
        fallbacks: tuple[str, ...] = (),
        number: int = 0,
    ) -> None:
        """sizes: the number of ranks of each engine. fallbacks: weights that are sent whole. number: the highest that was a version."""
        self._transport, self._guest, self._link = transport, guest, link
        self._engines, self._sizes, self._fallbacks, self._number = engines, sizes, fallbacks, number
        self._turns = [turn_of(sum(sizes[:i])) for i in range(len(sizes))]
        self._others = range(1, members.sources)
        self._targets = range(members.sources, members.sources + members.targets)
        self._watches: list[Watch] = []
        self._is_counted = self._are_open = False
        """Whether the first engine's version counts in `number`; whether an update of an engine may be open that nobody can end."""
        self._stopped = ""
        """Why the connections were broken."""
        self.is_lost = False
        """Whether a connection has ended: no further update is possible."""

    def update(self, send: Callable[[], Outcome], failures: Sequence[str], version: Version) -> UpdateReport:
        """One update, as Session.update; failures: why this rank cannot send."""
        try:
            return self._update(send, failures, version)
        finally:
            for turn in self._turns:
                self._guest.ask(turn, "", before=BUSY)

    def _update(self, send: Callable[[], Outcome], failures: Sequence[str], version: Version) -> UpdateReport:
        began, outcome = time.monotonic(), Outcome(failures=[*failures])
        self._watches = [Watch(engine, self._link.seconds) for engine in self._engines]
        for peer in self._others:
            self._hear(peer, outcome)
        for turn in self._turns:
            self._guest.ask(turn, BUSY, before="")
        if takers := [*filter(None, map(self._taken, range(len(self._engines))))]:
            self.is_lost = True
            outcome.failures[:0] = takers
        if outcome.failures:
            back = ". Make a new Sender, with take_over=True to take the engine back" if takers else ""
            raise self._failed(outcome, f"Nothing was sent, the engine goes on with the weights that it has{back}")
        paused_at = time.monotonic()
        self._begin(outcome)
        if outcome.failures:
            raise self._failed(outcome, f"Nothing was sent. {self._statement([KEPT] * len(self._engines))}")
        waiting_seconds = time.monotonic() - paused_at
        receiving = [requested(engine.update) for engine in self._engines]
        self._tell(self._others, {"go": True}, outcome)
        with self._guarding(receiving, FIRST_COMPLETED, outcome):
            sending_seconds = self._send(send, outcome)
        is_whole = not outcome.failures
        named = self._named(version)
        decision = {"install": is_whole, "reason": _joined(outcome.failures), "fingerprint": outcome.fingerprint, "number": self._number}
        self._tell([*self._others, *self._targets], decision, outcome)
        self._wait(receiving, outcome)
        finishing = [requested(engine.finish) for engine in self._engines]
        with self._guarding(finishing, ALL_COMPLETED, outcome):
            states = self._states(outcome) if is_whole else [KEPT] * len(self._engines)
        self._are_open = not self._wait(finishing, outcome)
        self._end(states, named, outcome)
        if outcome.failures:
            raise self._failed(outcome, self._statement(states))
        report = UpdateReport(outcome.nbytes, time.monotonic() - began, waiting_seconds, sending_seconds, named, self._fallbacks)
        self._tell(self._others, {"report": asdict(report)}, outcome)
        return report

    def leave(self) -> None:
        """Let the engines leave the channel. Where an update may still be open they are not asked: their workers would raise."""
        for i, engine in enumerate(self._engines):
            with suppress(Exception):
                if not self._are_open and not self._taken(i):
                    Watch(engine, self._link.seconds).ask(engine.leave)

    def _begin(self, outcome: Outcome) -> None:
        """Pause the engines and start the update; where one refuses, undo both."""
        undo: list[Callable[[], None]] = []
        self._are_open = True
        told = None if self._is_counted else requested(self._engines[0].version)
        try:
            for watch in self._watches:
                # A pause that was not answered in time may come yet.
                undo.append(partial(watch.ask, watch.engine.resume))
                watch.ask(watch.engine.pause, self._link.pause)
            for watch in self._watches:
                watch.ask(watch.engine.start)
                undo.append(partial(watch.ask, watch.engine.finish))
            if told is not None:
                self._number, self._is_counted = max(self._number, _number(self._watches[0].answer(told))), True
        except Exception as error:
            outcome.failures.append(reason(error))
            for action in reversed(undo):
                with suppress(Exception):
                    action()

    @contextmanager
    def _guarding(self, requests: Sequence[Future[None]], when: str, outcome: Outcome) -> Iterator[None]:
        """Wait for ranks of the engines in this context. If an engine ends meanwhile, or those requests, by which its ranks take part, the
        connections of this rank are broken.

        when: whether its ranks take part until all of the requests have ended, or the first one.
        """
        over, lock = Event(), Lock()

        def guard() -> None:
            try:
                while True:
                    done, running = wait(requests, EVERY, when)
                    if over.is_set():
                        return
                    for watch, request in zip(self._watches, requests, strict=True):
                        if request in running:
                            watch.look()
                    if (not running or (done and when == FIRST_COMPLETED)) and not over.wait(EVERY):
                        for request in done:
                            request.result()
                        raise SystemRefusal("the engine's ranks do not take part in the update any more", do=_LOG)
            except Exception as error:
                with lock:
                    if not over.is_set():
                        self._stopped = reason(error)
                        self._guest.ask("stop", self._stopped)
                        self._transport.close()

        requested(guard)
        try:
            yield
        finally:
            with lock:
                over.set()
            if self._stopped:
                outcome.failures.insert(0, self._stopped)

    def _send(self, send: Callable[[], Outcome], outcome: Outcome) -> float:
        """Send this rank's part, and hear how it went for all others; returns the seconds that it took."""
        began = time.monotonic()
        try:
            own = send()
            outcome.failures += own.failures
            outcome.lost |= own.lost
            outcome.nbytes += own.nbytes
            outcome.fingerprint = own.fingerprint
        except Exception as error:
            outcome.failures.append(reason(error))
        for peer in [*self._others, *self._targets]:
            self._hear(peer, outcome)
        return time.monotonic() - began

    def _hear(self, peer: int, outcome: Outcome) -> None:
        """Hear whether a rank is ready, or how its part went."""

        def hear() -> None:
            told = self._transport.hear(peer).document
            outcome.failures += told["failures"]
            outcome.nbytes += told.get("nbytes", 0)

        outcome.attempt(peer, hear)

    def _states(self, outcome: Outcome) -> list[str]:
        """What became of each engine, by what its ranks tell."""
        not_heard = Message({"installed": False, "broken": True, "reason": "the result of a rank was not heard"})
        results = [(outcome.attempt(peer, partial(self._transport.hear, peer)) or not_heard).document for peer in self._targets]
        states = []
        for own in of_engines(results, self._sizes):
            outcome.failures += [result["reason"] for result in own if not result["installed"]][:1]
            if all(result["installed"] for result in own):
                states.append(INSTALLED)
            else:
                states.append(KEPT if not any(result["installed"] or result.get("broken") for result in own) else IN_DOUBT)
        return states

    def _named(self, version: Version) -> str:
        """What the engines will call the weights. No number is given twice."""
        named = (version() if callable(version) else version) or str(self._number + 1)
        self._number = max(self._number, _number(named))
        return named

    def _end(self, states: Sequence[str], version: str, outcome: Outcome) -> None:
        """Let the engines answer again, unless they are in doubt, and ask whether they do."""
        for i, (watch, state) in enumerate(zip(self._watches, states, strict=True)):
            ask, engine = watch.ask, watch.engine
            try:
                if state == INSTALLED:
                    ask(engine.set_version, version)
                    ask(engine.clear_cache)
                if state != IN_DOUBT and not self._taken(i):
                    ask(engine.resume)
                if state == INSTALLED:
                    is_paused, told = requested(engine.is_paused), ask(engine.version)
                    if told != version:
                        raise SystemRefusal(f"it tells the version {printable(told)!r} after {version!r} was set", where=engine.name)
                    if watch.answer(is_paused):
                        raise SystemRefusal("it is still paused after it was resumed", where=engine.name)
            except Exception as error:
                outcome.failures.append(reason(error))

    def _statement(self, states: Sequence[str]) -> str:
        """What the engines hold after an update that failed, and whether they answer: they are asked."""
        return ". ".join(map(self._stated, range(len(states)), states))

    def _stated(self, i: int, state: str) -> str:
        watch = self._watches[i]
        name = watch.engine.name
        if taken := self._taken(i):
            return taken
        try:
            is_paused = watch.ask(watch.engine.is_paused)
        except Exception as error:
            return f"{name} could not be asked what it holds ({reason(error).rstrip('.')})"
        if state == IN_DOUBT:
            return f"{name} may hold old and new weights, and {'answers' if is_paused is False else _PAUSED}"
        answers = {True: _PAUSED, False: "answers", None: "was asked to go on; it does not tell whether it does"}[is_paused]
        return f"{name} holds the {'new' if state == INSTALLED else 'old'} weights and {answers}"

    def _taken(self, i: int) -> str:
        """Who has taken an engine over; empty: nobody."""
        turn = self._guest.ask(self._turns[i])
        return f"{self._engines[i].name} was taken over by {turn}" if turn not in (None, "", BUSY) else ""

    def _wait(self, requests: Iterable[Future[None]], outcome: Outcome) -> bool:
        """Wait for requests to the engines. After one that fails nobody knows whether the engine's update is still open. Returns whether
        none did."""
        failures = []
        for watch, request in zip(self._watches, requests, strict=True):
            try:
                watch.answer(request)
            except Exception as error:
                failures.append(reason(error))
        outcome.failures += failures
        self.is_lost |= bool(failures)
        return not failures

    def _tell(self, peers: Iterable[int], document: dict[str, Any], outcome: Outcome) -> None:
        for peer in peers:
            outcome.attempt(peer, partial(self._transport.tell, peer, document))

    def _failed(self, outcome: Outcome, do: str) -> SystemRefusal:
        """The error of an update that failed, told to the other source ranks."""
        self.is_lost |= bool(outcome.lost)
        failed = self._stopped or _joined(outcome.failures)
        document = {"failed": failed, "do": do, "is_lost": self.is_lost}
        others = [*self._others] if self._stopped else [peer for peer in self._others if peer not in outcome.lost]
        self._tell(others, document, outcome)
        if self.is_lost:
            self.leave()
            self._guest.ask("end", json.dumps(document))
            ends_at = time.monotonic() + _FOR_READERS
            while time.monotonic() < ends_at and not all(self._guest.ask(f"read {peer}") is not None for peer in others):
                time.sleep(0.05)
        return dropped(failed, do)


def of_engines(of_ranks: Sequence[OfRank], sizes: Sequence[int]) -> list[Sequence[OfRank]]:
    """What the ranks of each engine have, of that of all target ranks. sizes: the number of ranks of each engine."""
    return [of_ranks[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def dropped(failed: str, do: str) -> SystemRefusal:
    """The error of an update that failed."""
    return SystemRefusal(f"the update failed: {failed}", do=do)


def _joined(failures: Sequence[str]) -> str:
    """The first failures: others follow from them."""
    return "; ".join([*dict.fromkeys(failure.rstrip(".") for failure in failures)][:2])


def _number(version: str) -> int:
    """A version that is a number; 0 for any other."""
    return int(version) if version.isdecimal() and len(version) < 19 else 0
