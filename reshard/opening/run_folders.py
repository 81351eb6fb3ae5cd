"""The checkpoints of a folder: those of a run, one for each step or several where a step has parts, and those of a folder of models.

    RUN/iter_0000100/                                Megatron, with latest_checkpointed_iteration.txt beside it
    RUN/global_step100/                              DeepSpeed, with latest beside it
    RUN/step-100/                                    torchtitan
    RUN/checkpoint-100/                              transformers, also with pytorch_model_fsdp_0/ inside
    RUN/ppo/global_step_100/actor/, critic/          verl
    RUN/epoch_0_step_100/                            NeMo AutoModel
    RUN/checkpoints/000100/                          LeRobot
    RUN/100/                                         nanotron, with latest.txt beside it
    RUN/epoch=0-step=100.ckpt                        Lightning: a file, or a folder
    RUN/m--val_loss=1.23-step=100-last/              NeMo
    MODELS/llama/, MODELS/qwen3/                     no steps: each is a part
    RUN/model.safetensors, RUN/checkpoint-100/       the final model, a part too, beside steps

Folders are listed to a certain depth, and each is asked whether a format claims it. No file of weights is opened. A run in a store is
listed once, with a request per 1,000 files; further requests read small files, such as trackers.

Frameworks write a file last, once all ranks have written theirs:

    latest_checkpointed_iteration.txt    beside the step's folder; holds the newest step (Megatron, verl, slime)
    latest                               beside the step's folder; holds the newest step's name (DeepSpeed)
    latest.txt                           beside the step's folder; holds the newest step (nanotron)
    .metadata                            in the checkpoint (torch.distributed.checkpoint)
    reshard.json                         in the checkpoint (reshard)
    model.safetensors.index.json         in a delta, if all files that their names count are there

Without such a file, a checkpoint counts as complete when nothing has changed in it for a while.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from reshard.adapter import registry
from reshard.adapter.save_folders import step_of, without_optimizers
from reshard.errors import RequestError, ReshardError, SystemRefusal
from reshard.geometry.value import value
from reshard.plans.manifest import MANIFEST
from reshard.storage.files import Files, read_whole
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import is_url
from reshard.storage.tar import in_archive, open_files, open_tree
from reshard.storage.trees import FilesElsewhere, FolderFiles

_NUMBER_TRACKER = "latest.txt"
"""Beside folders that are called by the number of the step alone."""
_CHECKPOINTS = "checkpoints"
"""The folder above such folders that has no tracker (LeRobot)."""
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest", _NUMBER_TRACKER)
_MARKERS = (".metadata", MANIFEST)
# Files that are never complete without a marker.
_NEED = {".distcp": ".metadata"}
# A tracker holds a name or a number.
_MOST_BYTES = 4096
# Folders of models that are trained together: a step that has them is not one checkpoint, even where a format would choose one of them.
MODELS = frozenset({"actor", "critic", "policy", "value", "ref", "reward", "generator", "discriminator"})
# A run has few folders above its steps, and a step few above its checkpoints.
_DEEPEST, _DEEPEST_IN_STEP = 5, 3
_MOST_FOLDERS = 20_000
# A checkpoint that is one file has the step in its name and one of these endings.
_FILES = (".ckpt", ".pt", ".pth", ".nemo")
HERE = "."
"""The part, and the last name of the path, of a model that lies in the folder of a run itself, beside its steps."""
# What a run keeps beside its steps, in files that may end as a model's do: Muon's layer_wise_optimizer_0.pt, a Trainer's rng_state.pth.
_OF_A_RUN = re.compile(r"optim|sched|rng_state|trainer_state|training_args|dataloader")
_UNCHANGED = "unchanged for"
# The Hub's cache keeps each revision in a folder of models--ORG--NAME/snapshots/; refs/main beside it names the newest one.
_SNAPSHOTS = "snapshots"
LATEST = "latest"
"""The choice of the newest complete step."""
QUIET_SECONDS = 60.0
"""How long nothing must have changed in a checkpoint that has no marker, until it counts as complete."""


@value
class Completeness:
    """Whether a checkpoint is complete."""

    complete: bool
    """Whether it was saved to its end."""
    reason: str
    """What tells so, in words."""

    @property
    def may_settle(self) -> bool:
        """Whether it is incomplete only because something has changed in it not long ago."""
        return not self.complete and self.reason.startswith(_UNCHANGED)


@value
class Step:
    """One checkpoint of a run, or of a folder of models."""

    JSON = "step=number part path format bytes=nbytes age_seconds complete reason=completeness.reason"

    path: str
    """Its folder or file."""
    name: str
    """The name of the step's folder, such as iter_0000100; empty without a step."""
    number: int | None
    """The step; None if it belongs to no step."""
    part: str
    """Where in the step's folder it lies, such as actor; empty if it is the folder itself. Of a model without a step: its folder."""
    format: str | None
    """Its format; None if no format claims it (yet)."""
    nbytes: int
    """The bytes of its files."""
    written: float | None
    """When a file of it was written last, in seconds since 1970; None if the storage does not tell."""
    completeness: Completeness
    """Whether it is complete, and what tells so."""
    files: tuple[str, ...]
    """The paths of its files in it."""

    @property
    def order(self) -> int:
        """The step; before all steps if it belongs to none."""
        return -1 if self.number is None else self.number

    @property
    def age(self) -> float | None:
        """Seconds since a file of it was written."""
        return None if self.written is None else max(0.0, time.time() - self.written)

    @property
    def complete(self) -> bool:
        """Whether it can be read."""
        return self.format is not None and self.completeness.complete


