"""nanotron: one safetensors file for each weight, or for each tensor-parallel rank's part of it.

    checkpoint_metadata.json    the version of the form, TP and DP sizes, the step
    model_config.json           sizes of the model; Hugging Face's config.json follows from it
    config.yaml                 the settings of the run, which are not read
    model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors
                                a part: metadata in its header say which rows of it are which rows of the whole
    model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
                                a weight that all ranks hold
    optimizer/, lr_scheduler/, random/    pickles of the run, which are not read

slices.py   the metadata of a part
config.py   model_config.json and config.json, one from the other
read.py     the index
write.py    the layout of new files

Measured on files that nanotron 0.4 wrote (fixtures/nanotron), which are of version 1.2. Files of version 1.5 (2411b022, run
once, with its convert_nanotron_to_hf.py as the judge) differ in `metas` and in the names of files of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints, Option
from reshard.errors import MissingFile, UnsupportedError
from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files

CONFIG, METADATA = "model_config.json", "checkpoint_metadata.json"
WEIGHTS = "model/"
OF_THE_RUN = ("optimizer/", "lr_scheduler/", "random/")
"""Folders of pickles."""
TENSOR = "data"
"""The name of the tensor in a file."""
_NAME = re.compile(r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+)(_exp-rank-.*)?)?\.safetensors")
# No model has words in its names that deep: a folder that contains itself ends here.
_DEEPEST = 16
ROTARY_ROWS = Option(
    "rotary_rows",
    "choice",
    "Write the rows of queries and keys in pairs, for nanotron 0.4 (default), or in halves, for rope_interleaved: false.",
    choices=("pairs", "halves"),
)


class Nanotron(Format):
    name = "nanotron"
    summary = "nanotron: a safetensors file for each weight and tensor-parallel rank"
    owns = ("model_*.safetensors", METADATA, CONFIG)
    options = (ROTARY_ROWS,)

    def detect(self, files: Files) -> str | None:
        return METADATA if METADATA in files.list() and f"{WEIGHTS}model/" in files.list(WEIGHTS) else None

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


@value
class WeightFile:
    """A file of a weight."""

    path: str
    """Its path."""
    name: str
    """The name of the weight in nanotron's model."""
    tp_rank: int | None = None
    """The tensor-parallel rank whose part it is; None: it holds all of the weight."""
    pp_rank: int = 0
    """The pipeline stage that wrote it; 0 if the name does not say."""
    tp: int = 1
    """The number of tensor-parallel ranks."""
    pp: int = 1
    """The number of pipeline stages."""


def path_of(name: str, tp_rank: int | None = None, tp: int = 1) -> str:
    """The path of the file of a weight, or of a rank's part of it where there is one pipeline stage."""
    *modules, last = name.split(".")
    of_rank = "" if tp_rank is None else f"_pp-rank-0-of-1_tp-rank-{tp_rank}-of-{tp}"
    return f"{WEIGHTS}{'/'.join(modules)}/model_{last}{of_rank}.safetensors"


def weight_files(files: Files) -> list[WeightFile]:
    """The files of all weights.

    Raises: MissingFile for a part that is not there, UnsupportedError for parts of experts, or of several saves.
    """
    found = list(_below(files, WEIGHTS, 0))
    divisions = {(file.tp, file.pp) for file in found if file.tp_rank is not None}
    if len(divisions) > 1:
        sizes = " and ".join(f"TP {tp} PP {pp}" for tp, pp in sorted(divisions))
        raise UnsupportedError(f"there are files of {sizes}", where=files.root, do="Keep the files of one save only")
    parts: dict[str, dict[int, WeightFile]] = {}
    for file in found:
        if file.tp_rank is not None:
            parts.setdefault(file.name, {})[file.tp_rank] = file
    for ranks in parts.values():
        one = next(iter(ranks.values()))
        for rank in range(one.tp):
            if rank not in ranks:
                path = one.path.replace(f"tp-rank-{one.tp_rank}-of", f"tp-rank-{rank}-of")
                raise MissingFile(
                    f"there is no {path}", where=files.root, why="The names of the other files say that there is one", do="Copy it again"
                )
    return found


def _below(files: Files, folder: str, depth: int) -> Iterator[WeightFile]:
    for path in files.list(folder):
        if path.endswith("/"):
            if depth < _DEEPEST:
                yield from _below(files, path, depth + 1)
            continue
        *modules, last = path.removeprefix(WEIGHTS).split("/")
        match = _NAME.fullmatch(last)
        if match is None:
            continue
        name, pp_rank, pp, tp_rank, tp, expert = match.groups()
        if expert:
            raise UnsupportedError("it is a part of the weights of experts, which reshard does not read", where=path)
        whole = ".".join((*modules, name))
        yield WeightFile(path, whole) if tp is None else WeightFile(path, whole, int(tp_rank), int(pp_rank), int(tp), int(pp))


FORMAT = Nanotron()
