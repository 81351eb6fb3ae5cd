"""A serving engine's checkpoint by a layout that was learned from the engine's own loader, in place of the rules for a declared model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.plans.layout import Layout, Sidecar, Target
from reshard.serving.learned.document import LAYOUT_FILE, layout_of, text_of
from reshard.serving.learned.fit import (
    check_config,
    check_engine,
    check_known,
    check_sizes,
    check_sources,
    held_sources,
    size_problem,
)
from reshard.serving.learned.layout import LearnedLayout, TensorTemplate
from reshard.serving.learned.numbers import values
from reshard.storage.files import Files, LocalFiles, read_whole

if TYPE_CHECKING:
    from reshard.adapter.format import Hints
    from reshard.adapter.serving_format.engine import ServingEngine

# Layout files have a few kB, of models with many towers some hundred.
_MOST_BYTES = 1 << 26


def read_layout(path: str) -> LearnedLayout:
    """The layout in a file. Raises RequestError if there is none, or it is no layout file."""
    if not os.path.isfile(path):
        raise RequestError(f"`layout={path}`: there is no such file", do="Write it with `reshard learn`", id="not-found")
    return layout_of(read_whole(LocalFiles(Path(path)), os.path.basename(path), limit=_MOST_BYTES).decode("utf-8", "replace"), path)


def stored_layout(files: Files, hints: Hints) -> LearnedLayout | None:
    """The layout that an engine's files follow: the one that the user names, or the one beside them."""
    if hints.layout is not None:
        return read_layout(hints.layout)
    if files.size(LAYOUT_FILE) is None:
        return None
    return layout_of(read_whole(files, LAYOUT_FILE, limit=_MOST_BYTES).decode("utf-8", "replace"), LAYOUT_FILE)


def stored_sizes(layout: LearnedLayout, parallel: Parallel, shapes: Mapping[str, tuple[int, ...]]) -> Parallel:
    """The parallel sizes of files, with the expert-parallel size, which the shapes tell. shapes: those of the first rank's tensors.

    Raises: CheckpointError if the layout does not cover the sizes, or has other shapes.
    """
    for ep in dict.fromkeys((1, parallel.tp)):
        candidate = Parallel(parallel.tp, parallel.pp, ep)
        if size_problem(layout, candidate) is None:
            found = layout.rank_templates(candidate, 0, 0)
            expected = {name: values(template.shape, (candidate.tp, 0)) for name, _, template in found}
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
    check_known(layout, templates, accept_platform=bool(target.options.get("accept_platform")))
    dtypes, of_sources = _stored_dtypes(layout, content, target)
    files = rank_files(serving_format, target, lambda tp_rank, pp_rank: layout.rank_tensors(parallel, tp_rank, pp_rank, dtypes))
    stored = {dtypes.get(name, template.dtype): None for name, template in templates.items() if template.parts}
    needed = serving_format.keys_for_ranks(companions.config or {}, content.weights)
    companions, config_notes = companions.with_keys(needed, f"since {serving_format.engine} needs it")
    sidecars = companions.sidecars(stored, target.dtype or layout.dtype)
    unused = {name: f"{serving_format.engine}'s own loader does not read it" for name in content.weights if name not in used}
    note = f"by a layout learned from {serving_format.engine} {layout.engine_version} ({layout.model_class}, build for {layout.platform})"
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
    found: dict[str, DType] = {}
    holders: dict[str, str] = {}
    for name, template, sources in held_sources(layout, target.parallel):
        if name not in found:
            found[name] = _stored_dtype(layout, name, template, sources, content, target)
        for source in sources:
            other = holders.setdefault(source, name)
            if found[other] != found[name]:
                raise UnsupportedError(
                    f"the engine keeps it in two element types, {found[other]} as {other} and {found[name]} as {name}",
                    where=source,
                    do="Convert to hf, which the engine loads as well",
                )
    return found, {source: found[name] for source, name in holders.items()}


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
