"""How a serving engine lays out what one rank holds: data over the roles of a model, the same for all architectures.

model.parts() -> those of the stage -> each cut for the rank -> joined as the engine fuses them -> under the engine's name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.geometry.parallel import Parallel, stage_layers
from reshard.geometry.stored import StoredTensor, constant
from reshard.models.model import Model, Part
from reshard.models.roles import Heads, Split
from reshard.models.splits import SplitRules, problem, shard

# Biases that no published DeepSeek has, so that the engines' classes have no place for them.
LATENT_BIASES = frozenset({("mla.q_a", "bias"), ("mla.kv_a", "bias"), ("attention.o", "bias")})


@dataclass(frozen=True, slots=True)
class Fusion:
    """Roles that an engine stores as one tensor, one after the other, under `component` in place of their own module's name.

    Of experts: all that a rank has, stacked, as `component`_weight in the module that holds them; also where it is one role.
    """

    roles: tuple[str, ...]
    component: str


@dataclass(frozen=True, slots=True)
class ExtraTensor:
    """A tensor without weights that an engine demands beside every weight of a role, which it is named after: `name` in place of that
    weight's module. value: of all its elements, rounded to its type. dtype: None for that of the model."""

    role: str
    name: str
    value: float
    dtype: DType | None
    shape: tuple[int, ...] = ()


