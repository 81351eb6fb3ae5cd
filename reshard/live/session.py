"""Session: the ranks of a trainer, joined with the ranks of engines in one channel, update after update.

Source rank 0 leads (leading.py): it alone asks the engines, knows the plan, and decides. An update:

    source rank 0                             other source ranks            target ranks (target_rank.py)
    hears who is ready                        tell whether they are ready
    pauses the engines, starts the update                                   start
    "go", or why not                          hear it                       receive
    sends its ways                            send their ways               receive theirs
    hears all verdicts, tells the decision    tell a verdict, hear          tell a verdict, hear
    finishes the update, hears the results                                  finish: all install, or none; tell the result
    version, cache, resume; tells the end     hear the end

A session's methods are called by all source ranks at the same time.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

from reshard.engine.events import event
from reshard.errors import RequestError, SystemRefusal, printable
from reshard.live.arrangement import Arrangement, Link
from reshard.live.engines.control import EngineControl
from reshard.live.engines.watch import requested
from reshard.live.hello import Hello, check, check_numbers, held_to_json
from reshard.live.leading import Lead, UpdateReport, Version, dropped, of_engines
from reshard.live.plan.schedule import Schedule
from reshard.live.trainers import Trainers
from reshard.live.wire.channel import Joining, is_loopback, joined, led
from reshard.live.wire.exchange import Members
from reshard.live.wire.line import Outcome
from reshard.live.wire.meeting import ANY_ADDRESS, Guest, Meeting
from reshard.live.wire.secret import SECRET, TOKEN, Secret
from reshard.live.wire.transport import Transport, reason

_EVERY = 0.2
"""Seconds between two looks into the meeting."""
_PROCESS = secrets.token_hex(8)
"""Of this process and those that it forks."""
Arrange = Callable[[Sequence[Hello]], Arrangement]


class Session:
    """A source rank's end of the channel. Make it with `opened`."""

    def __init__(self, transport: Transport, guest: Guest, members: Members, sends: Schedule | None, lead: Lead | None) -> None:
        """sends: what this rank sends; None: a stream. lead: of source rank 0."""
        self.transport, self.members, self.sends = transport, members, sends
        self._guest, self._lead, self._is_lost = guest, lead, False
        weakref.finalize(self, guest.close)  # a session that nobody has any more owns no engine

    def update(self, send: Callable[[], Outcome], ready: Callable[[], None], version: Version = None) -> UpdateReport:
        """One update.

        send: sends this rank's part. ready: raises if it cannot. version: what the engines call the new weights.

        Raises: SystemRefusal if the update was dropped or did not end well, on every rank. The message says what the engines hold.
        """
        if self._is_lost:
            raise SystemRefusal("the connection to the engine ended in an earlier update", do="Make a new Sender")
        failures = []
        try:
            ready()
        except Exception as error:
            failures.append(reason(error))
        if self._lead is None:
            return self._follow(send, failures)
        try:
            return self._lead.update(send, failures, version)
        finally:
            if self._lead.is_lost:
                self._is_lost = True
                self.close()

    def close(self) -> None:
        """Leave the channel. The engines give their staging back, and go on with the weights that they have."""
        if self._lead is not None and not self._is_lost:
            self._lead.leave()
        self._is_lost = True
        for end in (self.transport, self._guest):
            with suppress(Exception):
                end.close()

    def _follow(self, send: Callable[[], Outcome], failures: list[str]) -> UpdateReport:
        """What another source rank than 0 does."""
        self._is_lost, over = True, Event()
        noted = requested(self._noted_end, over)
        try:
            self.transport.tell(0, {"failures": failures})
            end = self.transport.hear(0).document
            if end.get("go"):
                outcome = send()
                self.transport.tell(0, {"failures": outcome.failures, "nbytes": outcome.nbytes})
                self.transport.hear(0)
                end = self.transport.hear(0).document
        except Exception as error:
            over.set()
            if (told := noted.result()) is None:
                raise dropped(reason(error), "The engine's log says whether it has installed the update. Make a new Sender") from None
            end = told
        over.set()
        if end.get("is_lost"):
            with suppress(Exception):
                self._guest.ask(f"read {self.transport.rank}", "")
            self.close()
        self._is_lost = bool(end.get("is_lost"))
        if "failed" in end:
            raise dropped(end["failed"], end["do"])
        return UpdateReport(**{**end["report"], "fallbacks": tuple(end["report"]["fallbacks"])})

    def _noted_end(self, over: Event) -> dict[str, Any] | None:
        """How the update ends, if source rank 0 stops it; None if it does not until the update is over. Once it has stopped the update, or
        its process has ended, the connections of this rank are broken: nobody waits for what does not come."""
        with suppress(Exception):
            while (stop := self._guest.ask("stop")) is not None or not over.is_set():
                if stop is not None:
                    self.transport.close()
                    if (end := self._guest.ask("end")) is not None:
                        return dict(json.loads(end))
                time.sleep(_EVERY)
            return None
        self.transport.close()
        return None


def opened(engines: Callable[[], Sequence[EngineControl]], trainers: Trainers, arrange: Arrange, link: Link) -> Session:
    """Join the trainer's ranks with those of the engines, and check both sides against the plan.

    engines, arrange: used by source rank 0 alone. engines: finds them. arrange: from what all target ranks say of themselves to what they
    are answered. Where one raises, everybody is refused.

    Raises: RequestError or SystemRefusal on every rank; the engines go on as they are.
    """
    return _followed(trainers, link) if trainers.rank else _led(engines, trainers, arrange, link)


