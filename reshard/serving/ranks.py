"""EngineRank: the tensors in the state dict of one rank of a serving engine.

the model's parts -> those of this rank's stage -> the shard of each -> joined as the engine fuses them -> under the engine's names
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.parallel import Parallel, stage_layers
from reshard.geometry.stored import StoredTensor, constant
from reshard.models.model import Model, Part
from reshard.models.splits import shard
from reshard.serving.rules import EngineRules, Fusion
from reshard.serving.weights import model_dtype, parts_by_layer


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A tensor in a rank's state dict."""

    name: str
    """The engine's name."""

    array: Mosaic
    """The boxes of canonical tensors that it holds, and their places in it."""

    parts: tuple[Part, ...]
    """The parts that it is made of."""


@dataclass(frozen=True)
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

    @property
    def layers(self) -> range:
        """The layers of its stage."""
        return stage_layers(self.rules.layers_per_stage(self.model.dimensions["layers"], self.parallel.pp), self.pp_rank)

    @property
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

        Raises: RequestError if parts of one tensor have different element types.
        """
        compute_dtype = model_dtype(self.model, dtypes)
        by_layer = parts_by_layer(self.model, self.rules)
        ends = by_layer.get(None, ())
        groups = [[part] for part in ends if part.role == "embedding"]
        groups += [list(by_layer.get(layer, ())) for layer in self.layers]
        groups.append([part for part in ends if part.role != "embedding"])
        for group in groups:
            tensors = list(self.rank_tensors_of(group))
            names = {tensor.name for tensor in tensors}
            for tensor in tensors:
                yield tensor.array.stored(tensor.name, _one_dtype(tensor, dtypes, self.rules.engine))
                yield from (extra for extra in self._extra_tensors(tensor, compute_dtype) if extra.name not in names)

    def rank_tensors_of(self, parts: list[Part]) -> Iterator[RankTensor]:
        """The tensors that some parts of the model become. All parts are of one layer, or all are outside of the layers."""
        fusion_of = {role: fusion for fusion in reversed(self.rules.fusions) for role in fusion.roles}
        groups: dict[tuple[object, ...], list[Part]] = {}
        for part in parts:
            fusion = fusion_of.get(part.role)
            # The parts of a fused tensor are one group, all experts included. Any other tensor of the model is a group of its own: its
            # sections, such as [z; x; b; c; dt], stay one tensor, in which a rank holds its share of each.
            block = part.tensor.rsplit(".", 2)[0] if part.layer is None else None
            groups.setdefault((fusion.roles, part.parameter, block) if fusion else (part.tensor,), []).append(part)
        for group in groups.values():
            first, fusion = group[0], fusion_of.get(group[0].role)
            if first.expert is not None:
                if self.experts:
                    yield self._stacked_experts(group, fusion)
            elif first.layer is None and self.model.is_tied and first.tensor == self.model.architecture.tied[1]:
                yield from self._tied_embedding(first)
            elif first.layer is not None or self._is_on_stage(first.role):
                ordered = sorted(group, key=lambda part: fusion.roles.index(part.role)) if fusion else group
                is_fused = fusion is not None and len({part.tensor for part in group}) > 1
                name = _with_component(ordered[0].tensor, fusion.component) if is_fused and fusion else first.tensor
                shards = [self._shard(part) for part in ordered]
                yield RankTensor(self._engine_name(name, ordered[0]), joined(shards), tuple(ordered))

    def _engine_name(self, name: str, first: Part) -> str:
        """The engine's name of a tensor whose Hugging Face name is `name` and whose first part is `first`."""
        module_name = self.rules.module_name(first.role)
        if module_name is None:
            return self.rules.renamed(name)
        layer = None if first.layer is None else first.layer - self.layers.start
        return f"{module_name.format(layer=layer)}.{first.parameter}"

    def _shard(self, part: Part) -> Mosaic:
        tp = 1 if part.expert is not None and self.parallel.ep > 1 else self.parallel.tp
        split_rules = self.rules.split_rules(self.model, self.parallel.tp)
        array = shard(self.rules.with_split(part), tp, self.tp_rank if tp > 1 else 0, split_rules)
        run = self.rules.quirks.even_rows_first.get(part.role)
        if run and part.parameter == "weight":
            array = array.with_even_first(0, self.model.dimensions[run])
        return array.flattened() if part.scale and not any(part.block_shape) else array

    def _stacked_experts(self, group: list[Part], fusion: Fusion | None) -> RankTensor:
        """One tensor for all experts of this rank: [experts, ...]."""
        assert fusion is not None, "experts are stacked, so each of their roles is in a fusion"
        in_order = sorted(group, key=lambda part: fusion.roles.index(part.role))
        by_expert: dict[int, list[Part]] = {expert: [] for expert in self.experts}
        for part in in_order:
            if part.expert in by_expert:
                by_expert[part.expert].append(part)
        first, shards = group[0], []
        for parts in by_expert.values():
            stored_parts = parts[-1:] if first.parameter in self.rules.scales_kept_once else parts
            shards.append(joined([self._shard(part) for part in stored_parts]))
        array = stacked(shards)
        has_one_scale_per_expert = len(array.shape) == 2 and array.shape[1] == 1 and first.scale is not None
        is_stacked = self.model.weights[first.tensor].declared.stacked
        module = first.tensor.rpartition("." if is_stacked else f".{first.expert}.")[0]
        name = self._engine_name(f"{module}.{fusion.component}_{first.parameter}", in_order[0])
        parts_here = tuple(part for parts in by_expert.values() for part in parts)
        return RankTensor(name, array.merged(0) if has_one_scale_per_expert else array, parts_here)

    def _tied_embedding(self, part: Part) -> Iterator[RankTensor]:
        """The tied embedding, if this stage holds it, under the name or names that the engine stores."""
        head, embedding = self.model.architecture.tied
        names = {"head": head, "embedding": embedding}
        roles = [role for role in names if self._is_on_stage(role)]
        stored_as = self.rules.quirks.tied_table_stored_as
        if roles and stored_as != "both":
            roles = [stored_as if stored_as in roles or stored_as == "embedding" else roles[0]]
        for role in roles:
            yield RankTensor(self._engine_name(names[role], replace(part, role=role)), self._shard(part), (part,))

    def _is_on_stage(self, role: str) -> bool:
        stage = 0 if role in ("embedding", "position_embedding", "embedding_norm") else self.parallel.pp - 1
        every_stage = self.rules.quirks.every_stage
        return self.pp_rank == stage or role in every_stage or role.partition(".")[0] in every_stage

    def _extra_tensors(self, tensor: RankTensor, compute_dtype: DType) -> Iterator[StoredTensor]:
        """The constants that the engine expects beside a tensor."""
        first = tensor.parts[0] if tensor.parts else None
        if first is None or first.parameter != "weight":
            return
        parent = first.tensor.removesuffix(".weight").rpartition(".")[0]
        for extra in self.rules.extra_tensors:
            if extra.role == first.role:
                dtype = extra.dtype or compute_dtype
                yield constant(self.rules.renamed(f"{parent}.{extra.name}"), dtype, extra.shape, dtype.encoded(extra.value))


