"""TensorRT-LLM checkpoints: the input of `trtllm-build`, which builds engines. Releases 0.8 to 1.2; newer releases load hf: the
builder was removed from TensorRT-LLM in July 2026.

    config.json          the model and the parallel sizes, in TensorRT-LLM's own terms
    rank{N}.safetensors  N = stage * tp + rank within the stage; layers are numbered from 0 in every stage

q, k and v are one tensor `qkv` [this rank's rows of q; k; v]; a KV head is repeated where there are fewer KV heads than ranks. `mlp.fc` is
the half that the activation is applied to (Hugging Face's gate_proj), `mlp.gate` is the other half (up_proj). Experts are stacked with up
above gate, and the router has 32 bits. Embedding, position embedding and head are padded with zero rows to a multiple of tp and split by
rows (use_parallel_embedding, embedding_sharding_dim 0). A tied table is stored twice. The remainder of the layers goes one by one to the
first stages.

    rules.py     the differences between the model classes, and the rules
    config.py    config.json, from and to Hugging Face's

Compared, name by name and bit by bit, with the files of NVIDIA's own writer of such checkpoints, ModelOpt 0.47 (fixtures/trtllm). No engine
was built, since that needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.adapter.serving_format import ServingFormat

if TYPE_CHECKING:
    from reshard.adapter.format import Hints
    from reshard.geometry.dtypes import DType
    from reshard.geometry.meshes import Parallel
    from reshard.models.engine_rules import EngineRules
    from reshard.models.model import Model
    from reshard.plans.layout import Target
    from reshard.storage.files import Files


class Trtllm(ServingFormat):
    name = "trtllm"
    other_names = ("tensorrt-llm", "tensorrt_llm", "trt-llm")
    summary = (
        "TensorRT-LLM checkpoints for trtllm-build, up to release 1.2 (newer ones load hf): tensor, pipeline and expert parallel ranks"
    )
    owns = ("rank*.safetensors",)
    refines = ("hf",)
    engine = "TensorRT-LLM"
    producer = "TensorRT-LLM checkpoint"
    until = "1.2"
    file_pattern = re.compile(r"rank(?P<rank>\d+)\.safetensors")

    def detect(self, files: Files) -> str | None:
        path = super().detect(files)
        if path is None:
            return None
        from .config import trtllm_config

        return path if trtllm_config(files) is not None else None

    def file_name(self, parallel: Parallel, pp_rank: int, tp_rank: int, part: int) -> str:
        return f"rank{pp_rank * parallel.tp + tp_rank}.safetensors"

    def rules(self, model: Model, target: Target) -> EngineRules:
        from .rules import rules_for_sizes

        return rules_for_sizes(model, target.parallel)

    def notes(self, model: Model, target: Target) -> tuple[str, ...]:
        from .rules import notes

        return notes(model)

    def engine_config(self, model: Model, parallel: Parallel, dtypes: Mapping[str, DType]) -> dict[str, Any]:
        from .config import config_of

        return config_of(model, parallel, dtypes)

    def stored_config(self, files: Files, hints: Hints) -> Mapping[str, Any]:
        from .config import hugging_face_config, stored_config

        config = stored_config(files)
        return hints.config if hints.config and "model_type" in hints.config else hugging_face_config(config)

    def stored_sizes(self, files: Files) -> Parallel:
        from .config import sizes_of, stored_config

        return sizes_of(stored_config(files))


FORMAT = Trtllm()
