"""EngineRank: the tensors in the state dict of one rank of a serving engine.

the parts of one layer of each kind -> the shard of each -> joined as the engine fuses them -> in every layer, under the engine's names
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from sys import intern

from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.meshes import Parallel, stage_layers
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.sections import Sections, StoredTensor, constant
from reshard.geometry.value import value
from reshard.models.architecture import EXPERTS, USE
from reshard.models.engine_rules import EngineRules, Fusion
from reshard.models.model import LayerKind, Model
from reshard.models.parts import Part
from reshard.models.sizes import evaluate
from reshard.models.splits import shard
from reshard.models.stored_forms import Component
from reshard.serving.weights import model_dtype, parts_by_kind, split_rules, with_split


@value
class RankTensor:
    """A tensor in a rank's state dict, as it is in every layer of one kind. Its names have {layer} in place of the number of the layer."""

    name: str
    """Its name before the engine's own naming."""
    first: Part
    """The first part that it is made of, which decides its name in the engine."""
    shape: tuple[int, ...]
    """Its shape."""
    sections: Sections
    """The boxes of canonical tensors that it holds."""
    origins: tuple[str, ...]
    """The canonical tensors of the parts that it is made of, those included of which this rank holds nothing. Zeros are of none."""


# What vLLM reorders with the rows of a weight (0.32, models/llama4.py, permute_qk_weight_for_rotary).
_IN_ORDER_OF_ROWS = ("weight", "weight_packed", "weight_scale")


