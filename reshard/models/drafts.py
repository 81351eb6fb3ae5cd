"""Draft models: what predicts further tokens for another model, and is stored as a checkpoint of its own (EAGLE, Medusa, MTP, DFlash).

The config of a draft often has the `model_type` of an ordinary model (`llama`), and weights that such a model lacks: its class tells them
apart. Serving engines read a draft from its Hugging Face folder at every tensor-parallel size, because it takes its embedding and often its
head from the model that it drafts for. So a draft is carried as it is, and never cut.

Source of the classes: vLLM 0.32, model_executor/models/registry.py, _SPECULATIVE_DECODING_MODELS; speculators 0.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Eagle2_5_VL is a model with a vision tower, and no draft.
_CLASS = re.compile(r"^P?[Ee]agle(?!2_5)|Eagle3?(?:Model)?$|Medusa|MTP|DFlash|DSpark|Speculator|DraftModel$")
_TABLES = frozenset({"d2t", "t2d", "token_map", "draft_id_to_target_id"})


def draft_class(config: Mapping[str, Any]) -> str | None:
    """The class of a draft model, from a Hugging Face config; None if it describes no draft model."""
    classes = config.get("architectures")
    named = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    if drafts := [name for name in named if _CLASS.search(name)]:
        return drafts[0]
    method = config.get("speculators_model_type")
    return method if isinstance(method, str) else None


def is_draft_table(name: str) -> bool:
    """Whether a tensor is an integer table of a draft: which token of the model each token of its smaller vocabulary is."""
    return name.rpartition(".")[2] in _TABLES