def _followed(trainers: Trainers, link: Link) -> Session:
    shared = trainers.share()
    if "refused" in shared:
        raise RequestError(shared["refused"])
    joining = Joining.of(shared)
    transport, guest = joined(joining, trainers.rank, joining.key(bytes.fromhex(shared[SECRET])), link.device)
    answer = transport.hear(0)
    if "refused" in answer.document:
        transport.close()
        guest.close()
        raise RequestError(answer.document["refused"])
    return Session(transport, guest, Members(joining.sources, joining.targets), Schedule.from_bytes(answer.content), None)


def _led(find: Callable[[], Sequence[EngineControl]], trainers: Trainers, arrange: Arrange, link: Link) -> Session:
    try:
        engines = find()
        sizes = [engine.ranks() for engine in engines]
        joining, meeting, secret = _met(engines, sizes, trainers.size, link)
    except Exception as error:
        trainers.share({"refused": reason(error)})
        raise
    trainers.share({**asdict(joining), SECRET: secret.content.hex()})
    # The engines' ranks are in the channel until they have heard the answer, and only then do the requests end.
    with ThreadPoolExecutor(len(engines)) as pool:
        offsets = accumulate(sizes, initial=0)
        requests = [
            pool.submit(engine.init, {**asdict(replace(joining, offset=offset)), SECRET: secret.told})
            for engine, offset in zip(engines, offsets, strict=False)
        ]

        def still_coming() -> None:
            for request in requests:
                if request.done():
                    request.result()
                    raise SystemRefusal(
                        "the engine's ranks did not join the channel",
                        do=f"Its log says why, in a line that begins with reshard: such as another version of reshard, or another {TOKEN}",
                    )

        try:
            transport, guest = led(joining, meeting.open(joining.key(secret.content)), still_coming, link.device)
        finally:
            secret.forget()
        members = Members(joining.sources, joining.targets)
        try:
            hellos, sends, fallbacks = _arranged(transport, members, sizes, arrange)
            for request in requests:
                request.result()
            for engine, own in zip(engines, of_engines(hellos, sizes), strict=True):
                if any(hello.is_open for hello in own):
                    engine.finish()  # a sender before has left an update open, which the engine's ranks have dropped
        except Exception:
            transport.close()
            guest.close()
            raise
    for before in sorted({hello.before for hello in hellos} - {""}):
        event("replaced", f"{printable(before)} had joined the engine before and has ended", owner=before)
    number = max(hello.number for hello in hellos)
    return Session(transport, guest, members, sends, Lead(transport, guest, members, engines, sizes, link, fallbacks, number))


def _met(engines: Sequence[EngineControl], sizes: Sequence[int], sources: int, link: Link) -> tuple[Joining, Meeting, Secret]:
    """What the ranks are told of the channel; where they will meet; and the secret, which has its way to the engines."""
    own = [engine.own_address() for engine in engines]
    host = link.host or (own[0] if link.bind is None or link.bind in ANY_ADDRESS else link.bind)
    meeting = Meeting(link.bind or host, link.port)
    joining = Joining(
        host,
        meeting.port,
        sources,
        sum(sizes),
        backend=link.backend,
        seconds=link.seconds,
        owner=f"{link.name or Path(sys.argv[0]).name or 'python'} (host {os.uname().nodename}, process {os.getpid()})",
        process=f"{_PROCESS} {os.getpid()}",
        take_over=link.take_over,
        channel=secrets.token_hex(8),
    )
    return joining, meeting, Secret.of(all(map(is_loopback, own)), link.trust_network)


def _arranged(
    transport: Transport, members: Members, sizes: Sequence[int], arrange: Arrange
) -> tuple[list[Hello], Schedule | None, tuple[str, ...]]:
    """Hear what the target ranks hold, and answer all ranks: what they receive and send, or a refusal. Returns also what is sent whole."""
    others, targets = range(1, members.sources), range(members.sources, members.sources + members.targets)
    outcome = Outcome()
    heard = [outcome.attempt(peer, partial(transport.hear, peer)) for peer in targets]
    try:
        if outcome.failures:
            raise SystemRefusal(outcome.failures[0])
        hellos = [Hello.of(said.document) for said in heard if said]
        for own in of_engines(hellos, sizes):
            check_numbers(own)
        arrangement = arrange(hellos)
        answers = [arrangement.answer(rank) for rank in range(members.targets)]
        for hello, answer in zip(hellos, answers, strict=True):
            check(hello, answer.targets, answer.fed, has_whole=bool(answer.beside.whole))
    except Exception as error:
        for peer in {*others, *targets} - outcome.lost:  # a rank that has not been heard does not hear
            with suppress(Exception):
                transport.tell(peer, {"refused": reason(error)})
        raise
    for peer, answer in zip(targets, answers, strict=True):
        about: dict[str, Any] = {"targets": held_to_json(answer.targets), "fills": dict(answer.fills), "beside": answer.beside.to_json()}
        content = answer.receives.to_bytes() if answer.receives is not None else b""
        about |= {"expected": answer.expected, "verify": answer.verify, "changes": answer.changes, "since": answer.since}
        transport.tell(peer, about, content)
    failures = [failure for peer in targets for failure in transport.hear(peer).document["failures"]]
    for peer in others:
        if failures:
            transport.tell(peer, {"refused": failures[0]})
        else:
            assert arrangement.sends is not None, "a stream has a single sender"
            transport.tell(peer, {}, arrangement.sends(peer).to_bytes())
    if failures:
        raise SystemRefusal(failures[0], where="a rank of the engine")
    fallbacks = dict.fromkeys(held.name for answer in answers for held in answer.beside.whole)
    return hellos, None if arrangement.sends is None else arrangement.sends(0), tuple(fallbacks)