@value(slots=False)
class EngineRank:
    """One rank of an engine that serves a model."""

    model: Model
    """The model."""
    rules: EngineRules
    """How the engine stores it."""
    parallel: Parallel
    """The parallel sizes of the whole run."""
    tp_rank: int = 0
    """The rank among the tensor-parallel ranks of its stage."""
    pp_rank: int = 0
    """Its pipeline stage."""

    @cached_property
    def layers(self) -> range:
        """The layers of its stage."""
        return stage_layers(self.rules.layers_per_stage(self.model.dimensions["layers"], self.parallel.pp), self.pp_rank)

    @cached_property
    def experts(self) -> range:
        """The experts of each layer that the rank holds: all, or one run of them with expert parallelism.

        Where ep does not divide the experts, the runs of the first ranks are longer by one.
        """
        number, ep = self.model.dimensions.get("experts", 0), self.parallel.ep
        if ep == 1:
            return range(number)
        base, remainder = divmod(number, ep)
        start = self.tp_rank * base + min(self.tp_rank, remainder)
        return range(start, start + base + (self.tp_rank < remainder))

    def tensors(self, dtypes: Mapping[str, DType]) -> Iterator[StoredTensor]:
        """The tensors of the state dict, in the model's order. dtypes: canonical name -> the element type to store.

        Layers of one kind are laid out once; the others take over the boxes and get names of their own.

        Raises: RequestError if parts of one tensor have different element types.
        """
        compute_dtype = model_dtype(self.model, dtypes)
        by_kind = parts_by_kind(self.model, self.rules)
        kind_of = {layer: kind for kind in by_kind if kind for layer in kind.layers}
        laid_out: dict[LayerKind, list[RankTensor]] = {}
        yield from self.stored([part for part in by_kind[None] if part.role == "embedding"], None, dtypes)
        for layer in self.layers:
            if kind := kind_of.get(layer):
                if kind not in laid_out:
                    laid_out[kind] = list(self._rank_tensors_of(by_kind[kind]))
                yield from self._in_layer(laid_out[kind], layer, dtypes, compute_dtype)
        yield from self.stored([part for part in by_kind[None] if part.role != "embedding"], None, dtypes)

    def stored(self, parts: Sequence[Part], layer: int | None, dtypes: Mapping[str, DType]) -> Iterator[StoredTensor]:
        """The tensors that some parts of the model become in one layer (None: outside of the layers)."""
        return self._in_layer(list(self._rank_tensors_of(parts)), layer, dtypes, model_dtype(self.model, dtypes))

    def _rank_tensors_of(self, parts: Sequence[Part]) -> Iterator[RankTensor]:
        """The tensors that some parts of the model become. All parts are of one layer, or all are outside of the layers."""
        fusion_of = {role: fusion for fusion in self.rules.fusions for role in fusion.roles}
        groups: dict[tuple[object, ...], list[Part]] = {}
        # What the engine stores a second time, in the place of weights that the layer does not have.
        roles = {part.role for part in parts}
        absent = {used: role for role, used in self.rules.in_place_of.items() if role not in roles}
        copies = (replace(part, role=absent[part.role]) for part in parts if part.role in absent)
        for part in (*parts, *copies, *self._zero_biases(parts)):
            fusion = fusion_of.get(part.role)
            # The parts of a fused tensor are one group, all experts included. Any other tensor of the model is a group of its own: its
            # sections, such as [z; x; b; c; dt], stay one tensor, in which a rank holds its share of each.
            block = part.tensor.rsplit(".", 2)[0] if part.layer is None else None
            groups.setdefault((fusion.roles, part.parameter, block) if fusion else (part.tensor,), []).append(part)
        for group in groups.values():
            if not any(part.array.tiles for part in group):
                continue  # the model has no such biases at all
            first, fusion = group[0], fusion_of.get(group[0].role)
            if first.expert is not None:
                if self.experts:
                    yield self._stacked_experts(group, fusion)
            elif first.layer is None and self.model.is_tied and first.tensor == self.model.architecture.tied[1]:
                yield from self._tied_embedding(first)
            elif first.layer is not None or self._is_on_stage(first.role):
                ordered = sorted(group, key=lambda part: fusion.roles.index(part.role)) if fusion else group
                is_fused = fusion is not None and len({part.tensor for part in group}) > 1
                name = _with_component(ordered[0].pattern, fusion.component) if is_fused and fusion else first.pattern
                yield self._rank_tensor(name, ordered)

    def _zero_biases(self, parts: Sequence[Part]) -> Iterator[Part]:
        """For the weights of the roles whose bias the engine fills with zeros, a bias without any elements of the model."""
        for part in parts:
            if (part.role, "bias") in self.rules.zeros and part.parameter == "weight":
                tensor, pattern = (name.removesuffix("weight") + "bias" for name in (part.tensor, part.pattern))
                array = Mosaic(part.array.shape[:1], ())
                yield replace(part, parameter="bias", tensor=tensor, pattern=pattern, array=array, block_shape=(1,))

    def _in_layer(
        self, tensors: list[RankTensor], layer: int | None, dtypes: Mapping[str, DType], compute_dtype: DType
    ) -> Iterator[StoredTensor]:
        """The tensors as they are in one layer (None: outside of the layers), each with the constants beside it."""
        stored = [
            StoredTensor(
                self._engine_name(tensor, layer),
                _one_dtype(tensor, layer, dtypes, self.rules.engine),
                tensor.shape,
                tensor.sections.with_names(in_layer(tensor.sections.names, layer)),
            )
            for tensor in tensors
        ]
        names = {stored_tensor.name for stored_tensor in stored}
        for tensor, stored_tensor in zip(tensors, stored, strict=True):
            yield stored_tensor
            yield from (extra for extra in self._extra_tensors(tensor, layer, compute_dtype) if extra.name not in names)

    def _engine_name(self, tensor: RankTensor, layer: int | None) -> str:
        """The engine's name of a tensor in a layer."""
        if module_name := self.rules.module_names.get(tensor.first.role):
            number = None if layer is None else layer - self.layers.start
            return f"{module_name.format(layer=number)}.{tensor.first.parameter}"
        if layer in self.model.uses_of_blocks and self.model.weights[tensor.first.tensor].declared.in_shared_block:
            layer = self._named_layer(layer)
        return self._renamed(tensor.name, layer)

    def _named_layer(self, layer: int) -> int:
        """The layer under whose name a shared block is stored: vLLM takes the name of a tensor that comes first in the alphabet (0.32,
        sharded_state_loader.py, _filter_subtensors), so of layers 2 and 10 that use the block the name of layer 10."""
        return min(self.model.uses_of_blocks[layer].values(), key=str)

    def _renamed(self, name: str, layer: int | None) -> str:
        """The engine's name of a tensor of a layer; in the engine's own list of such layers, if there is one."""
        rules = self.rules
        if layer is None or not (rules.layer_lists or any(rename.layers for rename in rules.names[:1])):
            return rules.renamed(name.replace("{layer}", str(layer)))
        sets = tuple(of for of, layers in self.model.layer_sets.items() if layer in layers)
        if own := next((of for of in rules.layer_lists if of in sets), None):
            number = sorted(self.model.layer_sets[own]).index(layer)
            name = f"{rules.layer_lists[own]}.{number}.{name.partition('.{layer}.')[2]}"
        return rules.renamed(name.replace("{layer}", str(layer)), sets)

    def _rank_tensor(self, name: str, parts: list[Part]) -> RankTensor:
        """The shards of some parts, joined to one tensor, with rows of zeros at its end up to a multiple."""
        component = parts[0].component
        if component and (component.use == "shape" or component.kept_once):
            parts = parts[-1:]
        array = self._joined_shards(parts)
        if step := self.rules.padded_rows.get(parts[0].role):
            array = array.padded(0, -(-array.shape[0] // step) * step)
        shape = [] if parts[0].role in self.rules.without_axes else list(_stored_shape(array, component))
        for axis in self.rules.unit_axes.get(parts[0].role, ()):
            shape.insert(axis, 1)
        origins = tuple(part.pattern for part in parts if part.array.tiles)
        return RankTensor(name, parts[0], tuple(shape), self._sections(array, parts), origins)

    def _sections(self, array: Mosaic, parts: list[Part]) -> Sections:
        """The sections of an array of these parts, with {layer} in the names."""
        patterns = {part.tensor: part.layer_pattern for part in parts}
        sections = array.sections()
        return sections.with_names(tuple(patterns[name] for name in sections.names))

    def _shard(self, part: Part) -> Mosaic:
        tp = 1 if part.expert is not None and self.parallel.ep > 1 else self.parallel.tp
        padding = split_rules(self.model, self.rules, self.parallel.tp)
        array = shard(with_split(part, self.rules), tp, self.tp_rank if tp > 1 else 0, padding)
        run = self.rules.even_rows_first.get(part.role)
        if run and part.parameter in _IN_ORDER_OF_ROWS and part.block_shape[0]:
            array = self._with_even_rows_first(part, array, array.shape[0] if run == "all" else part.dimensions[run])
        is_number = part.form is not None and part.is_scale and not any(part.block_shape) and math.prod(array.shape) == 1
        return array.flattened() if is_number else array

    def _with_even_rows_first(self, part: Part, array: Mosaic, run: int) -> Mosaic:
        """Raises UnsupportedError if rows that this separates share a scale."""
        if part.block_shape[0] != 1:
            raise UnsupportedError(
                f"each of its elements belongs to {part.block_shape[0]} rows of the weight, and {self.rules.engine} reorders the rows",
                where=part.tensor,
                why="The rows of a block would get the scales of others",
                do="Convert to hf, or add `dequantize=True`",
            )
        return array.with_even_first(0, run)

    def _stacked_experts(self, group: list[Part], fusion: Fusion | None) -> RankTensor:
        """One tensor for all experts of this rank: [experts, ...]. Experts that are alike are laid out once."""
        assert fusion is not None, "experts are stacked, so each of their roles is in a fusion"
        in_order = sorted(group, key=lambda part: fusion.roles.index(part.role))
        by_expert: dict[int, list[Part]] = {expert: [] for expert in self.experts}
        for part in in_order:
            if part.expert in by_expert:
                by_expert[part.expert].append(part)
        component = group[0].component
        keeps_one = group[0].parameter in self.rules.scales_kept_once or (component is not None and component.use == "shape")
        stored = [parts[-1:] if keeps_one else parts for parts in by_expert.values()]
        first = stored[0]
        array = self._joined_shards(first)
        is_stacked = self.model.weights[group[0].tensor].declared.stacked == EXPERTS
        if is_stacked and component is None and array.tiles:
            of_one = self._sections(array, first)
            shape = (len(stored), *_stored_shape(array, None))
            sections = Sections(of_one.names, of_one.pattern.along_first_axis(len(stored), math.prod(array.shape)))
        elif all(len(parts) == len(first) and all(map(Part.is_like, first, parts)) for parts in stored):
            of_one = self._sections(array, first)
            shape, sections = (len(stored), *_stored_shape(array, first[0].component)), _repeated(of_one, math.prod(array.shape), stored)
        else:
            array = stacked([self._joined_shards(parts) for parts in stored])
            shape, sections = _stored_shape(array, first[0].component), self._sections(array, [part for parts in stored for part in parts])
        if len(shape) == 2 and shape[1] == 1 and group[0].is_scale:
            shape = shape[:1]  # one scale for each expert
        module = group[0].pattern.rpartition("." if is_stacked else ".{expert}.")[0]
        origins = tuple(part.layer_pattern for parts in by_expert.values() for part in parts)
        return RankTensor(f"{module}.{fusion.component}_{group[0].parameter}", in_order[0], shape, sections, origins)

    def _joined_shards(self, parts: list[Part]) -> Mosaic:
        """The shards of some parts, joined. A component of a weight has the axes in which it is stored. Tables of one vocabulary are joined
        before ranks share the rows."""
        if parts[0].split.is_padded:
            parts = [replace(parts[0], array=joined([part.array for part in parts]))]
        arrays, component = [self._shard(part) for part in parts], parts[0].component
        if parts[0].role in self.rules.side_by_side:
            array = joined(arrays, axis=1)
        else:
            array = stacked(arrays) if self._stacks_others(parts[0]) else joined(arrays)
        return array.transposed() if component and component.transposed and not component.is_single else array

    def _stacks_others(self, part: Part) -> bool:
        """Whether the tensor of a part stacks the weights of experts that every token uses."""
        weight = self.model.weights.get(part.tensor)
        return weight is not None and weight.declared.stacked not in ("", EXPERTS)

    def _tied_embedding(self, part: Part) -> Iterator[RankTensor]:
        """The tied embedding, if this stage holds it, under the name or names that the engine stores."""
        head, embedding = self.model.architecture.tied
        names = {"head": head, "embedding": embedding}
        roles = [role for role in names if self._is_on_stage(role)]
        stored_as = self.rules.tied_table_stored_as
        if roles and stored_as != "both":
            roles = [stored_as if stored_as in roles or stored_as == "embedding" else roles[0]]
        for role in roles:
            yield replace(self._rank_tensor(names[role], [part]), first=replace(part, role=role))

    def _is_on_stage(self, role: str) -> bool:
        stage = 0 if role in ("embedding", "position_embedding", "embedding_norm") else self.parallel.pp - 1
        every_stage = self.rules.every_stage
        return self.pp_rank == stage or role in every_stage or role.partition(".")[0] in every_stage

    def _extra_tensors(self, tensor: RankTensor, layer: int | None, compute_dtype: DType) -> Iterator[StoredTensor]:
        """The constants that the engine expects beside a tensor."""
        first = tensor.first
        is_codes = first.component is not None and not first.is_scale
        if first.parameter != "weight" and not is_codes:
            return
        if is_codes and first.expert is not None and self.rules.zero_expert_biases:
            module = tensor.name.removesuffix(first.parameter)
            biases = (tensor.shape[0], tensor.shape[-1])
            yield constant(self._renamed(f"{module}bias", layer), compute_dtype, biases, compute_dtype.encoded(0.0))
        if is_codes and first.expert is not None and self.rules.unset_input_scales:
            experts, module = tensor.shape[0], tensor.name.removesuffix(first.parameter)
            fused = len(tensor.origins) // experts
            scales = (experts, fused) if fused > 1 else (experts,)
            unset = constant(self._renamed(f"{module}input_global_scale", layer), F32, scales, F32.encoded(1.0))
            yield replace(unset, is_unset=True)
        parent = first.pattern.rsplit(".", 2)[0]
        for extra in self.rules.extra_tensors:
            if extra.role == first.role:
                dtype = extra.dtype or compute_dtype
                value = self.model.dimensions[extra.square_root_of] ** 0.5 if extra.square_root_of else extra.value
                held = max(1, self.model.dimensions.get("kv_heads", 1) // self.parallel.tp)
                shape = tuple(evaluate(str(axis), {**self.model.dimensions, "rank_kv_heads": held}) for axis in extra.shape)
                for name in self._names_by_use(f"{parent}.{extra.name}", layer):
                    yield constant(name, dtype, shape, dtype.encoded(value))

    def _names_by_use(self, name: str, layer: int | None) -> Iterator[str]:
        """The engine's name of a constant beside a weight, or its names if a shared block has one for each use of it."""
        uses = self.model.uses_of_blocks.get(layer) if layer is not None else None
        renamed = self._renamed(name, self._named_layer(layer) if uses and layer is not None else layer)
        for use in uses if uses and USE in renamed else (None,):
            yield renamed.replace(USE, str(use))


def _stored_shape(array: Mosaic, component: Component | None) -> tuple[int, ...]:
    """The shape in which an engine holds an array. The words that share a group are no axis of their own."""
    if component and component.unit_axes:
        *stack, rows, columns = array.shape
        return (*stack, rows, 1, columns, 1)
    *outer, words = array.shape if component and component.packing and component.packing.words else (*array.shape, 1)
    return (*outer[:-1], outer[-1] * words) if outer else ()


def rank_tensors(
    model: Model, dtypes: Mapping[str, DType], rules: EngineRules, parallel: Parallel, tp_rank: int, pp_rank: int
) -> tuple[StoredTensor, ...]:
    """The tensors of one rank's state dict. dtypes: canonical name -> the element type to store."""
    return tuple(EngineRank(model, rules, parallel, tp_rank, pp_rank).tensors(dtypes))


def placeholder_dtypes(model: Model, rules: EngineRules) -> dict[str, DType]:
    """Canonical name -> F32, or F32 of a function, for callers that take the element types from elsewhere."""
    functions = rules.values
    return {weight.name: F32.of(functions[weight.role]) if weight.role in functions else F32 for weight in model.weights.values()}


@lru_cache(maxsize=1 << 16)
def in_layer(patterns: tuple[str, ...], layer: int | None) -> tuple[str, ...]:
    """The names of the tensors of one layer. Ranks that hold parts of the same tensors share the tuple."""
    return tuple(intern(pattern.replace("{layer}", str(layer))) for pattern in patterns)


def _repeated(of_one: Sections, elements: int, experts: list[list[Part]]) -> Sections:
    """The sections of one expert's array of so many elements, repeated for all experts, which are alike. experts: the parts of each."""
    numbers = {part.layer_pattern: i for i, part in enumerate(experts[0])}
    order = [numbers[name] for name in of_one.names]
    names = tuple(parts[i].layer_pattern for parts in experts for i in order)
    return Sections(names, of_one.pattern.repeated(len(experts), elements))


def _one_dtype(tensor: RankTensor, layer: int | None, dtypes: Mapping[str, DType], engine: str) -> DType:
    """The element type of all parts of a tensor in a layer. Raises: UnsupportedError if they have several."""
    names = in_layer(tensor.origins, layer)
    first = dtypes[names[0]]
    if len(set(map(id, map(dtypes.__getitem__, names)))) == 1:
        return first
    by_dtype = {dtypes[name]: name for name in names}
    if len(by_dtype) > 1:
        raise UnsupportedError(
            f"its parts have different element types: {', '.join(f'{name} {dtype}' for dtype, name in by_dtype.items())}",
            where=tensor.name.replace("{layer}", str(layer)),
            why=f"{engine} stores them as one tensor",
            do="Choose one for all with `dtype=`",
        )
    return first


def _with_component(name: str, component: str) -> str:
    """The name with another last component of its module: x.q_proj.weight -> x.qkv_proj.weight."""
    module, _, parameter = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{component}.{parameter}"
