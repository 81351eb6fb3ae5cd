"""Inspection: what `reshard inspect` knows of a checkpoint, from its metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError, ReshardError
from reshard.geometry.quantities import plural
from reshard.models.config_values import component_class
from reshard.models.lookup import draft_class
from reshard.models.quantization import unknown_quantization

if TYPE_CHECKING:
    from reshard.canonical.content import Content, Drop
    from reshard.canonical.dequantization import QuantizedFamily
    from reshard.opening.checkpoint import Checkpoint
    from reshard.plans.summary import ExpertSummary
    from reshard.requests.outlook import Outlook


class Inspection:
    """An opened checkpoint, and what is derived from it."""

    JSON = (
        "path=checkpoint.path format=index.format detected_by=checkpoint.detected producer=facts.producer version=facts.version "
        "step=facts.step parallel=facts.parallel model_type architecture_known parameters parameters_as_stored "
        "experts bytes=nbytes files=index.files kinds models=checkpoint.models quantized adapter tensor_count withheld_count object_count "
        "notes=facts.notes mesh outlook tree shares"
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.index, self.facts, self.tensors = checkpoint.index, checkpoint.index.facts, checkpoint.index.tensors
        self.config, self.adapter_config = checkpoint.model_files.config, checkpoint.model_files.adapter_config or {}
        self.nbytes = sum(file.nbytes for file in self.index.files)

    @cached_property
    def content(self) -> Content | None:
        """What a conversion would take; None if it would be refused, for example because none of several models is the main one."""
        return None if isinstance(self._content, ReshardError) else self._content

    @cached_property
    def _content(self) -> Content | ReshardError:
        try:
            return self.checkpoint.content()
        except ReshardError as error:
            return error

    @cached_property
    def outlook(self) -> Outlook:
        """What it can become."""
        from reshard.requests.outlook import outlook

        return outlook(self.checkpoint, self._content)

    @property
    def is_adapter(self) -> bool:
        """Whether it holds a LoRA adapter and no base weights."""
        return self.content is not None and self.content.is_adapter

    @property
    def withheld(self) -> tuple[Drop, ...]:
        """What a conversion leaves out."""
        return self.content.withheld if self.content else ()

    @cached_property
    def parameters(self) -> int:
        """The number of elements of the model, or of all models if none is the main one; of an adapter without its base model."""
        from reshard.plans import summary

        if self.content is not None and (count := summary.parameter_count(self.content, self.config)):
            return count
        adapter = summary.adapter(self.index)
        return sum(model.parameters for model in self.checkpoint.models) or (adapter.parameters if adapter else 0)

    @property
    def parameters_as_stored(self) -> bool:
        """Whether the parameters are counted without a model: a copy of the embedding as the head counts, and so does a word of codes."""
        return self.parameters > 0 and (self.content is None or self.checkpoint.sized_model is None)

    @property
    def parameters_name(self) -> str:
        """What is counted: parameters of the model, or as stored."""
        return "parameters as stored" if self.parameters_as_stored else "parameters"

    @cached_property
    def quantized(self) -> tuple[QuantizedFamily, ...]:
        """The quantized weights."""
        from reshard.canonical.dequantization import quantized_families

        return quantized_families(self.content, self.config) if self.content else ()

    @cached_property
    def experts(self) -> ExpertSummary | None:
        """The routed experts, if it holds the weights of a model that has some."""
        from reshard.plans import summary

        try:
            return summary.experts(self.checkpoint.sized_model) if self.checkpoint.sized_model and self.parameters else None
        except RequestError:  # a config that says nonsense about them; what needs it refuses it
            return None

    @property
    def active_parameters(self) -> int | None:
        """The parameters that work on one token; None without experts, or if the config does not tell."""
        idle = self.experts.idle_parameters if self.experts else None
        return None if idle is None else self.parameters - idle

    @property
    def stored_as(self) -> str:
        """The quantized forms of the weights; without any, their element types."""
        dtypes = dict.fromkeys(tensor.dtype.name for tensor in self.tensors if tensor.kind in ("weight", "master"))
        forms = list(dict.fromkeys(family.form for family in self.quantized))
        others = [plural(len(forms) - 2, "other form")] if len(forms) > 2 else []
        return " and ".join([*forms[:2], *others]) or ", ".join(list(dtypes)[:3])

    @property
    def has_undeclared_model(self) -> bool:
        """Whether the config names a model that nobody has declared, and that a declaration would make known."""
        config = self.config
        return config is not None and self.checkpoint.model is None and not (draft_class(config) or unknown_quantization(config))


def name_of_model(config: Mapping[str, Any]) -> str | None:
    """What a config calls its model: its type, or the class of a draft model or of a diffusers component; None if it names none."""
    from reshard.models.lookup import model_type_of

    draft = draft_class(config)
    return f"draft model {draft}" if draft else component_class(config) or model_type_of(config)
