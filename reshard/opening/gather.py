"""What lies at a place, gathered once into one frozen Checkpoint before anything is concluded from it. Each step looks at the files for one
thing, and adds it:

    refuse unfinished, unchosen -> remember (reshard.json) -> recognize (the format) -> describe (the model) -> read (the index)

The order of the steps decides which error a user sees.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.model_files import (
    CONFIG,
    PIPELINE,
    ModelFiles,
    blaming_the_parent,
    find_adapter_config,
    find_model_files,
    find_model_files_near,
)
from reshard.adapter.save_folders import step_of
from reshard.canonical.renaming import without_wrappers
from reshard.engine.destinations.journal import Unfinished, read_journal
from reshard.errors import CheckpointError, RequestError, TargetError, UnexpectedContentError, some
from reshard.index.index import Index, RunFacts
from reshard.opening.checkpoint import Checkpoint
from reshard.plans.manifest import check_listed_files, usable_manifest
from reshard.storage.files import Files
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import gc_paused, is_url
from reshard.storage.tar import open_files, open_tree

if TYPE_CHECKING:
    from reshard.models.architecture import Architecture


# Behind the folder of a run: the model in it.
_HERE = "/."


def gather(path: str, options: Mapping[str, Any]) -> Checkpoint:
    """What lies at a path: its format, the files that describe its model, and the index. options: the keywords of `open`.

    Raises: CheckpointError if a conversion has not ended here, or files that reshard wrote are missing or cut short; RequestError if there
    is nothing in a known format, or the config that the caller names does not fit; what the format's reader raises.
    """
    files = _without_steps(path) if path.endswith(_HERE) else open_tree(path)
    checkpoint = Checkpoint(path, files, Index("", (), (), RunFacts()), ModelFiles(files, "", None), "", options=options)
    for step in (refuse_unfinished, refuse_unchosen, remember, recognize, describe, read):
        checkpoint = step(checkpoint)
    return checkpoint


def refuse_unfinished(checkpoint: Checkpoint) -> Checkpoint:
    """Raises CheckpointError if a conversion is completing the files, or if it left nothing but its work folder."""
    files, unfinished = checkpoint.files, _unfinished(checkpoint)
    if unfinished and (unfinished.committing or files.list() == (f"{WORK_FOLDER}/",)):
        raise unfinished.refusal()
    if files.store is not None:
        from reshard.engine.destinations.store import check_ended

        check_ended(files)
    return checkpoint


def _without_steps(path: str) -> Files:
    """The files of RUN/., the model in the folder of a run, without the steps beside it."""
    from reshard.opening.run_folders import HERE, RunFolder

    return RunFolder(path.removesuffix(_HERE)).tree(HERE)


def refuse_unchosen(checkpoint: Checkpoint) -> Checkpoint:
    """Raises SeveralCheckpoints if a model lies here beside the steps of its run, and neither a format nor the path RUN/. chooses it."""
    if checkpoint.options.get("format") is None:
        refuse_model_beside_steps(checkpoint.path, checkpoint.files)
    return checkpoint


def refuse_model_beside_steps(path: str, files: Files) -> None:
    """Raises SeveralCheckpoints if a model lies in a folder beside the steps of its run, and the path RUN/. does not choose it."""
    if not path.endswith(_HERE) and any(folder.endswith("/") and step_of(folder.rstrip("/")) is not None for folder in files.list()):
        from reshard.opening.choice import SeveralCheckpoints
        from reshard.opening.run_folders import RunFolder

        run = RunFolder(path)
        if run.has_model():
            raise SeveralCheckpoints(path, run.checkpoints())


def remember(checkpoint: Checkpoint) -> Checkpoint:
    """Add what reshard recorded when it wrote the files. Raises CheckpointError if files that it lists are missing or cut short."""
    manifest = usable_manifest(checkpoint.files)
    if manifest is not None:
        check_listed_files(checkpoint.files, manifest)
    return replace(checkpoint, manifest=manifest)


def recognize(checkpoint: Checkpoint) -> Checkpoint:
    """Add the format, and why the files are taken for it."""
    try:
        with _read_as_claims(checkpoint.path):
            name = checkpoint.options.get("format")
            format, detected = (registry.named(name), "`format=`") if name else registry.detect(checkpoint.files)
    except RequestError:
        if unfinished := _unfinished(checkpoint):
            raise unfinished.refusal() from None
        raise
    return replace(checkpoint, index=replace(checkpoint.index, format=format.name), detected=detected)


def describe(checkpoint: Checkpoint) -> Checkpoint:
    """Add the files that describe the model, and the architecture if it is not the one that the config names."""
    files, options = checkpoint.files, checkpoint.options
    model_files = find_model_files_near(files)
    declared = model_files.declared(options.get("architecture"))
    if (model := options.get("model")) is not None:
        model_files = _named_by(model, model_files, declared, wins=options.get("model_wins", False))
        declared = declared or model_files.declared()
    declaration = _declaration(declared, model_files.config or {})
    model_files = replace(model_files, declaration=declaration, adapter_config=find_adapter_config(files))
    return replace(checkpoint, model_files=model_files, architecture=declared)


def read(checkpoint: Checkpoint) -> Checkpoint:
    """Add the index, as the format's reader makes it of the files."""
    model_files, layout = checkpoint.model_files, checkpoint.options.get("stored_layout")
    vocab_size = checkpoint.options.get("vocab_size")
    hints = Hints(model_files.config, vocab_size, checkpoint.architecture, None if layout is None else os.fspath(layout))
    with _read_as_claims(checkpoint.path), gc_paused(), blaming_the_parent(model_files), naming_what_is_there(checkpoint.files):
        index = without_wrappers(registry.named(checkpoint.format).read(checkpoint.files, hints))
    return replace(checkpoint, index=index)


