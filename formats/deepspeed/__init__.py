"""DeepSpeed: the folder of one tag, saved with ZeRO-0, 1, 2 or 3, also with pipelines, experts and tensor parallelism.

universal.py   universal checkpoints, a format of its own
layout/        how a tag lies on disk: its files, the contents of their pickles, flat buffers, tensor-parallel parts
read/          from the files of a tag, or of a universal checkpoint, to its index, step by step
write/         ZeRO-3 shards for any number of ranks, and universal checkpoints

Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8 (fixtures/deepspeed).
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.storage.files import Files

from .layout.tag import find_tag_folder, is_file_of_a_tag


class DeepSpeed(Format):
    """A tag of a DeepSpeed run. Written as ZeRO-3 shards."""

    name = "deepspeed"
    summary = "DeepSpeed ZeRO-0 to 3, pipeline, MoE, AutoTP: a tag's folder, or its parent with `latest`"
    owns = ("*_model_states.pt", "*_optim_states.pt", "latest")
    keeps_names = True
    keeps_optimizer = True
    reader, writer = "read.index", "write.zero3"

    def detect(self, files: Files) -> str | None:
        folder = find_tag_folder(files)
        if folder is None or f"{folder}zero/" in files.list(folder):
            return None
        return next((path for path in files.list(folder) if is_file_of_a_tag(path)), None)


FORMAT = DeepSpeed()