def find_steps(root: str | os.PathLike[str], *, quiet: float = QUIET_SECONDS, seen: Seen | None = None) -> list[Step]:
    """The checkpoints of all steps below a folder, by step and part. The folder may be a URL.

    quiet: see QUIET_SECONDS. seen: what earlier looks have seen, for storages that do not tell when a file was written.

    Raises: RequestError if the folder does not exist, or has too many folders to be a run.
    """
    return RunFolder(root).steps(quiet=quiet, seen=seen)


class Seen:
    """The states of checkpoints, and since when they are unchanged as far as this process has seen."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[object, float]] = {}

    def unchanged_since(self, path: str, state: object, now: float) -> float | None:
        """When this state was seen first; None if it is seen now for the first time."""
        earlier, since = self._since.get(path, (None, now))
        if earlier != state:
            self._since[path] = state, now
            return None
        return since


class RunFolder:
    """A folder that may hold several checkpoints: each is a tree of files."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Raises RequestError if the folder does not exist."""
        self._root = os.fspath(root).rstrip("/") or "/"
        self._files = open_files(self._root)
        # What is read of one step says nothing about the others.
        self._files.opened()

    def steps(self, *, quiet: float = QUIET_SECONDS, seen: Seen | None = None) -> list[Step]:
        """The checkpoints of all steps, as `find_steps` returns them."""
        looks = Seen() if seen is None else seen
        return _in_order(self._checkpoint(step, part, quiet, looks) for step in self._step_places() for part in self._parts(step))

    def checkpoints(self) -> list[Step]:
        """The checkpoints of all steps; and those of no step, which lie in other folders: of models, or of a step that is the root."""
        number = step_of(self._root.rpartition("/")[2])
        parts = [part for part in self._parts("", known_steps=True) if part]
        others = [replace(self._checkpoint("", part, 0.0, Seen()), number=number) for part in parts]
        here = [self._checkpoint("", HERE, 0.0, Seen())] if self.has_model() else []
        return _in_order([*self.steps(), *others, *here])

    def has_model(self) -> bool:
        """Whether a model lies in the folder itself, and steps in folders beside it: an HF Trainer's final model, for example."""
        folders = [path for path in self._files.list() if path.endswith("/") and self._step_of(path) is not None]
        if not folders or all(format_of(self.tree(path)) is None for path in folders):
            return False
        others = [path for path in self._files.list() if path.endswith("/") or _OF_A_RUN.search(path)]
        return format_of(_Without(self._files, others)) is not None

    def is_run(self) -> bool:
        """Whether the folder is meant as a run: it holds several steps, or steps lie below it and no checkpoint in it."""
        if len({path for path in self._files.list() if self._step_of(path) is not None and path.endswith("/")}) > 1:
            return True
        return next(self._step_places(), None) is not None and not registry.is_claimed(self.tree(""))

    def _step_of(self, path: str) -> int | None:
        """The step of a folder or file in this tree, by its name; None if it is none."""
        above, _, name = path.rstrip("/").rpartition("/")
        if not path.endswith("/"):
            ending = os.path.splitext(name)[1]
            return step_of(name.removesuffix(ending)) if ending in _FILES else None
        if name.isascii() and name.isdecimal() and len(name) < 18:
            is_step = (above or self._root).rpartition("/")[2] == _CHECKPOINTS or self._files.size(f"{above}/{_NUMBER_TRACKER}".lstrip("/"))
            return int(name) if is_step else None
        return step_of(name)

    def _step_places(self) -> Iterator[str]:
        """The paths of the folders and files of steps, relative to the root. Symbolic links, such as `latest`, are left out."""
        pending, looked = [("", 0)], 0
        while pending:
            folder, depth = pending.pop()
            for path in self._files.list(folder):
                looked += 1
                if looked > _MOST_FOLDERS:
                    raise RequestError(f"more than {_MOST_FOLDERS:,} files and folders", where=self._root, do="Give the folder of one run")
                if self._is_hidden(path):
                    continue
                if self._step_of(path) is not None:
                    yield path
                elif path.endswith("/") and depth < _DEEPEST:
                    pending.append((path, depth + 1))

    def _is_hidden(self, path: str) -> bool:
        above, _, name = path.rstrip("/").rpartition("/")
        if above.endswith(_SNAPSHOTS) and (main := _text(self._files, f"{above.removesuffix(_SNAPSHOTS)}refs/main")):
            return name != main
        is_link = not is_url(self._root) and os.path.islink(f"{self._root}/{path.rstrip('/')}")
        return name.startswith(".") or name == WORK_FOLDER or is_link

    def _parts(self, place: str, *, known_steps: bool = False) -> list[str]:
        """Where at the place of a step checkpoints lie: [""] if it is one itself, or has none yet.

        known_steps: leave out the places of steps, and the root itself.
        """
        parts, pending = [], [("", 0)]
        while pending:
            part, depth = pending.pop(0)
            inner = [path for path in self.tree(place).list(part) if path.endswith("/")]
            is_above = any(path.rstrip("/").rpartition("/")[2] in MODELS for path in inner)
            if known_steps:
                is_above |= not part or any(self._step_of(path) is not None for path in inner)
            if not is_above and format_of(self.tree(_joined(place, part))) is not None:
                parts.append(part.rstrip("/"))
            elif depth < _DEEPEST_IN_STEP:
                inner = [path for path in inner if not (known_steps and (self._is_hidden(path) or self._step_of(path) is not None))]
                pending += [(path, depth + 1) for path in inner]
        return sorted(without_optimizers(parts)) or [""]

    def _checkpoint(self, place: str, part: str, quiet: float, seen: Seen) -> Step:
        """The checkpoint at a part of the place of a step; at a part of the root if the place is empty."""
        above, _, name = place.rstrip("/").rpartition("/")
        files, now = self.tree(_joined(place, part)), time.time()
        sizes = {path: files.size(path) or 0 for path in _paths(files)}
        written = max((moment for path in sizes if (moment := files.written(path)) is not None), default=None)
        since = written
        if written is None:
            since = seen.unchanged_since(files.root, [(*sized_path, files.stamp(sized_path[0])) for sized_path in sizes.items()], now)
        age = None if since is None else max(0.0, now - since)
        number = self._step_of(place) if place else None
        format = format_of(files)
        complete = completeness(files, self.tree(above), name, number, format, age=age, quiet=quiet)
        return Step(files.root, name, number, part, format, sum(sizes.values()), written, complete, tuple(sizes))

    def tree(self, place: str) -> Files:
        """The files at a place in the folder: of a step, or HERE."""
        if place == HERE:
            # DeepSpeed's universal form of a step lies beside it.
            names = ((path, path.replace("_universal/", "/")) for path in self._files.list())
            return _Without(self._files, [path for path, name in names if self._step_of(name) is not None])
        if place and not place.endswith("/") and self._files.size(place) is not None:
            return open_tree(f"{self._root}/{place}")
        return in_archive(FolderFiles(self._files, place) if place.strip("/") else self._files)


