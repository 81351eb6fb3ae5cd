"""The verb `watch`: convert every step of a run once, or push it to running servers, as soon as it is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from reshard.errors import RequestError, ReshardError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable, value
from reshard.index.deltas import DeltaEncoding
from reshard.opening.chains import source_of
from reshard.opening.keywords import PathLike, PlanOptions, checked_keywords
from reshard.opening.run_folders import QUIET_SECONDS, Seen, Step, find_steps
from reshard.runs.local_outputs import LocalOutputs
from reshard.runs.outputs import LATEST, Outputs, WatchRecord
from reshard.storage.system_calls import is_url, local_path
from reshard.verbs.convert import convert, target_place
from reshard.verbs.plan import plan
from reshard.verbs.steps.happened import WatchEvent, among_newest, check_written, happened, run_command
from reshard.verbs.steps.kept import Kept, kept

if TYPE_CHECKING:
    from reshard.live.from_files.pushing import PushResult

_POLL_SECONDS = 30.0
# A step that cannot be converted is tried again after twice the time, up to this.
_LONGEST_PAUSE = 3600.0


class WatchOptions(PlanOptions, total=False):
    """Keywords of `watch`."""

    once: bool
    """Convert what is complete now, and end."""
    keep: int | None
    """Keep the outputs of the newest steps only, as many as this (default: all)."""
    then: str | None
    """A shell command to run after each step, with RESHARD_STEP, RESHARD_SOURCE and RESHARD_TARGET in its environment."""
    part: str | None
    """Which checkpoint of each step, such as "actor", if a step has several."""
    delta: bool
    """Keep the run in the folder of `into`: as a full checkpoint now and then, and deltas between them."""
    full_every: int
    """With `delta`: how many steps a full checkpoint begins, itself and the deltas after it."""
    encoding: DeltaEncoding
    """With `delta`: how deltas say what changed, "xor" or "overwrite"."""
    link_unchanged: bool
    """Hard-link files that are equal to those of the output before."""
    poll: float
    """Seconds between two looks at the run."""
    quiet: float
    """Seconds without a change after which a checkpoint without a marker counts as complete."""
    push: str | Sequence[str] | None
    """The address of a running server, or several, which get the weights of the newest step."""
    changes: bool
    """With `push`: send only what changed since the step that was pushed before. The servers keep a copy of what they get."""


@checked_keywords
def watch(run: PathLike, *, to: str | None = None, into: str | None = None, **options: Unpack[WatchOptions]) -> Iterator[WatchEvent]:
    """Convert every complete step of a run to the format `to`, verify it, and go on until interrupted. Each step is converted once, also
    across restarts. Yields what was done.

    With `delta`, keep the run in the folder of `into`: every `full_every`-th step as a full checkpoint in the format `to`, the others as
    deltas, each to the step before it. The folder is a run: `open(folder, step=4200)` opens any step.

    into: the folder of one output, with {step} for the step's number, such as OUT/{step}; and {part} for the part. Both it and the run
    may be URLs. push: servers that get the newest step, after it was converted, or without that if `into` is left out.

    Takes the keywords of `plan`. A step that cannot be converted is an event, and is tried again later. With `once`, the last event is
    "failed" if all steps still wait; with `delta`, if a single one does.

    Raises: RequestError if the run does not exist, or each step has several checkpoints and none is chosen; UnsupportedError for
    `link_unchanged` or `delta` in a store.
    """
    given: dict[str, Any] = dict(options)
    once, poll, quiet = given.pop("once", False), given.pop("poll", _POLL_SECONDS), given.pop("quiet", QUIET_SECONDS)
    is_kept = given.pop("delta", False)
    for name in () if is_kept else ("full_every", "encoding"):
        if given.pop(name, None) is not None:
            raise RequestError(f"`{name}=` is only for `delta=True`", do="Add `delta=True`, or leave it out")
    part, servers = given.pop("part", None), given.pop("push", None) or ()
    servers = (servers,) if isinstance(servers, str) else tuple(servers)
    if (changes := given.pop("changes", False)) and not servers:
        raise RequestError("`changes=` is only for `push=`", do="Add `push=` with a server's address, or leave it out")
    work = _kept(run, to, into, {**given, "push": servers}) if is_kept else _work(to, into, servers, given, changes=changes)
    seen = Seen()
    pauses: dict[str, tuple[float, float]] = {}
    waiting: dict[str, str] = {}
    while True:
        steps = _chosen(find_steps(run, quiet=quiet, seen=seen), part, into or "")
        for step in work.pending(steps):
            if not step.complete:
                if waiting.get(step.path) != step.completeness.reason:
                    waiting[step.path] = step.completeness.reason
                    yield work.event("waiting", step, step.completeness.reason if step.format else "no known format lies here yet")
                continue
            pause, until = pauses.get(step.path, (poll, 0.0))
            if time.monotonic() < until:
                continue
            try:
                yield from work.do(step, source_of(step, steps))
            except ReshardError as error:
                pauses[step.path] = min(2 * pause, _LONGEST_PAUSE), time.monotonic() + pause
                yield work.event("failed", step, str(error))
        if once:
            yield from _not_kept(work, steps, every=is_kept)
            return
        time.sleep(poll)


def _not_kept(work: Kept | _Work | _Pushes, steps: list[Step], *, every: bool) -> Iterator[WatchEvent]:
    """A failure if steps still wait when a watch ends: if a single one does where `every` step is to be kept, else if all of them do."""
    waiting = [step for step in work.pending(steps) if not step.complete]
    if waiting and (every or len(waiting) == len(steps)):
        first, are = waiting[0], "step is" if len(steps) == 1 else "steps are"
        reason = first.completeness.reason if first.format else "no known format lies here yet"
        do = "Run the command again once the step is complete"
        yield work.event("failed", first, f"{len(waiting)} of {len(steps)} {are} not done. Step {first.order} waits: {reason}. {do}")


def _kept(run: PathLike, to: str | None, into: str | None, given: dict[str, Any]) -> Kept:
    """Keeping the run. Raises: as `watch` does."""
    if into is None or to is None:
        name, example = ("into", "into=KEPT/step-{step}") if into is None else ("to", "to=hf")
        why = "The run is kept in a folder, with full checkpoints in a format"
        raise RequestError(f"`{name}=` is missing", why=why, do=f"Give for example `{example}`")
    if is_url(into):
        raise UnsupportedError("a run is kept in a local directory", where=into, do="Keep it on this machine, then copy the folder")
    folder, name = _pattern(into)
    return kept(run, to, local_path(folder), name, given)


def _work(to: str | None, into: str | None, servers: tuple[str, ...], given: dict[str, Any], *, changes: bool) -> _Work | _Pushes:
    """What is done with each step. Raises: as `watch` does."""
    if into is None:
        if not servers:
            raise RequestError("there is nothing to do with a step", do="Give `into=OUT/{step}` and `to=`, or `push=` a server's address")
        return _Pushes(servers, given.pop("then", None), _of_a_push({"to": to, **given}, refuse=True), changes)
    if to is None:
        raise RequestError("`to=` is missing", why="The steps are converted to a format", do="Give for example `to=hf`")
    folder, name = _pattern(into)
    link = given.pop("link_unchanged", False)
    if link and is_url(into):
        raise UnsupportedError(
            "`link_unchanged=True` needs outputs on a disk",
            where=into,
            why="Objects have no links, and copies of objects take as much room",
            do="Leave it out",
        )
    keep, then = given.pop("keep", None), given.pop("then", None)
    pushes = _Pushes(servers, None, _of_a_push(given), changes) if servers else None
    return _Work(to, _outputs(folder), name, keep, then, link, given, pushes)


def _of_a_push(given: dict[str, Any], *, refuse: bool = False) -> dict[str, Any]:
    """The keywords that `push` has, too. refuse: raise RequestError for others."""
    from reshard.verbs.push import PushOptions

    others = [name for name, said in given.items() if name not in PushOptions.__annotations__ and said not in (None, False, 1, "", ())]
    if refuse and others:
        raise RequestError(
            f"`{others[0]}=` does not go with `push=` without `into=`",
            why="No file is written, and the servers have the sizes and the format",
            do="Leave it out, or add `into=OUT/{step}`",
        )
    return {name: said for name, said in given.items() if name in PushOptions.__annotations__}


def _pattern(into: str) -> tuple[str, str]:
    """The folder of the outputs, and the name of one. Raises RequestError unless {step} stands in the last part of the path, and only
    there; UnsupportedError for a web server."""
    target_place(into)
    folder, slash, name = into.rstrip("/").rpartition("/")
    if "{step}" not in name or "{" in folder:
        raise RequestError(f"`into={into}`: the last part of the path needs {{step}}", do="Use for example `into=OUT/{step}`")
    return folder or (slash or "."), name


def _outputs(folder: str) -> Outputs:
    """The outputs in a folder, which need not exist yet."""
    if not is_url(folder):
        return LocalOutputs(local_path(folder))
    from reshard.runs.store_outputs import StoreOutputs

    return StoreOutputs(folder)


def _chosen(steps: list[Step], part: str | None, into: str) -> list[Step]:
    """The checkpoints that are converted. Raises RequestError if a step has several, and the outputs would have one name."""
    if part is not None:
        return [step for step in steps if step.part == part]
    parts = sorted({step.part for step in steps if step.format})
    if len(parts) > 1 and "{part}" not in into:
        named = ", ".join(name or "the folder itself" for name in parts)
        do = f"Choose one with `part=`, such as `part=` {parts[-1]}, or write {{part}} in `into=`"
        raise RequestError(f"the steps have several checkpoints: {named}", do=do, id="ambiguous")
    return steps


@value
class _Work:
    """What is done with each step."""

    to: str
    """The format."""
    outputs: Outputs
    """Where they are written."""
    pattern: str
    """The name of an output, with {step}."""
    keep: int | None
    """How many outputs are kept."""
    then: str | None
    """The command after each."""
    link: bool
    """Whether equal files are linked."""
    options: dict[str, Any]
    """The keywords of `plan`."""
    pushes: _Pushes | None = None
    """What is done with servers."""

    def name(self, step: Step) -> str:
        return self.pattern.replace("{step}", str(step.order)).replace("{part}", step.part.replace("/", "-") or "model")

    def event(self, name: str, step: Step, detail: str) -> WatchEvent:
        return happened(name, step, self.outputs.place(self.name(step)), detail)

    def pending(self, steps: list[Step]) -> list[Step]:
        """The steps that are to be done, in order: where only the newest are kept, no older ones."""
        record = WatchRecord(self.outputs)
        return [step for step in among_newest(steps, self.keep) if not record.is_finished(step)]

    def do(self, step: Step, source: str) -> Iterator[WatchEvent]:
        """Convert and verify a step; then everything that depends on it. A kill at any moment leaves it to be done again."""
        name = self.name(step)
        target = self.outputs.place(name)
        record = WatchRecord(self.outputs)
        self.outputs.prepare([finished.name for finished in record.finished()])
        planned = plan(source, to=self.to, **self.options)
        is_new = not convert(planned, target, if_changed=True).unchanged
        files = planned.layout.files
        yield self.event("converted", step, plural(len(files), "file") if is_new else "it was there already")
        there = self.outputs.names()
        earlier = [finished for finished in record.finished() if finished.number < step.order and finished.name in there]
        if self.link and earlier:
            count, nbytes = self.outputs.link_unchanged(name, earlier[-1].name)
            yield self.event("linked", step, f"{plural(count, 'file')}, {nbytes:,} bytes, as in {earlier[-1].name}")
        check_written(target)
        newer = any(finished.number > step.order and finished.name in there for finished in record.finished())
        if not newer and self.outputs.move_latest(name):
            yield self.event("latest", step, f"{self.outputs.place(LATEST)} points at it")
        if self.pushes and not newer:
            yield from self.pushes.push(step, source)
        if self.then:
            yield self.event("ran", step, run_command(self.then, step, source, target))
        record.add(step, name)
        yield self.event("finished", step, f"{sum(file.nbytes for file in files):,} bytes verified")
        for old in record.finished()[: -self.keep] if self.keep else ():
            if old.name in there and self.outputs.remove(old.name):
                yield self.event("removed", step, f"{self.outputs.place(old.name)}, which is older than the newest {self.keep}")


@mutable
class _Pushes:
    """What is done with each step if its weights go to servers and no file is written. What was pushed is known until the watch ends."""

    servers: tuple[str, ...]
    """The addresses."""
    then: str | None
    """The command after each."""
    options: dict[str, Any]
    """The keywords of `push`."""
    changes: bool
    """Whether only what changed since the step before is sent."""
    newest: int | None = None
    """The newest step that was pushed."""
    last: PushResult | None = None
    """What was pushed last."""

    def event(self, name: str, step: Step, detail: str) -> WatchEvent:
        return happened(name, step, ", ".join(self.servers), detail)

    def pending(self, steps: list[Step]) -> list[Step]:
        """The newest complete step, unless it was pushed, and the unfinished ones after it."""
        newest = max((step.order for step in steps if step.complete), default=None)
        later = (step for step in steps if self.newest is None or step.order > self.newest)
        return [step for step in later if newest is None or step.order >= newest]

    def do(self, step: Step, source: str) -> Iterator[WatchEvent]:
        yield from self.push(step, source)
        if self.then:
            yield self.event("ran", step, run_command(self.then, step, source, ", ".join(self.servers)))
        self.newest = step.order
        yield self.event("finished", step, "the servers answer with it")

    def push(self, step: Step, source: str) -> Iterator[WatchEvent]:
        from reshard.verbs.push import push

        since = self.last if self.changes else None
        self.last = push(source, self.servers, changes=self.changes, since=since, **self.options)
        yield self.event("pushed", step, self.last.what)
