"""DeepSpeed: a tag's folder of ZeRO-0, 1, 2 or 3, with what surrounds them (pipeline, experts, tensor parallelism).

tag.py                which files there are
states.py             what each says
partitions.py         where parameters lie in flat buffers
tensor_parallel.py    how tensor-parallel ranks' parts make a whole
experts.py            whose experts are whose
reading.py            from all that to an index
writing.py            ZeRO-3 shards of another size
universal.py          universal checkpoints, read and written

Measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8 (fixtures/deepspeed).
"""

from __future__ import annotations

from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.errors import CheckpointError
from reshard.index.index import Index
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files

from .layout.tag import find_tag, is_file_of_a_tag, open_tag
from .read.checks import check_same_moment
from .read.index import read
from .write.zero3 import lay_out


class DeepSpeed(Format):
    name = "deepspeed"
    summary = "DeepSpeed ZeRO-0 to 3, pipeline, MoE, AutoTP: a tag's folder, or its parent with `latest`"
    owns = ("*_model_states.pt", "*_optim_states.pt", "latest")
    keeps_names = True
    keeps_optimizer = True

    def detect(self, files: Files) -> str | None:
        folder = find_tag(files)
        if folder is None or f"{folder}zero/" in files.list(folder):
            return None
        return next((path for path in files.list(folder) if is_file_of_a_tag(path)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        folder = find_tag(files)
        if folder is None:
            raise CheckpointError("there is no tag here: no *_model_states.pt, and no folder with any", where=files.root)
        return read(files, open_tag(files, folder), hints)

    def check_values(self, files: Files, index: Index) -> Index:
        return check_same_moment(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        return lay_out(content, target, companions)


FORMAT = DeepSpeed()
