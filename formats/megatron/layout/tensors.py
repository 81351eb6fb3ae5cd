"""What Megatron makes of a model's weights: its names, what it fuses, and how tensor-parallel ranks cut it. Once, for all architectures.

Every tensor is described as the whole that the ranks of one stage share, and as what one of them holds:

    linear_qkv    rows by query group: its q heads, its k, its v; cut evenly, also where there are more ranks than groups
    linear_fc1    gate and up; each is cut, a rank holds its part of the gate above its part of up
    experts       as an MLP, each; GroupedMLP and stacked forms: `grouped_fc1`, `grouped_fc2`
    vocabulary    padded at the end, then cut

Source: megatron/core/transformer (attention.py, mlp.py, moe/experts.py, multi_latent_attention.py), tensor_parallel/layers.py of 0.16.1;
measured on fixtures/megatron and fixtures/megatron_dist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.models.model import Model, Part

How = Literal["whole", "column", "row", "groups"]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """A tensor as the arrays that follow each other along axis 0, each of which the ranks cut along `axis` (None: all hold all of it)."""

    blocks: tuple[Mosaic, ...]
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.blocks[0].shape
        return (sum(block.shape[0] for block in self.blocks), *first[1:])

    @property
    def whole(self) -> Mosaic:
        return joined(self.blocks)

    def of_rank(self, tp: int, rank: int) -> Mosaic:
        """What one of `tp` ranks holds. Raises ValueError if the ranks do not divide it."""
        if self.axis is None:
            return self.whole
        return joined([block.part(self.axis, tp, rank) for block in self.blocks])

    @property
    def tensors(self) -> tuple[str, ...]:
        """The canonical tensors of which it holds something."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.names))


@dataclass(frozen=True, slots=True)
class _Row:
    """A Megatron name, with {kind} for weight or bias, and the roles in it."""

    name: str
    how: How
    roles: tuple[str, ...]


