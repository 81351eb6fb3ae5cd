"""A serving engine's checkpoint by a layout that was learned from the engine's own loader, in place of the rules for a declared model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.serving_format.engine import LEARNING_OPTIONS, LIBRARY, ServingEngine
from reshard.canonical.content import Content
from reshard.containers import safetensors
from reshard.errors import CheckpointError, RequestError, UnsupportedError, some
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.models.lookup import draft_class
from reshard.plans.layout import Layout, Sidecar, Target
from reshard.serving.learned.document import LAYOUT_FILE, layout_of, text_of
from reshard.serving.learned.fit import (
    check_config,
    check_engine,
    check_known,
    check_reads,
    check_sizes,
    check_sources,
    held_sources,
    size_problem,
)
from reshard.serving.learned.layout import LearnedLayout, TensorTemplate
from reshard.serving.learned.library import MOST_BYTES, Library, Wanted
from reshard.serving.learned.library import read_layout as read_layout
from reshard.serving.learned.numbers import values
from reshard.serving.learned.tracer import Tracer
from reshard.serving.legality import require_model
from reshard.storage.files import Files, read_whole

LOGGER = logging.getLogger("reshard")


def stored_layout(files: Files, hints: Hints) -> LearnedLayout | None:
    """The layout that an engine's files follow: the one that the user names, or the one beside them."""
    if hints.layout is not None:
        return read_layout(hints.layout)
    if files.size(LAYOUT_FILE) is None:
        return None
    return layout_of(read_whole(files, LAYOUT_FILE, limit=MOST_BYTES).decode("utf-8", "replace"), LAYOUT_FILE)


def settled(serving_format: ServingEngine, content: Content, target: Target, companions: ModelFiles) -> Target:
    """The target with the layout that `learn=` or `layout_dir=` choose, or the environment for a model that is not declared. In place of
    these options it names the layout file, so that whoever plans again takes the same one.

    Raises: RequestError if no layout fits and none is to be learned; UnsupportedError if the engine does not load the model.
    """
    options = {name: value for name, value in target.options.items() if name not in LEARNING_OPTIONS}
    learns, folder = bool(target.options.get("learn")), target.options.get("layout_dir")
    _check_consistent(target.options)
    if folder is None and "layout" not in options and (learns or content.model is None):
        folder = os.environ.get(LIBRARY) or None
    if not learns and folder is None:
        return replace(target, options=options)
    if companions.config is None or draft_class(companions.config):
        require_model(None, companions.config, serving_format.engine)
    assert serving_format.tracer is not None, "formats without a tracer have none of these options"
    tracer = Tracer(serving_format.tracer, serving_format.name, target.options.get("engine_python") or sys.executable)
    version = tracer.version() if learns else target.engine_version
    shapes = {name: tensor.shape for name, tensor in content.weights.items()}
    wanted = Wanted(serving_format.name, version, target.parallel, companions.config, shapes)
    library = Library(Path(folder).expanduser()) if folder else Library.cached()
    path = library.find(wanted)
    if path is None and not learns:
        raise RequestError(
            "no learned layout fits this checkpoint at these sizes",
            where=str(library.folder),
            why=some(library.reasons(wanted)) or f"There is no layout of {serving_format.engine} in this folder",
            do="Add `learn=True` `engine_python=PATH` to let the engine's own loader tell the layout",
        )
    path = path or library.add(_traced(tracer, version, content, target, companions), wanted)
    return replace(target, options={**options, "layout": str(path)})


def _check_consistent(options: Mapping[str, Any]) -> None:
    """Raises RequestError for options that contradict each other, or mean nothing alone."""
    for name in ("learn", "layout_dir"):
        if options.get(name) and options.get("layout"):
            raise RequestError(f"`layout=` and `{name}=` contradict each other", why="The file is the layout", do="Leave out one of them")
    for name in ("engine_python", "trust_remote_code"):
        if options.get(name) and not options.get("learn"):
            raise RequestError(f"`{name}=` has a meaning only with `learn=True`", do="Add `learn=True`, or leave it out")


