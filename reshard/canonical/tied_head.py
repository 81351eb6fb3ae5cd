"""Tied weights: one tensor with several names, such as a head that is the embedding. A checkpoint stores it under one or more of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.errors import CheckpointError
from reshard.index.index import Index, Tensor
from reshard.models.config_values import with_value

if TYPE_CHECKING:
    from reshard.models.model import Model

KEY = "tie_word_embeddings"
"""The config's key that says whether the two are tied."""


def tie(tensors: dict[str, Tensor], alias: str, name: str) -> bool:
    """Make what is stored under another name of a weight, such as that of a tied head, its replica; or the weight itself, if that is not
    stored. Replicas are compared whenever they are read.

    Returns whether it became a replica. Raises CheckpointError if the two differ in dtype or shape.
    """
    if alias not in tensors:
        return False
    copy = tensors.pop(alias)
    weight = tensors.get(name)
    if weight is None:
        tensors[name] = replace(copy, name=name)
        return False
    if (weight.dtype, weight.shape) != (copy.dtype, copy.shape):
        raise CheckpointError(
            f"it is {copy.dtype} {list(copy.shape)}, {name} is {weight.dtype} {list(weight.shape)}",
            where=alias,
            why=f"The config ties the two ({KEY}), so they must be one tensor",
            do=f"Give the right config with `model=DIR`, or set {KEY} to false in it",
        )
    tensors[name] = with_replica(weight, copy)
    return True


def with_replica(tensor: Tensor, other: Tensor) -> Tensor:
    """One of the two, with the other as its replica."""
    return replace(tensor, shards=tensor.shards.with_copies([other.shards]), also_named=other.name)


def agreed_config(index: Index, model: Model) -> Mapping[str, Any] | None:
    """The config of a model with towers with one answer on whether the head is tied; None if it has one answer already.

    transformers 5 and vLLM 0.32 read the key at the top level of the config, which knows the head, and tie the two if the checkpoint stores
    no head. Earlier versions read it in the inner config of the language model (vLLM, config/vllm.py, with_hf_config).
    """
    inner = model.architecture.text_config
    if not inner or model.is_tied or model.architecture.head or model.config.get(KEY) is not True:
        return None
    from reshard.canonical.name_variants import Names

    names, head = Names(model), model.architecture.tied[0]
    stored = (tensor.name for tensor in index.tensors if tensor.kind in ("weight", "master"))
    if any((array := names.array(name)) is not None and head in array.names for name in stored):
        return None
    return with_value(model.config, [*inner.split("."), KEY], True)