class _Without(FilesElsewhere):
    """`Files` of the folder of a run, RUN/., without entries such as its steps, and without what names the newest step."""

    is_file = False

    def __init__(self, files: Files, hidden: Collection[str]) -> None:
        self._main, self.root = files, f"{files.root.rstrip('/')}/{HERE}"
        self._hidden = {*hidden, *_TRACKERS, "latest_universal"}

    def list(self, folder: str = "") -> tuple[str, ...]:
        return tuple(path for path in self._main.list(folder) if not self._is_hidden(path))

    def size(self, path: str) -> int | None:
        return None if self._is_hidden(path) else self._main.size(path)

    def _is_hidden(self, path: str) -> bool:
        name, slash, _ = path.partition("/")
        return name + slash in self._hidden


def _joined(place: str, part: str) -> str:
    """The path of a part of a place; an empty one is the place itself, and an empty place the root."""
    return f"{place.rstrip('/')}/{part}".lstrip("/") if part else place


def _in_order(steps: Iterable[Step]) -> list[Step]:
    return sorted(steps, key=lambda step: (step.order, step.path))


def format_of(files: Files) -> str | None:
    """The format that claims these files; None if none does, or several do."""
    try:
        return registry.detect(files)[0].name
    except ReshardError:
        return None


def _paths(files: Files) -> Iterator[str]:
    """The paths of all files of a tree."""
    pending = [""]
    while pending:
        for path in files.list(pending.pop()):
            if path.endswith("/"):
                pending.append(path)
            else:
                yield path