def _traced(tracer: Tracer, version: str | None, content: Content, target: Target, companions: ModelFiles) -> LearnedLayout:
    """The layout that the engine's loader makes of the content at the target's sizes. Its files are written without their elements.

    version: the installed version of the engine, from the tracer.
    """
    if content.selection.is_partial or content.states:
        raise RequestError("`learn=True` needs the whole model, and weights alone", do="Leave out `include=`, `exclude=` and `optimizer=`")
    sizes = {"tp": target.parallel.tp, "pp": target.parallel.pp, "ep": target.parallel.ep}
    asked = target.engine_version
    if asked not in (None, version):
        raise RequestError(f"`engine_version={asked}`: {version} is installed", where=tracer.python, do="Leave out `engine_version=`")
    text = f"traces the loader of {tracer.engine} {version} on {target.parallel.tp * target.parallel.pp} ranks: some seconds for each"
    LOGGER.info(text, extra={"event": "learn", "fields": {"engine": tracer.engine, "engine_version": version, **sizes}})
    entries = [(name, target.dtype_of(tensor), tensor.shape) for name, tensor in content.weights.items()]
    with TemporaryDirectory(prefix="reshard-learn-") as work:
        Path(work, "model.safetensors").write_bytes(safetensors.frame(entries, {}).header)
        for sidecar in companions.sidecars({dtype: None for _, dtype, _ in entries}):
            Path(work, sidecar.path).parent.mkdir(parents=True, exist_ok=True)
            Path(work, sidecar.path).write_bytes(sidecar.content)
        trusts = bool(target.options.get("trust_remote_code"))
        return tracer.layout(work, [sizes], companions.config or {}, trust_remote_code=trusts)


def stored_sizes(layout: LearnedLayout, parallel: Parallel, shapes: Mapping[str, tuple[int, ...]]) -> Parallel:
    """The parallel sizes of files, with the expert-parallel size, which the shapes tell. shapes: those of the first rank's tensors.

    Raises: CheckpointError if the layout does not cover the sizes, or has other shapes.
    """
    for ep in dict.fromkeys((1, parallel.tp)):
        candidate = Parallel(parallel.tp, parallel.pp, ep)
        if size_problem(layout, candidate) is None:
            templates = layout.rank_templates(candidate, 0, 0)
            expected = {name: values(template.shape, (candidate.tp, 0)) for name, _, template in templates}
            if all(shapes.get(name, shape) == shape for name, shape in expected.items()):
                return candidate
    raise CheckpointError(
        f"the files are those of {parallel}, with other shapes than the layout has at these sizes",
        why=f"The layout was learned from {layout.engine} {layout.engine_version}",
        do="Give the layout that the files were written with: `layout=FILE`",
    )


