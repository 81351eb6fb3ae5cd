"""Checkpoints of a run that were saved to their end and have lost a file since: names of files raise the question, headers answer it.

    model_world_size_4_rank_0.pt, _rank_1.pt, _rank_3.pt      the names count four files
    iter_0000200/mp_rank_00/ without mp_rank_01/              the other steps of the run have one more

Most runs have lost nothing, so nothing but the listing is looked at. A file may also be missing for a good reason: replicas hold its data,
or the run went on with fewer ranks. So a checkpoint in question is opened, and is incomplete only if opening says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from reshard.errors import IncompleteError, ReshardError
from reshard.opening.run_folders import Completeness, Step

# Names that say how many files there are.
_COUNTED = tuple(map(re.compile, (r"(.*\b)\d+-of-(\d{1,9})(\b.*)", r"(.*world_size_)(\d{1,9})_rank_\d+(.*)")))


def with_lost_files(steps: Sequence[Step]) -> list[Step]:
    """The checkpoints of a folder, with what those lack that are complete by their markers alone."""
    alike = defaultdict[tuple[str | None, str], list[Step]](list)
    for step in steps:
        alike[step.format, step.part].append(step)
    usual = {group: _in_most(other.files for other in similar) for group, similar in alike.items()}
    return [_looked_at(step) if step.complete and _may_lack_files(step, usual[step.format, step.part]) else step for step in steps]


def _in_most(every: Iterable[Sequence[str]]) -> set[str]:
    """The files that more than half of the checkpoints have; of two checkpoints, those of both together."""
    listings = list(every)
    counted = Counter(path for files in listings for path in files)
    return {path for path, number in counted.items() if 2 * number > len(listings) - (len(listings) == 2)}


def _may_lack_files(step: Step, usual: Collection[str]) -> bool:
    numbered = Counter[tuple[str, ...]]()
    for path in step.files:
        numbered.update(match.groups() for pattern in _COUNTED if (match := pattern.fullmatch(path)))
    return any(number < int(count) for (_, count, _), number in numbered.items()) or not set(step.files).issuperset(usual)


def _looked_at(step: Step) -> Step:
    """A checkpoint in question, opened."""
    from reshard.opening.open import open

    try:
        open(step.path, format=step.format)
    except IncompleteError as error:
        where = "" if error.where in (None, step.path) else f"{error.where}: "
        return replace(step, completeness=Completeness(False, where + error.what))
    except ReshardError:  # whoever opens it is told; this says nothing about files
        pass
    return step
