"""Opening: from a path and what the user says about it to a Checkpoint, or to a Model alone. Metadata is read, and no weight."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import (
    CONFIG,
    ModelFiles,
    blaming_the_parent,
    find_adapter_config,
    find_model_files,
    find_model_files_near,
)
from reshard.canonical.optimizer_state import uncounted
from reshard.canonical.renaming import without_wrappers
from reshard.canonical.tensor_classes import classified
from reshard.canonical.tied_head import KEY, agreed_config
from reshard.engine.checks.one_save import check_copied_files, check_steps
from reshard.engine.destinations.journal import Unfinished, read_journal
from reshard.engine.events import details, event
from reshard.errors import CheckpointError, RequestError, TargetError, UnexpectedContentError, UnsupportedError, blaming
from reshard.geometry.quantities import plural
from reshard.index.coverage import check_index
from reshard.index.index import Index
from reshard.models.architecture import Architecture
from reshard.models.known_models import known_config, with_known_name
from reshard.models.lookup import (
    changed_keys,
    declared_by,
    find_architecture,
    find_model,
    model_type_of,
    named_architecture,
    unknown_architecture,
)
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization, with_stored_modules
from reshard.plans.manifest import check_listed_files, usable_manifest
from reshard.requests.checkpoint import Checkpoint
from reshard.requests.keywords import ModelOptions, OpenOptions, PathLike, checked_keywords
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import gc_paused, is_url
from reshard.storage.tar import open_base, open_files, open_tree
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


def opened(source: Checkpoint | PathLike, *, is_alone: bool = True, **options: Unpack[OpenOptions]) -> Checkpoint:
    """The given checkpoint, or the checkpoint at a path, opened with these options.

    is_alone: False for one of several, to which options may not apply: `model` is used if it has no config of its own, or if it wins.
    """
    if isinstance(source, Checkpoint):
        return source
    if is_alone:
        return open(source, **options)
    own: dict[str, Any] = dict(options)
    if not own.get("model_wins") and find_model_files_near(open_base(source)).config is not None:
        own["model"] = None
    with blaming(os.fspath(source)):
        return _open(source, own)


def adapter_of(base: Checkpoint, path: PathLike) -> Checkpoint:
    """The LoRA adapter at a path, which is to be merged into a base. The config of the base tells how Megatron lays one out, if the adapter
    has none of its own."""
    found = open(path)
    if found.model_files.config is not None or registry.named(found.format).holds_adapters or base.model_files.path is None:
        return found
    return open(path, model=base.model_files.path, architecture=base.architecture)


def open_both(left: PathLike, right: PathLike, **options: Unpack[ModelOptions]) -> tuple[Checkpoint, Checkpoint]:
    """Open two checkpoints that are to be compared.

    `model` is used for a checkpoint without a config of its own. If only one checkpoint gives the vocabulary size, it is used for both.
    """
    without_config = [path for path in (left, right) if find_model_files(open_base(path)).config is None]
    if (model := options.get("model")) is not None and not without_config:
        raise RequestError(f"`model=` {os.fspath(model)} is not used: both checkpoints have a {CONFIG} of their own", do="Leave it out")
    found = [_open(path, options if path in without_config else {**options, "model": None}) for path in (left, right)]
    for i, other in ((0, 1), (1, 0)):
        vocabulary = (found[other].model_files.config or {}).get("vocab_size")
        if found[i].index.facts.unanswered and not found[other].index.facts.unanswered and vocabulary:
            found[i] = _open(found[i].path, {"vocab_size": vocabulary, "architecture": options.get("architecture")})
    check_used(found, options)
    return found[0], found[1]


@gc_paused()
def _open(path: PathLike, options: Mapping[str, Any]) -> Checkpoint:
    path, options = _chosen(path, options)
    base, *deltas = chain_of(path, options.get("deltas") or ())
    if deltas:
        from reshard.requests.deltas import patched

        of_base = {name: given for name, given in options.items() if name != "deltas"}
        return patched(_open(base, of_base), [_open(delta, {}) for delta in deltas])
    began = time.monotonic()
    format, checkpoint = unchecked(path, options)
    files, index = checkpoint.files, checkpoint.index
    check_index(index)
    check_steps(files, index)
    check_copied_files(files, index)
    checkpoint = classified_checkpoint(replace(checkpoint, index=_with_note_on_counts(format.check_values(files, index))))
    files.opened()
    _log_opened(checkpoint, time.monotonic() - began)
    return checkpoint


def _with_note_on_counts(index: Index) -> Index:
    """The index, with a note if there are moments without a step count."""
    names = uncounted(((tensor.kind, tensor.name) for tensor in index.tensors), index.param_groups)
    if not names:
        return index
    note = f"the optimizer has moments of {plural(len(names), 'parameter')} such as {names[0]}, and no count of the steps that made them"
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, note)))


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
    config = checkpoint.model_files.config
    model_type = model_type_of(config or {})
    yield f"the config is of the model type {model_type}" if config else "there is no config", {"model_type": model_type}
    for stored in checkpoint.models:
        text = f"holds the model {stored.root}: {plural(stored.tensors, 'tensor')}, {stored.nbytes:,} bytes"
        yield text, {"root": stored.root, "main": stored.is_main, "tensors": stored.tensors, "bytes": stored.nbytes}


def classified_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every tensor's class (canonical/tensor_classes.py)."""
    try:
        return replace(checkpoint, index=classified(checkpoint.index, checkpoint.model))
    except RequestError:  # the config does not give the model's sizes, and names alone tell the classes; what needs the sizes says so
        return replace(checkpoint, index=classified(checkpoint.index, None))


