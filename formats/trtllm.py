"""TensorRT-LLM checkpoints: what `trtllm-build` makes engines of. Releases 0.8 to 1.x, as long as they build engines; newer ones load hf.

    config.json          the model and the parallel sizes, in TensorRT-LLM's own words
    rank{N}.safetensors  N = stage * tp + rank within the stage; layers are numbered from 0 in every stage

q, k, v are one tensor `qkv` [q rows of this rank; k; v], a KV head repeated where there are fewer than ranks. `mlp.fc` is the half that
the activation is applied to (Hugging Face's gate_proj), `mlp.gate` the other one (up_proj); experts are stacked with up above gate, and
the router has 32 bits. Tables are padded by zero rows to a multiple of tp and cut by rows (use_parallel_embedding, embedding_sharding_dim
0), also that of positions; a tied table is stored twice. What is left over of the layers goes one each to the first stages.

Compared, name by name and bit by bit, with what NVIDIA's own writer of such checkpoints, ModelOpt 0.47, writes (fixtures/trtllm). No engine
was built: that needs a GPU. The config's keys follow the source: tensorrt_llm/models/modeling_utils.py (PretrainedConfig), models/llama,
qwen and gpt/config.py, layers/moe.py (MoeConfig), mapping.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.adapter.engine_files import check_content, index_of_ranks, read_headers, served_model
from reshard.adapter.format import Hints
from reshard.adapter.model_files import CONFIG, ModelFiles, read_json
from reshard.adapter.safetensors_writer import framed
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.content import Content
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.parallel import Parallel
from reshard.index.index import Index, RunFacts
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.models.roles import Vocabulary
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.target import Target
from reshard.serving.rules import EngineRules, Fusion, check_degrees, model_dtype, rank_tensors, stored_dtypes
from reshard.storage.files import Files

_FILE = re.compile(r"rank(?P<rank>\d+)\.safetensors")
_LAYER = "transformer.layers.{layer}."
_NAMES = {
    "embedding": "transformer.vocab_embedding",
    "position_embedding": "transformer.position_embedding",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention.norm": _LAYER + "input_layernorm",
    "attention.q": _LAYER + "attention.qkv",
    "attention.q_norm": _LAYER + "attention.q_layernorm",
    "attention.k_norm": _LAYER + "attention.k_layernorm",
    "attention.o": _LAYER + "attention.dense",
    "mlp.norm": _LAYER + "post_layernorm",
    "mlp.gate": _LAYER + "mlp.fc",
    "mlp.up": _LAYER + "mlp.gate",
    "mlp.down": _LAYER + "mlp.proj",
    "router": _LAYER + "mlp.router",
    "expert.up": _LAYER + "mlp.fc",
    "expert.down": _LAYER + "mlp.proj",
    "shared_expert.up": _LAYER + "mlp.shared_expert.fc",
    "shared_expert.down": _LAYER + "mlp.shared_expert.proj",
    "shared_expert.score": _LAYER + "mlp.shared_expert_gate",
}
_FUSIONS = (
    Fusion(("attention.q", "attention.k", "attention.v"), "qkv"),
    Fusion(("shared_expert.up", "shared_expert.gate"), "fc"),
    Fusion(("expert.up", "expert.gate"), "fc"),
    Fusion(("expert.down",), "proj"),
)


@dataclass(frozen=True, slots=True)
class _Own:
    """What a model's class has of its own. says: keys of its config and what they say, a `Copied` where the Hugging Face config knows;
    names: of modules, where they are not those of _NAMES; all_sparse: whether all its layers have experts, whatever the config says."""

    says: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    all_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Copied:
    """What the Hugging Face config says under `key`; if nothing, `default`."""

    key: str
    default: Any = None


_ROTARY = {"position_embedding_type": "rope_gpt_neox", "norm_epsilon": Copied("rms_norm_eps", 1e-6)}
_LLAMA = {
    **_ROTARY,
    "hidden_act": Copied("hidden_act", "silu"),
    "attn_bias": Copied("attention_bias", False),
    "mlp_bias": Copied("mlp_bias", False),
    "residual_mlp": False,
}
_QWEN = {**_ROTARY, "hidden_act": "silu", "attn_bias": True, "mlp_bias": False, "seq_length": 8192, "use_logn_attn": False}
_QWEN_MOE = {**_QWEN, "hidden_act": "swiglu"}
_OWN = {
    "llama": _Own(_LLAMA),
    "mistral": _Own(_LLAMA),
    "mixtral": _Own({**_LLAMA, "hidden_act": "swiglu"}),
    "qwen2": _Own({**_QWEN, "qwen_type": "qwen2"}),
    "qwen3": _Own({**_QWEN, "qwen_type": "qwen3", "attn_bias": False}),
    "qwen2_moe": _Own({**_QWEN_MOE, "qwen_type": "qwen2_moe"}, all_sparse=True),
    "qwen3_moe": _Own({**_QWEN_MOE, "qwen_type": "qwen3_moe", "attn_bias": False}, all_sparse=True),
    # Its activation is the tanh form of gelu, which TensorRT-LLM calls so.
    "gpt2": _Own(
        {
            "position_embedding_type": "learned_absolute",
            "norm_epsilon": Copied("layer_norm_epsilon", 1e-5),
            "hidden_act": "gelu",
            "bias": True,
            "q_scaling": 1.0,
        },
        names={"mlp.up": _LAYER + "mlp.fc"},
    ),
}
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
}
# TensorRT-LLM's key, and Hugging Face's.
_SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: equal, and what is left over one each to the first stages (mapping.py, pp_layers)."""
    base, rest = divmod(layers, pp)
    return tuple(base + (stage < rest) for stage in range(pp))


