"""Lead: what source rank 0 does in an update, while the other source ranks follow (session.py).

If anything fails before the decision, the engines drop the update and go on with their old weights. A rank that fails while it installs, or
whose result is not heard, leaves its engine in doubt: it may hold old and new weights, and stays paused. The next whole update mends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from reshard.errors import SystemRefusal
from reshard.geometry.value import value
from reshard.live.engines.control import EngineControl
from reshard.live.wire.exchange import Members
from reshard.live.wire.line import Outcome
from reshard.live.wire.transport import Transport, reason

INSTALLED, KEPT, IN_DOUBT = "installed", "kept", "in doubt"
Version = str | Callable[[], str] | None
"""What engines call new weights; a function tells it once they were sent; None: a number, one more than the first engine's."""


@value
class UpdateReport:
    """What an update was."""

    nbytes: int
    """Bytes of weights on the wire, of all source ranks."""
    seconds: float
    """From the pause to the end, with the engines' own processing."""
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
        members: Members,
        engines: Sequence[EngineControl],
        sizes: Sequence[int],
        pause: str,
        fallbacks: tuple[str, ...] = (),
    ) -> None:
        """sizes: the number of ranks of each engine. fallbacks: weights that are sent whole."""
        self._fallbacks = fallbacks
        self._transport, self._engines, self._sizes, self._pause = transport, engines, sizes, pause
        self._others = range(1, members.sources)
        self._targets = range(members.sources, members.sources + members.targets)
        self.is_lost = False
        """Whether a connection has ended: no further update is possible."""

    def update(self, send: Callable[[], Outcome], failures: Sequence[str], version: Version) -> UpdateReport:
        """One update, as Session.update; failures: why this rank cannot send."""
        began, outcome = time.monotonic(), Outcome(failures=[*failures])
        for peer in self._others:
            self._hear(peer, outcome)
        if not outcome.failures:
            self._begin(outcome)
        if outcome.failures:
            raise self._failed(outcome, "Nothing was sent, the engine goes on with the weights that it has")
        with ThreadPoolExecutor(len(self._engines)) as pool:
            receiving = [pool.submit(engine.update) for engine in self._engines]
            self._tell(self._others, {"go": True}, outcome)
            sending_seconds = self._send(send, outcome)
            is_whole = not outcome.failures
            decision = {"install": is_whole, "reason": _joined(outcome.failures), "fingerprint": outcome.fingerprint}
            self._tell([*self._others, *self._targets], decision, outcome)
            self._wait(receiving, outcome)
            finishing = [pool.submit(engine.finish) for engine in self._engines]
            states = self._states(outcome) if is_whole else [KEPT] * len(self._engines)
            self._wait(finishing, outcome)
        told = self._end(states, version, outcome)
        if outcome.failures:
            raise self._failed(outcome, _statement(self._engines, states))
        report = UpdateReport(outcome.nbytes, time.monotonic() - began, sending_seconds, told, self._fallbacks)
        about = {name: getattr(report, name) for name in UpdateReport.__slots__}  # type: ignore[attr-defined]
        self._tell(self._others, {"report": about}, outcome)
        return report

    def leave(self) -> None:
        """Let the engines leave the channel. After an update that may still be open they are not asked: their workers would raise."""
        for engine in self._engines:
            with suppress(Exception):
                engine.leave()

    def _begin(self, outcome: Outcome) -> None:
        """Pause the engines and start the update; where one refuses, undo both."""
        undo: list[Callable[[], None]] = []
        try:
            for engine in self._engines:
                # A pause that was not answered in time may come yet.
                undo.append(engine.resume)
                engine.pause(self._pause)
            for engine in self._engines:
                engine.start()
                undo.append(engine.finish)
        except Exception as error:
            outcome.failures.append(reason(error))
            for action in reversed(undo):
                with suppress(Exception):
                    action()

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
            if peer in outcome.lost:
                continue
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
        results: list[dict[str, Any]] = []
        for peer in self._targets:
            result: dict[str, Any] = {"installed": False, "broken": True, "reason": "the result of a rank was not heard"}
            outcome.attempt(peer, partial(self._hear_result, peer, result))
            results.append(result)
        states, start = [], 0
        for size in self._sizes:
            own = results[start : start + size]
            start += size
            outcome.failures += [result["reason"] for result in own if not result["installed"]][:1]
            if all(result["installed"] for result in own):
                states.append(INSTALLED)
            else:
                states.append(KEPT if not any(result["installed"] or result.get("broken") for result in own) else IN_DOUBT)
        return states

    def _hear_result(self, peer: int, result: dict[str, Any]) -> None:
        told = self._transport.hear(peer).document
        result.clear()
        result.update(told)

    def _end(self, states: Sequence[str], version: Version, outcome: Outcome) -> str:
        """Let the engines answer again, unless they are in doubt; returns the version of those that have new weights."""
        for engine, state in zip(self._engines, states, strict=True):
            try:
                if state == INSTALLED:
                    version = (version() if callable(version) else version) or _next(engine.version())
                    engine.set_version(version)
                    engine.clear_cache()
                if state != IN_DOUBT:
                    engine.resume()
            except Exception as error:
                outcome.failures.append(reason(error))
        return version if isinstance(version, str) else ""

    def _wait(self, requests: Iterable[Future[None]], outcome: Outcome) -> None:
        """Wait for requests to the engines. After one that fails nobody knows whether the engine's update is still open."""
        for request in requests:
            try:
                request.result()
            except Exception as error:
                outcome.failures.append(reason(error))
                self.is_lost = True

    def _tell(self, peers: Iterable[int], document: dict[str, Any], outcome: Outcome) -> None:
        for peer in peers:
            outcome.attempt(peer, partial(self._transport.tell, peer, document))

    def _failed(self, outcome: Outcome, do: str) -> SystemRefusal:
        """The error of an update that failed, told to the other source ranks."""
        self.is_lost |= bool(outcome.lost)
        failed = _joined(outcome.failures)
        self._tell(self._others, {"failed": failed, "do": do, "is_lost": self.is_lost}, outcome)
        return dropped(failed, do)


def dropped(failed: str, do: str) -> SystemRefusal:
    """The error of an update that failed."""
    return SystemRefusal(f"the update failed: {failed}", do=do)


def _statement(engines: Sequence[EngineControl], states: Sequence[str]) -> str:
    """What the engines hold after an update that failed."""
    words = {
        INSTALLED: "holds the new weights and answers",
        KEPT: "holds the old weights and answers",
        IN_DOUBT: "may hold old and new weights, and stays paused until an update succeeds",
    }
    return ". ".join(f"{engine.name} {words[state]}" for engine, state in zip(engines, states, strict=True))


def _joined(failures: Sequence[str]) -> str:
    """The first failures: others follow from them."""
    return "; ".join([*dict.fromkeys(failure.rstrip(".") for failure in failures)][:2])


def _next(version: str) -> str:
    """One more than a version that is a number; 1 after any other."""
    return str(int(version) + 1) if version.isdecimal() else "1"
