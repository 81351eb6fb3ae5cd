"""nanotron: one safetensors file for each weight, or for each tensor-parallel rank's part of it.

    checkpoint_metadata.json    the version of the form, TP and DP sizes, the step
    model_config.json           sizes of the model; Hugging Face's config.json follows from it
    config.yaml                 the settings of the run, which are not read
    model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors
                                a part: metadata in its header say which rows of it are which rows of the whole
    model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
                                a weight that all ranks hold
    optimizer/, lr_scheduler/, random/    pickles of the run, which are not read

files.py    names of files and folders
slices.py   the metadata of a part
config.py   model_config.json and config.json, one from the other

Measured on files that nanotron 0.4 wrote (fixtures/nanotron), which are of version 1.2. Files of version 1.5 (2411b022, run
once, with its convert_nanotron_to_hf.py as the judge) differ in `metas` and in the names of files of experts.
"""

from __future__ import annotations

from reshard.adapter.format import Format, Option
from reshard.storage.files import Files

from .files import CONFIG, METADATA, WEIGHTS


class Nanotron(Format):
    name = "nanotron"
    summary = "nanotron: a safetensors file for each weight and tensor-parallel rank"
    owns = ("model_*.safetensors", METADATA, CONFIG)
    options = (
        Option(
            "rotary_rows",
            "choice",
            "Write the rows of queries and keys in pairs, for nanotron 0.4 (default), or in halves, for rope_interleaved: false.",
            choices=("pairs", "halves"),
        ),
    )

    def detect(self, files: Files) -> str | None:
        return METADATA if METADATA in files.list() and f"{WEIGHTS}model/" in files.list(WEIGHTS) else None


FORMAT = Nanotron()
