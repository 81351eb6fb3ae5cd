"""Chains: the step of a run that is a delta becomes BASE+DELTA+DELTA, the path of the checkpoint that it makes.

    KEPT/step-100/   a full checkpoint                    KEPT/step-100
    KEPT/step-200/   the version 000200 of 000100         KEPT/step-100+KEPT/step-200
    KEPT/step-300/   the version 000300 of 000200         KEPT/step-100+KEPT/step-200+KEPT/step-300

In a run, the version of a delta is the number of its step, and its base is the step of the run that it names. Where the run lies does not
matter. Whether the weights of the base are those that the delta was made of is compared when the path is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.save_folders import step_of
from reshard.errors import CheckpointError, IncompleteError, RequestError, ReshardError
from reshard.opening.run_folders import Step
from reshard.storage.tar import open_tree

if TYPE_CHECKING:
    from reshard.index.deltas import DeltaFacts


def source_of(step: Step, steps: Sequence[Step]) -> str:
    """The path of the checkpoint of a step: its folder, or those of its base and its deltas. steps: all of the run.

    Raises: as `chain_to` does.
    """
    if step.number is None or step.format is None:
        return step.path
    return "+".join(chain_to(step.path, step.number, lambda number: [base.path for base in steps if _is_base(base, number, step.part)]))


def _is_base(step: Step, number: int, part: str) -> bool:
    return step.number == number and step.part == part and step.format is not None


def chain_to(path: str, number: int, places: Callable[[int], Sequence[str]]) -> tuple[str, ...]:
    """The folders that make the checkpoint of a step: a full checkpoint, then deltas; the last is `path`.

    number: the step. places: the folders of the step of this number.

    Raises: IncompleteError if a step of the chain is not there; RequestError if a step lies there twice; CheckpointError if a delta makes
    another step than its folder is called after.
    """
    chain = [path]
    while (facts := delta_at(chain[0])) is not None:
        if int(facts.version) != number:
            raise CheckpointError(
                f"the folder is that of step {number}, and the delta in it makes the version {facts.version}",
                where=chain[0],
                why="It belongs to another step or to another run",
                do="Put the delta of this step there, or take this one away",
            )
        base = int(facts.base_version)
        bases = places(base) if base < number else ()
        if not bases:
            raise IncompleteError(
                f"step {number} is a delta of step {base}, and no step {base} lies in the run",
                where=chain[0],
                why=f"Its weights are those of step {base} and what changed since",
                do=f"Copy the folder of step {base} back to where it was, beside this one",
            )
        if len(bases) > 1:
            raise RequestError(
                f"step {number} is a delta of step {base}, and step {base} lies in the run twice: {bases[0]} and {bases[1]}",
                where=chain[0],
                why="Only one of them can be its base",
                do="Take one of them away",
                id="ambiguous",
            )
        chain.insert(0, bases[0])
        number = base
    return tuple(chain)


def delta_alone(path: str, facts: DeltaFacts) -> RequestError:
    """The error for a delta at `path` where a checkpoint is expected: it is read on top of its base only."""
    named = f"{facts.base or 'BASE'}+{path}"
    folder, _, _ = path.rstrip("/").rpartition("/")
    with suppress(ReshardError, ValueError):
        beside = [entry.rstrip("/") for entry in open_tree(folder or ".").list()]
        places = [(step_of(entry), f"{folder}/{entry}" if folder else entry) for entry in beside]
        named = "+".join(chain_to(path, int(facts.version), lambda number: [place for step, place in places if step == number]))
    return RequestError(
        f"it is a delta, and does not say the weights of its base, {facts.base or facts.base_version}",
        where=path,
        why="It holds only what changed since",
        do=f"Give both, as BASE+DELTA: {named}",
        id="ambiguous",
    )


def delta_at(path: str) -> DeltaFacts | None:
    """What the delta in a folder says about itself; None if a full checkpoint lies there, or nothing that a format claims.

    Raises: CheckpointError if the delta is not whole.
    """
    files = open_tree(path)
    try:
        format, _ = registry.detect(files)
    except RequestError:
        return None
    return format.read(files, Hints()).facts.delta if format.changes_base else None