class Trtllm(ServingFormat):
    name = "trtllm"
    summary = "TensorRT-LLM checkpoints for trtllm-build (releases that build engines): tensor, pipeline and expert parallel ranks"
    owns = ("rank*.safetensors",)
    refines = ("hf",)

    def detect(self, files: Files) -> str | None:
        found = next((path for path in files.list() if _FILE.fullmatch(path)), None)
        return found if found and _own_config(files) else None

    def read(self, files: Files, hints: Hints) -> Index:
        said = _own_config(files)
        if not said:
            raise CheckpointError("it is no config of a TensorRT-LLM checkpoint", where=CONFIG, do="Give another --format")
        config = hints.config if hints.config and "model_type" in hints.config else _as_hugging_face(said)
        model = served_model(find_model(config, hints.architecture), config, "TensorRT-LLM")
        parallel = _sizes(said)
        _check_complete(files, parallel)
        headers = {divmod(rank, parallel.tp): read_headers(files, [f"rank{rank}.safetensors"]) for rank in range(parallel.tp * parallel.pp)}
        sizes = {"tp": parallel.tp, "pp": parallel.pp, **({"ep": parallel.ep} if parallel.ep > 1 else {})}
        facts = RunFacts("TensorRT-LLM checkpoint", None, parallel=sizes, config=config)
        return index_of_ranks(self.name, model, _checked_rules(model, parallel), parallel, headers, facts)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        model = served_model(content.model, companions.config, "TensorRT-LLM")
        rules = self.engine_rules(model, target)
        check_content(content, model, rules)
        target.parallel.allow("tp", "pp", "ep", what="TensorRT-LLM, where each rank serves its own part")
        check_degrees(model, rules, target.parallel)
        dtypes = {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}
        main = _one_dtype(model, dtypes)
        stored = stored_dtypes(model, rules, dtypes)
        files: list[TargetFile] = []
        for rank in range(target.parallel.tp * target.parallel.pp):
            pp_rank, tp_rank = divmod(rank, target.parallel.tp)
            ranks = {"pp": pp_rank, "tp": tp_rank}
            if target.wants(ranks):
                held = rank_tensors(model, stored, rules, target.parallel, tp_rank, pp_rank)
                files.append(framed(f"rank{rank}.safetensors", held, ranks))
        config = json.dumps(_config(model, target.parallel, main), indent=4) + "\n"
        carried = (sidecar for sidecar in companions.sidecars(dtypes.values()) if sidecar.path != CONFIG)
        return Layout(self.name, tuple(files), (*carried, Sidecar(CONFIG, config.encode())), target.parallel, tuple(_notes(model)))

    def engine_rules(self, model: Model, target: Target) -> EngineRules:
        """How the engine splits a model. Raises RequestError for a model whose checkpoints are not known."""
        return _checked_rules(model, target.parallel)


