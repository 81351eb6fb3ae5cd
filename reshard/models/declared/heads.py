"""Heads: what a model has after its last layer. The class in `architectures` tells it, and where it does not, the stored names do.

    LlamaForCausalLM                   the head that the model type declares
    LlamaForSequenceClassification     score.weight [labels, hidden]: a classifier, a reranker, or with one label a reward model
    LlamaForTokenClassification        score.weight, score.bias: a critic of verl
    Qwen2ForRewardModel                score.0 and score.2: an MLP
    RewardModel, CriticModel           OpenRLHF: the module that the config's value_head_prefix names
    LlamaModel                         none: an embedding model, whose names may lack "model."
    LlamaForRewardModelWithGating      matrices of the class's own code, which are taken as they are
    v_head.summary, stored             TRL: beside lm_head, whatever the class is

Source: transformers 5.24, modeling_layers.py (GenericForSequenceClassification, GenericForTokenClassification) and the classes of the model
types; OpenRLHF 0.9, models/model.py; TRL 0.24, AutoModelForCausalLMWithValueHead; verl 0.9, utils/model.py (load_valuehead_model).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.models.architecture import Architecture, ClassHead, Dimension, Weight
from reshard.models.config_values import stated_class
from reshard.models.roles import COLUMN, ROW

_MLP = ("0.weight", "0.bias", "2.weight", "2.bias")
_PARTS = ("weight", "bias", *_MLP)
# Class -> what such a model is with one label and with several, the module of its head, and the tensors in it. The first row counts.
_ROWS: tuple[tuple[str, tuple[str, str], str, tuple[str, ...]], ...] = (
    (
        "(?:GPT2|GPTNeoX|GPTBigCode|Bloom|Falcon|Mpt)ForTokenClassification",
        ("a critic", "a token classifier"),
        "classifier",
        ("weight", "bias"),
    ),
    (".*ForTokenClassification", ("a critic", "a token classifier"), "score", ("weight", "bias")),
    (".*ForSequenceClassification", ("a reward model", "a classifier"), "score", ("weight",)),
    (".*For(?:Process)?RewardModel(?:ing)?", ("a reward model", "a reward model"), "score", _MLP),
    ("RewardModel|LLMForSequenceRegression", ("a reward model", "a reward model"), "value_head", ("weight",)),
    ("CriticModel", ("a critic", "a critic"), "value_head", ("weight",)),
    (".*ForQuestionAnswering", ("a model that answers questions", "a model that answers questions"), "qa_outputs", ("weight", "bias")),
    (".*(?:Model|ForEmbedding|ForTextEncoding)", ("an embedding model", "an embedding model"), "", ()),
)
OF_ITS_OWN = "a model with a head of its own class"
# OpenRLHF makes these classes while it runs. With a head under this name, the class of transformers has the same weights.
_OF_OPENRLHF = ("RewardModel", "CriticModel", "LLMForSequenceRegression")
_OF_LANGUAGE = re.compile(r"ForCausalLM$|LMHeadModel$|ForConditionalGeneration$|ChatModel$")
# The modules of heads, as the row's class, a value of value_head_prefix, or the code of a trainer names them.
_MODULES = ("score", "classifier", "value_head", "v_head.summary", "qa_outputs")
_VALUE_HEADS = ("value_head", "v_head.summary")
# Names in layers have at least as many dots; most of a large checkpoint's names are such.
_DOTS_IN_LAYERS = 5
# What PEFT puts into the name of a head that it trains (modules_to_save), and of the one before.
_OF_PEFT = re.compile(r"\.(?:modules_to_save\.\w+|original_module)\.")
# accelerate's fully_shard puts FSDP before the name of the class; the others are classes that only wrap the model.
_FSDP = re.compile(r"^FSDP(?=[A-Z])")
_PEFT = re.compile(r"Peft(?:Mixed)?Model(For\w+)?")
_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "LoraModel")


def plain_class(named: str, declared: str | None) -> str:
    """The model's class in place of that of a wrapper around it: LlamaForCausalLM for FSDPLlamaForCausalLM and PeftModelForCausalLM.

    declared: the class of language models of this type; None if it is not known.
    """
    name = _FSDP.sub("", named)
    of_peft = _PEFT.fullmatch(name)
    if declared is None or not (of_peft or name in _WRAPPERS):
        return name
    task = (of_peft[1] if of_peft else None) or "ForCausalLM"
    return declared if task in ("ForCausalLM", "ForSeq2SeqLM") else _stem(declared) + task.replace("ForFeatureExtraction", "Model")


def head_of(config: Mapping[str, Any], declared: Architecture, stored: Mapping[str, tuple[int, ...]]) -> ClassHead | None:
    """The head that a model has in place of the declared one, or with it; None: the declared one alone.

    stored: the names and shapes of the tensors that are stored; empty if they are not known.
    """
    named = plain_class(stated_class(config) or declared.class_name or "", declared.class_name)
    stored = {_OF_PEFT.sub(".", name): shape for name, shape in stored.items() if name.count(".") < _DOTS_IN_LAYERS + 1}
    stored = {name: shape for name, shape in stored.items() if name.count(".") < _DOTS_IN_LAYERS}
    module, parts = _stored_head(config, declared, stored)
    has_lm_head = any(name.endswith(declared.tied[0]) for name in stored)
    stated = None if module in _VALUE_HEADS else _labels(config)
    labels = stated or next((stored[name][0] for name in _ends(stored, module, parts) if stored[name]), None)
    is_language = named == declared.class_name or bool(_OF_LANGUAGE.search(named))
    row = next((row for row in _ROWS if re.fullmatch(row[0], named)), None) if not is_language else None
    # Engines compute such a classifier from rows of lm_head, and there are models of their own whose class ends in Model.
    of_lm_head = config.get("classifier_from_token") if row and row[2] else has_lm_head or declared.class_name is None
    if row is not None and not of_lm_head:
        what = row[1][0] if labels == 1 else row[1][1]
        usual = _prefix(config) or row[2] if "value" in row[2] else row[2]
        if usual and not module and _has_own_head(declared, stored):
            return ClassHead(named, OF_ITS_OWN, is_usual=False, labels=labels)
        module, parts = (module, parts) if module and usual else (usual, row[3])
        is_usual = module == usual and (len(parts) > 2) == (len(row[3]) > 2)
        if named in _OF_OPENRLHF and (module, parts) == ("score", ("weight",)) and declared.class_name:
            named = _stem(declared.class_name) + "ForSequenceClassification"
        return ClassHead(named, what, module, parts, is_usual, labels, front=_front(declared, stored, module))
    if not module and not (is_language or has_lm_head) and row is None and _has_own_head(declared, stored):
        return ClassHead(named, OF_ITS_OWN, is_usual=False, labels=labels)
    if not module:
        return None
    if module.startswith("v_head") or has_lm_head:
        return ClassHead(named, "a language model with a value head", module, parts, False, labels, beside=True)
    suffix = "ForTokenClassification" if "bias" in parts else "ForSequenceClassification"
    its_class = _stem(named) + suffix if is_language and module == "score" else named
    return ClassHead(its_class, "a critic" if labels == 1 else "a classifier", module, parts, module == "score", labels)


def _stored_head(config: Mapping[str, Any], declared: Architecture, stored: Mapping[str, tuple[int, ...]]) -> tuple[str, tuple[str, ...]]:
    """The module of a head that is among the stored names, with its tensors; empty if there is none."""
    own = {weight.name for weight in declared.weights}
    for module in filter(None, dict.fromkeys((_prefix(config), *_MODULES))):
        there = {part for part in _PARTS if f"{module}.{part}" not in own and any(_ends(stored, module, (part,)))}
        if any(len(stored[name]) == 2 for part in there for name in _ends(stored, module, (part,))):
            form = _MLP if there & {*_MLP} else ("weight", "bias")
            return module, tuple(part for part in form if part in there or part.endswith("weight"))
    return "", ()


def _has_own_head(declared: Architecture, stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a matrix is stored beside the whole language model, under a name that nobody has declared: of a class with code of its own,
    such as ArmoRM's regression_layer and gating, or ColBERT's projection."""
    base = _base(declared)
    outside = [name for name, shape in stored.items() if not name.startswith(base) and len(shape) == 2]
    return bool(base and outside) and declared.tied[1] in stored


