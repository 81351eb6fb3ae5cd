"""A model's weights as Megatron stores them: names, fusions, and the split over tensor-parallel ranks. The same for all architectures.

Every tensor is described whole, as the ranks of one stage share it, and as the shard of one rank:

    linear_qkv    rows by query group: its q heads, its k, its v; split evenly, even if there are more ranks than groups
    linear_fc1    gate and up; each is split, and a rank holds its shard of gate above its shard of up
    in_proj       the parts that a Mamba layer or a gated delta net projects, and conv1d: each is split, as those of linear_fc1
    experts       one MLP per expert; `MegatronModel.grouped_experts` gives the form of GroupedMLP
    vocabulary    padded at the end, then split

Source: megatron/core/transformer (attention.py, mlp.py, moe/experts.py, multi_latent_attention.py), tensor_parallel/layers.py of 0.16.1;
measured on fixtures/megatron, fixtures/megatron_dist and fixtures/megatron_declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.value import value
from reshard.models.architecture import Computation
from reshard.models.model import Model
from reshard.models.parts import Part
from reshard.models.weights import numbered

FRAMEWORK = "megatron"
"""The name under which declarations say how Megatron computes their models."""
_Sharding = Literal["replicated", "column", "row", "query_groups"]

QkvOrder = Literal["by_group", "by_projection", "by_row"]
"""The order of the rows of q, k and v in linear_qkv.

by_group: for each query group its q, its k, its v, as Megatron has it today. Checkpoints before version 2.0 have one of the other two:
all q of a rank, then all k, then all v; or row 0 of q, of k and of v, then row 1, and so on.
"""


@value
class MegatronTensor:
    """A tensor of a Megatron model: arrays that follow each other along an axis. Each array is split over the ranks separately."""

    blocks: tuple[Mosaic, ...]
    """The arrays, such as gate and up."""
    axis: int | None
    """The axis that the ranks split; None: every rank holds all of it."""
    segments: tuple[str, ...] = ()
    """What a distributed save adds to the key for each array, which is a tensor of its own there; empty: all are one tensor."""
    along: int = 0
    """The axis along which the arrays follow each other."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        first = self.blocks[0].shape
        return (*first[: self.along], sum(block.shape[self.along] for block in self.blocks), *first[self.along + 1 :])

    @property
    def whole(self) -> Mosaic:
        """The array that the shards of all ranks make."""
        return self._joined(self.blocks)

    def shard(self, tp: int, tp_rank: int) -> Mosaic:
        """The array of one of `tp` ranks. Raises ValueError if the size does not divide by the ranks."""
        if self.axis is None:
            return self.whole
        return self._joined([block.part(self.axis, tp, tp_rank) for block in self.blocks])

    def _joined(self, arrays: Sequence[Mosaic]) -> Mosaic:
        array = joined(arrays, self.along)
        # The tiles follow the first axis, whatever the axis of the arrays.
        return Mosaic(array.shape, tuple(sorted(array.tiles, key=lambda tile: tile.at[0]))) if self.along else array

    def renamed(self, new: Callable[[str], str]) -> MegatronTensor:
        """The same tensor of other canonical tensors."""
        return replace(self, blocks=tuple(block.renamed(new) for block in self.blocks))

    def by_segment(self, key: str) -> dict[str, MegatronTensor]:
        """The tensors of a distributed save that hold it, by key."""
        if not self.segments:
            return {key: self}
        arrays = zip(self.segments, self.blocks, strict=True)
        return {f"{key}.{segment}": MegatronTensor((block,), self.axis) for segment, block in arrays}

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical tensors that it holds."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.names))


Dimensions = Mapping[str, int]
"""The sizes of a model by name, such as "heads"."""
Tensors = Mapping[str, MegatronTensor]
"""Tensors by Megatron's name, relative to their layer or expert."""


@value
class _TensorRule:
    """How Megatron stores one role, or several roles as one tensor."""

    name: str
    """Megatron's name, with {parameter} for weight or bias."""
    sharding: _Sharding
    roles: tuple[str, ...]
    """The roles that are fused in it, in order."""
    segments: tuple[str, ...] = ()
    """What a distributed save adds to the key for each of them, if it stores them separately."""


def _every_second(rows: Mosaic, first: int) -> Mosaic:
    """Every second row, from row 0 or 1 on."""
    return rows.split(0, 2).cut(1, first, first + 1).merged(0)