def unchecked(path: PathLike, options: Mapping[str, Any]) -> tuple[Format, Checkpoint]:
    """The checkpoint at a path and its format, before its tensors are checked. options: the keywords of `open`.

    Raises: as `open` does, except for incomplete tensors and different steps.
    """
    path, given = _chosen(path, options)
    try:
        return _unchecked(path, given)
    except RequestError as error:
        if error.id not in ("not-found", "ambiguous") or given.get("format") is not None:
            raise
        from reshard.requests.choice import only_checkpoint

        only = only_checkpoint(os.fspath(path))
        if only is None or error.id == "ambiguous":
            raise
    return _unchecked(only, given)


def _chosen(path: PathLike, options: Mapping[str, Any]) -> tuple[PathLike, dict[str, Any]]:
    """The path of the checkpoint that the options choose in a folder, and the other options."""
    given = dict(options)
    step, part = given.pop("step", None), given.pop("part", None)
    if step is None and part is None:
        return path, given
    from reshard.requests.choice import Choice

    return Choice(step, part).path(os.fspath(path)), given


def _unchecked(path: PathLike, options: Mapping[str, Any]) -> tuple[Format, Checkpoint]:
    """The checkpoint that lies at a path itself, and its format."""
    name, model, architecture = options.get("format"), options.get("model"), options.get("architecture")
    files = open_tree(path)
    unfinished = None if is_url(path) else _unfinished(Path(path))
    if unfinished and (unfinished.committing or files.list() == (f"{WORK_FOLDER}/",)):
        raise unfinished.refusal()
    if files.store is not None:
        from reshard.engine.destinations.store import check_ended

        check_ended(files)
    manifest = usable_manifest(files)
    if manifest is not None:
        check_listed_files(files, manifest)
    try:
        with _read_as_claims(os.fspath(path)):
            format, reason = (registry.named(name), "`format=`") if name else registry.detect(files)
    except RequestError:
        if unfinished:
            raise unfinished.refusal() from None
        raise
    model_files = find_model_files_near(files)
    named = None if architecture is None else named_architecture(architecture)
    declared = named or declared_by(model_files.declaration, model_files.declared_in)
    if model is not None:
        model_files = _model_files_at(model, model_files, declared, wins=options.get("model_wins", False))
        declared = declared or declared_by(model_files.declaration, model_files.declared_in)
    model_files = replace(model_files, declaration=_declaration(declared, model_files.config or {}))
    if (adapter_config := find_adapter_config(files)) is not None:
        model_files = replace(model_files, adapter_config=adapter_config)
    with _read_as_claims(os.fspath(path)), gc_paused(), blaming_the_parent(model_files):
        index = without_wrappers(format.read(files, _hints(model_files, options, declared)))
    if index.facts.step is None and manifest is not None and manifest.format == index.format:
        index = replace(index, facts=replace(index.facts, step=manifest.step))
    if manifest is not None and manifest.format == index.format and (combination := manifest.combination):
        index = replace(index, facts=replace(index.facts, notes=(*index.facts.notes, combination)))
    if index.facts.config is not None and index.facts.config != model_files.config:
        model_files = replace(model_files, config=index.facts.config, derived=True)
    model_files = replace(model_files, config=with_stored_modules(model_files.config, (tensor.name for tensor in index.tensors)))
    model_files = _with_agreed_config(index, model_files, declared)
    if model_files.notes:
        index = replace(index, facts=replace(index.facts, notes=(*index.facts.notes, *model_files.notes)))
    return format, Checkpoint(os.fspath(path), files, index, model_files, reason, declared, options)


def _unfinished(path: Path) -> Unfinished | None:
    """The conversion that writes a directory, or was interrupted there. Raises CheckpointError if its journal is not one of reshard."""
    try:
        return read_journal(path)
    except TargetError as error:
        raise CheckpointError(error.what, where=error.where, why="It says whether the checkpoint is complete", do=error.do) from None


