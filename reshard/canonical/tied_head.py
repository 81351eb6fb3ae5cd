"""Tied heads: the head and the embedding are one tensor, and a checkpoint stores either of them, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.name_variants import Names
from reshard.errors import CheckpointError
from reshard.index.index import Index, Tensor
from reshard.models.config_values import with_value
from reshard.models.model import Model

KEY = "tie_word_embeddings"
"""The config's key that says whether the two are tied."""


def tie(tensors: dict[str, Tensor], head: str, embedding: str) -> tuple[str, ...]:
    """Make a stored tied head a replica of the embedding; the head becomes the embedding if that is not stored. Replicas are compared
    whenever they are read.

    Returns the name of the head if it became a replica, otherwise (). Raises CheckpointError if the two differ in dtype or shape.
    """
    if head not in tensors:
        return ()
    copy = tensors.pop(head)
    table = tensors.get(embedding)
    if table is None:
        tensors[embedding] = replace(copy, name=embedding)
        return ()
    if (table.dtype, table.shape) != (copy.dtype, copy.shape):
        raise CheckpointError(
            f"it is {copy.dtype} {list(copy.shape)}, {embedding} is {table.dtype} {list(table.shape)}",
            where=head,
            why=f"The config ties the two ({KEY}), so they must be one tensor",
            do=f"Give the right config with `model=DIR`, or set {KEY} to false in it",
        )
    tensors[embedding] = with_replica(table, copy)
    return (head,)


def with_replica(tensor: Tensor, other: Tensor) -> Tensor:
    """One of the two, with the other as its replica."""
    return replace(tensor, shards=tensor.shards.with_copies([other.shards]), also_named=other.name)


def agreed_config(index: Index, model: Model) -> Mapping[str, Any] | None:
    """The config of a model with towers with one answer on whether the head is tied; None if it has one answer already.

    transformers 5 and vLLM 0.32 read the key at the top level of the config, which knows the head, and tie the two if the checkpoint stores
    no head. Earlier versions read it in the inner config of the language model (vLLM, config/vllm.py, with_hf_config).
    """
    inner = model.architecture.text_config
    if not inner or model.is_tied or model.config.get(KEY) is not True:
        return None
    names, head = Names(model), model.architecture.tied[0]
    stored = (tensor.name for tensor in index.tensors if tensor.kind in ("weight", "master"))
    if any((array := names.array(name)) is not None and head in array.names for name in stored):
        return None
    return with_value(model.config, [*inner.split("."), KEY], True)
