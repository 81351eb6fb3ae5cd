"""The formats of reshard, and by which names their checkpoints are known, as data.

Only formats with a glob that fits are imported and asked.
A glob is compared with the paths of the entries of the checkpoint's folder, and of the folders in it. `*` stands for any characters of one
name, folders end in a slash, and `../*/` in front is the checkpoint's folder, if its name matters. A signature may fit checkpoints of other
formats as well. It has to fit whenever the format's `detect` finds or refuses something.
"""

from __future__ import annotations

_RANK_FILES = (
    "*rank*.pt", "*rank*.pth", "*rank*.bin", "*rank*.ckpt", "*/*rank*.pt", "*/*rank*.pth", "*/*rank*.bin", "*/*rank*.ckpt",
)  # fmt: skip
_MEGATRON = (
    "latest_checkpointed_iteration.txt",
    "iter_*/",
    "release/",
    "mp_rank_*/",
    "tp_rank_*/",
    "model_weights.ckpt",
    "metadata.json",
    "weights/metadata.json",
    "model_weights/metadata.json",
    "dist_ckpt/metadata.json",
    "common.pt",
    "../iter_*/.metadata",
    "../release/.metadata",
)

USUAL_ENGINE = "vllm"
"""The serving engine that is meant where none is named."""

SIGNATURES: dict[str, tuple[str, ...]] = {
    "consolidated": ("consolidated*.pth", "consolidated*.safetensors"),
    "dcp": (".metadata", "__*.metadata", "*.distcp", "*.distcp/", "*/.metadata", "weights/model/", "pretrained_model/"),
    "dcp-safetensors": ("shard-*-model-*.safetensors", "*/shard-*-model-*.safetensors", "weights/model/"),
    "deepspeed": ("latest", "*_states.pt", "*/*_states.pt"),
    "delta": ("model.safetensors.index.json",),
    "fsdp": _RANK_FILES,
    "fsdp-local": _RANK_FILES,
    "fsdp-dtensor": _MEGATRON,
    "hf": ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin", "model*.bin"),
    "megatron": _MEGATRON,
    "megatron-dist": _MEGATRON,
    "nanotron": ("checkpoint_metadata.json",),
    "peft": ("adapter_model.safetensors", "adapter_model.bin"),
    "pt": ("*.pt", "*.pth", "*.bin", "*.ckpt", "*.tar"),
    "sglang": ("model-rank-*-part-*.safetensors",),
    "torch-checkpointing": ("metadata.pkl", "*_*0.pt", "*_*0.json"),
    "trtllm": ("rank*.safetensors",),
    "universal": ("latest_universal", "zero/", "*/zero/"),
    "vllm": ("model-rank-*-part-*.safetensors", "model-pp-*-tp-*-part-*.safetensors"),
}

SHARED_FOLDERS = {
    "fsdp-dtensor": "megatron.fsdp_dtensor",
    "megatron-dist": "megatron.megatron_dist",
    "peft": "hf.peft",
    "universal": "deepspeed.universal",
}
"""The modules of formats that lie in another format's folder. The folder of any other format has its name, with _ for -."""
