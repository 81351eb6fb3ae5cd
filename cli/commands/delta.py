"""reshard delta: write what changed between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import nbytes_text
from reshard.pages.sections import Facts, Section

from .. import options
from ..progress import weight_bytes, working
from ..replies import Reply
from ..runs import show_events
from ..tables import fingerprint_text

if TYPE_CHECKING:
    from reshard.verbs.delta import DeltaResult


@options.command(
    "delta",
    "reshard delta step-1000 step-1100 delta-1100",
    "reshard delta step-1000+delta-1100 step-1200 delta-1200",
    "reshard delta hf-model trainer/global_step_100 delta --encoding overwrite --cast",
    "reshard delta --of runs/7 kept --dtype bf16 --full-every 20",
)
@click.argument("places", nargs=-1, required=True, metavar="[BASE NEW] TARGET")
@click.option("--of", "run", metavar="RUN", help="Keep every step of this run in TARGET: full checkpoints, and deltas between them.")
@options.full_every
@click.option("--to", metavar="FORMAT", help="With --of: the format of the full checkpoints (default: hf).")
@click.option("--dtype", metavar="DTYPE", help="With --of: cast floating-point weights: bf16, fp16 ...")
@click.option("--component", "part", metavar="NAME", help="With --of: which checkpoint of each step, such as actor.")
@click.option(
    "--encoding",
    type=click.Choice(["xor", "overwrite"]),
    default="xor",
    show_default=True,
    help="Differences of all bytes, or positions and new bytes, which may be applied twice.",
)
@click.option("--cast", is_flag=True, help="Where element types differ, cast NEW's values to BASE's.")
@options.model
@options.effort
def command(places: tuple[str, ...], run: str | None, encoding: Any, cast: bool, **given: Any) -> Reply | None:
    """Write what changed from the checkpoint BASE to NEW into the directory TARGET. They may have any formats and parallel sizes.

    --of RUN keeps a whole run in TARGET: the first step and every N-th one as a full checkpoint, the others as deltas to the step before.
    It does what --delta of `reshard watch` does with --all, and prints its events. TARGET is a run folder: `--step 4200` chooses any of its
    steps in every command. Run again, it goes on with the steps that are new. The exit code is 1 if a step is not kept, also because it
    may still be written.

    The weights are compared under their canonical names. TARGET has the form that slime, miles and ModelExpress read: one zstd frame of
    each changed tensor in safetensors files, with an index. The index holds the fingerprints of both checkpoints, so that `reshard apply`
    refuses another base.
    """
    import reshard
    from reshard.opening.keywords import EffortOptions, ModelOptions, usual_values

    usual = usual_values(EffortOptions)
    of_run = {name: given.pop(name) for name in ("full_every", "to", "dtype", "part")}
    wrong = {name: given[name] for name in EffortOptions.__annotations__ if name in given} if run is not None else of_run
    if unfit := next((name for name, value in wrong.items() if value != usual.get(name)), None):
        when = "has no meaning with" if run is not None else "has a meaning only with"
        raise click.UsageError(f"--{unfit.replace('_', '-')} {when} --of", click.get_current_context())
    if len(places) != (3 if run is None else 1):
        expected = "BASE NEW TARGET" if run is None else "TARGET alone"
        raise click.UsageError(f"{len(places)} paths are given, {expected} are expected", click.get_current_context())
    if run is not None:
        into = os.path.join(places[0], "step-{step}")
        of_run |= {"to": of_run["to"] or "hf", **options.take(given, ModelOptions)}
        show_events(reshard.watch(run, into=into, delta=True, once=True, encoding=encoding, **of_run))
        return None
    base, new, target = places
    from reshard.opening.choice import SeveralCheckpoints
    from reshard.opening.open import open_both

    about_model = options.take(given, ModelOptions)
    try:
        a, b = open_both(base, new, **about_model)
    except SeveralCheckpoints as error:  # BASE and NEW are often two steps of one run, so no option chooses one
        error.do = f"Give the path of one, such as {error.steps[-1].path}; --of RUN keeps all"
        raise
    with working("delta", weight_bytes(b), given) as effort:
        result = reshard.delta(a, b, target, encoding=encoding, cast=cast, **effort)
    return Reply(result.to_json(), _sections(result))


def _sections(result: DeltaResult) -> Iterator[Section]:
    """How much changed, and how much smaller the delta is."""
    share = result.changed_elements / max(1, result.elements)
    smaller = f", {result.checkpoint_bytes / result.nbytes:,.0f} times smaller" if 2 * result.nbytes < result.checkpoint_bytes else ""
    yield f"{result.path}: version {result.version} of {result.base_version}, {result.encoding}"
    yield Facts(
        [
            ("changed", f"{result.changed_tensors:,} of {result.tensors:,} tensors, {result.changed_elements:,} elements ({share:.2%})"),
            ("size", f"{nbytes_text(result.nbytes)} for {nbytes_text(result.checkpoint_bytes)}{smaller}, in {result.seconds:.1f} s"),
            ("base", fingerprint_text(result.base.root)),
            ("result", fingerprint_text(result.result.root)),
            ("note", result.source_checks.notes()),
        ]
    )
