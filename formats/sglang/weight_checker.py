"""SGLang's weight checker, `POST /weights_checker`: a number of 64 bits for every parameter and buffer of every rank.

    {"success": true, "ranks": [{"checksums": {"model.norm.weight": 16 hexadecimal digits, ...},
                                 "parallelism_info": [{"role": "target", "tp_rank": 0, "pp_rank": 0, "dp_rank": 0, ...}]}, ...]}

A draft model is another entry of `parallelism_info`, and its parameters have its role and a dot before their names. `reshard digests`
writes the one entry without a list; both are read.

On a GPU the number is a mix of the parameter's 32-bit words and their positions (TensorHash); elsewhere it is the first 8 bytes of the
SHA-256. Read in SGLang 0.5.23 (srt/utils/weight_checker.py, kernels/ops/memory/gpu_tensor_hash.py), whose kernel gave the numbers in
tests/verbs/test_digests.py in Triton's interpreter. Servers on a CPU were asked (tests/live/on_sglang.py), none on a GPU.

On a CPU with AMX the weights of linear layers, experts and short convolutions are packed under their own names in panels of 32 rows of
pairs (srt/layers/amx_utils.py: the operator convert_weight_packed, which vLLM's CPU build has too). On a GPU, matrices that are not
quantized are held as loaded, and of FP8 matrices with blocks the checker hashes the dequantized values, which are not computed here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.adapter.serving_format.weight_checker import (
    ParameterHash,
    ReadableWeight,
    ServerFacts,
    ServingRank,
    WeightChecker,
    panels,
    split_key,
    texts,
)
from reshard.geometry.meshes import is_size

_TILE = 8192
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
_POSITION_TURNS = (15, 13)
_MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_64_BITS = (1 << 64) - 1

_Words = npt.NDArray[np.uint32]


class ShortSha256:
    """The first 8 bytes of the SHA-256, as 16 digits."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        self._sha256.update(data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()[:16]


class TensorHash:
    """SGLang's hash of a tensor on a GPU. Each tile of 8192 words has two sums of mixed words; the number of bytes is mixed in at the end,
    and the tiles are added."""

    def __init__(self) -> None:
        self._rest = b""
        self._words = 0
        self._sums: list[_Words] = []
        self._scratch = np.empty((2, _TILE), np.uint32)

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        data = data.cast("B")
        tile = 4 * _TILE
        if self._rest:
            missing = min(tile - len(self._rest), len(data))
            self._rest += bytes(data[:missing])
            data = data[missing:]
            if len(self._rest) < tile:
                return
            self._add(np.frombuffer(self._rest, "<u4"))
        whole = len(data) - len(data) % tile
        for start in range(0, whole, tile):
            self._add(np.frombuffer(data[start : start + tile], "<u4"))
        self._rest = bytes(data[whole:])

    def hexdigest(self) -> str:
        """The digest of all bytes so far, as 16 digits."""
        if self._rest:
            self._add(np.frombuffer(self._rest + bytes(-len(self._rest) % 4), "<u4"))
            self._rest = b""
        if not self._words:
            return f"{0:016x}"
        sums = np.array(self._sums, np.uint32) ^ np.uint32(4 * self._words & 0xFFFFFFFF)
        _mix(sums, np.empty_like(sums))
        parts = (sums[:, 0].astype(np.uint64) << np.uint64(32)) | sums[:, 1]
        return f"{_spread(int(parts.sum(dtype=np.uint64))):016x}"

    def _add(self, words: _Words) -> None:
        """Add the words of a tile."""
        positions = np.arange(self._words, self._words + len(words), dtype=np.uint64).astype(np.uint32)
        mixed, scratch = self._scratch[0, : len(words)], self._scratch[1, : len(words)]
        sums = np.empty(2, np.uint32)
        for i, (seed, factor, turn) in enumerate(zip(_SEEDS, _POSITION_FACTORS, _POSITION_TURNS, strict=True)):
            np.multiply(positions, np.uint32(factor), out=mixed)
            mixed += np.uint32(seed)
            np.left_shift(positions, np.uint32(turn), out=scratch)
            mixed ^= scratch | (positions >> np.uint32(32 - turn))
            mixed ^= words
            _mix(mixed, scratch)
            sums[i] = np.sum(mixed, dtype=np.uint32)
        self._sums.append(sums)
        self._words += len(words)


def _mix(words: _Words, scratch: _Words) -> None:
    """The finishing steps of MurmurHash3, in place."""
    for shift, factor in ((16, _MIX_FACTORS[0]), (13, _MIX_FACTORS[1]), (16, None)):
        words ^= np.right_shift(words, np.uint32(shift), out=scratch)
        if factor is not None:
            words *= np.uint32(factor)


def _spread(number: int) -> int:
    """The finishing steps of SplitMix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor & _64_BITS
    return number ^ number >> 31


class SglangWeightChecker(WeightChecker):
    path = "/weights_checker"
    start = "SGLang: start a version that has /weights_checker, such as 0.5.23"
    info_path = "/server_info"
    version_path = "/model_info"
    hashes = (TensorHash, ShortSha256)
    own = re.compile(r"normalizer$|(cos|sin)_cache|inv_freq|freqs_cis|expert_mask_gpu")
    repackings = (panels(32, 2), panels(None, 1))

    def keeps(self, weight: ReadableWeight, new_hash: Callable[[], ParameterHash]) -> bool:
        return super().keeps(weight, new_hash) and (new_hash is TensorHash or len(weight.shape) < 2)

    def read(self, answer: Mapping[str, Any]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for answered in answer["ranks"]:
            told = answered["parallelism_info"]
            models = {str(model.get("role", "target")): model for model in (told if isinstance(told, list) else [told])}
            drafts, about = tuple(f"{role}." for role in models if role != "target"), models["target"]
            numbers = [about[f"{axis}_rank"] for axis in ("dp", "pp", "tp")]
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise ValueError(numbers)
            rank = ServingRank(dp=numbers[0], pp=numbers[1], tp=numbers[2])
            digests |= {rank.key(name): digest for name, digest in texts(answered["checksums"]).items() if not name.startswith(drafts)}
        return digests

    def about(self, info: Mapping[str, Any]) -> ServerFacts:
        dtype, model = str(info.get("dtype", "auto")), info.get("model_path")
        told: dict[str, Any] = {axis: info.get(f"{axis}_size") for axis in ("tp", "pp", "dp")}
        sizes = ServingRank(**told, pcp=1) if all(is_size(size) for size in told.values()) else None
        return ServerFacts(
            is_size(info["ep_size"]) and info["ep_size"] > 1,
            None if dtype == "auto" else dtype,
            sizes,
            model if isinstance(model, str) else None,
        )

    def document(self, digests: Mapping[str, str]) -> dict[str, Any]:
        ranks: dict[ServingRank, dict[str, str]] = {}
        for key, digest in digests.items():
            rank, name = split_key(key)
            ranks.setdefault(rank, {})[name] = digest
        return {
            "ranks": [
                {"checksums": checksums, "parallelism_info": {"role": "target", "tp_rank": r.tp, "dp_rank": r.dp, "pp_rank": r.pp}}
                for r, checksums in ranks.items()
            ]
        }


weight_checker = SglangWeightChecker
