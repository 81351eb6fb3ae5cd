"""PlannedPush: a checkpoint that goes to running servers, planned; PushResult: what was sent.

plan as if files were written -> the ranks of the servers join a channel, and are checked against the plan (session.py)
                              -> the blocks of the plan into the streams of all ranks (running_engines.py)
                              -> the ranks agree, and install what came
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from reshard.engine.blocks import fingerprint_of_result
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.conversion import Conversion
from reshard.engine.events import event
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.recorded import recorded_fingerprint, with_late_comparison
from reshard.errors import RequestError, SystemRefusal, printable
from reshard.geometry.documents import document
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.live.agreement import check_same_model
from reshard.live.arrangement import Arrangement, Link, RankAnswer
from reshard.live.engines.choice import server_control
from reshard.live.from_files.rank_streams import RankStreams
from reshard.live.from_files.running_engines import RunningEngines
from reshard.live.from_files.running_server import RunningServer
from reshard.live.from_files.staged_rank import StagedRank, staged_ranks
from reshard.live.hello import Hello
from reshard.live.session import Session, opened
from reshard.live.trainers import Trainers
from reshard.live.wire.line import Outcome
from reshard.live.wire.stream import StreamWriter
from reshard.live.wire.transport import SECONDS, ConnectionEnded
from reshard.models.model import Model
from reshard.opening.keywords import LinkOptions
from reshard.plans.digests import is_digest
from reshard.plans.plan import Plan
from reshard.plans.summary import DropSummary, drops
from reshard.storage.claims import SourceChecks

_SLOWEST = 5e6
"""Bytes per second of a push that is waited for to its end."""


@value
class PushResult:
    """What a push has sent."""

    JSON = (
        "servers format parallel version fingerprint bytes=nbytes full_bytes=full_nbytes since seconds waiting_seconds sending_seconds "
        "dropped notes source_checks"
    )

    servers: tuple[str, ...]
    """The addresses of the servers."""
    format: str
    """The format whose form their ranks take."""
    parallel: Parallel
    """The parallel sizes of each."""
    version: str
    """The version that the servers tell now: the fingerprint of the weights, unless another one was given."""
    source: str
    """The checkpoint."""
    fingerprint: str
    """The fingerprint of the weights as the servers' ranks hold them."""
    nbytes: int
    """The bytes of weights that were sent to all ranks."""
    full_nbytes: int
    """The bytes of all weights of all ranks, which travel if it is not known what they hold."""
    since: str | None
    """The checkpoint since which changes were sent; None: all weights were."""
    seconds: float
    """From the pause of the servers until they answered again."""
    waiting_seconds: float
    """The part of it in which the servers waited for requests that ran."""
    sending_seconds: float
    """The part of it in which weights were read and sent."""
    dropped: tuple[DropSummary, ...] = ()
    """What was left out, by reason and kind."""
    notes: tuple[str, ...] = ()
    """Remarks about what was sent."""
    source_checks: SourceChecks = SourceChecks()
    """What of the source was compared with the checksums that its files hold."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        sizes = {"tp": self.parallel.tp, "pp": self.parallel.pp, "ep": self.parallel.ep}
        seconds = {name: round(getattr(self, name), 3) for name in ("seconds", "waiting_seconds", "sending_seconds")}
        return document(self, parallel=sizes, **seconds)

    @property
    def what(self) -> str:
        """What was sent, in words."""
        of_all = f" of {self.full_nbytes:,}, changed since {self.since}," if self.since else ""
        return f"{self.nbytes:,} bytes{of_all} in {self.seconds:.1f} s, version {self.version}"

    def __str__(self) -> str:
        return f"{', '.join(self.servers)}: {self.what}"


@value(eq=False)
class Base:
    """A checkpoint whose weights servers may hold."""

    path: str
    """Its path."""
    plan: Plan
    """The plan of a push of it."""
    fingerprint: str
    """The fingerprint of its weights as ranks would hold them."""

    @staticmethod
    def of(path: str, plan: Plan, fingerprint: str | None, effort: Effort) -> Base:
        """A checkpoint with the fingerprint that is known of it, or was recorded; otherwise its weights are read."""
        return Base(path, plan, fingerprint or recorded_fingerprint(plan) or fingerprint_of_result(plan, effort).root)


@value(eq=False)
class PlannedPush:
    """A push that has not begun: what goes where."""

    source: str
    """The checkpoint."""
    plan: Plan
    """The plan, as if files were written for the servers."""
    servers: tuple[RunningServer, ...]
    """The servers."""
    notes: tuple[str, ...] = ()
    """Remarks about the push."""
    keeps: bool = False
    """Whether the servers keep what they get, for the changes of the next push."""
    base: Base | None = None
    """The checkpoint that the servers hold, by the version that they tell, if only changes are to be sent."""
    link: LinkOptions = field(default_factory=LinkOptions)
    """How the servers' ranks are joined."""

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(route.target.nbytes for route in self.plan.routes)

    def run(self, effort: Effort = NO_LIMITS, version: str | None = None) -> PushResult:
        """Send the weights. Raises: as `push` does."""
        digests = check_digests(effort, (self.plan.source_files, self.plan.source.tensors))
        return _Pushing(self, effort).run(version, digests.notes())

    def changed_bytes(self, effort: Effort = NO_LIMITS) -> tuple[int, int]:
        """The bytes that would be sent to one replica, and those of all its weights. Both checkpoints are read and compared, if there is a
        base."""
        staged = staged_ranks(self.plan)
        full = sum(rank.nbytes for rank in staged)
        if self.base is None:
            return full, full
        streams = RankStreams(((rank, [StreamWriter(None, changes=True)]) for rank in staged), has_held=True)
        destination = RunningEngines(self.servers[0].address, streams, effort, self.base.plan)
        for _ in Conversion(self.plan, destination, source_checksums=effort.source_checksums).run():
            pass
        return streams.nbytes, full