@contextmanager
def naming_what_is_there(files: Files) -> Iterator[None]:
    """A context in which an error about missing files says which of the ranks' files are there."""
    try:
        yield
    except CheckpointError as error:
        from reshard.adapter.rank_files import add_what_is_there

        add_what_is_there(error, files)
        raise


def _unfinished(checkpoint: Checkpoint) -> Unfinished | None:
    """The conversion that writes a directory, or was interrupted there. Raises CheckpointError if its journal is not one of reshard."""
    try:
        return None if is_url(checkpoint.path) else read_journal(Path(checkpoint.path))
    except TargetError as error:
        raise CheckpointError(error.what, where=error.where, why="It says whether the checkpoint is complete", do=error.do) from None


def _named_by(model: str | os.PathLike[str], own: ModelFiles, architecture: Architecture | None, *, wins: bool) -> ModelFiles:
    """The files in the directory that `model=` names, or beside the config that it names. own: those that are used without it.

    Raises: RequestError if there is no config; or if it describes another layout than the checkpoint's own, unless it wins (`model_wins`).
    """
    from reshard.models.lookup import changed_keys

    place = open_files(model)
    model_files = find_model_files((place.parent() if place.is_file else None) or place)
    if model_files.config is None:
        parts = [path for path in place.list() if path.endswith("/") and place.size(f"{path}{CONFIG}") is not None]
        raise RequestError(
            f"there is no {CONFIG} in {os.fspath(model)!r}",
            why=f"It is a pipeline of diffusers, whose folders have their own: {some(parts)}" if place.size(PIPELINE) is not None else None,
            do="Give `model=` the directory that holds the model's config" + ("; or choose it with `part=`" if parts else ""),
        )
    changed = ", ".join(map(str, changed_keys(own.config, model_files.config, architecture))) if own.config is not None else ""
    if changed and not wins:
        raise RequestError(
            f"`model=` {os.fspath(model)} contradicts the checkpoint's own config: {changed}",
            where=own.path,
            why="Weights are split by these values, and their shapes alone do not show that a value is wrong",
            do="Leave out `model=`, or add `model_wins=True` if the checkpoint's own config is wrong",
        )
    return replace(model_files, wins_over=f"{own.path}{CONFIG}: {changed}" if changed else None)


def _declaration(declared: Architecture | None, config: Mapping[str, Any]) -> bytes | None:
    """The declaration that an output needs beside its config, to be read without `architecture`; None if the config is enough."""
    if declared is None:
        return None
    if declared.declaration is not None:
        return declared.declaration.encode()
    from reshard.models.lookup import find_architecture, model_type_of

    name = declared.model_type
    if name == model_type_of(config) or not find_architecture(name):
        return None
    return f"language: 2\nmodel_type: {name}\nextends: {name}\n".encode()


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