def _ends(stored: Mapping[str, tuple[int, ...]], module: str, parts: tuple[str, ...]) -> Iterator[str]:
    """The stored names of these tensors of a module outside of the layers, the last ones first."""
    for part in reversed(parts):
        ending = f"{module}.{part}"
        for name in stored:
            if name.endswith(ending) and re.fullmatch(r"(?:[A-Za-z_]+\.)*", name.removesuffix(ending)):
                yield name


def _prefix(config: Mapping[str, Any]) -> str | None:
    """The module that OpenRLHF's config names."""
    named = config.get("value_head_prefix")
    return named if isinstance(named, str) and re.fullmatch(r"\w+", named) else None


def _labels(config: Mapping[str, Any]) -> int | None:
    """The number of outputs that a config states."""
    listed, number = config.get("id2label"), config.get("num_labels")
    return len(listed) if isinstance(listed, Mapping) and listed else number if isinstance(number, int) else None


def _front(declared: Architecture, stored: Iterable[str], module: str) -> tuple[str, str]:
    """The first word of the language model's names, and what a model has in its place: embedding models may lack it, also where the names
    are not known, and the classes that answer questions spell it `transformer` for most model types."""
    base = _base(declared)
    if not base or (module and module != "qa_outputs") or any(name.startswith(base) for name in stored):
        return "", ""
    return (base, "transformer.") if module else (base, "")