class _Pushing:
    """One push, from the first connection to the servers on."""

    def __init__(self, planned: PlannedPush, effort: Effort) -> None:
        self._planned, self._plan, self._effort = planned, planned.plan, effort
        self._addresses = tuple(server.address for server in planned.servers)
        self._place = ", ".join(self._addresses)
        self._ranks: tuple[tuple[StagedRank, list[int]], ...] = ()
        """The ranks of one replica, with the numbers of the target ranks that hold the same."""
        self._base, self._notes = planned.base, planned.notes
        """The checkpoint that all ranks hold."""
        self._stopped: BaseException | None = None
        """Why nothing more was sent, if the reason lies here."""

    def run(self, version: str | None, about_digests: Iterable[str]) -> PushResult:
        # A request to receive weights ends when all of them are there.
        seconds = max(SECONDS, self._plan.totals().copied / _SLOWEST)
        engines = [server_control(address, seconds) for address in self._addresses]
        link = Link(seconds=SECONDS, name="reshard push", **self._planned.link)
        self._notes += tuple(about_digests)
        session = opened(lambda: engines, Trainers(), self._arranged, link)
        try:
            conversion, streams = self._conversion(session)
            report = session.update(lambda: self._sent(conversion, streams), lambda: None, lambda: version or _root(conversion))
        except SystemRefusal as refusal:
            if self._stopped is None:
                raise
            if isinstance(self._stopped, SystemRefusal | RequestError):
                self._stopped.do = self._stopped.do or refusal.do
            raise self._stopped from None
        finally:
            session.close()
        event(
            "pushed",
            f"pushed {self._plan.source_files.root} to {self._place}: {report.nbytes:,} bytes in {report.seconds:.2f} s, "
            f"version {report.version}",
            servers=list(self._addresses),
            bytes=report.nbytes,
            version=report.version,
            seconds=round(report.seconds, 3),
        )
        return PushResult(
            self._addresses,
            self._planned.servers[0].format,
            self._planned.servers[0].parallel,
            report.version,
            self._planned.source,
            _root(conversion),
            report.nbytes,
            sum(staged.nbytes * len(targets) for staged, targets in self._ranks),
            self._base.path if self._base else None,
            report.seconds,
            report.waiting_seconds,
            report.sending_seconds,
            drops(self._plan),
            (*self._notes, *conversion.notes, *conversion.source_checks.notes()),
            conversion.source_checks,
        )

    def _arranged(self, hellos: Sequence[Hello]) -> Arrangement:
        """What the ranks are answered: what their staging holds. Raises RequestError if one serves another model, or in other parts."""
        sizes = self._planned.servers[0].parallel
        for hello in hellos:
            check_serves(self._plan.content.model, hello.config, self._place)
            if hello.parallel != sizes:
                told = f"a rank says that the sizes are {hello.parallel}, and the server {sizes}"
                raise RequestError(told, where=self._place, do="Push again")
        staged = {rank.position: rank for rank in staged_ranks(self._plan, frozenset().union(*(hello.others for hello in hellos)))}
        positions = [hello.position for hello in hellos]
        self._ranks = tuple((rank, [i for i, own in enumerate(positions) if own == position]) for position, rank in staged.items())
        if self._base and any(hello.holds != self._base.fingerprint for hello in hellos):
            self._notes += (f"all weights are sent: the servers have kept no copy of {self._base.path} for changes; they keep this one",)
            self._base = None
        since = self._base.fingerprint if self._base else ""

        def answer(number: int) -> RankAnswer:
            rank = staged[positions[number]]
            return RankAnswer(rank.targets, {}, None, rank.nbytes, True, changes=self._planned.keeps, since=since)

        return Arrangement(answer)

    def _conversion(self, session: Session) -> tuple[Conversion, RankStreams]:
        """What writes the weights into the streams to all ranks, and the streams."""

        def writers(targets: Iterable[int]) -> list[StreamWriter]:
            peers = map(session.members.target, targets)
            return [StreamWriter(session.transport, peer, verify=True, changes=self._planned.keeps) for peer in peers]

        streams = RankStreams(((staged, writers(targets)) for staged, targets in self._ranks), has_held=self._base is not None)
        # The digests that the ranks compare say whether deltas have made what they should.
        held = with_late_comparison(self._base.plan) if self._base else None
        destination = RunningEngines(self._place, streams, self._effort, held)
        return Conversion(self._plan, destination, source_checksums=self._effort.source_checksums), streams

    def _sent(self, conversion: Conversion, streams: RankStreams) -> Outcome:
        """Send the weights. Whatever goes wrong here is kept, and the servers hear that nothing more comes: they must not wait."""
        try:
            for done in conversion.run():
                self._effort.report(done.nbytes)
        except BaseException as error:  # also Ctrl-C: the servers are to answer again
            self._stopped = None if isinstance(error, ConnectionEnded) else error
            streams.give_up()
            return Outcome(failures=[str(error) or type(error).__name__])
        return Outcome(nbytes=streams.nbytes, fingerprint=_root(conversion))


