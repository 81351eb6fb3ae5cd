"""reshard watch: convert every step of a run as soon as it is complete, or push it to running servers."""

from __future__ import annotations

from typing import Any

import click

from .. import options
from ..runs import show_events


@options.command(
    "watch",
    "reshard watch runs/7 --to vllm --tp 8 --into served/{step} --keep 3",
    "reshard watch runs/7 --to hf --into hf/{step} --all",
    "reshard watch runs/7 --push http://localhost:8000 --changes",
    "reshard watch runs/7 --delta --to hf --dtype bf16 --into kept/step-{step}",
)
@click.argument("run")
@click.option("--into", metavar="OUT/{step}", help="The folder of each output; {step} is the step's number.")
@click.option(
    "--push", multiple=True, metavar="SERVER", help="Send the newest step's weights to this running server, such as http://localhost:8000."
)
@click.option("--changes", is_flag=True, help="With --push: send only what changed since the step before; the servers keep a copy.")
@click.option("--delta", is_flag=True, help="Keep the run: full checkpoints now and then, and deltas between them.")
@options.full_every
@click.option("--encoding", type=click.Choice(["xor", "overwrite"]), help="With --delta: how deltas say what changed (default: xor).")
@click.option("--all", "once", is_flag=True, help="Convert what is complete now, and end.")
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep the outputs of the newest N steps.")
@click.option("--then", metavar="COMMAND", help="Run a shell command after each step; RESHARD_TARGET and RESHARD_STEP are set.")
@click.option("--component", "part", metavar="NAME", help="Which checkpoint of each step, such as actor, if a step has several.")
@click.option("--link-unchanged", is_flag=True, help="Hard-link files that are equal to those of the output before.")
@click.option("--poll", type=click.FloatRange(0.01), default=30.0, metavar="SECONDS", help="Look at the run so often (default: 30).")
@click.option(
    "--quiet-for",
    "quiet",
    type=click.FloatRange(0),
    default=60.0,
    metavar="SECONDS",
    help="Without a marker, a checkpoint is complete when nothing has changed for so long (default: 60).",
)
@options.target(required=False)
@options.selection("Convert")
@options.model
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per line for every event.")
def command(run: str, to: str | None, **given: Any) -> None:
    """Convert every step of RUN once, as soon as it is complete, and verify it; keep it as a delta; or push it to running servers.

    --to and --into convert each step to a format, into a folder of its own. --push sends the weights of the newest step to a server, as
    `reshard push` does, after that or instead of it. --delta keeps the run in the folder of --into, which is a run itself: --step
    chooses any of its steps, also one that is a delta.

    A step is complete when its marker is there: a tracker that names it or a later step (latest, latest_checkpointed_iteration.txt), or
    .metadata; without one, when nothing has changed in it for a while. The link `latest` beside the outputs points at the newest; in a
    store it is an object that holds its name. A restart goes on where it was; what was finished stands in reshard.watch.jsonl beside the
    outputs. The exit code is 1 with --all if a step could not be converted, or all steps still wait; with --delta, if a single one waits.
    """
    from reshard.verbs.watch import watch

    show_events(watch(run, to=to, **given))
