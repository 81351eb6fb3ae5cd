"""The verb `push`: the weights of a checkpoint become those of running servers, without files between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from reshard.adapter.model_files import CONFIG
from reshard.engine.blocks import fingerprint_of_result
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.conversion import Conversion
from reshard.engine.events import event
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.recorded import recorded_fingerprint, with_late_comparison
from reshard.errors import RequestError, ReshardError, SystemRefusal, printable
from reshard.geometry.documents import document
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.live.agreement import check_same_model
from reshard.live.arrangement import LinkOptions
from reshard.live.engines.choice import server_control
from reshard.live.from_files.rank_streams import RankStreams
from reshard.live.from_files.running_engines import RunningEngines
from reshard.live.from_files.running_server import RunningServer, running_server
from reshard.live.from_files.staged_rank import StagedRank, staged_ranks
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import (
    EffortOptions,
    ModelOptions,
    OpenOptions,
    PathLike,
    RecipeOptions,
    SelectionOptions,
    checked_keywords,
    take,
)
from reshard.opening.open import open
from reshard.plans.digests import is_digest
from reshard.plans.plan import Plan
from reshard.plans.summary import DropSummary, drops
from reshard.requests.request import cast_of_server
from reshard.storage.claims import SourceChecks
from reshard.storage.trees import chain_of
from reshard.verbs.plan import plan

if TYPE_CHECKING:
    from reshard.live.arrangement import Arrangement
    from reshard.live.hello import Hello
    from reshard.live.session import Session
    from reshard.live.wire.line import Outcome
    from reshard.models.model import Model

_SECONDS = 300.0
_SLOWEST = 5e6
"""Bytes per second of a push that is waited for to its end."""


class PushOptions(ModelOptions, SelectionOptions, RecipeOptions, LinkOptions, EffortOptions, total=False):
    """Keywords of `push`. Sizes and format are those of the servers."""

    changes: bool
    """Send only what changed since what the servers hold: the checkpoint of `since`, or the base or a part of a chain of deltas. They keep
    what they get in the memory of their hosts, for the next push."""
    since: Checkpoint | PathLike | PushResult | None
    """The checkpoint that was pushed before, or what `push` has returned of it; implies `changes`."""


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


@checked_keywords
def push(
    source: Checkpoint | PathLike, server: str | Sequence[str], *, version: str | None = None, **options: Unpack[PushOptions]
) -> PushResult:
    """Send the weights of a checkpoint to a running server, or to several with the same parallel sizes, and let them answer with these.

    The servers are asked for their sizes; each byte of the source is read once, in constant memory. Requests that run are waited for.
    version: what the servers call the new weights (default: the fingerprint).

    Raises: RequestError if the checkpoint is of another model than a server's, or a server cannot take updates; SystemRefusal if the update
    was dropped, with what the servers hold. CheckpointError if the source is damaged: then the servers go on with their old weights.
    """
    given: dict[str, Any] = dict(options)
    effort = Effort(**take(given, EffortOptions))
    return planned_push(source, server, effort, **given).run(effort, version)


@value(eq=False)
class Base:
    """A checkpoint whose weights servers may hold."""

    path: str
    """Its path."""
    plan: Plan
    """The plan of a push of it."""
    fingerprint: str
    """The fingerprint of its weights as ranks would hold them."""


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
        return _Pushing(replace(self, notes=(*self.notes, *digests.notes())), effort, version).run()

    def changed_bytes(self, effort: Effort = NO_LIMITS) -> tuple[int, int]:
        """The bytes that would be sent to one replica, and those of all its weights. Both checkpoints are read and compared, if there is a
        base."""
        from reshard.live.wire.stream import StreamWriter

        staged = staged_ranks(self.plan)
        full = sum(each.nbytes for each in staged)
        if self.base is None:
            return full, full
        streams = RankStreams(((each, [StreamWriter(None, changes=True)]) for each in staged), has_held=True)
        destination = RunningEngines(self.servers[0].address, streams, effort, self.base.plan)
        for _ in Conversion(self.plan, destination, source_checksums=effort.source_checksums).run():
            pass
        return streams.nbytes, full


def planned_push(source: Checkpoint | PathLike, server: str | Sequence[str], effort: Effort = NO_LIMITS, **options: Any) -> PlannedPush:
    """What a push would do; nothing is sent. Takes the keywords of `push` but those of its effort. With `changes`, a base whose fingerprint
    was not recorded is read.

    Raises: RequestError if the servers cannot take updates, or do not have the same parallel sizes.
    """
    addresses = [server] if isinstance(server, str) else list(server)
    if not addresses:
        raise RequestError("there is no server to push to", do="Give an address, such as http://localhost:8000")
    servers = tuple(running_server(address) for address in addresses)
    _check_alike(servers)
    for each in servers:
        server_control(each.address, _SECONDS).ranks()
    about_model = take(options, OpenOptions)
    link: Any = take(options, LinkOptions)
    since, keeps = options.pop("since", None), options.pop("changes", False)
    checkpoint, notes = _opened(source, servers[0], about_model)
    _check_local_config(checkpoint, servers[0])
    sizes, asked = servers[0].parallel, options.pop("dtype", None)

    def planned(opened: Checkpoint) -> Plan:
        dtype = asked or cast_of_server(opened.index, servers[0].dtype)
        return plan(opened, to=servers[0].format, tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, dtype=dtype, **options)

    def base(of: Checkpoint | PathLike, fingerprint: str | None = None) -> Base:
        opened, _ = _opened(of, servers[0], about_model)
        found = planned(opened)
        return Base(opened.path, found, fingerprint or recorded_fingerprint(found) or fingerprint_of_result(found, effort).root)

    found = planned(checkpoint)
    keeps = keeps or since is not None
    is_expected = keeps and (since is not None or bool(checkpoint.deltas))
    held, reasons = _held(servers, found, _bases(checkpoint, since, base)) if is_expected else (None, ())
    return PlannedPush(checkpoint.path, found, servers, (*found.layout.notes, *notes, *reasons), keeps, held, link)


def _bases(checkpoint: Checkpoint, since: Checkpoint | PathLike | PushResult | None, base: Callable[..., Base]) -> Iterator[Base]:
    """The checkpoints whose weights the servers may hold: the one that was given, or what a chain of deltas was before."""
    if isinstance(since, PushResult):
        with suppress(ReshardError):  # a run removes its old steps
            yield base(since.source, since.fingerprint)
    elif since is not None:
        yield base(since)
    else:
        chain = chain_of(checkpoint.path) if checkpoint.deltas else ()
        yield from (base("+".join(chain[:length])) for length in range(len(chain) - 1, 0, -1))


def _held(servers: Sequence[RunningServer], found: Plan, bases: Iterator[Base]) -> tuple[Base | None, tuple[str, ...]]:
    """The checkpoint whose weights all servers hold, by the versions that they tell; or None, and a sentence that says why."""
    versions = {server_control(each.address, _SECONDS).version() for each in servers}
    told = ", ".join(sorted(printable(version)[:80] for version in versions))
    if not all(map(is_digest, versions)) or len(versions) > 1:
        return None, (f"all weights are sent: the servers tell the version {told}, which is not the fingerprint of one checkpoint",)
    others = []
    for base in bases:
        if base.fingerprint in versions and _targets(base.plan) == _targets(found):
            return base, ()
        others.append(f"{base.path} is {base.fingerprint}")
    return None, (f"all weights are sent: the servers hold {told}, and {others[0]}",) if others else ()


def _targets(found: Plan) -> dict[str, Any]:
    """By name, the element types and shapes of what is sent."""
    return {route.name: (route.target.dtype, route.target.shape) for route in found.routes}


def _check_alike(servers: Sequence[RunningServer]) -> None:
    """Raises RequestError if the servers need different plans."""
    first = servers[0]
    for other in servers[1:]:
        if (other.format, other.parallel, other.dtype) != (first.format, first.parallel, first.dtype):
            raise RequestError(
                f"it runs {other.format} on {other.parallel} in {other.dtype}, and {first.address} {first.format} on {first.parallel} in "
                f"{first.dtype}",
                where=other.address,
                why="One push has one plan",
                do="Push to them one after the other",
            )


def _opened(source: Checkpoint | PathLike, server: RunningServer, about_model: Mapping[str, Any]) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint, and notes. If it has no config, the server's counts, where it lies on this machine."""
    if isinstance(source, Checkpoint):
        return source, ()
    checkpoint = open(source, **about_model)
    folder = _folder_of(server)
    if checkpoint.model_files.config is not None or folder is None:
        return checkpoint, ()
    return open(source, **{**about_model, "model": folder}), (f"the config is that of the server's model, {folder}",)


