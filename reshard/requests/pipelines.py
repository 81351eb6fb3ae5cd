"""The folder of a diffusers pipeline around a component: `--whole-pipeline` copies its other files beside the component that is written.

    PIPELINE/model_index.json            {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"], ...}
    PIPELINE/transformer/                the component of `model=`, or the source; written anew, with its own reshard.json
    PIPELINE/scheduler/, vae/, ...       copied byte for byte, model_index.json last

Source: diffusers 0.42.1, DiffusionPipeline.save_pretrained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, PIPELINE
from reshard.errors import RequestError, TargetError, UnsupportedError
from reshard.geometry.value import value
from reshard.plans.manifest import sample_ranges
from reshard.plans.plan import Plan
from reshard.storage.files import Files, LocalFiles, leads_elsewhere, read_range
from reshard.storage.output_file import OutputFile
from reshard.storage.staging import check_free_space
from reshard.storage.system_calls import is_url, system_errors
from reshard.storage.tar import open_files

# Folders of tools, which are no part of a pipeline: of git, and of downloads by huggingface_hub.
_OF_TOOLS = (".git/", ".cache/")
_BLOCK = 8 << 20


@value(eq=False)
class WholePipeline:
    """A pipeline that is written to a directory, with one component in place of its own."""

    files: Files
    """The files of the pipeline that is copied."""
    folder: str
    """The folder of the component, with a slash at its end."""
    target: str
    """The directory that becomes the pipeline."""
    written: int
    """The bytes of the new component's files."""

    @staticmethod
    def around(plan: Plan, target: str | os.PathLike[str]) -> WholePipeline:
        """The pipeline around the component that `model=` names, or else around the source.

        Raises: RequestError if there is none, or diffusers does not load the target's format; UnsupportedError for a target in a store.
        """
        component = str((plan.order.opened.get("model") if plan.order else None) or plan.source_files.root).rstrip("/")
        component = component.removesuffix(f"/{CONFIG}")
        if not registry.named(plan.layout.format).needs_model_files:
            raise RequestError(f"`whole_pipeline=True`: diffusers does not load the format {plan.layout.format}", do="Use `to=hf`")
        if is_url(target):
            raise UnsupportedError(
                "`whole_pipeline=True` writes a local directory", where=os.fspath(target), do="Write one, and copy it to the store"
            )
        files = open_files(component).parent() if is_url(component) else LocalFiles(os.path.dirname(os.path.abspath(component)))
        if files is None or files.size(PIPELINE) is None:
            raise RequestError(
                f"`whole_pipeline=True`: no {PIPELINE} lies in the directory that contains {component}",
                why="The other components of the pipeline are copied from there",
                do="Name the component in its pipeline with `model=`, such as `model=Wan2.2-T2V/transformer`",
            )
        written = sum(file.nbytes for file in plan.layout.files)
        return WholePipeline(files, os.path.basename(component) + "/", os.fspath(target), written)

    @property
    def component(self) -> str:
        """The directory that the component is written to."""
        return os.path.join(self.target, self.folder.rstrip("/"))

    def check_place(self, *, is_new: bool, replaces: bool) -> None:
        """Look at what lies in the target before anything is written. is_new: whether nothing may lie there. replaces: whether files of the
        pipeline that lie there with other content are replaced.

        Raises: TargetError if the target is the pipeline itself, or holds what may not be replaced; SystemRefusal if the disk has too
        little free space for the copies and a new component.
        """
        root, at = os.path.realpath(self.files.root), os.path.realpath(self.target)
        if self.files.store is None and (at == root or at.startswith(f"{root}/") or root.startswith(f"{at}/")):
            raise TargetError(
                f"the target and the pipeline {root} contain each other", where=self.target, do="Choose a target outside of it"
            )
        with system_errors("read", self.target):
            entries = sorted(os.listdir(at)) if os.path.isdir(at) else []
        if is_new and entries:
            raise TargetError(
                f"the target exists and holds {entries[0]}",
                where=self.target,
                why="Nothing was written",
                do="Choose another directory, finish it with `resume=True`, or say `overwrite=True`",
                id="target-exists",
            )
        others = [path for path in self._paths() if os.path.lexists(self._place(path)) and not self._is_there(path)]
        if others and not (replaces and PIPELINE in entries):
            raise TargetError(
                f"{others[0]} is another file than that of the pipeline {self.files.root}",
                where=self.target,
                why="Nothing was written",
                do="Choose another directory; `overwrite=True` replaces the files of a pipeline",
                id="target-exists",
            )

        above = next(folder for folder in (Path(at), *Path(at).parents) if folder.exists())
        copies = sum(nbytes for path, nbytes in self.copies().items() if not (entries and self._is_there(path)))
        # What an earlier run has written of the component counts when it is staged.
        check_free_space(copies + (0 if os.path.isdir(self.component) else self.written), above, Path(self.target))

    def copies(self) -> dict[str, int]:
        """The files that are copied, with their bytes."""
        return {path: self.files.size(path) or 0 for path in self._paths()}

    def complete(self) -> str:
        """Copy the files that are not there yet, model_index.json last; a sentence about them. Each has its name only when it is whole."""
        copies = self.copies()
        for path in sorted(copies, key=lambda path: path == PIPELINE):
            if not self._is_there(path):
                self._copy(path)
        return f"copied from {self.files.root}, byte for byte: {len(copies)} files, {sum(copies.values()):,} bytes, such as {PIPELINE}"

    def _paths(self, folder: str = "") -> Iterator[str]:
        """The files of the pipeline, without those of the component. Raises UnsupportedError for a link that leads out of it."""
        for path in self.files.list(folder):
            if path == self.folder or path in _OF_TOOLS:
                continue
            if self.files.store is None and leads_elsewhere(self.files.root, path):
                raise UnsupportedError("it is a link that leads out of the pipeline", where=path, do="Put the file itself in its place")
            yield from self._paths(path) if path.endswith("/") else (path,)

    def _place(self, path: str) -> str:
        return os.path.join(self.target, path)

    def _is_there(self, path: str) -> bool:
        """Whether the target has a file of this length and with these samples."""
        there, size = LocalFiles(self.target), self.files.size(path)
        if os.path.islink(self._place(path)) or there.size(path) != size or size is None:
            return False
        return all(
            read_range(self.files, path, start, stop - start) == read_range(there, path, start, stop - start)
            for start, stop in sample_ranges(size)
        )

    def _copy(self, path: str) -> None:
        place, size = self._place(path), self.files.size(path) or 0
        with system_errors("written", place):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        with OutputFile(place).writing() as stream:
            for start in range(0, size, _BLOCK):
                stream.write(read_range(self.files, path, start, min(_BLOCK, size - start)))