def _checked_rules(model: Model, parallel: Parallel) -> EngineRules:
    """The rules for those sizes. Raises RequestError if they are not known for the model."""
    own, what = _OWN.get(model.architecture.family), f"a {model.architecture.model_type} model"
    if own is None:
        raise RequestError(
            f"how TensorRT-LLM calls and fuses the weights of {what} is not known here",
            why="Only what was compared with what NVIDIA's own writer makes of it is laid out",
            do=f"Known are {', '.join(_OWN)}. Convert to hf, which current releases load",
        )
    if model.quantization:
        raise RequestError(
            "the weights are quantised", why="TensorRT-LLM scales them in a way of its own", do="Add --dequantize, or convert to hf"
        )
    dense = model.dense_layers
    if own.all_sparse and dense:
        raise RequestError(
            f"TensorRT-LLM's class for {what} has experts in every layer; layer {dense[0]} has none",
            do="Convert to hf, which current releases load",
        )
    rules = EngineRules(
        name="TensorRT-LLM",
        fusions=_FUSIONS,
        extra_tensors=(),
        vocabulary_multiple=None,
        partition=partition,
        tied_table_stored_as="both",
        names={**_NAMES, **own.names},
        splits={"position_embedding": Vocabulary()},
        dtypes={"router": F32},
        equal_experts=True,
    )
    if unknown := sorted({part.role for part in model.parts()} - rules.names.keys() - {role for each in _FUSIONS for role in each.roles}):
        raise RequestError(f"what TensorRT-LLM calls the {unknown[0]} of {what} is not known", do="Convert to hf")
    if parallel.pp > model.dimensions["layers"]:
        raise RequestError(
            f"--pp {parallel.pp}: there are only {model.dimensions['layers']} layers", why="TensorRT-LLM refuses a stage without one"
        )
    return rules


def _notes(model: Model) -> Iterator[str]:
    yield "build engines of it with trtllm-build; releases that build none load hf instead"
    window = model.config.get("sliding_window")
    if window and model.config.get("use_sliding_window", True):
        yield f"the sliding window of {window} is no part of the checkpoint: it is asked for at run time (--max_attention_window_size)"


def _one_dtype(model: Model, dtypes: Mapping[str, DType]) -> DType:
    """The element type of all weights. Raises RequestError if there are several: the config names one."""
    main = model_dtype(model, dtypes)
    other = next((name for name in model.weights if dtypes[name] != main), None)
    if other or main.torch not in ("float16", "bfloat16", "float32"):
        raise RequestError(
            f"it is {dtypes[other]}, others are {main}" if other else f"the weights are {main}",
            where=other,
            why="A TensorRT-LLM checkpoint has one element type: float16, bfloat16 or float32",
            do="Choose one for all with --dtype",
        )
    return main


