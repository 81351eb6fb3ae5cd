"""The doors: `open` for one checkpoint, `open_both` for two that are compared.

    choose -> gather (gather.py) -> steps (steps.py) -> Checkpoint

Metadata is read, and no weight.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, find_model_files, find_model_files_near
from reshard.adapter.save_folders import split_step
from reshard.engine.events import details, event
from reshard.errors import RequestError, blaming
from reshard.geometry.quantities import plural
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.gather import gather
from reshard.opening.keywords import ModelOptions, OpenOptions, PathLike, checked_keywords
from reshard.opening.steps import CHECKING, DESCRIBING, Step
from reshard.storage.system_calls import gc_paused
from reshard.storage.tar import open_base
from reshard.storage.trees import chain_of


@checked_keywords
def open(path: PathLike, **options: Unpack[OpenOptions]) -> Checkpoint:
    """Open the checkpoint in a directory or file. Metadata is read, and a few elements that show whether the files belong together.

    The path `BASE+DELTA+DELTA`, and `deltas`, name deltas that `reshard delta` or a trainer wrote. They change the tensors of the base when
    these are read.

    Raises: CheckpointError if it is incomplete or contradicts itself, or a delta is of another base; RequestError if its format is unknown,
    or deltas do not follow each other.
    """
    checkpoint = _open(path, options)
    check_used([checkpoint], options)
    return checkpoint


def opened(source: Checkpoint | PathLike, **options: Unpack[OpenOptions]) -> Checkpoint:
    """The given checkpoint, or the checkpoint at a path, opened with these options."""
    return source if isinstance(source, Checkpoint) else open(source, **options)


def open_several(sources: Sequence[Checkpoint | PathLike], options: Mapping[str, Any]) -> list[Checkpoint]:
    """Open the checkpoints that a conversion takes. Of several, some may not need an option: `model` is used for those without a config."""
    if len(sources) == 1:
        return [opened(sources[0], **options)]
    checkpoints = [source if isinstance(source, Checkpoint) else open_one_of_several(source, options) for source in sources]
    if not isinstance(sources[0], Checkpoint):
        check_used(checkpoints, options)
    return checkpoints


def open_one_of_several(path: PathLike, options: Mapping[str, Any]) -> Checkpoint:
    """Open a checkpoint with options that may not apply to it: `model` is used if it has no config of its own, or with `model_wins`."""
    path = placed(path)
    if not options.get("model_wins") and find_model_files_near(open_base(path)).config is not None:
        options = {**options, "model": None}
    with blaming(os.fspath(path)):
        return _open(path, options)


def adapter_of(base: Checkpoint, path: PathLike) -> Checkpoint:
    """The LoRA adapter at a path, which is to be merged into a base. The config of the base tells how Megatron lays one out, if the adapter
    has none of its own."""
    adapter = open(path)
    if adapter.model_files.config is not None or registry.named(adapter.format).holds_adapters or base.model_files.path is None:
        return adapter
    return open(path, model=base.model_files.path, architecture=base.architecture)


def open_both(
    left: PathLike, right: PathLike, *, formats: Sequence[str] = (), **options: Unpack[ModelOptions]
) -> tuple[Checkpoint, Checkpoint]:
    """Open two checkpoints that are to be compared.

    formats: the formats of both, or one format, which counts for those of the two that it fits. `model` is used for a checkpoint without a
    config of its own. If only one checkpoint gives the vocabulary size, it is used for both.
    """
    left, right = placed(left), placed(right)
    without_config = [path for path in (left, right) if find_model_files(open_base(path)).config is None]
    if (model := options.get("model")) is not None and not without_config:
        raise RequestError(f"`model=` {os.fspath(model)} is not used: both checkpoints have a {CONFIG} of their own", do="Leave it out")
    of_sides = [{"format": name} for name in _formats_of(left, right, formats)]
    pair = [
        _open(path, {**options, **named} if path in without_config else {**options, **named, "model": None})
        for path, named in zip((left, right), of_sides, strict=True)
    ]
    for i, other in ((0, 1), (1, 0)):
        vocabulary = (pair[other].model_files.config or {}).get("vocab_size")
        if pair[i].index.facts.unanswered and not pair[other].index.facts.unanswered and vocabulary:
            about = {"vocab_size": vocabulary, "architecture": options.get("architecture")}
            pair[i] = _open(pair[i].path, {**about, **of_sides[i]})
    check_used(pair, options)
    return pair[0], pair[1]


def _formats_of(left: PathLike, right: PathLike, formats: Sequence[str]) -> Sequence[str | None]:
    """The format of each of two checkpoints; None: it is detected. Raises RequestError if a single format fits neither, or three are
    given."""
    if len(formats) > 1:
        if len(formats) > 2:
            raise RequestError(f"`format=` is given {len(formats)} times", do="Give it once, or once for each of the two checkpoints")
        return formats
    fitting = [name if registry.claims(name, open_base(path)) else None for path in (left, right) for name in formats]
    if formats and not any(fitting):
        what = f"`format={formats[0]}` fits neither {os.fspath(left)} nor {os.fspath(right)}"
        raise RequestError(what, do="Leave it out, or give it twice: the format of the first, and that of the second")
    return fitting or (None, None)


@gc_paused()
def _open(path: PathLike, options: Mapping[str, Any]) -> Checkpoint:
    path, options = _chosen(path, options)
    base, *deltas = chain_of(path, options.get("deltas") or ())
    if deltas:
        from reshard.opening.deltas import patched

        of_base = {name: given for name, given in options.items() if name != "deltas"}
        return patched(_open(base, of_base), [_open(delta, {}) for delta in deltas])
    began = time.monotonic()
    checkpoint = _through(CHECKING, _described(path, options))
    checkpoint.files.opened()
    _log_opened(checkpoint, time.monotonic() - began)
    return checkpoint


def look(path: PathLike, options: Mapping[str, Any], steps: Iterable[Step] = ()) -> Checkpoint:
    """The checkpoint at a path as its files describe it, with no other checks of its tensors than `steps`. options: the keywords of `open`.

    Raises: as `open` does, except for what these steps do not check.
    """
    return _through(steps, _described(*_chosen(path, options)))


def _described(path: PathLike, options: Mapping[str, Any]) -> Checkpoint:
    """What the files at a path describe; if it is no checkpoint itself, those of the only one below it."""
    try:
        checkpoint = gather(os.fspath(path), options)
    except RequestError as error:
        if error.id not in ("not-found", "ambiguous") or options.get("format") is not None:
            raise
        from reshard.opening.choice import only_checkpoint

        only = only_checkpoint(os.fspath(path))
        if only is None or error.id == "ambiguous":
            raise
        checkpoint = gather(only, options)
    return _through(DESCRIBING, checkpoint)


def _through(steps: Iterable[Step], checkpoint: Checkpoint) -> Checkpoint:
    for step in steps:
        checkpoint = step(checkpoint)
    return checkpoint


def placed(path: PathLike) -> PathLike:
    """The path of the checkpoint that RUN@STEP names; any other path as it is. Raises as `Choice.path` does."""
    return _chosen(path, {})[0]


def _chosen(path: PathLike, options: Mapping[str, Any]) -> tuple[PathLike, Mapping[str, Any]]:
    """The path of the checkpoint that RUN@STEP and the options choose in a folder, and the other options."""
    others, (run, named) = dict(options), split_step(path)
    step, part = others.pop("step", None), others.pop("part", None)
    if step is None and part is None and named is None:
        return path, others
    from reshard.opening.choice import Choice, NothingToChoose, component_of

    component = component_of(others.get("model"), part)
    others |= {"model": component} if component else {}
    try:
        return Choice.of(run, named, step, part).path(run), others
    except NothingToChoose:
        if component is None or step is not None or named is not None:
            raise
        return path, others


def check_used(checkpoints: list[Checkpoint], options: Mapping[str, Any]) -> None:
    """Raises RequestError if the caller gave a vocabulary size or an architecture, and no checkpoint needs it or has a config for it."""
    first = checkpoints[0]
    if options.get("vocab_size") is not None and not any(registry.named(checkpoint.format).needs_vocabulary for checkpoint in checkpoints):
        users = ", ".join(name for name, format in registry.formats().items() if format.needs_vocabulary)
        raise RequestError(
            "`vocab_size=` does not apply to this checkpoint", where=first.path, why=f"Only {users} need it", do="Leave it out"
        )
    if first.architecture is not None and all(checkpoint.model_files.config is None for checkpoint in checkpoints):
        raise RequestError(
            f"`architecture=` names {first.architecture.model_type}, and there is no {CONFIG}, nor one in the parent directory",
            where=first.path,
            why="A declaration takes the sizes of the model from its config",
            do="Add `model=DIR`, the directory with the model's config",
        )


def _log_opened(checkpoint: Checkpoint, seconds: float) -> None:
    index = checkpoint.index
    nbytes = sum(file.nbytes for file in index.files)
    event(
        "opened",
        f"opened {checkpoint.path}: {index.format} ({checkpoint.detected}), {plural(len(index.files), 'file')}, {nbytes:,} bytes, "
        f"{plural(len(index.tensors), 'tensor')} in {seconds:.2f} s",
        path=checkpoint.path,
        format=index.format,
        detected_by=checkpoint.detected,
        producer=index.facts.producer,
        step=index.facts.step,
        parallel=dict(index.facts.parallel),
        files=len(index.files),
        bytes=nbytes,
        tensors=len(index.tensors),
        seconds=round(seconds, 3),
    )
    details("model", lambda: _about_model(checkpoint))
    details(
        "file", lambda: ((f"reads {file.path}, {file.nbytes:,} bytes", {"path": file.path, "bytes": file.nbytes}) for file in index.files)
    )
    details("note", lambda: ((f"note: {note}", {"note": note}) for note in index.facts.notes))


def _about_model(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    from reshard.models.lookup import model_type_of

    config = checkpoint.model_files.config
    model_type = model_type_of(config or {})
    yield f"the config is of the model type {model_type}" if config else "there is no config", {"model_type": model_type}
    for stored in checkpoint.models:
        text = f"holds the model {stored.root}: {plural(stored.tensors, 'tensor')}, {stored.nbytes:,} bytes"
        yield text, {"root": stored.root, "main": stored.is_main, "tensors": stored.tensors, "bytes": stored.nbytes}
