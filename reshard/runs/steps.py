"""The checkpoints of a run: one for each step, or several where a step has parts such as an actor and a critic.

    RUN/iter_0000100/                                Megatron, with latest_checkpointed_iteration.txt beside it
    RUN/global_step100/                              DeepSpeed, with latest beside it
    RUN/step-100/                                    torchtitan
    RUN/checkpoint-100/                              transformers, also with pytorch_model_fsdp_0/ inside
    RUN/ppo/global_step_100/actor/, critic/          verl

Folders are listed to a certain depth, and each is asked whether a format claims it. No file of weights is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.adapter import registry
from reshard.adapter.save_folders import step_of
from reshard.errors import RequestError, ReshardError
from reshard.runs.completeness import Completeness, completeness
from reshard.storage.files import Files
from reshard.storage.local_path import modified
from reshard.storage.staging import WORK_FOLDER
from reshard.storage.tar import open_tree

# Folders of models that are trained together: a step that has them is not one checkpoint, even where a format would choose one of them.
_MODELS = frozenset({"actor", "critic", "policy", "value", "ref", "reward", "generator", "discriminator"})
# A run has few folders above its steps, and a step few above its checkpoints.
_DEEPEST, _DEEPEST_IN_STEP = 5, 3
_MOST_FOLDERS = 20_000
QUIET_SECONDS = 60.0
"""How long nothing must have changed in a checkpoint that has no marker, until it counts as complete."""


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a run."""

    path: str
    """Its folder."""
    name: str
    """The name of the step's folder, such as iter_0000100."""
    number: int
    """The step."""
    part: str
    """Where in the step's folder it lies, such as actor; empty if it is the folder itself."""
    format: str | None
    """Its format; None if no format claims it (yet)."""
    nbytes: int
    """The bytes of its files."""
    written: float | None
    """When a file of it was written last, in seconds since 1970; None if the storage does not tell."""
    completeness: Completeness
    """Whether it is complete, and what tells so."""

    @property
    def age(self) -> float | None:
        """Seconds since a file of it was written."""
        return None if self.written is None else max(0.0, time.time() - self.written)

    @property
    def complete(self) -> bool:
        """Whether it can be read."""
        return self.format is not None and self.completeness.complete


def find_steps(root: str | os.PathLike[str], *, quiet: float = QUIET_SECONDS) -> list[Step]:
    """The checkpoints of all steps below a folder, by step and part.

    quiet: see QUIET_SECONDS.

    Raises: RequestError if the folder does not exist, or has too many folders to be a run.
    """
    now, text = time.time(), os.fspath(root).rstrip("/") or "/"
    found = [_step(text, folder, part, now, quiet) for folder in _step_folders(text) for part in _parts(f"{text}/{folder}")]
    return sorted(found, key=lambda step: (step.number, step.path))


def _step_folders(root: str) -> Iterator[str]:
    """The paths of the folders of steps, relative to the root. Symbolic links, such as `latest`, are left out."""
    files, pending, looked = open_tree(root), [("", 0)], 0
    while pending:
        folder, depth = pending.pop()
        for path in files.list(folder):
            looked += 1
            if looked > _MOST_FOLDERS:
                raise RequestError(f"more than {_MOST_FOLDERS:,} files and folders", where=root, do="Give the folder of one run")
            name = path.rstrip("/").rpartition("/")[2]
            if not path.endswith("/") or name.startswith(".") or name == WORK_FOLDER or os.path.islink(f"{root}/{path.rstrip('/')}"):
                continue
            if step_of(name) is not None:
                yield path.rstrip("/")
            elif depth < _DEEPEST:
                pending.append((path, depth + 1))


def _parts(folder: str) -> list[str]:
    """Where in a step's folder checkpoints lie: [""] if it is one itself, or has none yet."""
    found, pending = [], [("", 0)]
    while pending:
        part, depth = pending.pop(0)
        inner = [path for path in open_tree(folder).list(part) if path.endswith("/")]
        has_models = any(path.rstrip("/").rpartition("/")[2] in _MODELS for path in inner)
        if not has_models and format_of(open_tree(f"{folder}/{part}".rstrip("/"))) is not None:
            found.append(part.rstrip("/"))
        elif depth < _DEEPEST_IN_STEP:
            pending += [(path, depth + 1) for path in inner]
    return sorted(found) or [""]


def format_of(files: Files) -> str | None:
    """The format that claims these files; None if none does, or several do."""
    try:
        return registry.detect(files)[0].name
    except ReshardError:
        return None


def _step(root: str, folder: str, part: str, now: float, quiet: float) -> Step:
    above, _, name = folder.rpartition("/")
    path = f"{root}/{folder}/{part}".rstrip("/")
    files, parent = open_tree(path), open_tree(f"{root}/{above}".rstrip("/"))
    nbytes, newest = 0, None
    for each in _files(files):
        nbytes += files.size(each) or 0
        written = modified(f"{path}/{each}")
        newest = written if newest is None or (written or 0) > newest else newest
    age = None if newest is None else max(0.0, now - newest)
    number = step_of(name) or 0
    return Step(path, name, number, part, format_of(files), nbytes, newest, completeness(files, parent, name, number, age, quiet))


def _files(files: Files) -> Iterator[str]:
    """The paths of all files of a tree."""
    pending = [""]
    while pending:
        for path in files.list(pending.pop()):
            if path.endswith("/"):
                pending.append(path)
            else:
                yield path


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is meant as a run: it holds the folders of several steps, or steps lie below it and no checkpoint in it."""
    if not os.path.isdir(path):
        return False
    files = open_tree(path)
    here = sum(name.endswith("/") and step_of(name.rstrip("/")) is not None for name in files.list())
    if here > 1:
        return True
    return not registry.is_claimed(files) and next(_step_folders(os.fspath(path).rstrip("/") or "/"), None) is not None