def _root(conversion: Conversion) -> str:
    """The fingerprint of what was written; empty if not everything was."""
    return conversion.fingerprint.root if conversion.fingerprint else ""


def check_serves(model: Model | None, config: Mapping[str, Any], where: str) -> None:
    """Raises RequestError, naming the keys, if a server's config gives the checkpoint's model another layout. None: that is not known."""
    if model is not None:
        check_same_model("checkpoint", model.config, config, where, model.architecture)


def base_of_servers(servers: Sequence[RunningServer], plan: Plan, bases: Iterable[Base]) -> tuple[Base | None, tuple[str, ...]]:
    """The checkpoint whose weights all servers hold, by the versions that they tell; or None, and a sentence that says why. plan: what is
    sent to them now."""
    versions = {server_control(server.address, SECONDS).version() for server in servers}
    told = ", ".join(sorted(printable(version)[:80] for version in versions))
    if not all(map(is_digest, versions)) or len(versions) > 1:
        return None, (f"all weights are sent: the servers tell the version {told}, which is not the fingerprint of one checkpoint",)
    others = []
    for base in bases:
        if base.fingerprint in versions and _targets(base.plan) == _targets(plan):
            return base, ()
        others.append(f"{base.path} is {base.fingerprint}")
    return None, (f"all weights are sent: the servers hold {told}, and {others[0]}",) if others else ()


def _targets(plan: Plan) -> dict[str, object]:
    """By name, the element types and shapes of what is sent."""
    return {route.name: (route.target.dtype, route.target.shape) for route in plan.routes}
