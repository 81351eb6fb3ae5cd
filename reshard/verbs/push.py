"""The verb `push`: the weights of a checkpoint become those of running servers, without files between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Unpack

from reshard.adapter.model_files import find_model_files
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.errors import ReshardError
from reshard.live.from_files.pushing import Base, PlannedPush, PushResult, base_of_servers, check_serves
from reshard.live.from_files.running_server import RunningServer, running_servers
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import (
    EffortOptions,
    LinkOptions,
    ModelOptions,
    OpenOptions,
    PathLike,
    RecipeOptions,
    SelectionOptions,
    checked_keywords,
    take,
)
from reshard.opening.open import open
from reshard.plans.plan import Plan
from reshard.requests.request import cast_of_server
from reshard.storage.tar import open_tree
from reshard.storage.trees import chain_of
from reshard.verbs.plan import plan


class PushOptions(ModelOptions, SelectionOptions, RecipeOptions, LinkOptions, EffortOptions, total=False):
    """Keywords of `push`. Sizes and format are those of the servers."""

    changes: bool
    """Send only what changed since what the servers hold: the checkpoint of `since`, or the base or a part of a chain of deltas. They keep
    what they get in the memory of their hosts, for the next push."""
    since: Checkpoint | PathLike | PushResult | None
    """The checkpoint that was pushed before, or what `push` has returned of it; implies `changes`."""


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
    effort = Effort.of(take(given, EffortOptions))
    return planned_push(source, server, effort, **given).run(effort, version)


def planned_push(source: Checkpoint | PathLike, server: str | Sequence[str], effort: Effort = NO_LIMITS, **options: Any) -> PlannedPush:
    """What a push would do; nothing is sent. Takes the keywords of `push` except those of its effort. With `changes`, a base whose
    fingerprint was not recorded is read.

    Raises: RequestError if the servers cannot take updates, or do not have the same parallel sizes.
    """
    servers = running_servers([server] if isinstance(server, str) else server)
    first, sizes = servers[0], servers[0].parallel
    about_model = take(options, OpenOptions)
    link: Any = take(options, LinkOptions)
    since, keeps, dtype = (options.pop(name, None) for name in ("since", "changes", "dtype"))

    def planned(opened: Checkpoint) -> Plan:
        cast = dtype or cast_of_server(opened.index, first.dtype)
        return plan(opened, to=first.format, tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, dtype=cast, **options)

    def base(of: Checkpoint | PathLike, fingerprint: str | None = None) -> Base:
        opened, _ = _opened(of, first, about_model)
        return Base.of(opened.path, planned(opened), fingerprint, effort)

    checkpoint, notes = _opened(source, first, about_model)
    if first.folder and checkpoint.model is not None:  # before anything is planned; the ranks are asked later
        check_serves(checkpoint.model, find_model_files(open_tree(first.folder)).config or {}, first.address)
    proven = planned(checkpoint)
    held: Base | None = None
    reasons: tuple[str, ...] = ()
    if since is not None or (keeps and checkpoint.deltas):
        held, reasons = base_of_servers(servers, proven, _bases(checkpoint, since, base))
    notes = (*proven.layout.notes, *notes, *reasons)
    return PlannedPush(checkpoint.path, proven, servers, notes, bool(keeps) or since is not None, held, link)


def _opened(source: Checkpoint | PathLike, server: RunningServer, about_model: Mapping[str, Any]) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint, and notes. If it has no config, the server's counts, where it lies on this machine."""
    if isinstance(source, Checkpoint):
        return source, ()
    checkpoint = open(source, **about_model)
    if checkpoint.model_files.config is not None or server.folder is None:
        return checkpoint, ()
    return open(source, **{**about_model, "model": server.folder}), (f"the config is that of the server's model, {server.folder}",)


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
