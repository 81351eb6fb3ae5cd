"""What one does with checkpoints: open, plan, convert, verify, fingerprint, roundtrip. The command line calls just these."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, ModelFiles, find_model_files
from reshard.adapter.protocol import Hints
from reshard.adapter.rank_files import check_steps
from reshard.canonical.content import Content, Selection, canonical, check_against_model
from reshard.canonical.dequantization import dequantized, quantized_names, without_quantization
from reshard.canonical.name_variants import with_canonical_names
from reshard.canonical.wrappers import without_wrappers
from reshard.containers.inert_pickle import uncollected
from reshard.engine.views import LazyTensor, View
from reshard.errors import RequestError
from reshard.geometry import dtypes
from reshard.geometry.parallel import Parallel
from reshard.geometry.stored import whole
from reshard.index.index import Index, Tensor
from reshard.models.architecture import Architecture
from reshard.models.declared.reader import named_architecture
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.plans.plan import Plan, make_plan
from reshard.plans.proof import prove
from reshard.plans.target import Target
from reshard.storage.files import Files, LocalFiles
from reshard.storage.tar import open_tree

PathLike = str | os.PathLike[str]


Progress = Callable[[int], None]


Weights = Literal["model", "master"] | None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint: its index, and the files it can read from. No weight has been read."""

    path: str
    files: Files
    index: Index
    model_files: ModelFiles
    detected: str
    architecture: Architecture | None = None

    @property
    def format(self) -> str:
        return self.index.format

    @cached_property
    def model(self) -> Model | None:
        """The model, if a config is there and its architecture is declared."""
        return find_model(self.model_files.config, self.architecture)

    def named(self, selection: Selection | None = None, *, model: Model | None = None) -> Index:
        """The index under the model's canonical names, whatever its library calls and fuses."""
        found = with_canonical_names(self.index, model or self.model, (selection or Selection()).strip_prefix)
        if found is not self.index:
            found.check()
        return found

    def content(self, selection: Selection | None = None, *, model: Model | None = None) -> Content:
        """The weights under the model's canonical names."""
        return canonical(self.named(selection, model=model), model or self.model, selection or Selection())

    def tensors(self, selection: Selection | None = None) -> View:
        """Every weight under its canonical name, read when asked for."""
        content = self.content(selection)
        stored = {name: whole(name, tensor.dtype, tensor.shape) for name, tensor in content.tensors.items()}
        return View(stored, content.tensors, self.files)

    def view(self, *, to: str, rank: int = 0, pp_rank: int = 0, ep_rank: int = 0, dp_rank: int = 0, **options: Any) -> View:
        """What one rank of a target holds, by the names that its engine gives it; takes the options of `plan`.

        rank: of the tensor-parallel ones. Only this rank is laid out and proven, and of the weights only its own bytes are ever read.

        Raises: RequestError if the target has no such rank.
        """
        only = {"tp": rank, "pp": pp_rank, "ep": ep_rank, "dp": dp_rank}
        made = plan(self, to=to, only=only, **options)
        files = [file for file in made.layout.files if made.target.wants(file.ranks)]
        if not files:
            named = ", ".join(f"{axis} rank {number}" for axis, number in only.items() if number)
            raise RequestError(f"the target has no {named or 'rank 0'}", why=f"It is laid out for {made.layout.parallel}")
        stored = {item.tensor.name: item.tensor for file in files for item in file.tensors}
        return View(stored, made.content.tensors, self.files)


