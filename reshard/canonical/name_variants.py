"""Name variants: other names, and other ways to fuse or stack, under which libraries store the weights of a model family.

    mlp.experts.gate_up_proj [E, 2 I, H]     all experts in one array, as transformers 5 holds them in memory: in training checkpoints, and
    mlp.experts.down_proj    [E, H, I]       in folders saved with save_original_format=False. They are published expert by expert.
    self_attn.qkv_proj, mlp.gate_up_proj     fused, as in phi3; other models publish q_proj, gate_proj, ... one by one
    layers.0. ..., h.0. ...                  without "model." or "transformer.": saved from the model without its head
    base_model.model. ... .base_layer.       the base of a LoRA adapter: saved from a PEFT model

The variants are rows of a table that readers and writers share. The meaning of a name is a Mosaic: the boxes of canonical tensors that lie
in its array. Source: transformers 5.23, conversion_mapping.py (the WeightConverters and WeightRenamings of mixtral, qwen2_moe and llava),
core_model_loading.py (base_model_prefix) and integrations/finegrained_fp8.py; measured on fixtures/hf/*-fused and gpt2-bare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from reshard.canonical.renaming import base_name, is_of_adapter, renamed
from reshard.canonical.stacked_experts import located_in, stacks
from reshard.errors import CheckpointError, some
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.quantities import plural
from reshard.index.index import Index, Kind, Tensor
from reshard.index.shards import Shards, concatenated
from reshard.models.model import Model
from reshard.models.parts import Part

# Name inside the layer -> the roles of the weights in it, concatenated along axis 0 in this order. {expert} is the expert's number, {kind}
# weight or bias; a name without {kind} is that of the only tensor of its role. Experts without a number are stacked along a new first axis.
NAME_VARIANTS: Mapping[str, str] = {
    "mlp.experts.gate_up_proj": "expert.gate expert.up",
    "mlp.experts.down_proj": "expert.down",
    "feed_forward.experts.gate_up_proj": "expert.gate expert.up",
    "feed_forward.experts.down_proj": "expert.down",
    "block_sparse_moe.experts.gate_up_proj": "expert.gate expert.up",
    "block_sparse_moe.experts.down_proj": "expert.down",
    "block_sparse_moe.router.{kind}": "router",
    "mixer.experts.up_proj": "expert.up",
    "mixer.experts.down_proj": "expert.down",
    "mlp.switch_mlp.gate_proj.{kind}": "expert.gate",
    "mlp.switch_mlp.up_proj.{kind}": "expert.up",
    "mlp.switch_mlp.down_proj.{kind}": "expert.down",
    "block_sparse_moe.switch_mlp.gate_proj.{kind}": "expert.gate",
    "block_sparse_moe.switch_mlp.up_proj.{kind}": "expert.up",
    "block_sparse_moe.switch_mlp.down_proj.{kind}": "expert.down",
    "mlp.experts.gate_proj.{kind}": "expert.gate",
    "mlp.experts.up_proj.{kind}": "expert.up",
    "mlp.experts.down_proj.{kind}": "expert.down",
    "mlp.gate.gate_proj.{kind}": "router",
    "mlp.experts.gate_up_proj_scale_inv": "expert.gate expert.up",
    "mlp.experts.down_proj_scale_inv": "expert.down",
    "mlp.gate.{kind}": "router",
    "mlp.router.{kind}": "router",
    "mlp.gate.e_score_correction_bias": "router.correction",
    "mlp.gate.moe_statics.e_score_correction_bias": "router.correction",
    "mlp.e_score_correction_bias": "router.correction",
    "mlp.experts.{expert}.gate_proj.{kind}": "expert.gate",
    "mlp.experts.{expert}.up_proj.{kind}": "expert.up",
    "mlp.experts.{expert}.down_proj.{kind}": "expert.down",
    "feed_forward.experts.{expert}.gate_proj.{kind}": "expert.gate",
    "feed_forward.experts.{expert}.up_proj.{kind}": "expert.up",
    "feed_forward.experts.{expert}.down_proj.{kind}": "expert.down",
    "mixer.experts.{expert}.up_proj.{kind}": "expert.up",
    "mixer.experts.{expert}.down_proj.{kind}": "expert.down",
    "block_sparse_moe.experts.{expert}.gate_proj.{kind}": "expert.gate",
    "block_sparse_moe.experts.{expert}.up_proj.{kind}": "expert.up",
    "block_sparse_moe.experts.{expert}.down_proj.{kind}": "expert.down",
    "mlp.shared_experts.gate_proj.{kind}": "shared_expert.gate",
    "mlp.shared_experts.up_proj.{kind}": "shared_expert.up",
    "mlp.shared_experts.down_proj.{kind}": "shared_expert.down",
    "block_sparse_moe.gate.{kind}": "router",
    "block_sparse_moe.experts.{expert}.w1.{kind}": "expert.gate",
    "block_sparse_moe.experts.{expert}.w2.{kind}": "expert.down",
    "block_sparse_moe.experts.{expert}.w3.{kind}": "expert.up",
    "self_attn.qkv_proj.{kind}": "attention.q attention.k attention.v",
    "self_attn.q_proj.{kind}": "attention.q",
    "self_attn.k_proj.{kind}": "attention.k",
    "self_attn.v_proj.{kind}": "attention.v",
    "self_attn.sinks": "attention.sink",
    "self_attn.conv1d.{kind}": "delta.conv_q delta.conv_k delta.conv_v",
    "self_attn.forget_gate.A_log": "delta.a_log",
    "self_attn.forget_gate.dt_bias": "delta.dt_bias",
    "self_attn.forget_gate.f_proj.{kind}": "delta.a",
    "self_attn.forget_gate.f_a_proj.{kind}": "kda.forget_in",
    "self_attn.forget_gate.f_b_proj.{kind}": "kda.forget_out",
    "self_attn.indexer.q_proj.{kind}": "minimax.index_q",
    "self_attn.indexer.k_proj.{kind}": "minimax.index_k",
    "self_attn.indexer.q_norm.{kind}": "minimax.index_q_norm",
    "self_attn.indexer.k_norm.{kind}": "minimax.index_k_norm",
    "mlp.shared_experts.gate_up_proj.{kind}": "shared_expert.gate shared_expert.up",
    "mlp.gate.tid2eid": "router.table",
    "input_layernorm.{kind}": "attention.norm",
    "post_attention_layernorm.{kind}": "mlp.norm",
    "self_attn.q_a_proj.{kind}": "mla.q_a",
    "self_attn.q_a_norm.{kind}": "mla.q_a_norm",
    "self_attn.q_b_proj.{kind}": "mla.q_b",
    "self_attn.kv_proj.{kind}": "mla.kv_a",
    "self_attn.kv_norm.{kind}": "mla.kv_a_norm",
    "attn.norm.{kind}": "mla.kv_a_norm",
    "self_attn.o_proj.{kind}": "attention.o",
    "attention.dense.{kind}": "delta.out",
    "self_attn.o_a_proj.{kind}": "mla.o_a",
    "self_attn.o_b_proj.{kind}": "mla.o_b",
    "self_attn.compressor.position_bias": "compressor.positions",
    "self_attn.compressor.kv_proj.{kind}": "compressor.kv",
    "self_attn.compressor.gate_proj.{kind}": "compressor.gate",
    "self_attn.compressor.kv_norm.{kind}": "compressor.norm",
    "self_attn.compressor.indexer.q_b_proj.{kind}": "indexer.q",
    "self_attn.compressor.indexer.scorer.weights_proj.{kind}": "indexer.weights",
    "self_attn.compressor.indexer.position_bias": "index_compressor.positions",
    "self_attn.compressor.indexer.kv_proj.{kind}": "index_compressor.kv",
    "self_attn.compressor.indexer.gate_proj.{kind}": "index_compressor.gate",
    "self_attn.compressor.indexer.kv_norm.{kind}": "index_compressor.norm",
    "attn_hc.fn": "hyper.attention_mix",
    "attn_hc.base": "hyper.attention_base",
    "attn_hc.scale": "hyper.attention_scale",
    "ffn_hc.fn": "hyper.mlp_mix",
    "ffn_hc.base": "hyper.mlp_base",
    "ffn_hc.scale": "hyper.mlp_scale",
    "mlp.gate_up_proj.{kind}": "mlp.gate mlp.up",
    "mlp.gate_proj.{kind}": "mlp.gate",
    "mlp.up_proj.{kind}": "mlp.up",
}
# (prefix of the stored name, prefix of the canonical name). {base} is the first part of the model's names: "model.", "transformer.", ...
PREFIXES = (("", "{base}"), ("language_model.", ""), ("model.language_model.", "{base}"), ("model.", ""), ("model.", "{base}"))
# Weights outside of the layers of gpt_neox and deepseek_v4, as transformers 5 holds them in memory.
OUTSIDE = (
    ("lm_head.", "embed_out."),
    ("lm_head.", "head."),
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.embed_tokens.", "model.word_embeddings."),
)
# The same for models with towers, which transformers 5 holds in memory, and saves some of, under other names than they are published with.
PREFIXES_WITH_TOWERS = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.vision_tower.", "model.vision_tower.vision_model."),
)
# (first word inside the layer of a stored name, that of the canonical name).
MODULES = (("self_attn.", "attention."),)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


# Kinds of tensors that have the name and the shape of a weight. transformers publishes experts one by one, and its optimizer has stacks.
_OF_WEIGHTS = ("weight", "master", "moment1")


class Names:
    """What stored names mean for one model: the canonical tensors that the array under a name holds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        layered = next((weight.name for weight in model.architecture.weights if "{layer}" in weight.name), "{layer}")
        self._base = layered.partition(".")[0] + "."
        self._layer = re.compile(re.escape(layered.partition("{layer}")[0]) + r"(\d+)\.(.+)")
        self._shapes = {name: weight.shape for name, weight in model.weights.items()}
        self._shapes |= {alias: self._shapes[name] for alias, name in model.aliases.items() if name in self._shapes}
        self._parts: dict[tuple[int | None, int | None, str, str | None], Part] | None = None
        self._stacks = stacks(model)
        declared = (weight.name.split(".") for weight in model.declared.weights)
        self._modules = {".".join(parts[:depth]) for parts in declared for depth in range(1, len(parts))}

    def is_canonical(self, name: str) -> bool:
        """Whether the name is that of a weight of the model, or of a tensor that the architecture leaves out on purpose."""
        return name in self._shapes or self._model.reason_to_drop(name) is not None

    def array(self, name: str) -> Mosaic | None:
        """The canonical tensors that a stored tensor with that name holds; None if the name means nothing to this model."""
        return next((array for _, candidate in self._with_base(name) if (array := self._array_of(candidate)) is not None), None)

    def prefix(self, name: str) -> tuple[str, str] | None:
        """The prefix of a stored name and the canonical one in its place; None if the name means nothing to this model."""
        return next((prefix for prefix, candidate in self._with_base(name) if self._array_of(candidate) is not None), None)

    def beside(self, name: str, prefixes: Iterable[tuple[str, str]]) -> str:
        """The name of a tensor that the declaration lacks, under the canonical prefix of its neighbours in the model.

        prefixes: of the neighbours. It keeps its name if that would lead into no part of the model.
        """
        name = base_name(name)
        for stored, canonical in prefixes:
            inner = name.removeprefix(stored)
            if name.startswith(stored) and canonical + inner.partition(".")[0] in self._modules:
                return canonical + inner
        return name

    def unneeded(self, name: str) -> str | None:
        """If `name` is a tensor that the architecture leaves out on purpose, its canonical name; otherwise None."""
        return next((candidate for _, candidate in self._with_base(name) if self._model.reason_to_drop(candidate)), None)

    def _with_base(self, name: str) -> Iterator[tuple[tuple[str, str], str]]:
        """The name, and the names with the canonical prefix in place of a stored one; each with both prefixes."""
        name = base_name(name)
        yield ("", ""), name
        for stored, canonical in PREFIXES + PREFIXES_WITH_TOWERS + OUTSIDE:
            if name.startswith(stored):
                canonical = canonical.format(base=self._base)
                yield (stored, canonical), canonical + name.removeprefix(stored)

    def _array_of(self, name: str) -> Mosaic | None:
        """The canonical tensors in a stored tensor, by its name under the canonical prefix."""
        if name in self._shapes:
            return Mosaic.of(name, Box.whole(self._shapes[name]))
        return self._stacks.get(name) or self._model.pieces.get(name) or self._array_of_variant(name)

    def _array_of_variant(self, name: str) -> Mosaic | None:
        match = self._layer.fullmatch(name)
        if match is None:
            return None
        layer, inner = int(match[1]), match[2]
        for stored, canonical in MODULES:
            other = f"{name.removesuffix(inner)}{canonical}{inner.removeprefix(stored)}"
            if inner.startswith(stored) and other in self._shapes:
                return Mosaic.of(other, Box.whole(self._shapes[other]))
        number = _EXPERT.search(inner)
        expert = int(number[0]) if number else None
        module, _, kind = _EXPERT.sub("{expert}", inner).rpartition(".")
        name = inner if inner in NAME_VARIANTS else f"{module}.{{kind}}"
        roles = NAME_VARIANTS.get(name, "").split()
        if not roles:
            return None
        if number or not roles[0].startswith("expert."):
            return self._joined(roles, layer, expert, None if name == inner else kind)
        parameter = kind if name != inner else "weight_scale_inv" if name.endswith("_scale_inv") else "weight"
        numbers = range(self._model.dimensions.get("experts", 0))
        experts = [array for expert_number in numbers if (array := self._joined(roles, layer, expert_number, parameter)) is not None]
        return stacked(experts) if experts and len(experts) == len(numbers) else None

    def _joined(self, roles: Sequence[str], layer: int, expert: int | None, kind: str | None) -> Mosaic | None:
        if self._parts is None:
            parts_of = self._model.parts()
            self._parts = {(part.layer, part.expert, part.role, part.parameter): part for part in parts_of}
            self._parts |= {(part.layer, part.expert, part.role, None): part for part in parts_of}
        parts = [self._parts.get((layer, expert, role, kind)) for role in roles]
        arrays = [part.array for part in parts if part is not None]
        if len(parts) == 1 and parts[0] is not None and expert is None and len(arrays[0].shape) < len(self._shapes[parts[0].tensor]):
            return Mosaic.of(parts[0].tensor, Box.whole(self._shapes[parts[0].tensor]))  # a vector that is stored as [1, n]
        if len(arrays) < len(parts) or (len(arrays) > 1 and not arrays[0].shape):
            return None  # scales without axes cannot be concatenated
        return joined(arrays)