def lay_out(serving_format: ServingEngine, layout: LearnedLayout, content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of all ranks, and the small files beside them.

    Raises: RequestError if the layout does not fit the content, the config or the sizes.
    """
    from reshard.adapter.serving_format.writing import about_values, rank_files

    parallel = target.parallel
    serving_format.check_sizes(parallel)
    check_engine(layout, serving_format.name, target.engine_version)
    if content.states:
        raise RequestError(f"{serving_format.engine} loads weights, no optimizer state", do="Leave out `optimizer=True`")
    check_config(layout, companions.config)
    check_sizes(layout, parallel)
    templates: dict[str, TensorTemplate] = {}
    used: set[str] = set()
    for name, template, sources in held_sources(layout, parallel):
        templates[name] = template
        used.update(sources)
    check_sources(layout, {name: tensor.shape for name, tensor in content.weights.items()}, used)
    check_reads(layout, parallel)
    check_known(layout, templates, accept_platform=bool(target.options.get("accept_platform")))
    dtypes, of_sources = _stored_dtypes(layout, content, target)
    files = rank_files(serving_format, target, lambda tp_rank, pp_rank: layout.rank_tensors(parallel, tp_rank, pp_rank, dtypes))
    stored = {dtypes.get(name, template.dtype): None for name, template in templates.items() if template.parts}
    needed = serving_format.keys_for_ranks(companions.config or {}, content.weights)
    companions, config_notes = companions.with_keys(needed, f"since {serving_format.engine} needs it")
    sidecars = companions.sidecars(stored, target.dtype or layout.dtype)
    unused = {name: f"{serving_format.engine}'s own loader does not read it" for name in content.weights if name not in used}
    note = f"by a layout learned from {serving_format.engine} {layout.engine_version} ({layout.model_class}, build for {layout.platform})"
    undigested = "" if layout.has_digest else "; it has no digest that would tell damage: an old version learned it"
    note += f", in {target.options['layout']}{undigested}"
    return Layout(
        serving_format.name,
        tuple(files),
        (Sidecar(LAYOUT_FILE, text_of(layout).encode()), *sidecars),
        parallel,
        (
            note,
            *serving_format.layout_notes({tensor.name for stage in layout.stages.values() for tensor in stage}),
            *config_notes,
            *_about_platform(templates),
            *(_about_casts(content, of_sources) if target.dtype is None else ()),
            *about_values(of_sources),
        ),
        left_out=unused,
    )


def _about_platform(templates: Mapping[str, TensorTemplate]) -> Iterator[str]:
    if touched := [name for name, template in templates.items() if template.kernel]:
        yield f"the shapes of {len(touched)} tensors depend on the platform that was traced, for example {touched[0]}"


def _about_casts(content: Content, of_sources: Mapping[str, DType]) -> Iterator[str]:
    """A note about weights that the engine keeps in another element type. of_sources: checkpoint tensor -> its type in the engine."""
    cast = [source for source, dtype in of_sources.items() if content.tensors[source].dtype != dtype and not dtype.function]
    if cast:
        first = f"{cast[0]} to {of_sources[cast[0]]}"
        yield f"{len(cast)} weights are cast, as the engine does it: {first}; `reshard verify --cast` compares them"


def _stored_dtypes(layout: LearnedLayout, content: Content, target: Target) -> tuple[dict[str, DType], dict[str, DType]]:
    """Tensor of a rank -> its element type; and checkpoint tensor -> its type in the engine.

    A tensor that the engine keeps in another type than it computes in stays in that type. All others have the type that was traced, as
    long as the checkpoint's tensors have the types that were traced and none is asked for.

    Raises: UnsupportedError if the parts of a tensor have different types, or one checkpoint tensor would need two types.
    """
    dtypes: dict[str, DType] = {}
    holders: dict[str, str] = {}
    for name, template, sources in held_sources(layout, target.parallel):
        if name not in dtypes:
            dtypes[name] = _stored_dtype(layout, name, template, sources, content, target)
        for source in sources:
            other = holders.setdefault(source, name)
            if dtypes[other] != dtypes[name]:
                raise UnsupportedError(
                    f"the engine keeps it in two element types, {dtypes[other]} as {other} and {dtypes[name]} as {name}",
                    where=source,
                    do="Convert to hf, which the engine loads as well",
                )
    return dtypes, {source: dtypes[name] for source, name in holders.items()}


def _stored_dtype(
    layout: LearnedLayout, name: str, template: TensorTemplate, sources: tuple[str, ...], content: Content, target: Target
) -> DType:
    if template.dtype != layout.dtype:
        return template.dtype
    if not sources:
        return target.dtype or template.dtype
    traced = layout.source_entries
    if target.dtype is None and all(content.tensors[source].dtype == traced[source].dtype for source in sources):
        return template.dtype
    asked = {target.dtype_of(content.tensors[source]): source for source in sources}
    if len(asked) > 1:
        raise UnsupportedError(
            f"its parts have different element types: {', '.join(f'{source} {dtype}' for dtype, source in asked.items())}",
            where=name,
            why="The engine stores them as one tensor",
            do="Choose one for all with `dtype=`",
        )
    return next(iter(asked))
