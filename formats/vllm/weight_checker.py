"""vLLM's weight checker, `POST /weight_checker` of a server in development mode: the SHA-256 of every parameter.

Measured on vLLM 0.32.0 (model_executor/model_loader/weight_checksum.py, v1/worker/gpu_worker.py: _weight_checksum_prefix). The answer to
`{"action": "checksum"}` is `{"checksums": {"dp0:pp0:pcp0:tp3:model.norm.weight": SHA-256, ...}}`. What a digest is of depends on the
kernels:

    a CPU's linear layers       nothing: the kernel keeps the weight, and an empty parameter is left (model_executor/layers/utils.py:
                                dispatch_cpu_unquantized_gemm); with AMX a bias becomes 32 bits wide
    a CPU's experts             panels of 16 rows, with AMX of pairs (experts/cpu_moe.py: cpu_prepack_moe_weight)
    a CPU's short convolutions  panels of 32 rows of pairs (causal_conv1d_weight_pack), also FP8 matrices with AMX (convert_weight_packed)
    a GPU's FP8 matrices        with one scale for each matrix or row transposed (kernels/linear/scaled_mm); with blocks as loaded
    a GPU's other matrices      as loaded

Some modules belong to two others: the router's gate and the shared experts to the layer of experts and to the block around it, projections
to MLA's layer and to the attention around it. sharded_state files have the inner name, `mlp.experts.gate`, `self_attn.mla_attn.q_b_proj`.
The checker asks `named_parameters`, which has the outer one, `mlp.gate`, `self_attn.q_b_proj`. MLA's layer splits `kv_b_proj` into `W_UV`
and `W_UK_T` after loading, and keeps all three.

The panels were measured with the operators of vLLM 0.32's CPU build, the forms on a GPU are read from its source. There are other kernels:
Marlin's, FlashInfer's and ROCm's arrange quantized weights and experts in ways that are not computed here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from reshard.adapter.serving_format.weight_checker import ServerFacts, ServingRank, WeightChecker, panels, texts, widened
from reshard.geometry.meshes import is_size

_SIZES = {
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tp": "tensor_parallel_size",
}


class VllmWeightChecker(WeightChecker):
    path = "/weight_checker"
    start = "vLLM: set VLLM_SERVER_DEV_MODE=1 in its environment"
    info_path = "/server_info?config_format=json"
    version_path = "/weight_info"
    hashes = (hashlib.sha256,)
    own = re.compile(r"attn\._?([qkv]|prob)_(scale|zero_point)$|\.mla_attn\.W_U(V|K_T)$|_input_global_scale$")
    other_names = (
        (re.compile(r"\.mla_attn\."), (".",)),
        (re.compile(r"\.experts\.gate\."), (".gate.",)),
        (re.compile(r"\.experts\._shared_experts\._layer\.expert_gate\."), (".shared_expert_gate.",)),
        (
            re.compile(r"\.experts\._shared_experts\._layer\.(shared_experts\.)?"),
            (".shared_experts.", ".shared_expert.", ".share_expert.", ".shared_mlp."),
        ),
    )
    repackings = (panels(16, 1), panels(16, 2), panels(32, 2), panels(None, 1), widened)

    def read(self, answer: Mapping[str, Any]) -> dict[str, str]:
        # A document of `reshard digests --json` has them under "baseline".
        return texts(answer["checksums"] if "checksums" in answer else answer["baseline"])

    def about(self, info: Mapping[str, Any]) -> ServerFacts:
        split, model = info["vllm_config"]["parallel_config"], info["vllm_config"]["model_config"]
        dtype, name = str(model["dtype"]).removeprefix("torch."), model.get("model")
        told = {axis: split.get(key) for axis, key in _SIZES.items()}
        sizes = ServingRank(**told) if all(is_size(size) for size in told.values()) else None
        return ServerFacts(split["enable_expert_parallel"] is True, dtype, sizes, name if isinstance(name, str) else None)

    def document(self, digests: Mapping[str, str]) -> dict[str, Any]:
        return {"action": "compare", "baseline": dict(digests)}


weight_checker = VllmWeightChecker