def normalizer(model: Model) -> ExtraTensor:
    """The factor of a model's embeddings, which gemma's classes keep beside them: the root of the hidden size."""
    return ExtraTensor("embedding", "normalizer", model.dimensions["hidden"] ** 0.5, None)


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How a serving engine lays out one rank's weights.

    partition: (number of layers, pp) -> layers per stage. vocabulary_multiple: to which the rows of tables are padded; None for the
    number of ranks. vocabulary_fits: where the ranks do not divide these rows, they are padded to so many times that multiple as there are
    ranks. every_stage: roles of the model's ends that all stages hold. as_stored: roles of fused weights that stay as the
    model has them. tied: the role under whose name a tied table is stored where a stage has both, or "both". names: of modules, by the
    role of what is first in them, where the engine has names of its own; {layer} is a layer's number within its stage. renames:
    patterns of names, in order, and what takes their place. splits: of roles that ranks share otherwise than usual. dtypes: of roles
    whose element type is not the source's (None: that of the model). shared: kinds of scales of which fused experts keep one for all.
    lacks: roles and kinds of weights for which the model's class has no place.
    experts_share_ranks: whether there must be no more tensor-parallel ranks than experts; equal_experts: whether ranks that share
    experts must have equally many; stages_need_experts: whether every stage must have a layer with some.
    """

    name: str
    fusions: tuple[Fusion, ...]
    extra_tensors: tuple[ExtraTensor, ...]
    vocabulary_multiple: int | None
    partition: Callable[[int, int], tuple[int, ...]]
    vocabulary_fits: bool = False
    every_stage: frozenset[str] = frozenset()
    as_stored: frozenset[str] = frozenset()
    tied_table_stored_as: str = "head"
    names: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    splits: Mapping[str, Split] = field(default_factory=dict)
    dtypes: Mapping[str, DType | None] = field(default_factory=dict)
    scales_kept_once: frozenset[str] = frozenset()
    unsupported: frozenset[tuple[str, str]] = frozenset()
    experts_share_ranks: bool = False
    equal_experts: bool = False
    stages_need_experts: bool = False

    def split_rules(self, model: Model, tp: int) -> SplitRules:
        rules = SplitRules(model.dimensions, self.vocabulary_multiple or tp)
        if self.vocabulary_fits and rules.padded_vocabulary(model.dimensions.get("vocab", 0)) % tp:
            return replace(rules, vocabulary_multiple=rules.vocabulary_multiple * tp)
        return rules

    def split(self, part: Part) -> Part:
        """The part with the split that it has here."""
        return replace(part, split=self.splits[part.role]) if part.role in self.splits else part

    def renamed(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


def check_degrees(model: Model, rules: EngineRules, parallel: Parallel) -> None:
    """Raises RequestError, naming the legal sizes, if the model does not split over `parallel`."""
    experts = model.dimensions.get("experts", 0)
    if parallel.ep > 1 and not experts:
        raise RequestError(f"--ep {parallel.ep}: a {model.architecture.model_type} model has no experts", do="Leave out --ep")
    if parallel.ep > 1 and parallel.ep != parallel.tp:
        raise RequestError(
            f"--ep {parallel.ep} with --tp {parallel.tp}: {rules.name} shares experts over the tensor-parallel ranks",
            do=f"Give --ep {parallel.tp}, or leave it out",
        )
    if found := degree_problem(model, rules, parallel.tp, parallel.ep):
        name, reason = found
        legal = legal_tensor_parallel_sizes(model, rules, with_experts=parallel.ep > 1)
        raise RequestError(
            f"--tp {parallel.tp} does not fit this model: {reason}",
            where=name,
            why=f"{rules.name} would refuse it, or give ranks parts of a head",
            do=f"Legal tensor-parallel sizes are {', '.join(map(str, legal)) or 'none: the model cannot be served so'}",
        )
    if unfit := stage_problem(model, rules, parallel.pp):
        raise RequestError(
            f"--pp {parallel.pp} does not fit this model: {unfit}", why=f"{rules.name} would refuse it", do="Use fewer stages"
        )


def stage_problem(model: Model, rules: EngineRules, pp: int) -> str | None:
    """Why the layers cannot be dealt to `pp` stages; None if they can."""
    counts = rules.partition(model.dimensions["layers"], pp)
    for pp_rank in range(pp if rules.stages_need_experts else 0):
        if not set(stage_layers(counts, pp_rank)) & model.sparse_layers:
            return f"stage {pp_rank} would have no layer with experts"
    return None


def legal_tensor_parallel_sizes(model: Model, rules: EngineRules, *, with_experts: bool = False) -> tuple[int, ...]:
    """The sizes over which every weight of the model splits, in ascending order. with_experts: the ranks share whole experts."""
    heads = model.dimensions["heads"]
    return tuple(tp for tp in range(1, heads + 1) if degree_problem(model, rules, tp, tp if with_experts else 1) is None)


def degree_problem(model: Model, rules: EngineRules, tp: int, ep: int = 1) -> tuple[str, str] | None:
    """The first weight that does not split over `tp` ranks (experts: over `ep`, whole), and why; None if all do."""
    split_rules, experts = rules.split_rules(model, tp), model.dimensions.get("experts", 0)
    for part in _kinds_of_parts(model, rules.as_stored, rules.unsupported):
        reason = problem(rules.split(part), 1 if part.expert is not None and ep > 1 else tp, split_rules)
        if reason:
            return part.tensor, reason
    if rules.experts_share_ranks and model.sparse_layers and tp > experts:
        return "experts", f"{tp} ranks are more than its {experts} experts"
    if rules.equal_experts and experts % ep:
        return "experts", f"{ep} ranks do not divide its {experts} experts"
    return _unaligned(model, rules)


def _unaligned(model: Model, rules: EngineRules) -> tuple[str, str] | None:
    """A weight that ends inside a block of its scales although another one follows it in the same tensor."""
    followed = {role for fusion in rules.fusions for role in fusion.roles[:-1]}
    for part in _kinds_of_parts(model, rules.as_stored, rules.unsupported):
        block = part.blocks[0] if part.blocks else None
        if block and part.role in followed and part.array.shape[0] % block:
            return (
                part.tensor,
                f"its {part.array.shape[0]} output features are no whole blocks of {block}, and others follow in the same tensor",
            )
    return None


@lru_cache(maxsize=16)
def _parts(model: Model, as_stored: frozenset[str], lacks: frozenset[tuple[str, str]]) -> dict[int | None, tuple[Part, ...]]:
    """The parts for which there is a place, by layer."""
    found: dict[int | None, list[Part]] = {}
    for part in model.parts(keep_fused=as_stored):
        if (part.role, part.parameter) not in lacks:
            found.setdefault(part.layer, []).append(part)
    return {layer: tuple(held) for layer, held in found.items()}


@lru_cache(maxsize=16)
def _kinds_of_parts(model: Model, as_stored: frozenset[str], lacks: frozenset[tuple[str, str]]) -> tuple[Part, ...]:
    """The first part of each role, kind and shape: what the legality of a degree depends on. Heads first: that they do not divide is what a
    person understands best."""
    first: dict[tuple[object, ...], Part] = {}
    for parts in _parts(model, as_stored, lacks).values():
        for part in parts:
            first.setdefault((part.role, part.parameter, part.array.shape), part)
    return tuple(sorted(first.values(), key=lambda part: not isinstance(part.split, Heads)))


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A tensor of a rank: its name, what it holds, and the parts that it is made of."""

    name: str
    array: Mosaic
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Rank:
    """One rank of an engine that serves a model."""

    model: Model
    rules: EngineRules
    parallel: Parallel
    tp_rank: int = 0
    pp_rank: int = 0

    @property
    def layers(self) -> range:
        """The layers of its stage."""
        return stage_layers(self.rules.partition(self.model.dimensions["layers"], self.parallel.pp), self.pp_rank)

    @property
    def experts(self) -> range:
        """The experts that it has of each layer: all, or a run of them, of which the first ranks' are longer by one."""
        number, ep = self.model.dimensions.get("experts", 0), self.parallel.ep
        if ep == 1:
            return range(number)
        base, rest = divmod(number, ep)
        start = self.tp_rank * base + min(self.tp_rank, rest)
        return range(start, start + base + (self.tp_rank < rest))

    def tensors(self, dtypes: Mapping[str, DType]) -> Iterator[StoredTensor]:
        """What its state dict holds, in the model's order. dtypes: of the canonical tensors, as they are to be stored.

        Raises: RequestError if parts of one tensor have different element types.
        """
        computed = model_dtype(self.model, dtypes)
        by_layer = _parts(self.model, self.rules.as_stored, self.rules.unsupported)
        ends = by_layer.get(None, ())
        groups = [[part] for part in ends if part.role == "embedding"]
        groups += [list(by_layer.get(layer, ())) for layer in self.layers]
        groups += [[part] for part in ends if part.role != "embedding"]
        for group in groups:
            here = list(self.rank_tensors_of(group))
            names = {held.name for held in here}
            for held in here:
                yield held.array.stored(held.name, _one_dtype(held, dtypes, self.rules.name))
                yield from (each for each in self._beside(held, computed) if each.name not in names)

    def rank_tensors_of(self, parts: list[Part]) -> Iterator[RankTensor]:
        """The tensors that some parts of the model, all of one layer or of none, become."""
        fusion_of = {role: fusion for fusion in self.rules.fusions for role in fusion.roles}
        groups: dict[tuple[object, ...], list[Part]] = {}
        for part in parts:
            fusion = fusion_of.get(part.role)
            # A fused tensor's parts lie together, those of experts too; others are by themselves.
            groups.setdefault((fusion.roles, part.parameter) if fusion else (part.tensor, part.role), []).append(part)
        for members in groups.values():
            first, fusion = members[0], fusion_of.get(members[0].role)
            if first.expert is not None:
                if self.experts:
                    yield self._experts(members, fusion)
            elif first.layer is None:
                yield from self._end(first)
            else:
                ordered = sorted(members, key=lambda part: fusion.roles.index(part.role)) if fusion else members
                several = fusion is not None and len({part.tensor for part in members}) > 1
                name = _component_replaced(first.tensor, fusion.component) if several and fusion else first.tensor
                arrays = [self._shard(part) for part in ordered]
                yield RankTensor(self._named(name, ordered[0]), joined(arrays), tuple(ordered))

    def _named(self, name: str, first: Part) -> str:
        """What the engine calls a tensor, which is `name` in the model's own spelling and begins with that part."""
        if first.role not in self.rules.names:
            return self.rules.renamed(name)
        layer = None if first.layer is None else first.layer - self.layers.start
        return f"{self.rules.names[first.role].format(layer=layer)}.{first.parameter}"

    def _shard(self, part: Part) -> Mosaic:
        tp = 1 if part.expert is not None and self.parallel.ep > 1 else self.parallel.tp
        array = shard(self.rules.split(part), tp, self.tp_rank if tp > 1 else 0, self.rules.split_rules(self.model, self.parallel.tp))
        return array.flattened() if part.scale and not any(part.block_shape) else array

    def _experts(self, members: list[Part], fusion: Fusion | None) -> RankTensor:
        assert fusion is not None, "experts are stacked, so each of their roles is in a fusion"
        by_expert: dict[int, list[Part]] = {expert: [] for expert in self.experts}
        for part in members:
            if part.expert in by_expert:
                by_expert[part.expert].append(part)
        arrays, kind = [], members[0].parameter
        for held in by_expert.values():
            held.sort(key=lambda part: fusion.roles.index(part.role))
            kept = held[-1:] if kind in self.rules.scales_kept_once else held
            arrays.append(joined([self._shard(part) for part in kept]))
        array = stacked(arrays)
        module = members[0].tensor.rpartition(f".{members[0].expert}.")[0]
        one_each = len(array.shape) == 2 and array.shape[1] == 1 and members[0].scale is not None
        in_order = sorted(members, key=lambda part: fusion.roles.index(part.role))
        name = self._named(f"{module}.{fusion.component}_{kind}", in_order[0])
        return RankTensor(name, array.merged(0) if one_each else array, tuple(part for held in by_expert.values() for part in held))

    def _end(self, part: Part) -> Iterator[RankTensor]:
        """What is no layer's, if the stage has it; a tied table under the name that counts there."""
        head, embedding = self.model.architecture.tied
        if not (self.model.is_tied and part.tensor == embedding):
            if self._is_here(part.role):
                yield RankTensor(self._named(part.tensor, part), self._shard(part), (part,))
            return
        by_kind = {"head": head, "embedding": embedding}
        here = [role for role in by_kind if self._is_here(role)]
        if here and self.rules.tied_table_stored_as != "both":
            here = [
                self.rules.tied_table_stored_as
                if self.rules.tied_table_stored_as in here or self.rules.tied_table_stored_as == "embedding"
                else here[0]
            ]
        for role in here:
            yield RankTensor(self._named(by_kind[role], replace(part, role=role)), self._shard(part), (part,))

    def _is_here(self, role: str) -> bool:
        own = 0 if role in ("embedding", "position_embedding") else self.parallel.pp - 1
        return self.pp_rank == own or role in self.rules.every_stage

    def _beside(self, held: RankTensor, model_dtype: DType) -> Iterator[StoredTensor]:
        first = held.parts[0] if held.parts else None
        if first is None or first.parameter != "weight":
            return
        module = first.tensor.removesuffix(".weight").rpartition(".")[0]
        for each in self.rules.extra_tensors:
            if each.role == first.role:
                dtype = each.dtype or model_dtype
                yield constant(self.rules.renamed(f"{module}.{each.name}"), dtype, each.shape, dtype.encoded(each.value))


