"""Trainers' names: the names, the fusions and the order of rotary rows under which trainers hold the weights of published models.

A trainer is a table of rows. A row is a stored name, with {layer} and {expert} for these numbers, and the roles of the weights in it,
concatenated along axis 0. The weights of experts under a name without {expert} are stacked, [experts, ...]. The order of rotary rows is
that of the query and key heads, of head_dim rows each:

    halves   0, 1, 2, ...                the published order: row i is rotated with row i + head_dim / 2
    pairs    0, d/2, 1, d/2 + 1, ...     row 2 i is rotated with row 2 i + 1

A trainer is recognised if every weight of the checkpoint has a name of its table; the shapes must fit, and every weight of the model
must be there. Nothing follows from a part of the names. The rows hold for the model types that the table lists.

Meta divides the weights among tensor-parallel ranks; `axis_of` says along which axis. formats/consolidated reads and writes such files.

Some trainers keep the optimizer's state under names of another form of the model. torchtitan 0.3 trains one tensor wqkv, which has the
heads of a query group behind one another, [kv_heads, heads / kv_heads + 2, head_dim, hidden], and stores the weights as wq, wk and wv.

Source: torchtitan 0.2.2 and 0.3.0 (models/*/state_dict_adapter.py, models/common/attention.py: FusedQKVLinear), Meta's model code (llama,
llama3) and transformers' convert_llama_weights_to_hf.py, mistral-inference (transformer_layers.py, moe.py), litgpt 0.5.13
(scripts/convert_hf_checkpoint.py), OLMo-core 3.0.0 (nn/hf/convert.py), nanotron 0.4 (models/llama.py), prime-rl 0.8; compared with them in
fixtures/trainer_names, fixtures/trainer_folders, fixtures/consolidated and fixtures/nanotron.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from reshard.canonical.renaming import renamed
from reshard.canonical.stacked_experts import located_in
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.index.subviews import SubviewsBuilder
from reshard.models.model import Model
from reshard.models.parts import Part
from reshard.models.roles import ROLES
from reshard.models.weights import numbered

_ROTARY = {"attention.q": "heads", "attention.k": "kv_heads"}


@value
class TrainerNames:
    """The names of one trainer."""

    trainer: str
    """What `--names` calls it."""
    rows: Mapping[str, tuple[str, ...]]
    """Stored name -> the roles of the weights in it."""
    pairs: tuple[str, ...] = ()
    """Model types whose rotary rows are stored in pairs."""
    halves: tuple[str, ...] = ()
    """Model types whose rotary rows have the published order, or that have other rows of this table alone."""
    computed: tuple[str, ...] = ()
    """Stored names, as globs, of tensors without a place in the published model, such as those that follow from the config: left out."""
    by_group: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of the optimizer's state -> the roles of the weights in it, concatenated for one query group after the other."""
    others_published: bool = False
    """Whether what has no row keeps its published name."""

    def leaves_out(self, name: str) -> bool:
        """Whether a stored name is that of a tensor without a place in the published model."""
        return any(fnmatchcase(name, glob) for glob in self.computed)

    def holds(self, model: Model) -> bool:
        """Whether the table is known for a model."""
        return model.architecture.model_type in (*self.pairs, *self.halves)


