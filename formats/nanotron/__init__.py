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

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints, Option

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files

CONFIG, METADATA = "model_config.json", "checkpoint_metadata.json"
WEIGHTS = "model/"
"""The folder of weights: folders below it are the words of a name, the name of a file is the last word and the rank."""
OF_THE_RUN = ("optimizer/", "lr_scheduler/", "random/")
"""Folders of pickles."""
TENSOR = "data"
"""The name of the tensor in a file."""
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


FORMAT = Nanotron()
