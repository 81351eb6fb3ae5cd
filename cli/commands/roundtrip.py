"""reshard roundtrip: there and back loses nothing, proven from the plans or done for real."""

from __future__ import annotations

from typing import Any

from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Facts, Note

from .. import options
from ..progress import bar
from ..replies import Reply


@options.command("roundtrip", "reshard roundtrip step-1000 --to vllm --tp 8")
@options.checkpoint("source")
@options.target()
@options.selection("Convert")
@options.format_name
@options.model
@options.switch("--materialize", options.OUTPUT, "Convert there and back for real, and compare every bit.")
@options.option("--work", section=options.OUTPUT, metavar="DIR", help="Directory for --materialize (default: a temporary one).")
@options.effort
def command(source: str, to: str, materialize: bool, work: str | None, show_progress: bool | None, **given: Any) -> Reply:
    """Prove that converting SOURCE and reading the result back loses nothing.

    The target's own reader gets the planned headers and says where it would find each weight: every byte must map to itself. No weight is
    read, except with --materialize. The exit code is 1 if something would be lost: also a weight that is left out. Optimizer state and
    buffers that are left out are named.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import EffortOptions, OpenOptions
    from reshard.verbs.roundtrip import materialize as there_and_back

    if work is not None and not materialize:
        raise RequestError("--work without --materialize: nothing is written", do="Add --materialize, or leave it out")
    checkpoint = reshard.open(source, **options.take(given, OpenOptions))
    effort = options.take(given, EffortOptions)
    plan = reshard.plan(checkpoint, to=to, **given)
    proof = reshard.roundtrip(plan)
    losses = list(proof.losses)
    materialize = materialize and not losses  # what the proof shows to be lost does not come back
    if materialize:
        with bar(4 * plan.totals().copied, "roundtrip", show_progress) as advance:
            losses += there_and_back(plan, checkpoint, work=work, **{**effort, "progress": advance})
    made = {
        "lossless": proof.lossless and not losses,
        "materialized": materialize,
        "tensors": proof.tensors,
        "boxes": proof.boxes,
        "bytes": proof.nbytes,
        "losses": losses,
        "left": list(proof.left),
    }
    how = "converted there and back, every bit compared" if materialize else "proven from the plans, no weight read"
    sizes = f"{plural(proof.tensors, 'tensor')}, {plural(proof.boxes, 'box', 'boxes')}, {nbytes_text(proof.nbytes)}"
    lost = Note(f"not lossless: {plural(len(losses), 'loss', 'losses')}", losses)
    of_what = "lossless for the weights" if proof.left else "lossless"
    left = Facts([("left out", proof.left)], title="")
    return Reply(made, [lost if losses else f"{of_what}: {sizes}; {how}", left], 1 if losses else 0)