_LLAMA = {
    "tok_embeddings.weight": ("embedding",),
    "layers.{layer}.attention.wq.weight": ("attention.q",),
    "layers.{layer}.attention.wk.weight": ("attention.k",),
    "layers.{layer}.attention.wv.weight": ("attention.v",),
    "layers.{layer}.attention.wo.weight": ("attention.o",),
    "layers.{layer}.feed_forward.w1.weight": ("mlp.gate",),
    "layers.{layer}.feed_forward.w2.weight": ("mlp.down",),
    "layers.{layer}.feed_forward.w3.weight": ("mlp.up",),
    "layers.{layer}.attention_norm.weight": ("attention.norm",),
    "layers.{layer}.ffn_norm.weight": ("mlp.norm",),
    "norm.weight": ("final_norm",),
    "output.weight": ("head",),
}
_TITAN = {name.replace("attention.w", "attention.qkv_linear.w") if name[-9:-7] != "wo" else name: roles for name, roles in _LLAMA.items()}
_TITAN["lm_head.weight"] = _TITAN.pop("output.weight")
_TITAN_QKV = {"layers.{layer}.attention.qkv_linear.wqkv.weight": ("attention.q", "attention.k", "attention.v")}
_TITAN_MOE = {
    "layers.{layer}.moe.router.gate.weight": ("router",),
    "layers.{layer}.moe.routed_experts.inner_experts.w1_EFD": ("expert.gate",),
    "layers.{layer}.moe.routed_experts.inner_experts.w2_EDF": ("expert.down",),
    "layers.{layer}.moe.routed_experts.inner_experts.w3_EFD": ("expert.up",),
}
# Rows of latent attention have the published order.
_TITAN_DEEPSEEK = (
    {name: roles for name, roles in _TITAN.items() if "qkv_linear" not in name}
    | _TITAN_MOE
    | {
        "layers.{layer}.attention.wq.weight": ("mla.q",),
        "layers.{layer}.attention.wq_a.weight": ("mla.q_a",),
        "layers.{layer}.attention.q_norm.weight": ("mla.q_a_norm",),
        "layers.{layer}.attention.wq_b.weight": ("mla.q_b",),
        "layers.{layer}.attention.wkv_a.weight": ("mla.kv_a",),
        "layers.{layer}.attention.kv_norm.weight": ("mla.kv_a_norm",),
        "layers.{layer}.attention.wkv_b.weight": ("mla.kv_b",),
        "layers.{layer}.moe.expert_bias_E": ("router.correction",),
        "layers.{layer}.moe.shared_experts.w1.weight": ("shared_expert.gate",),
        "layers.{layer}.moe.shared_experts.w2.weight": ("shared_expert.down",),
        "layers.{layer}.moe.shared_experts.w3.weight": ("shared_expert.up",),
    }
)
_TITAN_QWEN3 = (
    _TITAN
    | _TITAN_MOE
    | {
        "layers.{layer}.attention.q_norm.weight": ("attention.q_norm",),
        "layers.{layer}.attention.k_norm.weight": ("attention.k_norm",),
    }
)
_LITGPT = {
    "transformer.wte.weight": ("embedding",),
    "transformer.h.{layer}.norm_1.weight": ("attention.norm",),
    "transformer.h.{layer}.attn.qkv.weight": ("attention.q", "attention.k", "attention.v"),
    "transformer.h.{layer}.attn.proj.weight": ("attention.o",),
    "transformer.h.{layer}.norm_2.weight": ("mlp.norm",),
    "transformer.h.{layer}.mlp.fc_1.weight": ("mlp.gate",),
    "transformer.h.{layer}.mlp.fc_2.weight": ("mlp.up",),
    "transformer.h.{layer}.mlp.proj.weight": ("mlp.down",),
    "transformer.ln_f.weight": ("final_norm",),
    "lm_head.weight": ("head",),
}
_OLMO_CORE = {
    "embeddings.weight": ("embedding",),
    "blocks.{layer}.attention.w_q.weight": ("attention.q",),
    "blocks.{layer}.attention.w_k.weight": ("attention.k",),
    "blocks.{layer}.attention.w_v.weight": ("attention.v",),
    "blocks.{layer}.attention.w_out.weight": ("attention.o",),
    "blocks.{layer}.attention_norm.weight": ("attention.norm",),
    "blocks.{layer}.feed_forward.w1.weight": ("mlp.gate",),
    "blocks.{layer}.feed_forward.w2.weight": ("mlp.down",),
    "blocks.{layer}.feed_forward.w3.weight": ("mlp.up",),
    "blocks.{layer}.feed_forward_norm.weight": ("mlp.norm",),
    "lm_head.norm.weight": ("final_norm",),
    "lm_head.w_out.weight": ("head",),
}
# OLMo 2 has its norms after attention and MLP, under the same names, and norms of queries and keys.
_OLMO_CORE_2 = _OLMO_CORE | {
    "blocks.{layer}.attention_norm.weight": ("attention.post_norm",),
    "blocks.{layer}.feed_forward_norm.weight": ("mlp.post_norm",),
    "blocks.{layer}.attention.q_norm.weight": ("attention.q_norm",),
    "blocks.{layer}.attention.k_norm.weight": ("attention.k_norm",),
}
# Mistral's mixture of experts, in the files that are named consolidated.safetensors (8x22B; mistral-inference, moe.py).
_MIXTRAL = {name: roles for name, roles in _LLAMA.items() if "feed_forward" not in name} | {
    "layers.{layer}.feed_forward.gate.weight": ("router",),
    "layers.{layer}.feed_forward.experts.{expert}.w1.weight": ("expert.gate",),
    "layers.{layer}.feed_forward.experts.{expert}.w2.weight": ("expert.down",),
    "layers.{layer}.feed_forward.experts.{expert}.w3.weight": ("expert.up",),
}
# Rows in pairs, which nanotron stores by default up to 0.4, are put in order by formats/nanotron: only the folder says what they are.
_NANOTRON = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": ("embedding",),
    "model.decoder.{layer}.pp_block.input_layernorm.weight": ("attention.norm",),
    "model.decoder.{layer}.pp_block.attn.qkv_proj.weight": ("attention.q", "attention.k", "attention.v"),
    "model.decoder.{layer}.pp_block.attn.o_proj.weight": ("attention.o",),
    "model.decoder.{layer}.pp_block.post_attention_layernorm.weight": ("mlp.norm",),
    "model.decoder.{layer}.pp_block.mlp.gate_up_proj.weight": ("mlp.gate", "mlp.up"),
    "model.decoder.{layer}.pp_block.mlp.down_proj.weight": ("mlp.down",),
    "model.final_layer_norm.pp_block.weight": ("final_norm",),
    "model.lm_head.pp_block.weight": ("head",),
}
# What prime-rl's own classes name otherwise than transformers' (trainer/models/*/converting_*.py).
_PRIME = {
    "model.layers.{layer}.mlp.router.gate.weight": ("router",),
    "model.layers.{layer}.mlp.expert_bias": ("router.correction",),
    "model.layers.{layer}.mlp.experts.w1": ("expert.gate",),
    "model.layers.{layer}.mlp.experts.w2": ("expert.down",),
    "model.layers.{layer}.mlp.experts.w3": ("expert.up",),
    "model.layers.{layer}.mlp.shared_expert.w1": ("shared_expert.gate",),
    "model.layers.{layer}.mlp.shared_expert.w2": ("shared_expert.down",),
    "model.layers.{layer}.mlp.shared_expert.w3": ("shared_expert.up",),
}
_PRIME_BIAS = ("model.layers.*.mlp.expert_bias",)
# torchtitan balances the experts of every model with it. Where the published router has none, its adapter leaves it out.
_ROUTER_BIAS = ("layers.*.moe.expert_bias_E",)
_COMPUTED = ("rope.freqs", "freqs_cis")
# The first table that fits is taken; two that have the same rows differ in nothing.
TRAINERS = (
    TrainerNames("meta", _LLAMA, pairs=("llama", "mistral"), computed=_COMPUTED),
    TrainerNames("meta", _MIXTRAL, pairs=("mixtral",)),
    TrainerNames("torchtitan-0.2", _LLAMA, pairs=("llama",), computed=("freqs_cis",)),
    TrainerNames("torchtitan", _TITAN, pairs=("llama",), computed=("freqs_cis",), by_group=_TITAN_QKV),
    TrainerNames("torchtitan", _TITAN_QWEN3, halves=("qwen3", "qwen3_moe"), computed=_ROUTER_BIAS, by_group=_TITAN_QKV),
    TrainerNames("torchtitan", _TITAN_DEEPSEEK, halves=("deepseek_v3",)),
    TrainerNames("litgpt", _LITGPT, halves=("llama", "mistral")),
    TrainerNames("olmo-core", _OLMO_CORE, halves=("llama",)),
    TrainerNames("olmo-core", _OLMO_CORE_2, halves=("olmo2",)),
    TrainerNames("nanotron", _NANOTRON, halves=("llama",)),
    TrainerNames("prime-rl", _PRIME, halves=("qwen3_moe", "glm4_moe", "minimax_m2", "afmoe"), computed=_PRIME_BIAS, others_published=True),
)