def open(
    path: PathLike,
    *,
    format: str | None = None,
    model: PathLike | None = None,
    vocab_size: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> Checkpoint:
    """The checkpoint in a directory or file: Index and files, nothing read but metadata.

    format: its name, where it should not be detected. model: a directory with the Hugging Face config, where the checkpoint has none.
    vocab_size: how many rows of the embedding are no padding, where neither says it. architecture: a declared model type, or a file that
    declares one, in place of the one that the config names.

    Raises: CheckpointError if it is incomplete or contradicts itself, RequestError if its format is unknown.
    """
    opened = _opened(path, format, model, vocab_size, named_architecture(architecture) if architecture is not None else None)
    _check_architecture_is_used([opened])
    return opened


def _opened(path: PathLike, format: str | None, model: PathLike | None, vocab_size: int | None, named: Architecture | None) -> Checkpoint:
    files = open_tree(path)
    found, reason = (registry.reader(format), "named by --format") if format else registry.detect(files)
    model_files = find_model_files(LocalFiles(model) if model is not None else files)
    if model is not None and model_files.config is None:
        raise RequestError(f"there is no {CONFIG} in {os.fspath(model)!r}", do="Give --model the directory that holds the model's config")
    with uncollected():
        index = without_wrappers(found.read(files, Hints(model_files.config, vocab_size, named)))
    if index.facts.config is not None and index.facts.config != model_files.config:
        model_files = replace(model_files, config=index.facts.config, derived=True)
    index.check()
    check_steps(files, index.tensors)
    if hasattr(found, "examine"):
        index = found.examine(files, index)
    return Checkpoint(os.fspath(path), files, index, model_files, reason, named)


def _check_architecture_is_used(opened: list[Checkpoint]) -> None:
    """Raises RequestError if an architecture was named, and no config gives it numbers."""
    if opened[0].architecture is not None and all(each.model_files.config is None for each in opened):
        raise RequestError(
            f"--architecture names {opened[0].architecture.model_type}, and no {CONFIG} says how large this model is",
            where=opened[0].path,
            why="A declaration takes its numbers from the model's config",
            do="Give the directory of the model's config with --model DIR",
        )


def open_both(
    left: PathLike,
    right: PathLike,
    *,
    model: PathLike | None = None,
    vocab_size: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints that are to be compared. `model` is for those without a config of their own; and where only one of them says how
    large the vocabulary is, it speaks for both."""
    named = named_architecture(architecture) if architecture is not None else None
    opened = []
    for path in (left, right):
        own = model is None or find_model_files(open_tree(path)).config is not None
        opened.append(_opened(path, None, None if own else model, vocab_size, named))
    for i, other in ((0, 1), (1, 0)):
        known = (opened[other].model_files.config or {}).get("vocab_size")
        if opened[i].index.facts.unanswered and not opened[other].index.facts.unanswered and known:
            opened[i] = _opened(opened[i].path, None, None, known, named)
    _check_architecture_is_used(opened)
    return opened[0], opened[1]


def plan(
    source: Checkpoint | PathLike,
    *,
    to: str,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    dtype: str | None = None,
    keep_dtype: tuple[str, ...] = (),
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    strip_prefix: str = "",
    weights: Weights = None,
    optimizer: bool = False,
    engine_version: str | None = None,
    max_shard_bytes: int | None = None,
    dequantize: bool = False,
    model: PathLike | None = None,
    vocab_size: int | None = None,
    architecture: Architecture | PathLike | None = None,
    only: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """The proven plan of a conversion to format `to`. Nothing is written, no weight is read.

    dequantize: quantised weights become values, in `dtype` or bf16. only: one rank, such as {"tp": 3}, to look at; such a plan is not run.
    options: what only some formats know.

    Raises: RequestError if the model or the degrees do not allow it, CheckpointError if the source does not hold the whole model.
    """
    opened = source if isinstance(source, Checkpoint) else open(source, model=model, vocab_size=vocab_size, architecture=architecture)
    writer = registry.writer(to)
    said = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items() if value is not None}
    if foreign := sorted(said.keys() - set(getattr(writer, "options", ()))):
        raise RequestError(f"--{foreign[0].replace('_', '-')} does not apply to {to}", do="Leave it out")
    if getattr(writer, "keeps_optimizer", False):
        weights, optimizer = weights or ("master" if opened.index.by_kind("master") else None), True
    check_answers(opened)
    selection = Selection(weights, include, exclude, strip_prefix, optimizer, masters=getattr(writer, "keeps_masters", False))
    index = opened.named(selection)
    content = canonical(index, opened.model, selection)
    check_against_model(content, partial=selection.is_partial, strict=False)
    told = index.facts.notes[len(opened.index.facts.notes) :]
    if getattr(writer, "keeps_names", False) and index is not opened.index:
        index, told = opened.index, (_KEPT,)
        content = canonical(index, opened.model, selection)
    content = replace(content, read_scalar=lambda key: _scalar(content.tensors[key], opened.files))
    companions = opened.model_files
    fixed = quantized_names(content, companions.config)
    if dequantize:
        content, fixed = dequantized(content, companions.config), frozenset()
        companions = replace(companions, config=without_quantization(companions.config or {}), derived=True)
    target = Target(to, Parallel(tp, pp, ep, dp), dtype_named(dtype), keep_dtype, engine_version, max_shard_bytes, fixed, said, only or {})
    layout = writer.lay_out(content, target, companions)
    layout = replace(layout, notes=(*told, *layout.notes))
    made = make_plan(index, opened.files, content, target, layout)
    prove(made)
    return made


def check_answers(opened: Checkpoint) -> None:
    """Raises RequestError if a checkpoint leaves something unsaid that only its owner knows."""
    if opened.index.facts.unanswered:
        raise RequestError(
            f"{opened.path} does not say {'; nor '.join(opened.index.facts.unanswered)}",
            why="It is in no file of the checkpoint, and is not guessed",
            do="Say it with the option named above",
        )


def dtype_named(name: str | None, option: str = "--dtype") -> dtypes.DType | None:
    """The floating-point type that a person means; None for None. Raises RequestError, naming those that are known."""
    if name is None:
        return None
    found = dtypes.from_user(name)
    if found is None or not found.floating:
        raise RequestError(f"{option} {name}: not a floating-point type that is known", do="Use one of " + ", ".join(dtypes.known_names()))
    return found


_KEPT = (
    "names stay as the source has them, so that its run goes on, and the fingerprint is of these; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published ones"
)


def _scalar(tensor: Tensor, files: Files) -> float:
    """The value of a tensor of one element."""
    return float(LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).numpy().item())