TABLE, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# What no optimizer sees.
BUFFERS, UNTRAINED = {"mlp.router.expert_bias"}, {"router.correction"}
_ENDS = (
    _Row("embedding.word_embeddings.{kind}", "column", ("embedding",)),
    _Row("embedding.position_embeddings.{kind}", "whole", ("position_embedding",)),
    _Row("decoder.final_layernorm.{kind}", "whole", ("final_norm",)),
    _Row("output_layer.{kind}", "column", ("head",)),
)
# In the order in which a layer registers its parameters, norms under the names of the local spec.
_LAYER = (
    _Row("input_layernorm.{kind}", "whole", ("attention.norm",)),
    _Row("self_attention.linear_proj.{kind}", "row", ("attention.o",)),
    _Row("self_attention.linear_qkv.{kind}", "groups", ("attention.q", "attention.k", "attention.v")),
    _Row("self_attention.q_layernorm.{kind}", "whole", ("attention.q_norm",)),
    _Row("self_attention.k_layernorm.{kind}", "whole", ("attention.k_norm",)),
    _Row("self_attention.linear_q_proj.{kind}", "column", ("mla.q",)),
    _Row("self_attention.linear_q_down_proj.{kind}", "column", ("mla.q_a",)),
    _Row("self_attention.linear_q_up_proj.{kind}", "column", ("mla.q_b",)),
    _Row("self_attention.linear_kv_down_proj.{kind}", "column", ("mla.kv_a",)),
    _Row("self_attention.linear_kv_up_proj.{kind}", "column", ("mla.kv_b",)),
    _Row("self_attention.q_layernorm.{kind}", "whole", ("mla.q_a_norm",)),
    _Row("self_attention.kv_layernorm.{kind}", "whole", ("mla.kv_a_norm",)),
    _Row("pre_mlp_layernorm.{kind}", "whole", ("mlp.norm",)),
    _Row("mlp.linear_fc1.{kind}", "column", ("mlp.gate", "mlp.up")),
    _Row("mlp.linear_fc2.{kind}", "row", ("mlp.down",)),
    _Row("mlp.router.{kind}", "whole", ("router",)),
    _Row("mlp.router.expert_bias", "whole", ("router.correction",)),
    _Row("mlp.shared_experts.gate_weight", "whole", ("shared_expert.score",)),
    _Row("mlp.shared_experts.linear_fc1.{kind}", "column", ("shared_expert.gate", "shared_expert.up")),
    _Row("mlp.shared_experts.linear_fc2.{kind}", "row", ("shared_expert.down",)),
)
_EXPERT = (
    _Row("linear_fc1.{kind}", "column", ("expert.gate", "expert.up")),
    _Row("linear_fc2.{kind}", "row", ("expert.down",)),
)
_EXTRA = (
    _Row("enorm.{kind}", "whole", ("extra.embedding_norm",)),
    _Row("hnorm.{kind}", "whole", ("extra.hidden_norm",)),
    _Row("eh_proj.{kind}", "column", ("extra.projection",)),
    _Row("final_layernorm.{kind}", "whole", ("extra.final_norm",)),
)
# What of a model has a place in Megatron's.
ROLES = {role for rows in (_ENDS, _LAYER, _EXPERT, _EXTRA) for row in rows for role in row.roles} | {"extra.embedding", "extra.head"}
Tensors = Mapping[str, MegatronTensor]
# What the distributed optimizer and the plain one call a full-precision copy.
MASTERS = {"param": "master_param", "fp32_param": "master_param"}


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter: not to vectors and biases (optimizer/__init__.py, _get_param_groups)."""
    return len(shape) > 1 and not name.endswith("bias")


class MegatronModel:
    """A model's tensors under Megatron's names. Layers are numbered through the whole model; vocabulary_rows: padding included.

    qkv: how the rows of q, k and v follow each other in linear_qkv. "groups" as everywhere today; before version 2.0 of checkpoints each
    rank had all its q, its k, its v ("parts"), or element 0 of q, of k, of v, element 1 and so on ("elements").
    """

    def __init__(self, model: Model, vocabulary_rows: int, qkv: str = "groups") -> None:
        self.model, self._vocabulary_rows, self._qkv = model, vocabulary_rows, qkv
        self._parts: dict[tuple[int | None, int | None], list[Part]] = {}
        for part in model.parts:
            self._parts.setdefault((part.layer, part.expert), []).append(part)
        self._known: dict[tuple[object, ...], Tensors] = {}

    @property
    def layers(self) -> int:
        return self.model.dimensions["layers"]

    @property
    def extra_layers(self) -> int:
        return self.model.extra_layers

    @property
    def experts(self) -> int:
        return self.model.dimensions.get("experts", 0)

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return "kv_rank" in self.model.dimensions

    def is_sparse(self, layer: int) -> bool:
        return layer in self.model.sparse_layers

    @cached_property
    def ends(self) -> Tensors:
        """What is no layer's. A tied head is the embedding once more."""
        found = dict(self._of(_ENDS, None, None))
        for name in (TABLE, HEAD):
            if name in found:
                (table,) = found[name].blocks
                found[name] = MegatronTensor((table.padded(0, self._vocabulary_rows),), 0)
        if self.model.is_tied:
            found[HEAD] = found[TABLE]
        return found

    def layer(self, number: int) -> Tensors:
        """One layer's tensors, those of its experts aside."""
        return self._of(_LAYER, number, None)

    def extra(self, number: int) -> Tensors:
        """What a layer that predicts a further token has beside a layer."""
        return self._of(_EXTRA, self.layers + number, None)

    def expert(self, layer: int, number: int) -> Tensors:
        return self._of(_EXPERT, layer, number)

    def grouped(self, layer: int, experts: range, which: str, etp: int, etp_rank: int) -> Mosaic:
        """GroupedMLP's weight1 or weight2 of a rank, as the array [experts, in, out] that its memory is."""
        name = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}[which]
        return stacked(self.expert(layer, expert)[name].of_rank(etp, etp_rank).transposed() for expert in experts)

    def _of(self, rows: Sequence[_Row], layer: int | None, expert: int | None) -> Tensors:
        key = (rows, layer, expert)
        if key not in self._known:
            self._known[key] = self._made(rows, self._parts.get((layer, expert), ()))
        return self._known[key]

    def _made(self, rows: Sequence[_Row], parts: Iterable[Part]) -> Tensors:
        held: dict[str, dict[str, Part]] = {}
        for part in parts:
            held.setdefault(part.role, {})[part.parameter] = part
        found: dict[str, MegatronTensor] = {}
        for row in rows:
            kinds = dict.fromkeys(kind for role in row.roles for kind in held.get(role, ()))
            for kind in kinds:
                members = [held[role][kind] for role in row.roles if kind in held.get(role, {})]
                arrays = tuple(member.array for member in members)
                axis = _axis(row.how, arrays[0])
                if row.how == "groups":
                    arrays = self._fused(arrays)
                found[row.name.format(kind=kind)] = MegatronTensor(arrays, axis)
        return found

    def _fused(self, arrays: tuple[Mosaic, ...]) -> tuple[Mosaic, ...]:
        if self._qkv == "parts":
            return arrays
        if self._qkv == "elements":
            return (joined([array.split(0, 1) for array in arrays], axis=1),)
        # q, k and v of every query group in turn (attention.py, SelfAttention.get_query_key_value_tensors).
        groups = self.model.dimensions["kv_heads"]
        return (joined([array.split(0, array.shape[0] // groups) for array in arrays], axis=1).merged(0),)


def _axis(how: How, array: Mosaic) -> int | None:
    if how == "whole" or (how == "row" and len(array.shape) == 1):
        return None  # every rank adds the bias of a row-parallel layer, so every rank has it
    return 1 if how == "row" else 0


# Other spellings, as regular expressions of a layer's names: Transformer Engine fuses a norm into the linear layer that follows it; and
# GPT models before Megatron-Core (legacy/model/transformer.py).
_SPELLINGS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"input_layernorm.\1"),
        (r"self_attention\.linear_q_up_proj\.layer_norm_(weight|bias)", r"self_attention.q_layernorm.\1"),
        (r"self_attention\.linear_kv_up_proj\.layer_norm_(weight|bias)", r"self_attention.kv_layernorm.\1"),
        (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", r"pre_mlp_layernorm.\1"),
        (r"input_norm\.(weight|bias)", r"input_layernorm.\1"),
        (r"post_attention_(?:layer)?norm\.(weight|bias)", r"pre_mlp_layernorm.\1"),
        (r"(?:self_)?attention\.query_key_value\.(weight|bias)", r"self_attention.linear_qkv.\1"),
        (r"(?:self_)?attention\.dense\.(weight|bias)", r"self_attention.linear_proj.\1"),
        (r"mlp\.dense_h_to_4h\.(weight|bias)", r"mlp.linear_fc1.\1"),
        (r"mlp\.dense_4h_to_h\.(weight|bias)", r"mlp.linear_fc2.\1"),
    )
]


def respelled(name: str) -> str:
    """A layer's name as `MegatronModel` has it."""
    for pattern, other in _SPELLINGS:
        if match := pattern.fullmatch(name):
            return match.expand(other)
    return name
