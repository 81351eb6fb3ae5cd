"""What one does with checkpoints: open, plan, convert, verify, fingerprint, roundtrip. The command line calls just these."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from reshard import dtypes, registry
from reshard.adapter import Hints
from reshard.architecture import Architecture, Model, find_model
from reshard.archives import open_tree
from reshard.canonical import Canonical, Selection, canonical, check_against_model
from reshard.compare import Comparison, Side, compare, fingerprint_blocks, fingerprint_of
from reshard.containers.inert_pickle import uncollected
from reshard.declarations import named_architecture
from reshard.dequantization import dequantized, quantized_names, without_quantization
from reshard.digests import Fingerprint
from reshard.engine.run import MANIFEST, Conversion
from reshard.errors import RequestError
from reshard.files import Files, LocalFiles, VirtualFiles
from reshard.index import Index, Tensor
from reshard.model_files import CARRIED, CONFIG, ModelFiles, find_model_files
from reshard.optimizers import is_master_key
from reshard.outputs import WORK_FOLDER
from reshard.parallel import Parallel
from reshard.plans import Plan, Target, make_plan
from reshard.proof import RoundTrip, compose, prove, widens
from reshard.rank_files import check_steps
from reshard.spellings import respelled
from reshard.stored import whole
from reshard.views import LazyTensor, View
from reshard.wrappers import without_wrappers

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
        found = respelled(self.index, model or self.model, (selection or Selection()).strip_prefix)
        if found is not self.index:
            found.check()
        return found

    def content(self, selection: Selection | None = None, *, model: Model | None = None) -> Canonical:
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
        if opened[i].index.facts.asks and not opened[other].index.facts.asks and known:
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
        weights, optimizer = weights or ("master" if opened.index.by_role("master") else None), True
    check_answers(opened)
    selection = Selection(weights, include, exclude, strip_prefix, optimizer, masters=getattr(writer, "keeps_masters", False))
    index = opened.named(selection)
    content = canonical(index, opened.model, selection)
    check_against_model(content, partial=selection.is_partial, strict=False)
    told = index.facts.notes[len(opened.index.facts.notes) :]
    if getattr(writer, "keeps_names", False) and index is not opened.index:
        index, told = opened.index, (_KEPT,)
        content = canonical(index, opened.model, selection)
    content = replace(content, scalar=lambda key: _scalar(content.tensors[key], opened.files))
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
    if opened.index.facts.asks:
        raise RequestError(
            f"{opened.path} does not say {'; nor '.join(opened.index.facts.asks)}",
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


def convert(
    made: Plan,
    target: PathLike,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Fingerprint:
    """Run a plan into the directory `target`; returns the fingerprint of what was written.

    Raises: RequestError if the target exists and neither `resume` nor `overwrite` was said, or the disk has no room.
    """
    running = conversion(made, target, resume=resume, overwrite=overwrite, workers=workers, memory=memory)
    for done in running.run():
        if progress:
            progress(done.nbytes)
    assert running.fingerprint is not None
    return running.fingerprint


def conversion(
    made: Plan,
    target: PathLike,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int | None = None,
) -> Conversion:
    """A conversion that has not begun, for those who show its progress; `convert` is the short way."""
    if made.target.only:
        raise RequestError(f"this is a plan of {dict(made.target.only)} alone", do="Plan without `only` what is to be written")
    root = Path(target)
    replaces = _replaceable(root, made, resume=resume, overwrite=overwrite)
    return Conversion(made, root, resume=resume, replaces=replaces, workers=workers, memory=memory)


def verify(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike,
    *,
    cast: bool = False,
    selection: Selection | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Whether two checkpoints hold the same weights, whatever their layouts: names, shapes, element types, every bit.

    Where only one of them has a config, it speaks for both. cast: where element types differ, compare after casting the left's.
    """
    if isinstance(left, Checkpoint) or isinstance(right, Checkpoint):
        a, b = (side if isinstance(side, Checkpoint) else open(side) for side in (left, right))
    else:
        a, b = open_both(left, right)
    model = a.model or b.model
    a_side, b_side = (Side(side.files, side.index, side.content(selection, model=model)) for side in (a, b))
    result = Comparison()
    for nbytes in compare(a_side, b_side, result, with_cast=cast, workers=workers, memory=memory):
        if progress:
            progress(nbytes)
    return result