def names_besides(names: Iterable[str], index: Index, model: Model) -> list[str]:
    """Those of these names in an index that are not of the model's weights; none if the index has the names of a trainer, which are not
    published ones even where they are spelled alike."""
    others = [name for name in names if name not in model.weights]
    if others:
        from reshard.canonical.trainer_names import places_in

        return others if places_in(index, model) is None else []
    return []


def unknown_names(names: Collection[str], model: Model) -> list[str]:
    """Those of these names that mean nothing to the model, and that it is not declared to carry."""
    others = [name for name in names if not model.reason_not_served(name)]
    known = Names(model) if others else None
    return [name for name in others if known and known.array(name) is None]


def with_canonical_names(index: Index, model: Model | None, prefix: str = "") -> Index:
    """The index under the model's canonical names, in which fused and stacked tensors are pieces of canonical ones.

    Optimizer state and param groups are renamed, too. If every name is canonical already, the result is `index` itself.
    prefix: precedes the stored names of the model. A name that is canonical without the prefix keeps it; a renamed tensor loses it.

    Raises: CheckpointError if a tensor has another shape than its name says, or two tensors disagree about a weight.
    """
    if model is None:
        return _without_peft(index)
    index = _with_declared_axes(_without_padding(index, model), model)
    of_model = (tensor.name.removeprefix(prefix) for tensor in index.tensors if tensor.kind in _OF_WEIGHTS)
    if all(map(_declared(model).fullmatch, of_model)):
        return index
    from reshard.canonical.trainer_names import with_published_names

    if (published := with_published_names(index, model)) is not index:
        return published
    names = Names(model)

    @cache
    def array(name: str) -> Mosaic | None:
        """The array of a stored name; None if the name is canonical or means nothing."""
        short = name.removeprefix(prefix)
        return None if names.is_canonical(short) else names.array(short)

    others = _others(index, array, names, prefix)
    by_name: dict[tuple[Kind, str], list[tuple[str, Tensor]]] = {}
    changed: dict[str, str] = {}
    for tensor in index.tensors:
        for part in _canonical(tensor, array, others, model):
            by_name.setdefault((part.kind, part.name), []).append((tensor.name, part))
            if part.name != tensor.name:
                changed.setdefault(tensor.name, part.name)
    if not changed:
        return index
    others_than_pieces = [name for name in changed if name.removeprefix(prefix) not in model.pieces]

    def new_names(name: str) -> tuple[str, ...]:
        mosaic = array(name)
        return (others.get(name, name),) if mosaic is None else mosaic.names

    stored = next(iter(others_than_pieces), None)
    note = None
    if stored is not None:
        count = len(others_than_pieces)
        note = f"{count} tensors are stored under other names than the published ones; for example, {stored} holds {changed[stored]}"
    return renamed(index, map(_combined, by_name.values()), new_names, note)


