"""DeepSpeed: the folder of one tag, saved with ZeRO-0, 1, 2 or 3, also with pipelines, experts and tensor parallelism.

universal.py   universal checkpoints, a format of its own
layout/        how a tag lies on disk: its files, the contents of their pickles, flat buffers, tensor-parallel parts
read/          from the files of a tag, or of a universal checkpoint, to its index, step by step
write/         ZeRO-3 shards for any number of ranks, and universal checkpoints

Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8 (fixtures/deepspeed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.errors import IncompleteError

from .layout.tag import find_tag_folder, is_file_of_a_tag, open_tag

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


class DeepSpeed(Format):
    """A tag of a DeepSpeed run. Written as ZeRO-3 shards."""

    name = "deepspeed"
    summary = "DeepSpeed ZeRO-0 to 3, pipeline, MoE, AutoTP: a tag's folder, or its parent with `latest`"
    owns = ("*_model_states.pt", "*_optim_states.pt", "latest")
    keeps_names = True
    keeps_optimizer = True

    def detect(self, files: Files) -> str | None:
        folder = find_tag_folder(files)
        if folder is None or f"{folder}zero/" in files.list(folder):
            return None
        return next((path for path in files.list(folder) if is_file_of_a_tag(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.index import read_index

        folder = find_tag_folder(files)
        if folder is None:
            raise IncompleteError("there is no tag: no *_model_states.pt, and no folder with such a file", where=files.root)
        index = read_index(files, open_tag(files, folder), hints)
        beside = next((path for path in files.list() if path.endswith("/") and f"{path}zero/" in files.list(path)), None)
        note = (f"{beside.rstrip('/')} beside it is a universal checkpoint, which `format=universal` reads",) if beside else ()
        return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, *note)))

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.one_save import check_masters

        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.zero3 import zero3_layout

        return zero3_layout(content, target, companions)


FORMAT = DeepSpeed()