def _base(declared: Architecture) -> str:
    """The first word of all names of a language model, with its dot; empty if they have none in common."""
    names = [weight.name for weight in declared.weights if weight.role != "head"]
    base = names[0].partition(".")[0] + "." if names else ""
    return base if "{" not in base and all(name.startswith(base) for name in names) else ""


def _stem(class_name: str) -> str:
    return _OF_LANGUAGE.sub("", class_name)


# The architectures with a head that were made last: models are compared by their architecture's identity.
_LATEST: deque[tuple[Architecture, ClassHead, Architecture]] = deque(maxlen=8)


def with_head(declared: Architecture, head: ClassHead) -> Architecture:
    """The architecture with another head: the same object for the same two."""
    made = next((made for of, other, made in tuple(_LATEST) if of is declared and other == head), None)
    if made is None:
        _LATEST.append((declared, head, made := _with_head(declared, head)))
    return made


def _with_head(declared: Architecture, head: ClassHead) -> Architecture:
    of_language = [weight for weight in declared.weights if weight.role == "head"]
    hidden = next((weight.shape[1] for weight in of_language if len(weight.shape) == 2), "hidden")
    shapes = {"0.weight": (hidden, hidden), "0.bias": (hidden,), "2.bias": ("labels",), "bias": ("labels",)}
    splits = {"0": COLUMN, "2": ROW}  # of an MLP (vLLM 0.32, models/qwen2_rm.py)
    own = [
        Weight(f"{head.module}.{part}", "class_head", shapes.get(part, ("labels", hidden)), split=splits.get(part[0]))
        for part in head.parts
    ]
    old, new = head.front

    def renamed(text: str, spelled: Callable[[str], str] = str) -> str:
        return spelled(new) + text.removeprefix(spelled(old)) if text.startswith(spelled(old)) else text

    others = [replace(weight, name=renamed(weight.name)) for weight in declared.weights if weight.role != "head"]
    # The two of qa_outputs are the start and the end of an answer. A critic has one, whatever the labels of the config that it began with.
    keys = () if head.module == "qa_outputs" or head.module in _VALUE_HEADS else (".id2label", ".num_labels")
    labels = Dimension(keys, default=str(head.labels or 2) if head.module != "qa_outputs" else "2", counts=True)
    return replace(
        declared,
        weights=(*others, *(of_language if head.beside else ()), *own),
        dimensions={**declared.dimensions, "labels": labels},
        tied=(declared.tied[0], renamed(declared.tied[1])),
        dropped={renamed(pattern, re.escape): reason for pattern, reason in declared.dropped.items()},
        carried={renamed(pattern, re.escape): reason for pattern, reason in declared.carried.items()},
        head=head,
    )