def _without_padding(index: Index, model: Model) -> Index:
    """The index without the rows that follow the model's own in weights that may be stored with such rows."""
    if not any(weight.padded for weight in model.architecture.weights):
        return index
    own = {weight.name: weight.shape for weight in model.weights.values() if weight.declared.padded}

    def is_padded(tensor: Tensor) -> bool:
        shape = own.get(tensor.name)
        return shape is not None and tensor.shape[1:] == shape[1:] and tensor.shape[:1] > shape[:1]

    def without(tensor: Tensor) -> Tensor:
        shape = own[tensor.name]
        located = located_in(tensor.shards, Mosaic.of(tensor.name, Box.whole(shape)).padded(0, tensor.shape[0]))
        ((_, shards),) = located.of(tensor.shards)
        return replace(tensor, shape=shape, shards=shards, distribution=None)

    padded = [tensor for tensor in index.tensors if is_padded(tensor)]
    if not padded:
        return index
    first = padded[0]
    note = f"{first.name} is stored with {first.shape[0]} rows; the last {first.shape[0] - own[first.name][0]} are padding and are left out"
    note += f", and so are those of {plural(len(padded) - 1, 'other tensor')}" if len(padded) > 1 else ""
    tensors = tuple(without(tensor) if is_padded(tensor) else tensor for tensor in index.tensors)
    return replace(index, tensors=tensors, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _with_declared_axes(index: Index, model: Model) -> Index:
    """The index with the experts that are stored as [experts, out, in], and are published as [experts, in, out], in the published order.

    transformers 5.24 saves Qwen3-VL-MoE so. The shapes of all stacked experts decide: 2 I = H makes one of them square, and not all.
    """
    shapes = {weight.name: weight.shape for weight in model.weights.values() if weight.declared.transposed and len(weight.shape) == 3}
    stored = [
        tensor
        for tensor in index.tensors
        if tensor.kind in ("weight", "master") and len(tensor.shape) == 3 and base_name(tensor.name) in shapes
    ]
    wanted = [shapes[base_name(tensor.name)] for tensor in stored]
    exchanged = [(count, columns, rows) for count, rows, columns in wanted]
    if [tensor.shape for tensor in stored] == wanted or [tensor.shape for tensor in stored] != exchanged:
        return index
    changed = {id(tensor) for tensor in stored}

    def with_axes(tensor: Tensor) -> Tensor:
        count, rows, columns = tensor.shape
        shards = tensor.shards.strided((0, 0, 0), ((count, 0, 1), (columns, 2, 1), (rows, 1, 1)))
        return replace(tensor, shape=(count, columns, rows), shards=shards, distribution=None)

    first = stored[0]
    note = f"{plural(len(stored), 'tensor')} of experts, such as {first.name}, are stored as [experts, out, in] and published as "
    note += "[experts, in, out]; they are read in the published order"
    tensors = tuple(with_axes(tensor) if id(tensor) in changed else tensor for tensor in index.tensors)
    return replace(index, tensors=tensors, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _without_peft(index: Index) -> Index:
    """The index of an unknown model without the parts that PEFT adds to the names of base weights beside an adapter."""
    of_base = [tensor for tensor in index.tensors if tensor.kind in ("weight", "buffer") or not is_of_adapter(tensor)]
    changed = {tensor.name: name for tensor in of_base if (name := base_name(tensor.name)) != tensor.name}
    if not changed or not any(map(is_of_adapter, index.tensors)):
        return index
    tensors = tuple(replace(t, name=changed[t.name]) if t.name in changed and not is_of_adapter(t) else t for t in index.tensors)
    note = f"{len(changed)} base weights are stored under names of PEFT; for example, {next(iter(changed))}"
    return replace(index, tensors=tensors, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _declared(model: Model) -> re.Pattern[str]:
    """A pattern for the names in the modules that an architecture declares, with any layer, expert and parameter."""
    names = [*(weight.name for weight in model.declared.weights), *model.architecture.tied]
    modules = {re.escape(name.rpartition(".")[0]) for name in names}
    numbered = (re.sub(r"\\{(layer|expert|use)\\}", r"\\d+", module) for module in sorted(modules))
    return re.compile(rf"(?:{'|'.join(numbered)})\.\w+")


def _others(index: Index, array: Callable[[str], Mosaic | None], names: Names, prefix: str) -> dict[str, str]:
    """The new names of the weights and buffers that mean nothing to the model, by stored name: unneeded ones get the name of their
    declaration, and all others the prefix of the weights around them."""
    of_model = {tensor.name: tensor.name.removeprefix(prefix) for tensor in index.tensors if tensor.kind in ("weight", "buffer", "master")}
    others = {name: short for name, short in of_model.items() if array(name) is None and not names.is_canonical(short)}
    if not others:
        return {}
    known = (short for name, short in of_model.items() if array(name) is not None)
    prefixes = dict.fromkeys(known_prefix for short in known if (known_prefix := names.prefix(short)) is not None)
    new = {name: names.unneeded(short) or names.beside(short, prefixes) for name, short in others.items()}
    return {name: new_name for name, new_name in new.items() if new_name != others[name]}


def _canonical(tensor: Tensor, array: Callable[[str], Mosaic | None], others: Mapping[str, str], model: Model) -> Iterator[Tensor]:
    """What a stored tensor holds: parts of canonical tensors. A tensor whose name is canonical or means nothing is one part, itself.

    others: the new names of tensors that mean nothing.
    """
    parameter, _, kind = tensor.name.rpartition(".") if tensor.kind == "state" else (tensor.name, "", "")
    suffix = f".{kind}" if tensor.kind == "state" else ""
    # The modules that an adapter saves whole (modules_to_save) have names of the base.
    mosaic = array(parameter) if parameter and tensor.kind != "adapter" else None
    if mosaic is None:
        yield replace(tensor, name=others[parameter] + suffix) if parameter in others else tensor
    elif tensor.shape == mosaic.shape:
        located = dict(located_in(tensor.shards, mosaic).of(tensor.shards))
        for name in mosaic.names:
            # A tied head is not among the weights of the model. Its shape is that of the embedding, which is the shape of this tensor.
            shape = model.weights[name].shape if name in model.weights else tensor.shape
            shards = located.get(name) or Shards.of(())
            yield replace(tensor, name=name + suffix, shape=shape, shards=shards, distribution=None)
    elif tensor.elements == 1:  # a step count of a fused parameter counts for each of its weights
        for name in mosaic.names:
            yield replace(tensor, name=name + suffix)
    elif tensor.kind == "state":
        yield tensor
    else:
        raise CheckpointError(
            f"its shape is {list(tensor.shape)}; by its name it holds {some(mosaic.names, most=3)}"
            f", which together have the shape {list(mosaic.shape)}",
            where=tensor.name,
            why="The config belongs to another model, or a library stores the tensor in an unknown order",
            do="Give the config that this model was trained with: `model=DIR`",
        )


def _combined(parts: Sequence[tuple[str, Tensor]]) -> Tensor:
    """A canonical tensor from its parts, each with its stored name. Raises CheckpointError if two parts differ in dtype or shape."""
    stored, first = parts[0]
    for other_stored, other in parts[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{stored} says {first.dtype} {list(first.shape)}, {other_stored} says {other.dtype} {list(other.shape)}",
                where=first.name,
                why="By their names both hold this weight, which has one element type and shape",
                do="Save the model again with one of them",
            )
    if len(parts) == 1:
        return first
    return Tensor(first.name, first.dtype, first.shape, first.kind, concatenated([part.shards for _, part in parts]))
