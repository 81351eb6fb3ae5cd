"""adapter_config.json for an adapter: what the source's own says, what the tensors tell, and what the user gives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.adapter.model_files import ADAPTER_CONFIG, ModelFiles
from reshard.canonical.adapters.reading import STACKED
from reshard.canonical.content import Content
from reshard.canonical.lora import LoraSettings
from reshard.canonical.renaming import TRAINED_TOKENS, AdapterName, adapter_name, base_name
from reshard.errors import CheckpointError, RequestError
from reshard.index.origin import Tensor

# transformers' classes end in these; peft's TaskType has these names.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}

_OF_SGLANG = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def complete_config(content: Content, options: Mapping[str, Any], companions: ModelFiles) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of an adapter, and notes on those that were inferred.

    Raises: RequestError if a setting is in no file and was not given; CheckpointError if the tensors contradict the settings.
    """
    config, notes = dict(companions.adapter_config or {}), list[str]()
    pairs = {
        name.module: _rank(name, tensor) for name, tensor in _named(content) if name.parameter in ("lora_A.weight", "lora_embedding_A")
    }
    if not pairs:
        raise CheckpointError(
            f"no tensor is lora_A, for example {next(iter(content.tensors))}",
            why="The names are not those of PEFT, so the settings do not follow from them",
            do="Save the adapter with PEFT's names",
        )
    config.setdefault("peft_type", "LORA")
    if not config.get("target_parameters"):
        notes += _infer_ranks(config, pairs)
    if not config.get("target_modules") and not config.get("target_parameters"):
        config["target_modules"] = _target_modules(pairs, content)
        notes.append(f"target_modules follow from the names: {', '.join(config['target_modules'][:8])}")
    if any(name.parameter == "lora_magnitude_vector" for name, _ in _named(content)):
        config["use_dora"] = True
    saved = sorted({module for name in content.tensors if (module := _saved_module(name, pairs, content)) is not None})
    # null is a setting: such tensors are those of save_embedding_layers, which PEFT loads into the base, and vLLM refuses the module.
    if saved and "modules_to_save" not in config and config.get("bias", "none") == "none":
        config["modules_to_save"] = saved
    _check_trained_tokens(config, content)
    config = dict(LoraSettings(config).with_alpha(options.get("lora_alpha")).config)
    config["task_type"] = _text(config, options, "task_type", _task(companions.config or {}))
    config["base_model_name_or_path"] = _text(config, options, "base_model", _base_of(companions), key="base_model_name_or_path")
    notes += LoraSettings(config).notes
    if options.get("engine") == "sglang":
        notes += _as_sglang_reads(config, pairs)
    config.setdefault("use_rslora", False)
    config.setdefault("bias", "none")
    config["inference_mode"] = True
    return config, tuple(notes)


def _as_sglang_reads(config: dict[str, Any], modules: Iterable[str]) -> Iterator[str]:
    """Change settings to those of the same adapter that SGLang 0.5.23 reads right; yields notes.

    It does not read use_rslora. target_modules must be a list (lora/utils.py, get_normalized_target_modules), and it knows w1, w3 and w2 of
    experts in the names of tensors alone (lora/lora.py, _rename_expert_w_to_proj).
    """
    rank, alpha = config.get("r"), config.get("lora_alpha")
    has_patterns = config.get("rank_pattern") or config.get("alpha_pattern")
    if config.get("use_rslora") and not has_patterns and isinstance(rank, int) and isinstance(alpha, int | float):
        config |= {"use_rslora": False, "lora_alpha": alpha * math.sqrt(rank)}
        yield f"use_rslora is off and lora_alpha is {config['lora_alpha']:g}, which is the same scale: SGLang does not read use_rslora"
    names = config.get("target_modules")
    if names not in ("all", "all-linear") and (isinstance(names, str) or _OF_SGLANG.keys() & {*(names or ())}):
        last = {module.rpartition(".")[2] for module in modules}
        config["target_modules"] = sorted(_OF_SGLANG.get(name, name) for name in last)
        yield "target_modules is the list of the names that SGLang has for the adapted modules"


