"""Hugging Face: one safetensors file, or several with an index; or pickles of torch.save, the older form.

    config.json                        what the model is (generation_config.json, tokenizer files beside it)
    model.safetensors                  one file, or
    model-00001-of-00003.safetensors   several, with
    model.safetensors.index.json       {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
    pytorch_model.bin                  the same as torch.save of a dict, or pytorch_model-0000i-of-0000n.bin + its index

files.py    which files count
read.py     the tensors in them
write.py    the layout of new files, and their index
reference_layout.py   the names, fusions, shapes and element types of another folder

Names and shapes are those under which models are published. canonical/name_variants.py lists what transformers renamed or fused later.
Measured on transformers 5.23 and safetensors 0.8; index rules: transformers, modeling_utils.py.
"""

from __future__ import annotations

from reshard.adapter.format import MAX_SHARD_SIZE, Format, Option
from reshard.storage.files import Files

from .files import weight_files

LIKE = Option("like", "path", "Use the names, fusions, element types and files of this Hugging Face folder; only its headers are read.")
NAMES = Option("names", "text", "Write under the names, fusions and rotary order of this trainer, such as torchtitan or litgpt.")


class HuggingFace(Format):
    name = "hf"
    other_names = ("huggingface", "hf-safetensors", "safetensors", "transformers")
    summary = "Hugging Face: safetensors (single or with an index), pytorch_model*.bin"
    owns = ("*.safetensors", "*.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
    one_file_suffices = True
    needs_model_files = True
    options = (LIKE, NAMES, MAX_SHARD_SIZE)

    def detect(self, files: Files) -> str | None:
        return next(iter(weight_files(files)), None)


FORMAT = HuggingFace()