def rank_tensors(
    model: Model, dtypes: Mapping[str, DType], rules: EngineRules, parallel: Parallel, tp_rank: int, pp_rank: int
) -> tuple[StoredTensor, ...]:
    """What one rank's state dict holds. `dtypes` maps canonical names to the element types to be stored."""
    return tuple(Rank(model, rules, parallel, tp_rank, pp_rank).tensors(dtypes))


def stored_dtypes(model: Model, rules: EngineRules, dtypes: Mapping[str, DType]) -> dict[str, DType]:
    """The element types that an engine has, where it does not keep those that are given."""
    kinds = {w.name: "scale" if w.scale else w.role for w in model.weights.values()}
    own = {kind: dtype or model_dtype(model, dtypes) for kind, dtype in rules.dtypes.items()}
    return {name: own.get(kinds.get(name, ""), dtype) for name, dtype in dtypes.items()}


def shared_copies(model: Model, rules: EngineRules) -> dict[str, str]:
    """Canonical tensors for which an engine keeps another one, and which must equal it: scales of fused experts."""
    last_of = {role: fusion.roles[-1] for fusion in rules.fusions for role in fusion.roles}
    left_out = layers_not_served(model)
    experts = (part for part in model.parts(keep_fused=rules.as_stored) if part.expert is not None and part.tensor not in left_out)
    scales = [part for part in experts if part.parameter in rules.scales_kept_once]
    kept = {(part.layer, part.expert, part.parameter, part.role): part.tensor for part in scales}
    found = {part.tensor: kept[part.layer, part.expert, part.parameter, last_of[part.role]] for part in scales}
    return {name: other for name, other in found.items() if name != other}


