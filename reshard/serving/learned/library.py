"""A library of learned layouts: a folder of layout files, of which the one that fits a checkpoint is taken.

    DIR/MODEL_TYPE-ENGINE-VERSION-SIZES-DIGEST.json

What `reshard learn` writes fits in as it is: files are told apart by what they say, not by their names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import RequestError, ReshardError
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.serving.learned.document import layout_of, text_of
from reshard.serving.learned.fit import Shapes, check_config, check_engine, check_sizes, check_sources
from reshard.serving.learned.layout import LearnedLayout
from reshard.storage.files import LocalFiles, read_whole
from reshard.storage.output_file import OutputFile
from reshard.storage.own_files import cache_root
from reshard.storage.system_calls import system_errors

# Layout files have a few kB, of models with many towers some hundred.
MOST_BYTES = 1 << 26


def read_layout(path: str) -> LearnedLayout:
    """The layout in a file. Raises RequestError if there is none, or it is no layout file."""
    if not os.path.isfile(path):
        raise RequestError(f"`layout={path}`: there is no such file", do="Write it with `reshard learn`", id="not-found")
    return layout_of(read_whole(LocalFiles(Path(path)), os.path.basename(path), limit=MOST_BYTES).decode("utf-8", "replace"), path)


@value
class Wanted:
    """What a layout must fit."""

    engine: str
    """The engine's format."""
    version: str | None
    """The engine's version; None: any."""
    parallel: Parallel
    """The parallel sizes."""
    config: Mapping[str, Any] | None
    """The model's config."""
    shapes: Shapes
    """The checkpoint's weights."""

    def problem(self, layout: LearnedLayout) -> ReshardError | None:
        """Why a layout does not fit; None if it does."""
        try:
            check_engine(layout, self.engine, self.version)
            check_config(layout, self.config)
            check_sizes(layout, self.parallel)
            check_sources(layout, self.shapes, layout.source_shapes)
        except RequestError as error:
            return error
        return None


@value
class Library:
    """A folder of layout files."""

    folder: Path
    """The folder, which need not exist."""

    @staticmethod
    def cached() -> Library:
        """Where `learn=True` puts what it learns unless a folder is named."""
        return Library(Path(cache_root()).expanduser() / "layouts")

    def layouts(self) -> Iterator[tuple[Path, LearnedLayout]]:
        """Every layout with its file. Other JSON files, and damaged ones, are passed over."""
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                yield path, read_layout(str(path))
            except ReshardError:
                continue

    def find(self, wanted: Wanted) -> Path | None:
        """The file of the layout that fits; of several, that of the newest version of the engine."""
        fitting = [(_numbers(layout.engine_version), path) for path, layout in self.layouts() if wanted.problem(layout) is None]
        return max(fitting)[1] if fitting else None

    def reasons(self, wanted: Wanted) -> tuple[str, ...]:
        """Why the layouts of the same engine do not fit, each with its file."""
        problems = ((path, wanted.problem(layout)) for path, layout in self.layouts() if layout.engine == wanted.engine)
        return tuple(f"{path.name}: {problem.what}" for path, problem in problems if problem)

    def add(self, layout: LearnedLayout, wanted: Wanted) -> Path:
        """Write a layout under a name that follows from what it fits."""
        with system_errors("created", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        sources = {name: [str(entry.dtype), entry.shape] for name, entry in layout.source_entries.items()}
        digest = hashlib.sha256(json.dumps([layout.config, sources, layout.platform], sort_keys=True).encode()).hexdigest()[:12]
        words = (
            str((wanted.config or {}).get("model_type", "model")),
            layout.engine,
            layout.engine_version,
            wanted.parallel.in_file_names,
            digest,
        )
        path = self.folder / ("-".join("".join(c if c.isalnum() or c in "._+," else "_" for c in word) for word in words) + ".json")
        OutputFile.at(path).write(text_of(layout).encode())
        return path


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
