"""Checkpoint: an opened checkpoint, and the verb `open`. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.model_files import CONFIG, ModelFiles, find_model_files
from reshard.adapter.rank_files import check_steps
from reshard.canonical.content import Content, Selection, content_of
from reshard.canonical.name_variants import with_canonical_names
from reshard.canonical.wrappers import without_wrappers
from reshard.containers.inert_pickle import gc_paused
from reshard.engine.views import View
from reshard.errors import RequestError, UnexpectedContentError
from reshard.geometry.stored import whole
from reshard.index.index import Index
from reshard.models.architecture import Architecture
from reshard.models.lookup import find_model, named_architecture
from reshard.models.model import Model
from reshard.storage.files import Files, LocalFiles
from reshard.storage.tar import open_tree
from reshard.verbs.planning import plan_conversion
from reshard.verbs.request import ConversionRequest, ModelOptions, OpenOptions, PathLike

if TYPE_CHECKING:
    from reshard.verbs.request import PlanOptions


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint: its index, and the files that weights are read from when asked for."""

    path: str
    """The directory or file as the caller gave it."""
    files: Files
    """The files that it is read from."""
    index: Index
    """Which box of which tensor lies in which bytes of which file."""
    model_files: ModelFiles
    """The model's config and tokenizer files."""
    detected: str
    """Why it was taken for this format."""
    architecture: Architecture | None = None
    """The architecture that the caller named; None: the one that the config names."""

    @property
    def format(self) -> str:
        """The format's name."""
        return self.index.format

    @cached_property
    def model(self) -> Model | None:
        """The model, if there is a config and its architecture is declared."""
        return find_model(self.model_files.config, self.architecture)

    def named(self, selection: Selection | None = None, *, model: Model | None = None) -> Index:
        """The index under the model's canonical names, whatever its library calls and fuses."""
        found = with_canonical_names(self.index, model or self.model, (selection or Selection()).strip_prefix)
        if found is not self.index:
            found.check()
        return found

    def content(self, selection: Selection | None = None, *, model: Model | None = None) -> Content:
        """The weights under the model's canonical names."""
        return content_of(self.named(selection, model=model), model or self.model, selection or Selection())

    def tensors(self, selection: Selection | None = None) -> View:
        """Every weight under its canonical name, read when asked for."""
        content = self.content(selection)
        stored = {name: whole(name, tensor.dtype, tensor.shape) for name, tensor in content.tensors.items()}
        return View(stored, content.tensors, self.files)

    def view(self, *, to: str, rank: int = 0, pp_rank: int = 0, ep_rank: int = 0, dp_rank: int = 0, **options: Unpack[PlanOptions]) -> View:
        """What one rank of a target holds, under the names that its engine uses. Takes the keywords of `plan`.

        rank: the tensor-parallel rank. Only this rank is laid out and proven, and only its own bytes of the weights are ever read.

        Raises: RequestError if the target has no such rank.
        """
        only = {"tp": rank, "pp": pp_rank, "ep": ep_rank, "dp": dp_rank}
        plan = plan_conversion(self, ConversionRequest.of(to, {**options, "only": only}))
        files = [file for file in plan.layout.files if plan.target.wants(file.ranks)]
        if not files:
            missing = ", ".join(f"{axis} rank {number}" for axis, number in only.items() if number)
            raise RequestError(f"the target has no {missing or 'rank 0'}", why=f"It is laid out for {plan.layout.parallel}")
        stored = {item.tensor.name: item.tensor for file in files for item in file.tensors}
        return View(stored, plan.content.tensors, self.files)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.format}, {len(self.index.tensors)} tensors)"


def open(path: PathLike, **options: Unpack[OpenOptions]) -> Checkpoint:
    """Open the checkpoint in a directory or file. Only metadata is read.

    Raises: CheckpointError if it is incomplete or contradicts itself, RequestError if its format is unknown.
    """
    checkpoint = _open(path, options)
    _check_architecture_is_used([checkpoint])
    return checkpoint


def opened(source: Checkpoint | PathLike, **options: Unpack[ModelOptions]) -> Checkpoint:
    """The given checkpoint, or the checkpoint at a path, opened with these options."""
    return source if isinstance(source, Checkpoint) else open(source, **options)


def open_both(left: PathLike, right: PathLike, **options: Unpack[ModelOptions]) -> tuple[Checkpoint, Checkpoint]:
    """Open two checkpoints that are to be compared.

    `model` is used for a checkpoint without a config of its own. If only one checkpoint gives the vocabulary size, it is used for both.
    """
    found = []
    for path in (left, right):
        has_config = options.get("model") is not None and find_model_files(open_tree(path)).config is not None
        found.append(_open(path, {**options, "model": None} if has_config else options))
    for i, other in ((0, 1), (1, 0)):
        vocabulary = (found[other].model_files.config or {}).get("vocab_size")
        if found[i].index.facts.unanswered and not found[other].index.facts.unanswered and vocabulary:
            found[i] = _open(found[i].path, {"vocab_size": vocabulary, "architecture": options.get("architecture")})
    _check_architecture_is_used(found)
    return found[0], found[1]


def _open(path: PathLike, options: Mapping[str, Any]) -> Checkpoint:
    name, model, architecture = options.get("format"), options.get("model"), options.get("architecture")
    declared = named_architecture(architecture) if architecture is not None else None
    files = open_tree(path)
    with _read_as_claims(os.fspath(path)):
        return _opened(path, files, name, model, options.get("vocab_size"), declared)


def _opened(
    path: PathLike, files: Files, name: str | None, model: PathLike | None, vocab_size: int | None, declared: Architecture | None
) -> Checkpoint:
    format, reason = (registry.named(name), "named by --format") if name else registry.detect(files)
    model_files = find_model_files(LocalFiles(model) if model is not None else files)
    if model is not None and model_files.config is None:
        raise RequestError(f"there is no {CONFIG} in {os.fspath(model)!r}", do="Give --model the directory that holds the model's config")
    with gc_paused():
        index = without_wrappers(format.read(files, Hints(model_files.config, vocab_size, declared)))
    if index.facts.config is not None and index.facts.config != model_files.config:
        model_files = replace(model_files, config=index.facts.config, derived=True)
    index.check()
    check_steps(files, index.tensors)
    return Checkpoint(os.fspath(path), files, format.check_values(files, index), model_files, reason, declared)


@contextmanager
def _read_as_claims(path: str) -> Iterator[None]:
    """A context in which metadata is read: exceptions of values with an unexpected type, key or size become one of ours.

    Metadata is pickled by a dozen programs, as any objects they like. Readers check what they know; this is for the rest.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        import traceback

        code = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0][:200]
        raise UnexpectedContentError(
            f"its metadata has a form that reshard does not expect ({type(error).__name__}: {text}, in {code.name} of "
            f"{os.path.basename(code.filename)})",
            where=path,
            why="It is damaged, or was written by a program or version that reshard does not know",
            do="Copy the checkpoint again; if that does not help, run with --debug and report it as an issue",
        ) from error


def _check_architecture_is_used(checkpoints: list[Checkpoint]) -> None:
    """Raises RequestError if the caller named an architecture, and no checkpoint has a config with its numbers."""
    first = checkpoints[0]
    if first.architecture is not None and all(each.model_files.config is None for each in checkpoints):
        raise RequestError(
            f"--architecture names {first.architecture.model_type}, and no {CONFIG} says how large this model is",
            where=first.path,
            why="A declaration takes its numbers from the model's config",
            do="Give the directory of the model's config with --model DIR",
        )
