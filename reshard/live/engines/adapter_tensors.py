"""The tensors of an adapter as SGLang's route /load_lora_adapter_from_tensors takes them, without a folder that the server sees.

    {"lora_name", "config_dict": adapter_config.json, "serialized_named_tensors": [base64 of a pickle, once for each tensor-parallel rank]}

    pickle    {name: torch._utils._rebuild_tensor_v3(storage, first element, shape, strides, False, OrderedDict(), dtype)}
    storage   torch.storage._load_from_bytes(a torch.save file of one storage, which holds all tensors)

The pickle is only written here. SGLang's SafeUnpickler takes these functions alone and loads the storage with weights_only (0.5.23,
srt/utils/common.py; srt/managers/io_struct.py, tp_worker.py).
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from pathlib import Path

from reshard.adapter.model_files import ADAPTER_CONFIG
from reshard.containers import safetensors
from reshard.containers.pickle_writer import Call, Name, PersistentId, Shared, dumps
from reshard.containers.torch_frame import frame
from reshard.geometry.boxes import row_major
from reshard.storage.tar import open_tree

_ALIGNMENT = 8
"""Each tensor starts at a multiple of it, so that its first element has a number."""


def body_of(adapter: str, folder: Path, ranks: int) -> list[bytes]:
    """The body of a request that loads the adapter in a folder of PEFT's form, in pieces: that of the tensors occurs `ranks` times and is
    one object."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    head = json.dumps({"lora_name": adapter, "config_dict": config, "serialized_named_tensors": []}).encode().removesuffix(b"]}")
    payload = b2a_base64(_pickle(folder), newline=False)
    copies = [piece for _ in range(ranks) for piece in (b'","', payload)]
    return [head, b'"', *copies[1:], b'"]}']


def _pickle(folder: Path) -> bytes:
    """A pickle of the tensors in a folder, as a dictionary."""
    files, name = open_tree(folder), "adapter_model.safetensors"
    content, entries = bytearray(), safetensors.read_header(files, name).entries
    data = (folder / name).read_bytes()
    starts = {}
    for entry in entries:
        content += bytes(-len(content) % _ALIGNMENT)
        starts[entry.name] = len(content) // entry.dtype.itemsize
        content += memoryview(data)[entry.byte_offset : entry.byte_offset + entry.nbytes]
    stored = dumps(PersistentId(("storage", Name("torch.storage", "UntypedStorage"), "0", "cpu", len(content))))
    whole = b"".join(literal for _, literal in frame("archive", stored, [bytes(content)]).literals)
    storage = Shared(Call(Name("torch.storage", "_load_from_bytes"), (whole,)))
    hooks = Shared(Call(Name("collections", "OrderedDict")))
    return dumps(
        {
            entry.name: Call(
                Name("torch._utils", "_rebuild_tensor_v3"),
                (storage, starts[entry.name], entry.shape, row_major(entry.shape), False, hooks, Name("torch", entry.dtype.torch)),
            )
            for entry in entries
        }
    )
