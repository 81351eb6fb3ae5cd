"""reshard push: the weights of a checkpoint into a running server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import nbytes_text, plural
from reshard.opening.keywords import LinkOptions, RecipeOptions, SelectionOptions
from reshard.pages.sections import Facts, Section

from .. import options
from ..plans import plan_document
from ..progress import working
from ..replies import Reply

if TYPE_CHECKING:
    from reshard.engine.pool import Effort
    from reshard.live.from_files.pushing import PlannedPush, PushResult
    from reshard.plans.plan import Plan


@options.command(
    "push",
    "reshard push step-1000 http://localhost:8000 --model llama-3-8b",
    "reshard push step-1000 http://localhost:8000 --dry-run",
    "reshard push step-1000 http://host-1:8000 http://host-2:8000",
    "reshard push step-2000 http://localhost:8000 --since step-1000",
    "reshard push lora http://localhost:8000 --adapter --name tutor",
)
@options.checkpoint("source")
@click.argument("servers", nargs=-1, required=True, metavar="SERVER...")
@options.keywords(SelectionOptions, "weights", "strip_prefix", "root", "drop_unknown", section=options.SELECTION, verb="Push")
@options.keywords(RecipeOptions, section=options.TARGET)
@options.option(
    "--set-version",
    "version",
    section=options.TARGET,
    metavar="TEXT",
    help="What the servers call the new weights (default: the checkpoint's fingerprint, which `reshard verify` compares).",
)
@options.switch(
    "--changes", options.TARGET, "Send what changed since the base of a chain of deltas; the servers keep a copy for the next push."
)
@options.option("--since", section=options.TARGET, metavar="CKPT", help="Likewise, since this checkpoint, which was pushed before.")
@options.switch("--adapter", options.TARGET, "Send the LoRA adapter alone, as one that requests ask for by name.")
@options.option("--name", section=options.TARGET, metavar="NAME", help="With --adapter: its name (default: adapter).")
@options.option("--shared-dir", section=options.TARGET, metavar="DIR", help="With --adapter: a folder that the server sees.")
@options.option("--keep", section=options.TARGET, type=click.IntRange(1), metavar="N", help="With --adapter: versions that stay loaded.")
@options.keywords(LinkOptions, section=options.TARGET)
@options.format_name
@options.model
@options.switch("--dry-run", options.OUTPUT, "Ask the servers and show the proven plan; send nothing.")
@options.effort
@options.summary_or_full
def command(source: str, servers: tuple[str, ...], dry_run: bool, full: bool, **given: Any) -> Reply:
    """Send the weights of SOURCE to the running servers SERVER..., such as http://localhost:8000, which answer with them from then on.

    SOURCE may have any format. It is laid out for the servers' parallel sizes and element type, each byte is read once, and no file is
    written. The servers wait for requests that run, take all weights or none, and clear their prefix caches.

    With --since or --changes, only the values that differ travel, with their positions. Servers that hold other weights than the base, or
    have kept no copy of it, get all weights.

    With --adapter, SOURCE is a LoRA adapter, or a training step that holds one. It alone is sent, and requests ask for it by NAME@ and 12
    digits of its fingerprint (of SGLang for BASE:NAME@ and these). vLLM takes it if it was started with
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, SGLang with --enable-lora.

    vLLM takes weights if it was started with VLLM_SERVER_DEV_MODE=1 in its environment and --weight-transfer-config '{"backend":
    "reshard"}', and reshard is installed beside it. This command needs torch.
    """
    from reshard.engine.pool import Effort
    from reshard.verbs.push import planned_push

    of_adapter = {name: given.pop(name) for name in ("name", "shared_dir", "keep")}
    if given.pop("adapter"):
        return _push_adapter(source, servers, {**given, "dry_run": dry_run}, of_adapter)
    if unused := next((name for name, value in of_adapter.items() if value is not None), None):
        raise click.UsageError(f"--{unused.replace('_', '-')} has a meaning only with --adapter")
    effort = {name: given.pop(name) for name in ("workers", "memory", "source_checksums", "verify_source", "show_progress")}
    given["port"] = given["port"] or 0
    version, limits = given.pop("version"), Effort(effort["workers"], effort["memory"], source_checksums=effort["source_checksums"])
    planned = planned_push(source, servers, limits, **given)
    if dry_run:
        return Reply(partial(plan_document, planned.plan, full=full), _planned(planned, limits))
    with working("push", planned.total, effort) as keywords:
        result = planned.run(Effort.of(keywords), version)
    made = {**result.to_json(), "plan": plan_document(planned.plan, full=True)} if full else result.to_json()
    return Reply(made, _pushed(result, planned.plan), brief=True)


def _push_adapter(source: str, servers: tuple[str, ...], given: dict[str, Any], of_adapter: dict[str, Any]) -> Reply:
    """Send an adapter alone. Raises click.UsageError for an option that has no meaning with it."""
    from reshard.opening.keywords import OpenOptions
    from reshard.verbs.serve.push_adapter import push_adapter

    opened = {name: given.pop(name) for name in list(given) if name in OpenOptions.__annotations__}
    no_meaning = ("version", "changes", "since", "dry_run", *SelectionOptions.__annotations__, *RecipeOptions.__annotations__)
    if unused := next((name for name in no_meaning if given.get(name)), None):
        raise click.UsageError(f"--{unused.replace('_', '-')} has no meaning with --adapter")
    if len(servers) > 1:
        raise click.UsageError("with --adapter one server is given")
    chosen = {name: value for name, value in {**opened, **of_adapter}.items() if value is not None}
    result = push_adapter(source, servers[0], **chosen)
    unloaded = f"; unloaded {', '.join(result.unloaded)}" if result.unloaded else ""
    sent = f"{result.server}: {nbytes_text(result.nbytes)} in {result.seconds:.1f} s, adapter {result.adapter}{unloaded}"
    return Reply(result.to_json(), [sent, Facts([("folder", result.folder), ("note", result.notes)])])


def _planned(planned: PlannedPush, effort: Effort) -> Iterator[Section]:
    """What would be sent, and what is cast or left out on the way."""
    from reshard.pages.checkpoints import dropped_facts
    from reshard.pages.plans import CHECKED, cast_facts

    plan, totals = planned.plan, planned.plan.totals()
    for server in planned.servers:
        replicas = f", {plural(server.replicas, 'replica')}" if server.replicas > 1 else ""
        yield f"{plan.source.format} -> {server.address}: {server.format} on {server.parallel}{replicas}, {server.dtype or 'as stored'}"
    changes, cheaper = "", ""
    if planned.base:
        changed, full = planned.changed_bytes(effort)
        changes = f"{nbytes_text(changed)} of {nbytes_text(full)} since {planned.base.path}, if the ranks have kept it"
        if 2 * changed > full:
            cheaper = "a full update is cheaper, because it reads one checkpoint: leave out --changes and --since"
    yield Facts(
        [
            ("read", f"{nbytes_text(totals.read)}, {plural(totals.tensors, 'tensor')}"),
            ("send", f"{nbytes_text(totals.copied)} to {plural(len(plan.layout.files), 'rank')} of each replica"),
            ("changes", changes),
            ("note", cheaper),
            *cast_facts(plan),
            *dropped_facts(plan.drops),
            ("note", planned.notes),
            ("checked", f"every byte of every rank {CHECKED}"),
        ]
    )


def _pushed(result: PushResult, plan: Plan) -> Iterator[Section]:
    """What was sent, what the servers hold now, and what was left out."""
    from reshard.pages.checkpoints import dropped_facts

    rate = nbytes_text(int(result.nbytes / max(result.sending_seconds, 1e-9)))
    of_all = f" of {nbytes_text(result.full_nbytes)}, changed since {result.since}," if result.since else ""
    sent = f"{nbytes_text(result.nbytes)}{of_all} in {result.seconds:.1f} s ({rate}/s)"
    yield f"{', '.join(result.servers)}: {sent}, version {result.version}"
    yield Facts([("note", result.notes), *dropped_facts(plan.drops)])
