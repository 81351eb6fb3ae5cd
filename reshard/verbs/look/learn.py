"""The verb `learn`: ask a serving engine's own loader which box of which weight goes where, on which rank. No weight is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, find_model_files
from reshard.adapter.serving_format import ServingFormat
from reshard.errors import RequestError
from reshard.geometry.meshes import Parallel
from reshard.opening.keywords import PathLike
from reshard.serving.learned.document import text_of
from reshard.serving.learned.layout import LearnedLayout
from reshard.serving.learned.tracer import Tracer
from reshard.storage.output_file import OutputFile
from reshard.storage.tar import open_tree


def learn(
    model: PathLike,
    *,
    engine: str,
    tp: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
    engine_python: PathLike | None = None,
    trust_remote_code: bool = False,
) -> LearnedLayout:
    """The layout that the engine's own loader makes of a model, traced on every rank of every choice of sizes.

    model: a folder with config.json and safetensors files, of which only the headers are read. ep: 1, or a size of `tp`: the ranks then
    hold whole experts. engine_python: the Python that has the engine; None: this one.

    Raises: UnsupportedError if the engine does not load the model at these sizes, or a tensor cannot be followed.
    """
    folder, serving_format = Path(os.fspath(model)).resolve(), _traceable(engine)
    config = config_of(folder)
    for size in pp:
        Parallel(pp=size).allow(*serving_format.sizes, what=f"{serving_format.engine}'s files")
    cases = [{"tp": t, "pp": p, "ep": t if e > 1 else 1} for p in pp for e in ep for t in tp if e in (1, t)]
    if not cases:
        raise RequestError(
            f"`ep=` {','.join(map(str, ep))}: experts are distributed over the tensor-parallel ranks", do="Give it sizes of `tp=`"
        )
    return tracer_of(engine, engine_python).layout(str(folder), cases, config, trust_remote_code=trust_remote_code)


def write_layout(layout: LearnedLayout, path: PathLike) -> None:
    """Write the layout to an output file (storage/output_file.py)."""
    OutputFile.at(path).write(text_of(layout).encode())


def config_of(folder: Path) -> dict[str, Any]:
    """The model's config. Raises RequestError if the folder has no config or no safetensors file."""
    config = find_model_files(open_tree(folder)).config
    if config is None:
        raise RequestError(f"there is no {CONFIG}", where=str(folder), do="Give the directory of the model's Hugging Face files")
    if not any(folder.glob("*.safetensors")):
        raise RequestError(
            "there is no safetensors file",
            where=str(folder),
            why="The names and shapes of the published weights are taken from their headers",
            do="Copy the files there; the first bytes of each, up to the end of its header, are enough",
        )
    return dict(config)


def tracer_of(engine: str, engine_python: PathLike | None = None) -> Tracer:
    """The tracer of an engine's loader, in the Python that has the engine. Raises RequestError, listing the engines that can be traced."""
    package = _traceable(engine).tracer
    assert package is not None, "only engines with a tracer are traceable"
    return Tracer(package, engine, os.fspath(engine_python or sys.executable))


def _traceable(engine: str) -> ServingFormat:
    """The format of an engine whose loader can be traced. Raises RequestError, listing the engines that can, if it is none of them."""
    traceable = {name: format for name, format in registry.serving_formats().items() if format.tracer}
    if engine not in traceable:
        raise RequestError(f"`engine={engine}`: reshard cannot trace its loader", do=f"Engines that can be traced: {', '.join(traceable)}")
    return traceable[engine]