def weights_without_slot(model: Model, rules: EngineRules) -> tuple[str, ...]:
    """The weights for which the engine's class of the model has no place, although they change what the model answers."""
    placed = {part.tensor for parts in _parts(model, rules.as_stored, rules.unsupported).values() for part in parts}
    return tuple(name for name in model.weights if name not in placed)


def layers_not_served(model: Model) -> dict[str, str]:
    """The weights that engines leave out, and why."""
    layers = model.dimensions["layers"]
    why = "predicts further tokens; the served model has no such layer"
    return {weight.name: why for weight in model.weights.values() if weight.layer is not None and weight.layer >= layers}


def _one_dtype(held: RankTensor, dtypes: Mapping[str, DType], engine: str) -> DType:
    kinds = {dtypes[part.tensor]: part.tensor for part in held.parts}
    if len(kinds) > 1:
        raise RequestError(
            f"its parts have different element types: {', '.join(f'{name} {dtype}' for dtype, name in kinds.items())}",
            where=held.name,
            why=f"{engine} stores them as one tensor",
            do="Choose one for all with --dtype",
        )
    return next(iter(kinds))


def model_dtype(model: Model, dtypes: Mapping[str, DType]) -> DType:
    """The element type that the model computes with: that of its first table, which nothing quantises."""
    return dtypes[next(weight.name for weight in model.weights.values() if weight.role == "embedding")]


def _component_replaced(name: str, component: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{component}.{kind}"