def _with_agreed_config(index: Index, model_files: ModelFiles, declared: Architecture | None) -> ModelFiles:
    """The files with a config in which the inner config of the language model also says that a head that is not stored is tied."""
    config = model_files.config or {}
    if config.get(KEY) is not True or (model := find_model(config, declared)) is None or (agreed := agreed_config(index, model)) is None:
        return model_files
    inner = model.architecture.text_config
    change = f"the config ties a head that is not stored ({KEY}: true), and {inner} does not; {inner} is changed, as vLLM 0.32 reads it"
    return replace(model_files, config=agreed, derived=True, changes=(change,))


def _declaration(declared: Architecture | None, config: Mapping[str, Any]) -> bytes | None:
    """The declaration that an output needs beside its config, to be read without `architecture`; None if the config is enough."""
    if declared is None:
        return None
    if declared.declaration is not None:
        return declared.declaration.encode()
    name = declared.model_type
    if name == model_type_of(config) or not find_architecture(name):
        return None
    return f"language: 2\nmodel_type: {name}\nextends: {name}\n".encode()


def _hints(model_files: ModelFiles, options: Mapping[str, Any], declared: Architecture | None) -> Hints:
    """What the user says about a checkpoint."""
    layout = options.get("stored_layout")
    return Hints(model_files.config, options.get("vocab_size"), declared, None if layout is None else os.fspath(layout))


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
            do="Copy the checkpoint again; if that does not help, run the command with --debug and report it as an issue",
        ) from error


def _model_files_at(model: PathLike, own: ModelFiles, architecture: Architecture | None, *, wins: bool) -> ModelFiles:
    """The files in the directory that --model names, or beside the config that it names. own: those that are used without it.

    Raises: RequestError if there is no config; or if it describes another layout than the checkpoint's own, unless it wins (--model-wins).
    """
    found = open_files(model)
    model_files = find_model_files((found.parent() if found.is_file else None) or found)
    if model_files.config is None:
        raise RequestError(f"there is no {CONFIG} in {os.fspath(model)!r}", do="Give `model=` the directory that holds the model's config")
    changed = ", ".join(map(str, changed_keys(own.config, model_files.config, architecture))) if own.config is not None else ""
    if changed and not wins:
        raise RequestError(
            f"`model=` {os.fspath(model)} contradicts the checkpoint's own config: {changed}",
            where=own.path,
            why="Weights are split by these values, and their shapes alone do not show that a value is wrong",
            do="Leave out `model=`, or add `model_wins=True` if the checkpoint's own config is wrong",
        )
    return replace(model_files, wins_over=f"{own.path}{CONFIG}: {changed}" if changed else None)


def check_used(checkpoints: list[Checkpoint], options: Mapping[str, Any]) -> None:
    """Raises RequestError if the caller gave a vocabulary size or an architecture, and no checkpoint needs it or has a config for it."""
    first = checkpoints[0]
    if options.get("vocab_size") is not None and not any(registry.named(each.format).needs_vocabulary for each in checkpoints):
        users = ", ".join(name for name, found in registry.formats().items() if found.needs_vocabulary)
        raise RequestError(
            "`vocab_size=` does not apply to this checkpoint", where=first.path, why=f"Only {users} need it", do="Leave it out"
        )
    if first.architecture is not None and all(each.model_files.config is None for each in checkpoints):
        raise RequestError(
            f"`architecture=` names {first.architecture.model_type}, and there is no {CONFIG}, nor one in the parent directory",
            where=first.path,
            why="A declaration takes the sizes of the model from its config",
            do="Add `model=DIR`, the directory with the model's config",
        )


def is_bare(path: PathLike) -> bool:
    """Whether a path is a model's config, a folder with a config and without weights in any known format, or the name of a known model.

    Raises: RequestError if there is nothing, with the known model that may be meant.
    """
    if known_config(path) is not None:
        return True
    try:
        files = open_base(path)
    except RequestError as error:
        raise with_known_name(error, path) from None
    return find_model_files(files).config is not None and not registry.is_claimed(files)


def model_at(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model of a folder with a config.json, with or without weights; of a checkpoint whose own settings describe the model; or the
    known model of that name."""
    if (known := known_config(path)) is not None:
        return model_of(known, architecture)
    try:
        files = open_base(path)
    except RequestError as error:
        raise with_known_name(error, path) from None
    found = find_model_files(files)
    return model_of(found.config or open(path).model_files.config, architecture or declared_by(found.declaration, found.declared_in))


def model_of(config: Mapping[str, Any] | None, architecture: Architecture | PathLike | None = None) -> Model:
    """The model that a config describes. Raises RequestError if there is no config, or its architecture is not declared."""
    if config is None:
        raise RequestError(
            f"there is no {CONFIG} in the checkpoint or in its parent directory, so the model is not known",
            do="Add `model=DIR`, the directory with the model's config",
        )
    found = find_model(config, None if architecture is None else named_architecture(architecture))
    if found is not None:
        return found
    if method := unknown_quantization(config):
        raise UnsupportedError(f"the weights are quantized ({method}) with a method that reshard does not know")
    raise unknown_architecture(config)