def _config(model: Model, parallel: Parallel, dtype: DType) -> dict[str, Any]:
    """config.json: what PretrainedConfig and the class of the model's config take."""
    own, sizes, config = _OWN[model.architecture.family], model.dimensions, model.config
    family = model.architecture.family
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    mapping = {"world_size": parallel.tp * parallel.pp, "tp_size": parallel.tp, "pp_size": parallel.pp}
    said = {
        "architecture": next(name for name, model_type in _CLASSES.items() if model_type == family),
        "dtype": dtype.torch,
        "logits_dtype": "float32",
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_size": sizes["head_dim"],
        "intermediate_size": sizes["intermediate"],
        "max_position_embeddings": sizes["positions"] if "positions" in sizes else config.get("max_position_embeddings"),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "tie_word_embeddings": model.is_tied,
        **{key: config.get(value.key, value.default) if isinstance(value, Copied) else value for key, value in own.says.items()},
    }
    if "positions" not in sizes:
        said["rotary_base"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        said["rotary_scaling"] = None if kind == "default" else {**rope, "type": kind, "rope_type": kind}
    if "experts" in sizes:
        mapping |= {"moe_tp_size": parallel.tp // parallel.ep, "moe_ep_size": parallel.ep}
        # 1: the weights of the chosen experts are scaled to a sum of 1; 0: they are not (MoeConfig.ExpertScaleNormalizationMode).
        normalized = config.get("norm_topk_prob", family == "mixtral")
        top = config.get("num_experts_per_tok", 2 if family == "mixtral" else None)
        said["moe"] = {"num_experts": sizes["experts"], "top_k": top, "normalization_mode": int(bool(normalized))}
    for key, name in (("moe_intermediate_size", "expert_intermediate"), ("moe_shared_expert_intermediate_size", "shared_intermediate")):
        if name in sizes:
            said[key] = sizes[name]
    return {**said, "mapping": mapping, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}


def _own_config(files: Files) -> dict[str, Any]:
    """config.json, if it is TensorRT-LLM's; otherwise empty."""
    said = read_json(files, CONFIG) if files.size(CONFIG) is not None else {}
    return said if isinstance(said.get("mapping"), dict) and isinstance(said.get("architecture"), str) else {}


def _as_hugging_face(said: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config that says the same."""
    family = _CLASSES.get(said["architecture"])
    if family is None:
        raise CheckpointError(
            f"the architecture {said['architecture']!r} is not known here",
            where=CONFIG,
            why="How its weights lie in the ranks' files is not guessed",
            do=f"Known are {', '.join(_CLASSES)}",
        )
    moe, quantization = (value if isinstance(value := said.get(key), dict) else {} for key in ("moe", "quantization"))
    algorithms = {value for value in quantization.values() if isinstance(value, str)}
    if algorithms:
        raise CheckpointError(
            f"the weights are quantised ({', '.join(sorted(algorithms))})", where=CONFIG, do="Convert the checkpoint that it was made from"
        )
    if (not said.get("use_parallel_embedding") and _sizes(said).tp > 1) or said.get("embedding_sharding_dim"):
        raise CheckpointError("its tables are not cut by rows", where=CONFIG, why="Only checkpoints whose tables are so are read")
    config = {theirs: said[ours] for ours, theirs in _SHARED_KEYS.items() if said.get(ours) is not None}
    config |= {value.key: said[key] for key, value in _OWN[family].says.items() if isinstance(value, Copied) and key in said}
    if moe.get("num_experts"):
        config |= {
            "num_local_experts" if family == "mixtral" else "num_experts": moe["num_experts"],
            "num_experts_per_tok": moe.get("top_k"),
        }
        config |= {} if family == "mixtral" else {"norm_topk_prob": bool(moe.get("normalization_mode"))}
    if said.get("rotary_base") is not None:
        config |= {"rope_theta": said["rotary_base"], "rope_scaling": said.get("rotary_scaling")}
    if family == "gpt2":
        config |= {"n_inner": said.get("intermediate_size"), "activation_function": "gelu_new"}
    elif family == "mixtral" or family.startswith("qwen"):
        config["hidden_act"] = "silu"
    return {"architectures": [said["architecture"]], "model_type": family, "torch_dtype": said.get("dtype"), **config}


def _sizes(said: Mapping[str, Any]) -> Parallel:
    """The parallel sizes. Raises CheckpointError if they are of a kind that is not read."""
    mapping = said["mapping"]
    sizes = {name: mapping.get(name, 1) for name in ("tp_size", "pp_size", "cp_size", "moe_ep_size")}
    tp, pp, cp, ep = (value if isinstance(value, int) and value > 0 else 1 for value in sizes.values())
    if mapping.get("world_size", tp * pp) != tp * pp * cp:
        raise CheckpointError(f"its mapping says {dict(mapping)}, which does not multiply to the world size", where=CONFIG)
    return Parallel(tp=tp, pp=pp, ep=ep)


def _check_complete(files: Files, parallel: Parallel) -> None:
    held = {int(match["rank"]) for path in files.list() if (match := _FILE.fullmatch(path))}
    missing = next((rank for rank in range(parallel.tp * parallel.pp) if rank not in held), None)
    if missing is not None:
        raise CheckpointError(
            "it is not there",
            where=f"rank{missing}.safetensors",
            why=f"{CONFIG} says {parallel}, so there are {parallel.tp * parallel.pp} ranks",
            do="Copy it from where the checkpoint was written",
        )


FORMAT = Trtllm()
