"""vLLM sharded_state: each rank's state dict as the engine itself holds it, right after loading, before kernels repack it.

    config.json, tokenizer files
    model-rank-{tp}-part-{n}.safetensors          one pipeline stage; any number of parts, in any order
    model-pp-{pp}-tp-{tp}-part-{n}.safetensors    several stages; layer numbers stay global

q, k and v are one tensor `qkv_proj` [this rank's rows of q; k; v], gate and up are one `gate_up_proj`, a layer's experts are two tensors,
`w13_weight` [experts, gate above up, in] and `w2_weight`. The vocabulary is padded with zero rows to a multiple of 64. A tied table is
stored once per stage.

    rules.py             the differences between the model classes and between versions, and the rules of a version
    stored_version.py    the versions that a checkpoint's keys belong to
    heads.py             classifiers, reward models and embedding models
    weight_checker.py    how a live server tells the digests of its parameters

Measured on vLLM 0.32.0 (every key and bit against real ranks, fixtures/vllm); vLLM's loader is model_loader/sharded_state_loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from reshard.adapter.format import ENGINE_VERSION, LEARNED_LAYOUTS, MAX_SHARD_SIZE, Option
from reshard.adapter.serving_format import ServingFormat

if TYPE_CHECKING:
    from reshard.adapter.format import Hints
    from reshard.geometry.meshes import Parallel
    from reshard.index.index import Index
    from reshard.models.model import Model
    from reshard.plans.layout import Target
    from reshard.storage.files import Files


PP_LAYERS = Option("pp_layers", "numbers", "The layers of each pipeline stage, as VLLM_PP_LAYER_PARTITION gives them to vLLM.")


class Vllm(ServingFormat):
    name = "vllm"
    summary = "vLLM sharded_state: pre-sharded for tensor, pipeline and expert parallel ranks"
    owns = ("model-rank-*-part-*.safetensors", "model-pp-*-tp-*-part-*.safetensors", "reshard.layout.json")
    options = (ENGINE_VERSION, MAX_SHARD_SIZE, PP_LAYERS, *LEARNED_LAYOUTS)
    engine = "vLLM"
    producer = "vLLM sharded_state"
    tracer = "reshard.plugins.loader_tracer"
    file_pattern = re.compile(r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-[^/]*\.safetensors")

    def read(self, files: Files, hints: Hints) -> Index:
        from dataclasses import replace

        from reshard.errors import CheckpointError
        from reshard.plans.manifest import MANIFEST

        if files.size(MANIFEST) is not None:
            return super().read(files, hints)
        try:
            index = super().read(files, hints)
        except CheckpointError as error:
            error.do = f"{error.do or 'Copy the files again'}. If SGLang wrote the files, which it names alike, add `format=sglang`"
            raise
        note = "no file says which engine the files are for; they are read as vLLM's. If SGLang wrote them, use `format=sglang`"
        return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, note)))

    def file_name(self, parallel: Parallel, pp_rank: int, tp_rank: int, part: int) -> str:
        rank = f"pp-{pp_rank}-tp-{tp_rank}" if parallel.pp > 1 else f"rank-{tp_rank}"
        return f"model-{rank}-part-{part}.safetensors"

    def check_head(self, model: Model) -> None:
        if model.architecture.head or model.setting("classifier_from_token"):
            from .heads import check_head

            check_head(model)

    def about_folder(self, model: Model, parallel: Parallel) -> str | None:
        if not model.setting("classifier_from_token"):
            return None
        from .heads import rows_of_other_tokens

        return rows_of_other_tokens(model, parallel.tp)

    def not_loaded(self, model: Model) -> tuple[str, str] | None:
        if model.architecture.head is None:
            return None
        from .heads import not_loaded

        return not_loaded(model.architecture.head)

    def options_of_stages(self, layers_of_stages: tuple[int, ...]) -> Mapping[str, Any]:
        from .rules import remainder_before_last_stage

        own = remainder_before_last_stage(sum(layers_of_stages), len(layers_of_stages)) if layers_of_stages else ()
        return {} if layers_of_stages == own else {PP_LAYERS.name: layers_of_stages}

    def not_told(self, model: Model, target: Target) -> str | None:
        from .rules import stages_not_told

        return stages_not_told(model, target)

    def keys_for_ranks(self, config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, object]:
        from .rules import quantized_modules

        return quantized_modules(config, names)


FORMAT = Vllm()
