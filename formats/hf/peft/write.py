"""The layout of a PEFT folder: the adapter's tensors, and adapter_config.json."""

from __future__ import annotations

import json

from reshard.adapter.model_files import ADAPTER_CONFIG, ModelFiles
from reshard.canonical.content import Content
from reshard.errors import RequestError
from reshard.geometry.sections import whole
from reshard.plans.layout import Layout, Sidecar, Target, framed

from ..write import headers_of
from .config import complete_config


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The file of the tensors, and their settings.

    Raises: RequestError for parallel sizes, for optimizer state, or if a setting is not known.
    """
    target.parallel.allow(what="an adapter, which is whole")
    if content.states:
        raise RequestError("the file of PEFT holds an adapter, no optimizer state", do="Leave out `optimizer=True`")
    config, notes = complete_config(content, target.options, companions)
    if form := target.options.get("experts"):
        from reshard.canonical.adapters.forms import stored_as

        tensors = stored_as(content, form, target.dtype_of)
    else:
        tensors = [whole(name, target.dtype_of(tensor), tensor.shape) for name, tensor in sorted(content.tensors.items())]
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    path = "adapter_model.safetensors"
    (headers,) = headers_of(content, {path: [tensor.name for tensor in tensors]}).values()
    sidecars = (Sidecar(ADAPTER_CONFIG, text.encode()),)
    return Layout("peft", (framed(path, tensors, metadata=headers),), sidecars, notes=notes, headers=frozenset(headers))
