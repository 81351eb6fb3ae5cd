"""How weights are cut into files, and the index that says where they are.

Files are cut as huggingface_hub cuts them (serialization/_base.py, split_state_dict_into_shards_factory): in the model's order, a new one
where the next tensor would make it too large, a tensor that is too large alone in the file where it comes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from reshard.canonical.content import Content
from reshard.geometry.dtypes import DType
from reshard.geometry.stored import StoredTensor
from reshard.plans.layout import Sidecar, TargetFile

_INDEX = "model.safetensors.index.json"
# transformers' own default until version 5: files of at most 5 GB.
_MAX_SHARD_BYTES = 5_000_000_000


def in_model_order(content: Content) -> list[str]:
    """The names in the order of the model's own declaration, where it is known; otherwise as in the source."""
    declared = [name for name in content.model.weights if name in content.tensors] if content.model else []
    known = set(declared)
    return declared + [name for name in content.tensors if name not in known]


def cut(stored: Iterable[StoredTensor], most: int | None) -> dict[str, list[StoredTensor]]:
    """The tensors of each file, by its name."""
    most = most or _MAX_SHARD_BYTES
    shards: list[list[StoredTensor]] = []
    run: list[StoredTensor] = []
    size = 0
    for tensor in stored:
        if tensor.nbytes > most:
            shards.append([tensor])
            continue
        if size + tensor.nbytes > most:
            shards.append(run)
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    if run:
        shards.append(run)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def index_of(files: tuple[TargetFile, ...]) -> Sidecar:
    """Which tensor is in which of several files."""
    weight_map = {item.tensor.name: file.path for file in files for item in file.tensors}
    total = sum(item.tensor.nbytes for file in files for item in file.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Sidecar(_INDEX, (json.dumps(document, indent=2) + "\n").encode())


def main_dtype(stored: Iterable[StoredTensor]) -> DType | None:
    """The floating-point type that most elements have; of 8 bits only if there is no wider one, as such weights have scales beside them and
    the model computes with the wider type. None without any."""
    counted = Counter[DType]()
    for tensor in stored:
        if tensor.dtype.floating:
            counted[tensor.dtype] += tensor.nbytes // tensor.dtype.itemsize
    return max(counted, key=lambda dtype: (dtype.itemsize > 1, counted[dtype]), default=None)
