"""Kept: a run is kept as a full checkpoint every N steps and deltas between them, in one folder that is a run itself.

    KEPT/step-100/             a full checkpoint
    KEPT/step-200/             the delta of step 200 to step 100
    KEPT/.reshard/             what is being written; a step gets its place when it is whole and verified
    KEPT/reshard.watch.jsonl   what is finished (runs/outputs.py)

A step that the run saves again with other values takes the place of the old one. Deltas of the old one become full checkpoints first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.adapter.save_folders import step_of
from reshard.errors import CheckpointError, DifferenceFound, RequestError, check_word
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.deltas import INDEX, DeltaEncoding
from reshard.opening.chains import chain_to, delta_at
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import ModelOptions, PathLike, SelectionOptions
from reshard.opening.open import open, open_one_of_several
from reshard.opening.run_folders import Step
from reshard.plans.digests import content_digest
from reshard.plans.manifest import MANIFEST, usable_manifest
from reshard.runs.local_outputs import LocalOutputs
from reshard.runs.outputs import WatchRecord
from reshard.storage.files import LocalFiles
from reshard.storage.staging import Staging
from reshard.storage.system_calls import is_url, local_path
from reshard.verbs.convert import convert
from reshard.verbs.delta import delta
from reshard.verbs.look.fingerprint import fingerprint
from reshard.verbs.plan import plan
from reshard.verbs.steps.happened import WatchEvent, among_newest, check_written, happened, run_command

FULL_EVERY = 10
"""How many steps a full checkpoint begins. More make the run little smaller and its steps slower to read (docs/recipes/deltas.md)."""
# They make other values than the run has.
_CHANGES = ("dequantize", "quantize", "requantize", "merge_adapter", "drop_adapter")


@value
class Kept:
    """What is done with each step of a run that is kept."""

    folder: Path
    """Where it is kept."""
    pattern: str
    """The name of a step's folder, with {step}."""
    to: str
    """The format of the full checkpoints."""
    full_every: int
    """How many steps a full checkpoint begins: itself, and the deltas after it."""
    encoding: DeltaEncoding
    """How deltas say what changed."""
    keep: int | None
    """How many steps are kept, with what they need."""
    then: str | None
    """The command after each."""
    options: dict[str, Any]
    """The keywords of `plan`, for the full checkpoints."""

    @property
    def outputs(self) -> LocalOutputs:
        return LocalOutputs(self.folder)

    def event(self, name: str, step: Step, detail: str) -> WatchEvent:
        return happened(name, step, self._path(step.order), detail)

    def pending(self, steps: list[Step]) -> list[Step]:
        """The steps that are to be done, in order. Raises RequestError if the run has a step twice."""
        by_number: dict[int, Step] = {}
        for step in steps:
            if (other := by_number.setdefault(step.order, step)) is not step:
                raise RequestError(
                    f"the run has step {step.order} twice: {other.path} and {step.path}",
                    why="Both would be kept under one name",
                    do="Give the folder of one run",
                    id="ambiguous",
                )
        return self._unfinished(among_newest(steps, self.keep))

    def _unfinished(self, steps: Sequence[Step]) -> list[Step]:
        """Those of these saves that are not kept."""
        record, there = WatchRecord(self.outputs), self._numbers() if self.folder.is_dir() else []
        return [step for step in steps if step.order not in there or not record.is_finished(step)]

    def do(self, step: Step, source: str) -> Iterator[WatchEvent]:
        """Keep a step and verify it. A kill at any moment leaves what was kept, and the step to be done again.

        Raises: TargetError if another run writes here.
        """
        self.outputs.prepare([])
        staging = Staging(self.folder)
        with staging.locked(content_digest(f"kept\0{self.folder}".encode()), lambda: "a run is being kept"):
            self.outputs.put_back()
            staging.clean()
            if not self._unfinished([step]):  # A step that was set aside has its place again.
                return
            new = staging.work / self._name(step.order)
            chain, why = self._base(step.order)
            written, detail = self._delta(step, source, chain, new) if chain else self._full(self._opened(source), new)
            yield self.event("delta" if chain else "full", step, detail + why)
            if self._is_kept(step.order, written):
                staging.clean()
            else:
                yield from self._freed(step, staging.work)
                self.outputs.put(new, self._name(step.order))
            WatchRecord(self.outputs).add(step, self._name(step.order))
            yield self.event("finished", step, f"verified, {written}")
            yield from self._removed(step)
        if self.then:
            yield self.event("ran", step, run_command(self.then, step, source, self._path(step.order)))

    def _name(self, number: int) -> str:
        return self.pattern.replace("{step}", str(number))

    def _path(self, number: int) -> str:
        return str(self.folder / self._name(number))

    def _numbers(self) -> list[int]:
        """The steps that are kept, in order."""
        named = {number: name for name in self.outputs.names() if (number := step_of(name)) is not None and name == self._name(number)}
        return sorted(number for number, name in named.items() if any((self.folder / name / path).is_file() for path in (MANIFEST, INDEX)))

    def _chain(self, number: int) -> tuple[str, ...]:
        """The folders that make a kept step. Raises: as `chain_to` does."""
        there = {*self._numbers()}
        return chain_to(self._path(number), number, lambda base: [self._path(base)] if base in there else [])

    def _base(self, number: int) -> tuple[tuple[str, ...], str]:
        """What makes the kept step before this one, and what is to be said about that. Empty if this step becomes a full checkpoint."""
        earlier = max((kept_number for kept_number in self._numbers() if kept_number < number), default=None)
        if earlier is None:
            return (), ""
        try:
            chain = self._chain(earlier)
        except (CheckpointError, RequestError) as error:
            return (), f", as step {earlier} is not whole: {error.what}"
        return (chain, "") if len(chain) < self.full_every else ((), "")

    def _delta(self, step: Step, source: str, chain: tuple[str, ...], new: Path) -> tuple[str, str]:
        """Write a delta, and compare what it makes with the step. Returns the fingerprint, and what was written in words."""
        base, before = open("+".join(chain)), step_of(chain[-1])
        made = delta(_as_of(base, before), _as_of(self._opened(source), step.number), new, encoding=self.encoding, cast=True)
        root = fingerprint("+".join([*chain, str(new)])).root
        if root != made.result.root:
            raise DifferenceFound(f"the delta makes {root}, and the step has {made.result.root}", where=str(new), do="Run again")
        share = made.changed_elements / max(1, made.elements)
        return root, f"{made.nbytes:,} bytes to step {before}, {share:.2%} of the elements changed"

    def _opened(self, source: str) -> Checkpoint:
        """A checkpoint of the run, with what the user says about its model."""
        about_model: Any = {name: given for name, given in self.options.items() if name in ModelOptions.__annotations__}
        return open_one_of_several(source, about_model)

    def _full(self, source: Checkpoint, new: Path) -> tuple[str, str]:
        """Write a full checkpoint and verify it. Returns the fingerprint, and what was written in words."""
        others = {name: given for name, given in self.options.items() if name not in ModelOptions.__annotations__}
        result = convert(plan(source, to=self.to, **others), new)
        check_written(new)
        return result.fingerprint.root, f"{sum(result.files.values()):,} bytes in {plural(len(result.files), 'file')}"

    def _is_kept(self, number: int, written: str) -> bool:
        """Whether a step of this fingerprint is kept already, and its chain is whole."""
        if number not in self._numbers():
            return False
        try:
            self._chain(number)
            facts, manifest = delta_at(self._path(number)), usable_manifest(LocalFiles(self._path(number)))
        except (CheckpointError, RequestError):
            return False
        return written == (facts.result_fingerprint if facts else manifest.fingerprint if manifest else None)

    def _freed(self, step: Step, work: Path) -> Iterator[WatchEvent]:
        """Let nothing that is kept need the old values of a step: the deltas of it become full checkpoints."""
        numbers = self._numbers()
        # Where the step was taken away, it comes back: its deltas compare the fingerprint of their base.
        for later in [number for number in numbers if number > step.order and step.order in numbers]:
            facts = delta_at(self._path(later))
            if facts is not None and int(facts.base_version) == step.order:
                new = work / self._name(later)
                _, detail = self._full(open("+".join(self._chain(later))), new)
                self.outputs.put(new, self._name(later))
                yield self.event("full", step, f"{detail} of step {later}, as step {step.order} was saved again with other values")

    def _removed(self, step: Step) -> Iterator[WatchEvent]:
        """Remove the steps that are too old, except those that a kept step needs; the newest first, so that no kill makes a hole."""
        numbers = self._numbers()
        old = numbers[: -self.keep] if self.keep else []
        needed = {path for number in numbers[len(old) :] for path in self._chain(number)} if old else set()
        for number in reversed(old):
            if self._path(number) not in needed and self.outputs.remove(self._name(number)):
                yield self.event("removed", step, f"{self._path(number)}, which no step of the newest {self.keep} needs")