def _named(content: Content) -> Iterator[tuple[AdapterName, Any]]:
    """The tensors of the adapter whose names say what they are."""
    for name, tensor in content.tensors.items():
        if (parsed := adapter_name(name)) is not None:
            yield parsed, tensor


def _rank(name: AdapterName, tensor: Tensor) -> int:
    """The rank of an update, from its lora_A: [r, in], or [experts, r, in] of stacked experts."""
    return tensor.shape[-2 if STACKED.fullmatch(name.module) else 0]


def _infer_ranks(config: dict[str, Any], ranks: Mapping[str, int]) -> list[str]:
    """Set `r`, and `rank_pattern` for modules with another rank, if no file gives them; returns notes."""
    counts = Counter(ranks.values())
    if config.get("r") is not None:
        patterns = {*(config.get("rank_pattern") or {}).values(), config["r"]}
        if odd := next((module for module, rank in ranks.items() if rank not in patterns), None):
            raise CheckpointError(
                f"its matrices have the rank {ranks[odd]}, {ADAPTER_CONFIG} says {config['r']}",
                where=odd,
                why="The checkpoint and the settings are from different trainings",
                do="Give the settings of this training with `adapter_config=`",
            )
        return []
    main = counts.most_common(1)[0][0]
    config["r"] = main
    if len(counts) > 1:
        config["rank_pattern"] = {module: rank for module, rank in ranks.items() if rank != main}
    return [f"r follows from the shapes: {', '.join(map(str, sorted(counts)))}"]


def _target_modules(modules: Iterable[str], content: Content) -> list[str]:
    """The last parts of the modules' names, if they choose just these modules of the model; otherwise the full names."""
    adapted = set(modules)
    LoraSettings({}).check_parameters(adapted)
    last = {module.rpartition(".")[2] for module in adapted}
    of_model = {base_name(drop.name).rpartition(".")[0] for drop in content.drops if drop.name.endswith(".weight")}
    if content.model:
        of_model |= {name.rpartition(".")[0] for name in content.model.weights if name.endswith(".weight")}
    chosen = {module for module in of_model if module.rpartition(".")[2] in last}
    return sorted(last if of_model and chosen == adapted else adapted)


def _check_trained_tokens(config: Mapping[str, Any], content: Content) -> None:
    """Raises RequestError if rows of the embedding were trained, and nothing says which."""
    rows = next((name.in_file for name, _ in _named(content) if name.parameter == TRAINED_TOKENS), None)
    if rows and not config.get("trainable_token_indices"):
        raise RequestError(
            f"single rows of the embedding were trained, and no {ADAPTER_CONFIG} gives trainable_token_indices",
            where=rows,
            why="The tensor holds the rows, and not their numbers",
            do="Give the settings of the training with `adapter_config=`",
        )


def _saved_module(name: str, pairs: Mapping[str, int], content: Content) -> str | None:
    """The module that modules_to_save names, for a tensor that is none of LoRA's; None for others."""
    if adapter_name(name) is not None:
        return None
    module = base_name(name).rpartition(".")[0]
    return None if module in pairs else module.rpartition(".")[2]


def _text(config: Mapping[str, Any], options: Mapping[str, Any], option: str, known: str | None, *, key: str | None = None) -> str:
    """A setting that is a text: the user's, the file's, or the known one. Raises RequestError without any."""
    setting = options.get(option) or config.get(key or option) or known
    if not setting:
        flag = f"`{option}=`"
        raise RequestError(
            f"{key or option} is not known",
            why=f"The checkpoint has no {ADAPTER_CONFIG} that gives it",
            do=f"Give it with {flag}, or all settings with `adapter_config=`" + (", or the base with `model=DIR`" if known is None else ""),
        )
    return str(setting)


def _task(config: Mapping[str, Any]) -> str | None:
    """The task of the class that the model's config names."""
    names = config.get("architectures") or ()
    return next((task for name in names for ending, task in _TASKS.items() if str(name).endswith(ending)), None)


def _base_of(companions: ModelFiles) -> str | None:
    """The base model: the name that the model's config gives."""
    name = (companions.config or {}).get("_name_or_path")
    return str(name) if name else companions.path if companions.config is not None and companions.child is None else None
