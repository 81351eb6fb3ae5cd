"""The base as an adapter trained it, where the adapter has another head than the base.

    SEQ_CLS, TOKEN_CLS    score.weight in place of lm_head: the merge is a classifier, or with one label a reward model
    modules_to_save       a copy of a tied table: after the merge, head and embedding are two tables

Source: peft 0.21.2, peft_model.py (PeftModelForSequenceClassification) and utils/other.py (ModulesToSaveWrapper), whose copy of a tied
table is another tensor unless ensure_weight_tying is set; compared with the models that its merge saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content, Drop
from reshard.canonical.lora import LoraSettings
from reshard.canonical.renaming import PREFIX, adapter_name
from reshard.index.origin import Tensor
from reshard.models.declared.heads import plain_class
from reshard.models.lookup import find_model
from reshard.models.model import Model

_CLASSES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification", "QUESTION_ANS": "ForQuestionAnswering"}


def with_own_head(content: Content, settings: LoraSettings, tensors: Mapping[str, Tensor]) -> tuple[Content, dict[str, Tensor]]:
    """The base with the head that an adapter needs, and the tensors of the adapter that are not in it. tensors: of the adapter."""
    model = content.model
    whole = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if adapter_name(name) is None}
    if model is None or model.architecture.head is not None:
        return content, dict(tensors)
    if model.is_tied:
        own = [name for name in model.architecture.tied if name in whole and settings.saves(name.removesuffix(".weight"))]
        content = _untied(content, model) if own else content
    head = {name: tensor for name, tensor in whole.items() if name not in content.tensors and name not in model.aliases}
    as_classifier = _classifier(model, settings, head)
    if as_classifier is None:
        return content, dict(tensors)
    kept = {name: tensor for name, tensor in content.tensors.items() if name not in model.architecture.tied[:1]}
    drops = tuple(
        Drop.of(tensor, "the head of the adapter takes its place") for name, tensor in content.tensors.items() if name not in kept
    )
    own_head = {name: replace(head[name], name=name, kind="weight") for name in as_classifier.weights if name in head}
    made = replace(content, tensors={**kept, **own_head}, drops=(*content.drops, *drops), model=as_classifier)
    return made, {name: tensor for name, tensor in tensors.items() if name.removeprefix(PREFIX) not in own_head}


def with_changes(config: Mapping[str, Any], before: Model, after: Model) -> dict[str, Any]:
    """A config with the settings in which two models of one architecture differ."""
    changed = {key: value for key, value in after.config.items() if before.config.get(key) != value}
    return {**config, **changed}


def _untied(content: Content, model: Model) -> Content:
    """The base with a head of its own, which holds what the embedding holds."""
    head, embedding = model.architecture.tied
    inner = model.config.get("text_config")
    config = {**model.config, "tie_word_embeddings": False}
    if isinstance(inner, dict):
        config["text_config"] = {**inner, "tie_word_embeddings": False}
    tensors = {**content.tensors, head: replace(content.tensors[embedding], name=head)} if embedding in content.tensors else content.tensors
    return replace(content, tensors=tensors, model=Model(model.architecture, config))


def _classifier(model: Model, settings: LoraSettings, head: Mapping[str, Tensor]) -> Model | None:
    """The model with the head of a classifier in place of the language model's; None if these tensors are not such a head."""
    ending = _CLASSES.get(str(settings.config.get("task_type")))
    labels = next((tensor.shape[0] for name, tensor in head.items() if name.endswith(".weight") and len(tensor.shape) == 2), None)
    declared = model.architecture.class_name
    if ending is None or labels is None or declared is None:
        return None
    names = {str(label): f"LABEL_{label}" for label in range(labels)}
    config = {**model.config, "architectures": [plain_class(f"PeftModel{ending}", declared)]}
    if len(config.get("id2label") or ()) != labels:
        config |= {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
    made = find_model(config, model.architecture, {name: tensor.shape for name, tensor in head.items()})
    return made if made and made.architecture.head and head.keys() <= made.weights.keys() else None
