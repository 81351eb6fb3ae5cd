"""Meta's and Mistral's own files: params.json, and weights under Meta's names.

    params.json                     sizes of the model; Hugging Face's config.json follows from it and from the tensors' shapes
    consolidated.00.pth ... .07.pth one file per tensor-parallel rank (Llama 1 to 3): torch.save of a state dict
    consolidated.safetensors        all weights (Mistral), or consolidated-00001-of-0000N.safetensors with an index

files.py    which files hold the weights
params.py   params.json and config.json, one from the other
read.py     the index
write.py    the layout of new files

canonical/trainer_names.py has the names, the order of rotary rows and the axes along which ranks divide the weights.
Measured on files that Meta's model code (llama 2, llama3) wrote with fairscale 0.4.13 (fixtures/consolidated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints, Option

from .files import weight_files

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files

EMBEDDING_CUT = Option(
    "embedding_cut",
    "choice",
    "Divide the embedding among ranks by rows, as Llama 3 does, or by columns, as Llama 1 and 2 do.",
    choices=("rows", "columns"),
)


class Consolidated(Format):
    name = "consolidated"
    summary = "Meta's and Mistral's own: params.json, consolidated.00.pth ... (TP), consolidated.safetensors"
    owns = ("consolidated.[0-9][0-9].pth", "consolidated*.safetensors", "consolidated.safetensors.index.json", "params.json")
    refines = ("hf", "pt")
    options = (EMBEDDING_CUT,)

    def detect(self, files: Files) -> str | None:
        return next(iter(weight_files(files)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


FORMAT = Consolidated()
