"""SGLang sharded_state: each rank's state dict as the engine itself holds it.

    config.json, tokenizer files
    model-rank-{tp}-part-{n}.safetensors          any number of parts, in any order

The files have the same names as vLLM's, and so have most tensors. There are no attention scales, experts are always under `experts.`,
routers are where the model has them, and DeepSeek's fused projection has another name. The file names do not contain a pipeline stage.
SGLang reads the files after its kernels have changed the weights' form. Quantized weights would have to be in the form of one machine, so
they are not written.

    rules.py             the differences between the model classes, and the rules
    weight_checker.py    how a live server tells the digests of its parameters

Nothing in the files says which engine they are for. Files that SGLang itself saved are taken for vLLM's, whose files are mostly the same
bit by bit, unless --format sglang is given. Files that reshard wrote have a manifest that names the format.

Measured on SGLang 0.5.23 (every key and bit against real ranks, fixtures/sglang). Its loader, ShardedStateLoader in
model_loader/loader.py, is the same in 0.5.10.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from reshard.adapter.format import ENGINE_VERSION, LEARNED_LAYOUTS, MAX_SHARD_SIZE
from reshard.adapter.serving_format import ServingFormat

if TYPE_CHECKING:
    from reshard.geometry.meshes import Parallel
    from reshard.storage.files import Files


class Sglang(ServingFormat):
    name = "sglang"
    summary = "SGLang sharded_state: pre-sharded for tensor and expert parallel ranks"
    owns = ("model-rank-*-part-*.safetensors", "reshard.layout.json")
    # The file names are the same: only the manifest tells the formats apart.
    refines = ("vllm",)
    options = (ENGINE_VERSION, MAX_SHARD_SIZE, *LEARNED_LAYOUTS)
    engine = "SGLang"
    producer = "SGLang sharded_state"
    tracer = "reshard.plugins.loader_tracer"
    sizes = ("tp", "ep")
    file_pattern = re.compile(r"model-rank-(?P<rank>\d+)-part-[^/]*\.safetensors")

    def detect(self, files: Files) -> str | None:
        if super().detect(files) is None:
            return None
        from reshard.plans.manifest import MANIFEST

        return f"{MANIFEST} says so" if _json(files, MANIFEST).get("format") == self.name else None

    def file_name(self, parallel: Parallel, pp_rank: int, tp_rank: int, part: int) -> str:
        return f"model-rank-{tp_rank}-part-{part}.safetensors"

    def layout_notes(self, names: Collection[str]) -> tuple[str, ...]:
        if not any(".shared_expert" in name for name in names):
            return ()
        return (
            "start SGLang with --disable-shared-experts-fusion, as the layout was learned: otherwise it may take a shared expert for one "
            "more routed expert",
        )


def _json(files: Files, path: str) -> Mapping[str, object]:
    """A JSON file's object; empty if there is no such file, or it cannot be read."""
    from reshard.adapter.model_files import read_json
    from reshard.errors import CheckpointError

    try:
        return read_json(files, path) if files.size(path) is not None else {}
    except CheckpointError:
        return {}


FORMAT = Sglang()