def _folder_of(server: RunningServer) -> str | None:
    """The server's model, if it is a folder of this machine that has a config."""
    return server.model if server.model and os.path.isabs(server.model) and Path(server.model, CONFIG).is_file() else None


def _check_local_config(checkpoint: Checkpoint, server: RunningServer) -> None:
    """Compare the configs before anything is planned, where the server's model lies on this machine. Its ranks are asked later."""
    if (folder := _folder_of(server)) and checkpoint.model is not None:
        from reshard.adapter.model_files import find_model_files
        from reshard.storage.tar import open_tree

        _check_same_model(checkpoint.model, find_model_files(open_tree(folder)).config or {}, server.address)


def _check_same_model(model: Model | None, config: Mapping[str, Any], where: str) -> None:
    if model is not None:
        check_same_model("checkpoint", model.config, config, where, model.architecture)


class _Pushing:
    """One push, from the first connection to the servers on."""

    def __init__(self, planned: PlannedPush, effort: Effort, version: str | None) -> None:
        self._planned, self._plan, self._effort, self._version = planned, planned.plan, effort, version
        # A request to receive weights ends when all of them are there.
        seconds = max(_SECONDS, self._plan.totals().copied / _SLOWEST)
        self._servers = [server_control(each.address, seconds) for each in planned.servers]
        self._place = ", ".join(each.address for each in planned.servers)
        self._staged: tuple[StagedRank, ...] = ()
        self._targets: dict[tuple[int, int], list[int]] = {}
        self._stopped: BaseException | None = None
        """Why nothing more was sent, if the reason lies here."""
        self._notes: tuple[str, ...] = planned.notes
        self._checks = SourceChecks()
        self._base = planned.base
        """The checkpoint that all ranks hold."""
        self._fingerprint = ""

    def run(self) -> PushResult:
        from reshard.live.arrangement import Link
        from reshard.live.session import opened
        from reshard.live.trainers import Trainers

        link = Link(seconds=_SECONDS, name="reshard push", **self._planned.link)
        session = opened(lambda: self._servers, Trainers(), self._arranged, link)
        try:
            report = session.update(lambda: self._sent(session), lambda: None, lambda: self._version or self._fingerprint)
        except SystemRefusal as refusal:
            if self._stopped is None:
                raise
            if isinstance(self._stopped, SystemRefusal | RequestError):
                self._stopped.do = self._stopped.do or refusal.do
            raise self._stopped from None
        finally:
            session.close()
        sizes = self._planned.servers[0]
        event(
            "pushed",
            f"pushed {self._plan.source_files.root} to {self._place}: {report.nbytes:,} bytes in {report.seconds:.2f} s, "
            f"version {report.version}",
            servers=[each.address for each in self._planned.servers],
            bytes=report.nbytes,
            version=report.version,
            seconds=round(report.seconds, 3),
        )
        return PushResult(
            tuple(each.address for each in self._planned.servers),
            sizes.format,
            sizes.parallel,
            report.version,
            self._planned.source,
            self._fingerprint,
            report.nbytes,
            sum(each.nbytes * len(self._targets[each.pp_rank, each.tp_rank]) for each in self._staged),
            self._base.path if self._base else None,
            report.seconds,
            report.waiting_seconds,
            report.sending_seconds,
            drops(self._plan),
            self._notes,
            self._checks,
        )

    def _arranged(self, hellos: Sequence[Hello]) -> Arrangement:
        """What the ranks are answered: what their staging holds. Raises RequestError if one serves another model, or in other parts."""
        from reshard.live.arrangement import Arrangement, RankAnswer

        for hello in hellos:
            _check_same_model(self._plan.content.model, hello.config, self._place)
            self._check_degrees(hello)
        self._staged = staged_ranks(self._plan, frozenset().union(*(hello.others for hello in hellos)))
        by_rank = {(each.pp_rank, each.tp_rank): each for each in self._staged}
        for number, hello in enumerate(hellos):
            self._targets.setdefault(hello.position, []).append(number)
        if self._base and any(hello.holds != self._base.fingerprint for hello in hellos):
            self._notes += (f"all weights are sent: the servers have kept no copy of {self._base.path} for changes; they keep this one",)
            self._base = None
        since = self._base.fingerprint if self._base else ""

        def answer(number: int) -> RankAnswer:
            staged = by_rank[hellos[number].position]
            return RankAnswer(staged.targets, {}, None, staged.nbytes, True, changes=self._planned.keeps, since=since)

        return Arrangement(answer)

    def _check_degrees(self, hello: Hello) -> None:
        planned = self._planned.servers[0].parallel
        if (told := hello.parallel) != planned:
            raise RequestError(f"a rank says that the sizes are {told}, and the server {planned}", where=self._place, do="Push again")

    def _sent(self, session: Session) -> Outcome:
        """Send the weights. Whatever goes wrong here is kept, and the servers hear that nothing more comes: they must not wait."""
        from reshard.live.wire.line import Outcome
        from reshard.live.wire.stream import StreamWriter
        from reshard.live.wire.transport import ConnectionEnded

        def writers(staged: StagedRank) -> list[StreamWriter]:
            peers = map(session.members.target, self._targets[staged.pp_rank, staged.tp_rank])
            return [StreamWriter(session.transport, peer, verify=True, changes=self._planned.keeps) for peer in peers]

        streams = RankStreams(((each, writers(each)) for each in self._staged), has_held=self._base is not None)
        # The digests that the ranks compare say whether deltas have made what they should.
        held = with_late_comparison(self._base.plan) if self._base else None
        destination = RunningEngines(self._place, streams, self._effort, held)
        try:
            running = Conversion(self._plan, destination, source_checksums=self._effort.source_checksums)
            for done in running.run():
                self._effort.report(done.nbytes)
        except BaseException as error:  # Ctrl-C, too: the servers are to answer again
            self._stopped = None if isinstance(error, ConnectionEnded) else error
            streams.give_up()
            return Outcome(failures=[str(error) or type(error).__name__])
        assert running.fingerprint is not None
        self._notes += (*running.notes, *running.source_checks.notes())
        self._checks = running.source_checks
        self._fingerprint = running.fingerprint.root
        return Outcome(nbytes=streams.nbytes, fingerprint=self._fingerprint)
