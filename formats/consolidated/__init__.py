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

from reshard.adapter.format import Format, Option
from reshard.storage.files import Files

from .files import weight_files

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


FORMAT = Consolidated()
