"""vLLM's weight checker, `POST /weight_checker` of a server in development mode: the SHA-256 of every parameter.

Measured on vLLM 0.32.0 (model_executor/model_loader/weight_checksum.py, v1/worker/gpu_worker.py: _weight_checksum_prefix). The answer to
`{"action": "checksum"}` is `{"checksums": {"dp0:pp0:pcp0:tp3:model.norm.weight": SHA-256, ...}}`. On a CPU, linear layers are repacked
after loading and leave an empty parameter behind, whose digest is that of no bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from reshard.adapter.serving_format.weight_checker import ServerFacts, WeightChecker, texts


class VllmWeightChecker(WeightChecker):
    path = "/weight_checker"
    start = "vLLM: set VLLM_SERVER_DEV_MODE=1 in its environment"
    info_path = "/server_info?config_format=json"
    hashes = (hashlib.sha256,)

    def read(self, answer: Mapping[str, Any]) -> dict[str, str]:
        # A document of `reshard digests --json` has them under "baseline".
        return texts(answer["checksums"] if "checksums" in answer else answer["baseline"])

    def about(self, info: Mapping[str, Any]) -> ServerFacts:
        config = info["vllm_config"]
        dtype = str(config["model_config"]["dtype"]).removeprefix("torch.")
        return ServerFacts(config["parallel_config"]["enable_expert_parallel"] is True, dtype)

    def document(self, digests: Mapping[str, str]) -> dict[str, Any]:
        return {"action": "compare", "baseline": dict(digests)}