def kept(run: PathLike, to: str, folder: Path, pattern: str, options: dict[str, Any]) -> Kept:
    """What is done with each step of `run`. options: the keywords of `watch`.

    Raises: RequestError for a name that does not tell a step, a folder that is the run, or a keyword that deltas have no place for.
    """
    if "{part}" in pattern or step_of(pattern.replace("{step}", "1")) != 1:
        what = f"`into=` {folder / pattern}: the name of a folder does not tell that it is a step"
        raise RequestError(what, do="Use `into=KEPT/step-{step}`, and `part=` to choose one checkpoint of each step")
    given = {name: option for name, option in options.items() if option is not None}
    encoding, full_every = given.pop("encoding", "xor"), given.pop("full_every", FULL_EVERY)
    check_word("`encoding=`", encoding, ("xor", "overwrite"))
    if full_every < 1:
        raise RequestError(f"`full_every={full_every}`: a full checkpoint is one itself", do="Give 1 or more")
    here, of_run = folder.resolve(), None if is_url(run) else local_path(run).resolve()
    if of_run is not None and (here.is_relative_to(of_run) or of_run.is_relative_to(here)):
        raise RequestError(
            "the run would be kept in its own folder, or in one above it", where=str(folder), do="Choose a folder beside the run"
        )
    for name in (*SelectionOptions.__annotations__, *_CHANGES, "link_unchanged", "push"):
        if given.pop(name, None):
            why = "A delta holds what changed in the weights of the run, as the run saves them"
            raise RequestError(f"`{name}=` does not go with `delta=True`", why=why, do="Leave it out")
    return Kept(folder, pattern, to, full_every, encoding, given.pop("keep", None), given.pop("then", None), given)


def _as_of(checkpoint: Checkpoint, number: int | None) -> Checkpoint:
    """The checkpoint as that of a step: in a run, the number of its folder counts."""
    return replace(checkpoint, index=replace(checkpoint.index, facts=replace(checkpoint.index.facts, step=number)))