def _by_head(rows: Mosaic, heads: int, sizes: Mapping[str, int]) -> dict[str, Mosaic]:
    """The parts of rows in which every head has, one after the other, its own rows of each part. sizes: rows per head of each part."""
    by_head, found, start = rows.split(0, rows.shape[0] // heads), dict[str, Mosaic](), 0
    for role, size in sizes.items():
        found[role] = by_head.cut(1, start, start + size).merged(0)
        start += size
    return found


def _query_and_gate(rows: Mosaic, of: Dimensions) -> dict[str, Mosaic]:
    """The query, and with it the gate of attention's output, if the rows of each head are followed by as many of its gate."""
    if rows.shape[0] != 2 * of["heads"] * of["head_dim"]:
        return {"attention.q": rows}
    return _by_head(rows, of["heads"], {"attention.q": of["head_dim"], _OUTPUT_GATE: of["head_dim"]})


def _delta_qkvz(rows: Mosaic, of: Dimensions) -> dict[str, Mosaic]:
    k_rows, v_rows = of["delta_k_dim"], of["delta_v_dim"] * of["delta_v_heads"] // of["delta_k_heads"]
    return _by_head(rows, of["delta_k_heads"], {"delta.q": k_rows, "delta.k": k_rows, "delta.v": v_rows, "delta.z": v_rows})


def _delta_ba(rows: Mosaic, of: Dimensions) -> dict[str, Mosaic]:
    each = of["delta_v_heads"] // of["delta_k_heads"]
    return _by_head(rows, of["delta_k_heads"], {"delta.b": each, "delta.a": each})


# Role of a weight in a form of its own -> the usual roles that it consists of: gate and up in alternating rows; a bias beside its weight;
# parts head by head.
_SEPARATE: Mapping[str, Callable[[Mosaic, Dimensions], dict[str, Mosaic]]] = {
    "expert.gate_up": lambda array, _: {"expert.gate": _every_second(array, 0), "expert.up": _every_second(array, 1)},
    "expert.down_bias": lambda array, _: {"expert.down": array},
    "attention.q": _query_and_gate,
    "delta.qkvz": _delta_qkvz,
    "delta.ba": _delta_ba,
}
# Roles of this file's own: the gate of attention's output; the norm before a Mamba layer.
_OUTPUT_GATE, _MAMBA_NORM = "attention.output_gate", "ssm.layer_norm"

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
BUFFERS = ("mlp.router.expert_bias",)
"""Names of tensors that no optimizer updates."""
BUFFER_ROLES = {"router.correction"}
"""The roles of BUFFERS."""

_OUTSIDE_LAYERS = (
    _TensorRule("embedding.word_embeddings.{parameter}", "column", ("embedding",)),
    _TensorRule("embedding.position_embeddings.{parameter}", "replicated", ("position_embedding",)),
    _TensorRule("decoder.final_layernorm.{parameter}", "replicated", ("final_norm",)),
    _TensorRule("output_layer.{parameter}", "column", ("head",)),
)
_DELTA_NAMES, _SSM_NAMES = ("query", "key", "value", "z", "beta", "alpha"), ("z", "x", "B", "C", "dt")
"""The segments of a projection by which distributed saves store it (ssm/gated_delta_net.py and ssm/mamba_mixer.py, sharded_state_dict)."""
# In the order in which a layer registers its parameters. Norms have the names of the local spec.
_LAYER = (
    _TensorRule("mixer.dt_bias", "column", ("ssm.dt_bias",)),
    _TensorRule("mixer.A_log", "column", ("ssm.a_log",)),
    _TensorRule("mixer.D", "column", ("ssm.d",)),
    _TensorRule("mixer.in_proj.{parameter}", "column", ("ssm.z", "ssm.x", "ssm.b", "ssm.c", "ssm.dt"), _SSM_NAMES),
    _TensorRule("mixer.conv1d.{parameter}", "column", ("ssm.conv_x", "ssm.conv_b", "ssm.conv_c"), _SSM_NAMES[1:4]),
    _TensorRule("mixer.norm.{parameter}", "column", ("ssm.norm",)),
    _TensorRule("mixer.out_proj.{parameter}", "row", ("ssm.out",)),
    _TensorRule("norm.{parameter}", "replicated", (_MAMBA_NORM,)),
    _TensorRule("input_layernorm.{parameter}", "replicated", ("attention.norm",)),
    _TensorRule("self_attention.dt_bias", "column", ("delta.dt_bias",)),
    _TensorRule("self_attention.A_log", "column", ("delta.a_log",)),
    _TensorRule("self_attention.in_proj.{parameter}", "column", tuple(f"delta.{of}" for of in "qkvzba"), _DELTA_NAMES),
    _TensorRule("self_attention.conv1d.{parameter}", "column", ("delta.conv_q", "delta.conv_k", "delta.conv_v"), _DELTA_NAMES[:3]),
    _TensorRule("self_attention.out_norm.{parameter}", "replicated", ("delta.norm",)),
    _TensorRule("self_attention.out_proj.{parameter}", "row", ("delta.out",)),
    _TensorRule("self_attention.core_attention.softmax_offset", "column", ("attention.sink",)),
    _TensorRule("self_attention.linear_proj.{parameter}", "row", ("attention.o",)),
    _TensorRule("self_attention.linear_proj.post_layernorm.{parameter}", "replicated", ("attention.post_norm",)),
    _TensorRule("self_attention.linear_qkv.{parameter}", "query_groups", ("attention.q", _OUTPUT_GATE, "attention.k", "attention.v")),
    _TensorRule("self_attention.q_layernorm.{parameter}", "replicated", ("attention.q_norm",)),
    _TensorRule("self_attention.k_layernorm.{parameter}", "replicated", ("attention.k_norm",)),
    _TensorRule("self_attention.linear_q_proj.{parameter}", "column", ("mla.q",)),
    _TensorRule("self_attention.linear_q_down_proj.{parameter}", "column", ("mla.q_a",)),
    _TensorRule("self_attention.linear_q_up_proj.{parameter}", "column", ("mla.q_b",)),
    _TensorRule("self_attention.linear_kv_down_proj.{parameter}", "column", ("mla.kv_a",)),
    _TensorRule("self_attention.linear_kv_up_proj.{parameter}", "column", ("mla.kv_b",)),
    _TensorRule("self_attention.q_layernorm.{parameter}", "replicated", ("mla.q_a_norm",)),
    _TensorRule("self_attention.kv_layernorm.{parameter}", "replicated", ("mla.kv_a_norm",)),
    _TensorRule("pre_mlp_layernorm.{parameter}", "replicated", ("mlp.norm",)),
    _TensorRule("mlp.linear_fc1.{parameter}", "column", ("mlp.gate", "mlp.up")),
    _TensorRule("mlp.linear_fc2.{parameter}", "row", ("mlp.down",)),
    _TensorRule("mlp.linear_fc2.post_layernorm.{parameter}", "replicated", ("mlp.post_norm",)),
    _TensorRule("mlp.router.{parameter}", "replicated", ("router",)),
    _TensorRule("mlp.router.expert_bias", "replicated", ("router.correction",)),
    _TensorRule("mlp.fc1_latent_proj.{parameter}", "replicated", ("latent.in",)),
    _TensorRule("mlp.fc2_latent_proj.{parameter}", "replicated", ("latent.out",)),
    _TensorRule("mlp.shared_experts.gate_weight", "replicated", ("shared_expert.score",)),
    _TensorRule("mlp.shared_experts.linear_fc1.{parameter}", "column", ("shared_expert.gate", "shared_expert.up")),
    _TensorRule("mlp.shared_experts.linear_fc2.{parameter}", "row", ("shared_expert.down",)),
)
_EXPERT = (
    _TensorRule("linear_fc1.{parameter}", "column", ("expert.gate", "expert.up")),
    _TensorRule("linear_fc2.{parameter}", "row", ("expert.down",)),
)
_MTP_MODULE = (
    _TensorRule("enorm.{parameter}", "replicated", ("mtp.embedding_norm",)),
    _TensorRule("hnorm.{parameter}", "replicated", ("mtp.hidden_norm",)),
    _TensorRule("eh_proj.{parameter}", "column", ("mtp.projection",)),
    _TensorRule("final_layernorm.{parameter}", "replicated", ("mtp.final_norm",)),
)
MTP_COPIES = {"mtp.embedding": "embedding", "mtp.head": "head"}
"""Role of an MTP layer that Megatron does not store -> the role of the model that has the same values."""
ROLES = {
    *(role for rules in (_OUTSIDE_LAYERS, _LAYER, _EXPERT, _MTP_MODULE) for rule in rules for role in rule.roles),
    *MTP_COPIES,
    *_SEPARATE,
}
"""The roles that Megatron's layers have."""


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter: not to vectors and biases (optimizer/__init__.py, _get_param_groups)."""
    return len(shape) > 1 and not name.endswith("bias")


def computation_of(model: Model) -> Computation:
    """How Megatron computes a model, as its declaration says it."""
    return model.architecture.frameworks.get(FRAMEWORK, Computation())


def is_hybrid(model: Model) -> bool:
    """Whether Megatron's class for a model is MambaModel, in which a layer is a Mamba mixer, attention, an MLP or experts alone."""
    return "ssm_heads" in model.dimensions


class MegatronModel:
    """A model's tensors under Megatron's names. Layers are numbered through the whole model."""

    def __init__(self, model: Model, padded_vocab: int, qkv_order: QkvOrder = "by_group") -> None:
        self.model, self.padded_vocab, self.qkv_order = model, padded_vocab, qkv_order
        self._kind_of = {layer: kind for kind in model.layer_kinds for layer in kind.layers}
        self._cache: dict[tuple[object, ...], Tensors] = {}
        # Whether each expert has weights of its own, by the first layer of a kind; otherwise one weight holds those of all experts.
        self._has_separate_experts: dict[int, bool] = {}

    def __repr__(self) -> str:
        return f"<Megatron's {self.model.architecture.model_type} model: {self.layers} layers, vocabulary padded to {self.padded_vocab}>"

    @property
    def layers(self) -> int:
        """The number of layers without those for multi-token prediction."""
        return self.model.dimensions["layers"]

    @property
    def mtp_layers(self) -> int:
        """The number of layers for multi-token prediction, which follow the others."""
        return self.model.mtp_layers

    @property
    def experts(self) -> int:
        """The number of routed experts in a sparse layer; 0 if there are none."""
        return self.model.dimensions.get("experts", 0)

    def stored_name(self, name: str) -> str:
        """The name in a file of a tensor outside of the layers."""
        return name.replace("final_layernorm", "final_norm") if is_hybrid(self.model) else name

    @cached_property
    def functions(self) -> Mapping[str, str]:
        """Weight -> the function whose values Megatron stores in its place; without those that it stores as they are."""
        computation = computation_of(self.model)
        if not computation.values:
            return {}
        roles = {name: weight.role for name, weight in self.model.weights.items()}
        return {name: computation.values[role] for name, role in roles.items() if role in computation.values}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of each canonical tensor."""
        return {name: weight.shape for name, weight in self.model.weights.items()}

    def name_in(self, name: str, layer: int | None, expert: int | None) -> str:
        """The name that a canonical tensor of a layer or expert has in another one. expert: None for the same."""
        weight = self.model.weights[name]
        return numbered(weight.pattern, layer, weight.expert if expert is None else expert)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts."""
        return layer in self.model.sparse_layers

    @cached_property
    def outside_layers(self) -> Tensors:
        """The embeddings, the final norm and the head. A tied head is the same tensor as the embedding."""
        tensors = dict(self._tensors(_OUTSIDE_LAYERS, None, None))
        for name in (EMBEDDING, HEAD):
            if name in tensors:
                (block,) = tensors[name].blocks
                tensors[name] = MegatronTensor((block.padded(0, self.padded_vocab),), 0)
        if self.model.is_tied:
            tensors[HEAD] = tensors[EMBEDDING]
        return tensors

    def layer(self, layer: int) -> Tensors:
        """The tensors of a layer without its routed experts."""
        return self._tensors(_LAYER, layer, None)

    def mtp_module(self, mtp_layer: int) -> Tensors:
        """The tensors of a multi-token prediction layer outside of its transformer layer. mtp_layer: counted from the first MTP layer."""
        return self._tensors(_MTP_MODULE, self.layers + mtp_layer, None)

    def expert(self, layer: int, expert: int) -> Tensors:
        """The tensors of a routed expert."""
        return self._tensors(_EXPERT, layer, expert)

    def grouped_experts(self, layer: int, experts: range, which: str) -> MegatronTensor:
        """A GroupedMLP weight ("weight1" or "weight2") of these experts, [experts, in, out]."""
        name, axis = {"weight1": ("linear_fc1.weight", 2), "weight2": ("linear_fc2.weight", 1)}[which]
        blocks_of_experts = zip(*(self.expert(layer, expert)[name].blocks for expert in experts), strict=True)
        return MegatronTensor(tuple(stacked(block.transposed() for block in blocks) for blocks in blocks_of_experts), axis, along=2)

    def first_alike(self, layer: int) -> int:
        """The first layer whose weights are like those of `layer`."""
        kind = self._kind_of.get(layer)
        return kind.layers[0] if kind else layer

    def first_expert_alike(self, layer: int, expert: int) -> int:
        """The first expert of a layer whose weights have the same patterns of names as those of `expert`."""
        first = self.first_alike(layer)
        if first not in self._has_separate_experts:
            names = (name for tensor in self._tensors(_EXPERT, first, 0).values() for name in tensor.names)
            self._has_separate_experts[first] = all(self.model.weights[name].expert == 0 for name in names)
        return 0 if self._has_separate_experts[first] and 0 <= expert < self.experts else expert

    def _tensors(self, rules: Sequence[_TensorRule], layer: int | None, expert: int | None) -> Tensors:
        """The tensors of a layer or expert. Those of layers that are alike are made once, and get the names of each layer."""
        key = (rules, layer, expert)
        if key not in self._cache:
            first = None if layer is None else self.first_alike(layer)
            if layer == first:
                self._cache[key] = self._made(rules, self._parts.get(layer, {}).get(expert, ()))
            else:
                self._cache[key] = {
                    name: tensor.renamed(lambda own: self.name_in(own, layer, None))
                    for name, tensor in self._tensors(rules, first, expert).items()
                }
        return self._cache[key]

    @cached_property
    def _parts(self) -> dict[int | None, dict[int | None, list[Part]]]:
        """The parts outside of the layers (None) and of the first layer of each kind, by expert."""
        first: list[int | None] = [None, *(kind.layers[0] for kind in self.model.layer_kinds)]
        weights = [self.model.weights_outside_layers, *(kind.weights for kind in self.model.layer_kinds)]
        found: dict[int | None, dict[int | None, list[Part]]] = {layer: {} for layer in first}
        for layer, of_layer in zip(first, weights, strict=True):
            for part in self.model.parts_of(of_layer):
                found[layer].setdefault(part.expert, []).append(part)
        return found

    def _made(self, rules: Sequence[_TensorRule], parts: Iterable[Part]) -> Tensors:
        by_role: dict[str, dict[str, Mosaic]] = {}
        for part in parts:
            separate = _SEPARATE[part.role](part.array, self.model.dimensions) if part.role in _SEPARATE else {part.role: part.array}
            for role, array in separate.items():
                by_role.setdefault(role, {})[part.parameter] = array
        # The norm of a layer that is a Mamba mixer, an MLP or experts alone has the role after what follows it (ssm/mamba_block.py).
        if "attention.norm" in by_role and not by_role.keys() & {"mlp.norm", "attention.o", "delta.out"}:
            by_role[_MAMBA_NORM if "ssm.out" in by_role else "mlp.norm"] = by_role.pop("attention.norm")
        tensors: dict[str, MegatronTensor] = {}
        for rule in rules:
            for parameter in dict.fromkeys(parameter for role in rule.roles for parameter in by_role.get(role, ())):
                blocks = tuple(by_role[role][parameter] for role in rule.roles if parameter in by_role.get(role, {}))
                axis: int | None = 1 if rule.sharding == "row" else 0
                if rule.sharding == "replicated" or (rule.sharding == "row" and len(blocks[0].shape) == 1):
                    axis = None  # the bias of a row-parallel layer is replicated
                if rule.sharding == "query_groups":
                    blocks = self._fused_qkv(blocks)
                tensors[rule.name.format(parameter=parameter)] = MegatronTensor(blocks, axis, rule.segments)
        return tensors

    def _fused_qkv(self, projections: tuple[Mosaic, ...]) -> tuple[Mosaic, ...]:
        if self.qkv_order == "by_projection":
            return projections
        if self.qkv_order == "by_row":
            return (joined([array.split(0, 1) for array in projections], axis=1),)
        # q, k and v of every query group in turn (attention.py, SelfAttention.get_query_key_value_tensors).
        groups = self.model.dimensions["kv_heads"]
        return (joined([array.split(0, array.shape[0] // groups) for array in projections], axis=1).merged(0),)
