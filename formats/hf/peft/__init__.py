"""PEFT: a LoRA adapter without its base model, as peft saves and loads it and as serving engines load it.

    adapter_config.json        its settings: rank, alpha, target modules, base model
    adapter_model.safetensors  its tensors, or adapter_model.bin, the older form

read.py     the index, as of a Hugging Face folder
write.py    the layout of a new folder
config.py   the settings of an adapter whose checkpoint tells them only in part

The names are those of canonical/renaming.py. Measured on peft 0.21.2; source: utils/save_and_load.py, tuners/lora/config.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.adapter.format import ADAPTER, EXPERTS, EXPERTS_OF_ADAPTERS, Format, Option, check_experts
from reshard.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Target
    from reshard.storage.files import Files

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


class Peft(Format):
    """A LoRA adapter."""

    name = "peft"
    summary = "PEFT: a LoRA adapter (adapter_model.safetensors, adapter_config.json) without its base model"
    owns = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")
    refines = ("hf",)
    holds_adapters = True
    options = (
        *ADAPTER,
        Option("task_type", "text", "Task of the adapter, such as CAUSAL_LM, if nothing else tells it."),
        Option("base_model", "text", "Name or path of the base model, if nothing else tells it."),
        EXPERTS,
        Option("engine", "choice", "Take the form of experts that this engine reads right.", choices=("vllm", "sglang")),
    )

    def form_of_adapter(self, content: Content, target: Target) -> str | None:
        """The form into which the adapter of experts is brought; None for its own.

        Raises: RequestError if the options contradict each other.
        """
        check_experts(target.options, self.name, EXPERTS_OF_ADAPTERS)
        form, engine = target.options.get("experts"), target.options.get("engine")
        if form and engine:
            raise RequestError("`experts=` and `engine=` both name a form", do="Give one of them")
        if form is not None:
            return str(form)
        from .engines import form_for, has_names_of_tinker

        form = form_for(str(engine), content) if engine else None
        return "split" if form is None and has_names_of_tinker(content, joins=engine is not None) else form

    def about_serving(
        self, index: Index, settings: Mapping[str, Any], engine: str | None, base: Mapping[str, Any] | None
    ) -> Iterator[tuple[str, str, str]]:
        """What an engine would do with the adapter."""
        from .engines import about_serving

        return about_serving(engine or "vllm", {tensor.name: tensor.shape for tensor in index.tensors}, settings, base)

    def detect(self, files: Files) -> str | None:
        listing = [path for path in files.list() if not path.endswith("/")]
        weights = [path for path in listing if path.endswith((".safetensors", ".bin"))]
        # A folder may hold a whole model and an adapter: that is the model's.
        return next((path for path in WEIGHTS if weights and path in weights and set(weights) <= set(WEIGHTS)), None)


FORMAT = Peft()
