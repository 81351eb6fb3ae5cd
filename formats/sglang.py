"""SGLang sharded_state: each rank's state dict as the engine itself holds it.

    config.json, tokenizer files
    model-rank-{tp}-part-{n}.safetensors          any number of parts, in any order

The files are called as vLLM's, and so are most tensors; but there are no attention scales, experts always lie under `experts.`, routers
where the model has them, and DeepSeek's fused projection has another name. The names of the files know no pipeline stage. SGLang reads them
after its kernels have brought weights into their own form: quantised ones would have to be in the form of one machine, and are not written.

Nothing in the files tells whose they are. What SGLang itself saved is taken for vLLM's, which it mostly is bit by bit, unless --format
sglang says otherwise; what was written here has a manifest that does. Measured on SGLang 0.5.23 (every key and bit against real ranks,
fixtures/sglang); its loader, ShardedStateLoader in model_loader/loader.py, is the same in 0.5.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.adapter.engine_files import (
    about_left_out,
    check_content,
    check_demands,
    completed,
    degrees_of,
    framed_parts,
    index_of_ranks,
    paths_by_rank,
    read_headers,
    served_model,
    with_stored_experts,
)
from reshard.adapter.format import Hints
from reshard.adapter.model_files import ModelFiles, read_json
from reshard.adapter.option import ENGINE_VERSION, MAX_SHARD_SIZE
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.content import Content
from reshard.engine.run import MANIFEST
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import F32
from reshard.index.index import Index, RunFacts
from reshard.models.model import Model
from reshard.plans.layout import Layout, TargetFile
from reshard.plans.target import Target
from reshard.serving.rules import (
    LATENT_BIASES,
    EngineRules,
    Fusion,
    check_degrees,
    layers_not_served,
    normalizer,
    rank_tensors,
    stored_dtypes,
)
from reshard.serving.versions import about_version, version_numbers
from reshard.storage.files import Files

OLDEST, NEWEST = "0.5.10", "0.5.23"
_FILE = re.compile(r"model-rank-(?P<rank>\d+)-part-[^/]*\.safetensors")


@dataclass(frozen=True, slots=True)
class _Own:
    """What a model's class has of its own. keeps_normalizer: whether the factor of embeddings is a key; settings: what the config has to
    say; demands: what it must not say otherwise; lacks: see EngineRules; plain_heads: whether its heads are hidden / heads wide, whatever
    the config says; all_sparse: whether all its layers have experts, likewise; experts_share_ranks: see EngineRules; notes: what to know
    when it is started; layers_not_served: why there is no class that loads these files.
    """

    tied: str = "head"
    keeps_normalizer: bool = False
    settings: tuple[tuple[str, object], ...] = ()
    demands: tuple[tuple[str, object], ...] = ()
    lacks: frozenset[tuple[str, str]] = frozenset()
    plain_heads: bool = False
    all_sparse: bool = False
    experts_share_ranks: bool = False
    notes: tuple[str, ...] = ()
    layers_not_served: str | None = None


_MLP_BIASES = frozenset((role, "bias") for role in ("mlp.gate", "mlp.up", "mlp.down"))
_TIED = (("tie_word_embeddings", True),)
_UNFUSED = "start SGLang with --disable-shared-experts-fusion: otherwise it may take a shared expert for one more routed one"
OWN = {
    "llama": _Own(lacks=_MLP_BIASES),
    "mistral": _Own(lacks=_MLP_BIASES),
    "qwen2": _Own(),
    "qwen3": _Own(),
    "phi3": _Own(),
    "gemma2": _Own(tied="embedding", keeps_normalizer=True, settings=(("hidden_act", "gelu_pytorch_tanh"),), demands=_TIED),
    "gpt2": _Own(demands=_TIED),
    "mixtral": _Own(tied="both", plain_heads=True),
    "qwen2_moe": _Own(tied="both", plain_heads=True, all_sparse=True, experts_share_ranks=True),
    "qwen3_moe": _Own(tied="both", all_sparse=True, experts_share_ranks=True),
    "deepseek_v2": _Own(
        settings=(("moe_layer_freq", 1), ("scoring_func", "softmax")),
        lacks=LATENT_BIASES,
        experts_share_ranks=True,
        notes=(_UNFUSED,),
    ),
    "deepseek_v3": _Own(
        settings=(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
        lacks=LATENT_BIASES,
        experts_share_ranks=True,
        notes=(_UNFUSED,),
    ),
    "gpt_neox": _Own(layers_not_served="it has no class for them; its Transformers backend's names were not measured"),
}

_FUSIONS = (
    Fusion(("attention.q", "attention.k", "attention.v"), "qkv_proj"),
    Fusion(("mlp.gate", "mlp.up"), "gate_up_proj"),
    Fusion(("shared_expert.gate", "shared_expert.up"), "gate_up_proj"),
    Fusion(("mla.q_a", "mla.kv_a"), "fused_qkv_a_proj_with_mqa"),
    Fusion(("expert.gate", "expert.up"), "w13"),
    Fusion(("expert.down",), "w2"),
)


class Sglang(ServingFormat):
    name = "sglang"
    summary = "SGLang sharded_state: pre-sharded for tensor and expert parallel ranks"
    owns = ("model-rank-*-part-*.safetensors",)
    options = (ENGINE_VERSION, MAX_SHARD_SIZE)
    # The same file names: only a manifest tells them apart.
    refines = ("vllm",)

    def detect(self, files: Files) -> str | None:
        found = next((path for path in files.list() if _FILE.fullmatch(path)), None)
        return f"{MANIFEST} says so" if found and _manifest(files).get("format") == self.name else None

    def read(self, files: Files, hints: Hints) -> Index:
        model = served_model(hints.model, hints.config, "SGLang")
        ranks = paths_by_rank(files, _FILE)
        headers = {rank: read_headers(files, paths) for rank, paths in ranks.items()}
        parallel = with_stored_experts(degrees_of(ranks, files), model, headers.values())
        sizes = {"tp": parallel.tp, **({"ep": parallel.ep} if parallel.ep > 1 else {})}
        facts = RunFacts("SGLang sharded_state", None, parallel=sizes, config=hints.config)
        return index_of_ranks(self.name, model, _rules(model), parallel, headers, facts)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        model = served_model(content.model, companions.config, "SGLang")
        rules = self.engine_rules(model, target)
        check_content(content, model, rules)
        own = OWN.get(model.architecture.family, _Own())
        check_degrees(model, rules, target.parallel)
        companions, notes = completed(companions, own.settings, "SGLang")
        dtypes = stored_dtypes(model, rules, {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()})
        files: list[TargetFile] = []
        for rank in range(target.parallel.tp):
            if target.wants({"tp": rank}):
                stored = rank_tensors(model, dtypes, rules, target.parallel, rank, 0)
                files.extend(framed_parts(f"model-rank-{rank}", stored, target.max_shard_size, {"tp": rank}))
        left_out = layers_not_served(model)
        return Layout(
            self.name,
            tuple(files),
            companions.sidecars(dtypes.values()),
            target.parallel,
            (*_about_version(model, target), *own.notes, *notes, *about_left_out(left_out, content)),
            left_out=left_out,
        )

    def engine_rules(self, model: Model, target: Target) -> EngineRules:
        """How the engine splits a model. Raises RequestError for a version or a model whose files are not known, and for stages."""
        target.parallel.allow("tp", "ep", what="SGLang, whose files' names know no stage")
        _about_version(model, target)
        _check_served(model)
        return _rules(model)


def _manifest(files: Files) -> Mapping[str, object]:
    """What a conversion noted beside the files; nothing if it cannot be read: then the files themselves are all there is."""
    try:
        return read_json(files, MANIFEST) if files.size(MANIFEST) is not None else {}
    except CheckpointError:
        return {}


def _rules(model: Model) -> EngineRules:
    own = OWN.get(model.architecture.family, _Own())
    return EngineRules(
        name="SGLang",
        fusions=_FUSIONS,
        extra_tensors=(normalizer(model),) if own.keeps_normalizer else (),
        vocabulary_multiple=model.architecture.vocabulary_multiple or 64,
        vocabulary_fits=True,
        partition=lambda layers, pp: (layers,),
        tied_table_stored_as=own.tied,
        dtypes={"router.correction": F32},
        unsupported=own.lacks,
        experts_share_ranks=own.experts_share_ranks,
        equal_experts=True,
    )


def _check_served(model: Model) -> None:
    own = OWN.get(model.architecture.family, _Own())
    what = f"a {model.architecture.model_type} model"
    check_demands(model, own.demands, "SGLang")
    if own.layers_not_served:
        raise RequestError(
            f"SGLang does not load {what} from such files: {own.layers_not_served}", do="Convert to hf, which it loads as well"
        )
    if model.quantization:
        raise RequestError(
            "the weights are quantised",
            why="SGLang reads these files after its kernels have changed the weights' form, which differs from machine to machine",
            do="Convert to hf, which it loads as well, or add --dequantize",
        )
    width, plain = model.dimensions["head_dim"], model.dimensions["hidden"] // model.dimensions["heads"]
    if own.plain_heads and width != plain:
        raise RequestError(
            f"SGLang's class for {what} has heads of hidden size / heads, {plain}; the config says {width}",
            why="It would load a part of every head, and say nothing",
            do="Serve it with another engine",
        )
    dense = model.dense_layers
    if own.all_sparse and dense:
        raise RequestError(
            f"SGLang's class for {what} has experts in every layer, whatever the config says; layer {dense[0]} has none",
            why="It would serve experts that were never loaded, and say nothing",
            do="Serve it with another engine",
        )


def _about_version(model: Model, target: Target) -> list[str]:
    """What to tell about the version that is asked for. Raises RequestError if its files are not known."""
    text = target.engine_version or NEWEST
    if version_numbers(text, NEWEST) < version_numbers(OLDEST, NEWEST):
        raise RequestError(
            f"--engine-version {text}: the oldest SGLang whose files are known is {OLDEST}", do="Convert to hf, which every version loads"
        )
    return about_version("SGLang", text, NEWEST, model, is_known=model.architecture.family in OWN)


FORMAT = Sglang()