def fingerprint(
    source: Checkpoint | PathLike,
    *,
    selection: Selection | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Fingerprint:
    """The layout-independent digest of a checkpoint's weights; digests.py says what it hashes."""
    opened = source if isinstance(source, Checkpoint) else open(source)
    side = Side(opened.files, opened.index, opened.content(selection))
    digests: dict[str, dict[int, bytes]] = {}
    for name, number, nbytes, digest in fingerprint_blocks(side, workers=workers, memory=memory):
        digests.setdefault(name, {})[number] = digest
        if progress:
            progress(nbytes)
    return fingerprint_of(side, digests)


def roundtrip(made: Plan) -> RoundTrip:
    """Proof, by composing plans, that the way there and back is the identity; no weight is read.

    The target's own reader is given the planned headers, and nothing else, to say where it would find each weight.
    """
    virtual = VirtualFiles(f"the planned {made.layout.format} checkpoint")
    for file in made.layout.files:
        virtual.add(file.path, file.nbytes, file.literals)
    for sidecar in made.layout.sidecars:
        virtual.add(sidecar.path, len(sidecar.content), ((0, sidecar.content),))
    model = made.content.model
    config = find_model_files(virtual).config or (model.config if model else None)
    architecture = model.architecture if model else None
    writer = registry.writer(made.layout.format)
    read_back = writer.read(virtual, Hints(config, architecture=architecture))
    return compose(made, read_back if getattr(writer, "keeps_names", False) else respelled(read_back, find_model(config, architecture)))


def materialize(
    made: Plan,
    source: Checkpoint,
    *,
    work: PathLike | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Convert there and back for real, below `work`, and compare every bit with the source; returns what was lost, as sentences.

    The way back ends in the source's own format where that can be written, otherwise in whole tensors (hf; with optimizer state,
    which hf has none of, in the target's own format on one rank).
    """
    effort: dict[str, Any] = {"workers": workers, "memory": memory, "progress": progress}
    whole_format = made.layout.format if made.content.states else _WHOLE
    back_format = source.format if registry.can_write(registry.reader(source.format)) else whole_format
    with TemporaryDirectory(prefix="reshard-", dir=work) as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        convert(made, there, **effort)
        there_opened = open(there, model=source.model_files.path, architecture=source.architecture)
        content, facts = source.content(made.content.selection, model=made.content.model), source.index.facts
        selection = Selection(optimizer=bool(content.states), masters=any(is_master_key(key) for key in content.states))
        sizes: dict[str, Any] = {}
        if back_format == source.format:
            sizes = {name: facts.parallel[name] for name in ("tp", "pp") if name in facts.parallel}
            sizes = {"dp": facts.mesh.ranks} if facts.mesh else sizes
        convert(plan(there_opened, to=back_format, optimizer=selection.optimizer, **sizes), back, **effort)
        left = Side(source.files, source.index, content)
        losses: list[str] = []
        # What was made wider holds the same values; any other cast is a loss, and is found as one.
        casts = [route for route in made.routes if route.is_cast]
        wider = bool(casts) and all(widens(route) for route in casts)
        for name, found in (
            (f"there ({made.layout.format})", there_opened),
            (f"back ({back_format})", open(back, model=source.model_files.path, architecture=source.architecture)),
        ):
            result = Comparison()
            right = Side(found.files, found.index, found.content(selection, model=content.model))
            for nbytes in compare(left, right, result, with_cast=wider, workers=workers, memory=memory):
                if progress:
                    progress(nbytes)
            losses.extend(f"{difference.name}: {name}: {difference.detail}" for difference in result.differences)
        return losses


_KEPT = (
    "names stay as the source has them, so that its run goes on, and the fingerprint is of these; "
    "`reshard fingerprint`, where it knows the config, and `verify` go by the published ones"
)
# The format that holds every tensor whole, under its canonical name.
_WHOLE = "hf"


def _scalar(tensor: Tensor, files: Files) -> float:
    """The value of a tensor of one element."""
    return float(LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).numpy().item())


def _replaceable(root: Path, made: Plan, *, resume: bool, overwrite: bool) -> tuple[str, ...]:
    """The files in the target that a conversion may replace. Raises RequestError if it may not go there."""
    if root.exists() and not root.is_dir():
        raise RequestError("the target is a file; a directory is written", where=str(root))
    entries = sorted(entry.name for entry in root.iterdir()) if root.exists() else []
    if not entries:
        return ()
    source = Path(made.source_files.root)
    if root.resolve() == (source if source.is_dir() else source.parent).resolve():
        raise RequestError("source and target are the same directory", where=str(root), do="Choose another target")
    interrupted = WORK_FOLDER in entries
    if resume and (interrupted or MANIFEST in entries):
        return ()
    if not overwrite:
        raise RequestError(
            "an interrupted conversion lies here" if interrupted else f"the target exists and holds {len(entries)} entries",
            where=str(root),
            why="Nothing was written",
            do="Finish it with --resume, or start anew with --overwrite" if interrupted else "Choose another directory, or say --overwrite",
        )
    globs = [glob for found in registry.formats().values() for glob in found.owns]
    # Of folders only those are looked into that this target has, too.
    folders = {file.path.partition("/")[0] for file in made.layout.files if "/" in file.path}
    inner = sorted(str(path.relative_to(root)) for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    weights = [name for name in (*entries, *inner) if any(fnmatchcase(name, glob) for glob in globs)]
    if not weights and not interrupted:
        raise RequestError(
            f"--overwrite: {', '.join(entries[:3])} and what else lies there is no checkpoint",
            where=str(root),
            why="Only checkpoints are replaced",
            do="Choose another directory, or remove its content yourself",
        )
    carried = [name for name in entries if any(fnmatchcase(name, glob) for glob in (*CARRIED, CONFIG, MANIFEST))]
    return tuple(weights + carried)