_META = _MIXTRAL | _LLAMA


def axis_of(name: str) -> int | None:
    """The axis along which Meta's ranks divide a tensor of theirs; None if each holds all of it.

    Of the embedding it is 0, as in Llama 3 (fairscale's VocabParallelEmbedding). Llama 1 and 2 divide it along axis 1 (ParallelEmbedding).

    Raises: KeyError if Meta has no such name.
    """
    if name in _COMPUTED:
        return None
    layer, expert = (r"(?<=layers\.)\d+", "{layer}"), (r"(?<=experts\.)\d+", "{expert}")
    (role,) = _META[re.sub(*expert, re.sub(*layer, name))]
    return ROLES[role].split.axis


@value(slots=False, eq=False)
class Places:
    """Where the weights of a model lie in the tensors of a trainer."""

    table: TrainerNames
    """The trainer's names."""
    model: Model
    """The model."""

    @cached_property
    def arrays(self) -> dict[str, Mosaic]:
        """Stored name -> the weights in it, in the published order of rows."""
        parts = {(part.role, part.layer, part.expert): part.array for part in self._parts}
        if self.model.is_tied:
            # A stored head is compared with the embedding.
            parts["head", None, None] = parts["embedding", None, None].renamed(lambda _: self.model.architecture.tied[0])
        result: dict[str, Mosaic] = {}
        for name, roles in self.table.rows.items():
            stacks: dict[str, list[Mosaic]] = {}
            for role, layer, expert in parts:
                arrays = [parts[other, layer, expert] for other in roles if (other, layer, expert) in parts]
                if role == roles[0] and len(arrays) == len(roles):
                    stacks.setdefault(numbered(name, layer, expert), []).append(joined(arrays))
            is_stack = roles[0].startswith("expert.") and "{expert}" not in name
            result |= {own: stacked(arrays) if is_stack else arrays[0] for own, arrays in stacks.items()}
        if self.table.others_published:
            named = {name for array in result.values() for name in array.names}
            whole = {name: Mosaic.of(name, Box.whole(weight.shape)) for name, weight in self.model.weights.items() if name not in named}
            result = whole | result
        return result

    @cached_property
    def of_optimizer(self) -> dict[str, Mosaic]:
        """Names that only the optimizer has -> the trainer's tensors in them."""
        result: dict[str, Mosaic] = {}
        names = {roles[0]: name for name, roles in self.table.rows.items() if len(roles) == 1}
        for name, roles in self.table.by_group.items():
            for layer in sorted({part.layer for part in self._parts if part.role == roles[0] and part.layer is not None}):
                own = [numbered(names[role], layer) for role in roles]
                arrays = [Mosaic.of(weight, Box.whole(self.arrays[weight].shape)) for weight in own]
                groups = self.model.dimensions["kv_heads"]
                result[numbered(name, layer)] = joined([array.part(0, groups, group) for group in range(groups) for array in arrays])
        return result

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        parts = (part for part in self.model.parts() if part.component is None)
        return tuple(part for part in parts if part.parameter == "weight" or part.role == "router.correction")

    @cached_property
    def heads(self) -> dict[str, int]:
        """The heads of each stored tensor whose rows are in pairs."""
        if self.model.architecture.model_type not in self.table.pairs:
            return {}
        names = {roles[0]: name for name, roles in self.table.rows.items() if roles[0] in _ROTARY}
        of_layers = ((part.role, part.layer) for part in self._parts if part.role in names)
        return {numbered(names[role], layer): self.model.dimensions[_ROTARY[role]] for role, layer in of_layers}

    def written(self, weights: Set[str]) -> dict[str, Mosaic]:
        """The arrays of these weights. Raises UnsupportedError if the trainer has no name for one of them."""
        arrays = {name: array for name, array in self.arrays.items() if set(array.names) <= weights}
        if lost := sorted(weights - {name for array in arrays.values() for name in array.names}):
            raise UnsupportedError(
                f"{self.table.trainer} has no name for it",
                where=lost[0],
                do="Leave it out with `exclude=`, or write `to=hf` with the published names",
            )
        return arrays

    def stored(self, name: str, dtype: DType, part: Callable[[Mosaic], Mosaic] = lambda array: array) -> StoredTensor:
        """The tensor that the trainer holds under a name. part: cuts the array to that of a rank, between heads."""
        array = self.arrays[name]
        heads = self.heads.get(name)
        if heads is None:
            return part(array).stored(name, dtype)
        width, array = array.shape[0] // heads, part(array)
        (tile,) = array.tiles
        steps = row_major(array.shape)
        return StoredTensor(name, dtype, array.shape, Sections.of(rows_in_pairs(tile.name, tile.box, width, 0, steps)))

    def located(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Shards]]:
        """(canonical name, its pieces) of the weights in a stored tensor."""
        array, heads = self.arrays[name], self.heads.get(name)
        if heads is None:
            return located_in(tensor.shards, array).of(tensor.shards)
        builder, (tile,), width = SubviewsBuilder(), array.tiles, array.shape[0] // heads
        starts, sizes = tensor.shards.offsets, tensor.shards.sizes
        for row in range(len(tensor.shards)):
            box = Box(tuple(starts[row].tolist()), tuple(sizes[row].tolist()))
            for first in range(0, array.shape[0], width):
                for half in (0, 1):
                    # Stored row first + half + 2 i is canonical row first + half * width / 2 + i.
                    begin = max(0, -(-(box.offsets[0] - first - half) // 2))
                    end = min(width // 2, -(-(box.stops[0] - first - half) // 2))
                    if begin < end:
                        rows = (first + half * width // 2 + begin, end - begin)
                        at = (first + half + 2 * begin - box.offsets[0], *(0 for _ in box.sizes[1:]))
                        inside = Box((rows[0], *box.offsets[1:]), (rows[1], *box.sizes[1:]))
                        builder.add_strided(row, tile.name, inside, at, (2, *(1 for _ in box.sizes[1:])))
        return builder.build().of(tensor.shards)


def rows_in_pairs(name: str, box: Box, width: int, start: int, strides: tuple[int, ...]) -> Iterator[Section]:
    """The sections of a weight whose heads, of `width` rows each, are stored with their rows in pairs: row 2 i + half of a head is its row
    half * width / 2 + i. box: whole heads of the weight. start, strides: where its first row is stored, and how, in elements."""
    for first in range(0, box.sizes[0], width):
        for half in (0, 1):
            rows = box.narrow(0, first + half * width // 2, first + (half + 1) * width // 2)
            yield Section(name, rows, start + (first + half) * strides[0], (2 * strides[0], *strides[1:]))


def trainer_of(names: Collection[str]) -> str | None:
    """The trainer that gives its own names to the embedding, the final norm and the attention of the first layer; None if none does.

    What else these names mean is not known: the model may be one that no table of the trainer holds for.
    """
    for table in (table for table in TRAINERS if not table.others_published):
        judged = (name for name, (role, *_) in table.rows.items() if role in ("embedding", "final_norm") or role.startswith("attention."))
        if all(numbered(name, 0) in names for name in judged):
            return table.trainer
    return None


def check_trainer(names: Collection[str], model: Model) -> None:
    """Raises UnsupportedError if the names are those of a trainer, but cannot be read as those of this model."""
    if (trainer := trainer_of(names)) is None:
        return
    table, types = _table_of(trainer, model)
    places = Places(table, model) if table else None
    other = next((name for name in names if places and name not in places.arrays and not places.table.leaves_out(name)), None)
    known = f"and its {other} is not known" if places else f"which are known for {types}, and not for {model.architecture.model_type}"
    raise UnsupportedError(
        f"the names are those of {trainer}, {known}",
        where=other or next(iter(names)),
        why="Nothing tells where each tensor belongs in the published model",
        do=f"Convert it to the published names with {trainer}'s own program first",
    )


def _table_of(trainer: str, model: Model | None) -> tuple[TrainerNames | None, str]:
    """The names of a trainer that hold for a model, and the model types for which any are known."""
    tables = [table for table in TRAINERS if table.trainer == trainer]
    types = (model_type for table in tables for model_type in (*table.pairs, *table.halves))
    return next((table for table in tables if model is not None and table.holds(model)), None), ", ".join(types)


def named_places(trainer: str, model: Model | None, *, asked: str = "") -> Places:
    """The places of a trainer. asked: the option that asks for its names; by default `--names` with the trainer.

    Raises: RequestError if it is not known, UnsupportedError for another model.
    """
    asked = asked or f"`names={trainer}`"
    table, types = _table_of(trainer, model)
    if not types:
        known = dict.fromkeys(table.trainer for table in TRAINERS)
        raise RequestError(f"{asked}: unknown trainer", do=f"Choose one of {', '.join(known)}")
    if model is None or table is None:
        name = model.architecture.model_type if model else "an unknown model"
        raise UnsupportedError(
            f"{asked}: the names of {trainer} are known for {types}, and this is {name}",
            why="Names that were not compared with the trainer's own are not written",
            do="Write `to=hf` with the published names" if model else "Name the model with `model=DIR`",
        )
    model.architecture.check_head(f"{asked}: these names are")
    return Places(table, model)


def places_in(index: Index, model: Model) -> Places | None:
    """The places of the trainer whose names all weights of an index have; None if they are none's."""
    names = {tensor.name for tensor in index.tensors if tensor.kind in ("weight", "master")}
    for table in TRAINERS:
        # The first layers may have no experts.
        layers = (0, model.dimensions["layers"] - 1) if table.others_published else (0,)
        if table.holds(model) and any(numbered(name, layer, 0) in names for name in table.rows for layer in layers if "{layer}" in name):
            places = Places(table, model)
            if all(name in places.arrays or table.leaves_out(name) for name in names):
                return places
    return None


def with_states_of_weights(index: Index, model: Model | None) -> Index:
    """The index in which the optimizer's state has the names of the stored weights, if a trainer gives the two different ones."""
    if model is None or not any(table.by_group and table.holds(model) for table in TRAINERS):
        return index
    places = places_in(index, model)
    arrays = places.of_optimizer if places else {}
    if not places or not any(tensor.name in arrays for tensor in index.tensors):
        return index
    tensors: list[Tensor] = []
    for tensor in index.tensors:
        array = arrays.get(tensor.name)
        if array is None:
            tensors.append(tensor)
        elif tensor.shape == array.shape:
            whole = replace(tensor, distribution=None)
            located = located_in(tensor.shards, array).of(tensor.shards)
            tensors += [replace(whole, name=name, shape=places.arrays[name].shape, shards=shards) for name, shards in located]
        else:
            tensors += [replace(tensor, name=name) for name in array.names]
    return renamed(index, tensors, lambda name: arrays[name].names if name in arrays else (name,))


def with_published_names(index: Index, model: Model) -> Index:
    """The index under the published names, if all its weights have the names of one trainer; otherwise `index` itself. What follows from
    the config becomes a buffer.

    Raises: CheckpointError if a tensor has another shape than its name says.
    """
    places = places_in(index, model)
    if places is None:
        return index
    index = with_states_of_weights(index, model)
    tensors: list[Tensor] = []
    for tensor in index.tensors:
        array = places.arrays.get(tensor.name)
        if array is None:
            # Rotary frequencies and the like become a buffer.
            tensors.append(replace(tensor, kind="buffer") if tensor.kind == "weight" else tensor)
            continue
        if tensor.elements == 1 and tensor.shape != array.shape:
            tensors += [replace(tensor, name=name) for name in array.names]
            continue
        if tensor.shape != array.shape:
            raise CheckpointError(
                f"its shape is {list(tensor.shape)}; as a tensor of {places.table.trainer} it holds {', '.join(array.names)} "
                f"{list(array.shape)}",
                where=tensor.name,
                why="The config belongs to another model",
                do="Give the config that this model was trained with: `model=DIR`",
            )
        shapes = {name: model.weights[name].shape for name in array.names if name in model.weights}
        tensors += [
            replace(tensor, name=name, shape=shapes.get(name, tensor.shape), shards=shards, distribution=None)
            for name, shards in places.located(tensor.name, tensor)
        ]
    names = {name: array.names for name, array in places.arrays.items()}
    rows = "are stored in pairs, which are put in the published order" if places.heads else "have the published order"
    note = f"the names are those of {places.table.trainer}; rotary rows {rows}"
    plain = replace(index, facts=replace(index.facts, tied={}, buffers=None))
    return renamed(plain, tensors, lambda name: names.get(name, (name,)), note)