def rank_tensors(
    model: Model, dtypes: Mapping[str, DType], rules: EngineRules, parallel: Parallel, tp_rank: int, pp_rank: int
) -> tuple[StoredTensor, ...]:
    """The tensors of one rank's state dict. dtypes: canonical name -> the element type to store."""
    return tuple(EngineRank(model, rules, parallel, tp_rank, pp_rank).tensors(dtypes))


def placeholder_dtypes(model: Model) -> dict[str, DType]:
    """Canonical name -> F32, for callers that need only the names and shapes of a rank's tensors."""
    return dict.fromkeys(model.weights, F32)


def _one_dtype(tensor: RankTensor, dtypes: Mapping[str, DType], engine: str) -> DType:
    by_dtype = {dtypes[part.tensor]: part.tensor for part in tensor.parts}
    if len(by_dtype) > 1:
        raise UnsupportedError(
            f"its parts have different element types: {', '.join(f'{name} {dtype}' for dtype, name in by_dtype.items())}",
            where=tensor.name,
            why=f"{engine} stores them as one tensor",
            do="Choose one for all with --dtype",
        )
    return next(iter(by_dtype))


def _with_component(name: str, component: str) -> str:
    """The name with another last component of its module: x.q_proj.weight -> x.qkv_proj.weight."""
    module, _, parameter = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{component}.{parameter}"