def run_at(path: str | os.PathLike[str]) -> RunFolder | None:
    """The run at a path or URL; None if a checkpoint lies there, or nothing that is meant as a run."""
    if not is_url(path) and not os.path.isdir(path):
        return None
    try:
        run = RunFolder(path)
        return run if run.is_run() else None
    except SystemRefusal:
        raise
    except RequestError:  # whoever opens it says what is wrong
        return None


def completeness(
    files: Files, parent: Files, name: str, number: int | None, format: str | None, *, age: float | None, quiet: float
) -> Completeness:
    """Whether the checkpoint of a step is complete.

    files: those of the checkpoint. parent: those beside the step's folder. name, number: the step's folder and number. format: the one that
    claims it. age: seconds since the last change. quiet: after how many of them a checkpoint without a marker counts as complete.
    """
    if f"{WORK_FOLDER}/" in files.list():
        return Completeness(False, "reshard is writing it, or was interrupted")
    for tracker in _TRACKERS if number is not None else ():
        if (text := _text(parent, tracker)) is not None and (newest := _tracked(text, name, number)) is not None:
            return Completeness(number is not None and number <= newest, f"{tracker} names {text[:40]}")
    for path in files.list():
        marker = _NEED.get(path[path.rfind(".") :] if "." in path else "")
        if marker and not files.size(marker):
            return Completeness(False, f"{marker} is not there yet")
    for marker in _MARKERS:
        if files.size(marker):
            return Completeness(True, f"{marker} is there")
    if format is not None and (reason := registry.named(format).complete(files)):
        return Completeness(True, reason)
    if age is None:
        return Completeness(False, "nothing tells whether it is complete")
    return Completeness(age >= quiet, f"{_UNCHANGED} {age:.0f} s" + (f", complete after {quiet:g} s" if age < quiet else ""))


def _text(files: Files, path: str) -> str | None:
    """The text in a small file; None if there is none."""
    try:
        return read_whole(files, path, limit=_MOST_BYTES).decode("utf-8", "replace").strip() if files.size(path) else None
    except ReshardError:
        return None


def _tracked(text: str, name: str, number: int | None) -> int | None:
    """The newest complete step that a tracker's text names; None if it names none."""
    if text == name:
        return number
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else step_of(text)
