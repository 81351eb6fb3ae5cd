"""Which degrees a model can be served at, and what each rank holds then: weights, copies of them, and room for tokens.

Weights are counted in what the engine's rules lay out for a rank, byte by byte; but layers that are alike are laid out once.

    a stage's rank = the ends of the model that the stage has + its layers, each the bytes of its kind

Of the ranks that share a stage the first holds most: all parts are equal but for experts, of which the first ranks have one more where they
do not come out even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.parallel import Parallel, stage_layers
from reshard.geometry.stored import StoredTensor
from reshard.models.model import Model
from reshard.serving import kv_cache
from reshard.serving.rules import EngineRules, Rank, check_degrees, degree_problem, model_dtype, stored_dtypes, weights_without_slot

RulesFor = Callable[[Parallel], EngineRules]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a GPU offers. utilization: the part of it that the engine takes; reserve: of that, bytes for activations and all else that is
    neither weight nor cache. max_model_len: tokens of the longest sequence."""

    nbytes: int
    utilization: float = 0.9
    reserve: int = 0
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise RequestError(f"--gpu-memory-utilization {self.utilization}: a part of the whole is expected, such as 0.9")

    @property
    def usable(self) -> int:
        return int(self.nbytes * self.utilization) - self.reserve


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """How much fits beside the weights: bytes for the cache (on the rank with the fewest tokens), tokens, sequences of the longest kind."""

    cache: int
    tokens: int
    sequences: int | None


@dataclass(frozen=True, slots=True)
class Stage:
    """What the fullest rank of one pipeline stage holds: bytes of weights, those of them that other tensor-parallel ranks hold as well, and
    the cache's bytes per token and per sequence of the longest kind."""

    layers: range
    weights: int
    replicated: int
    cache_per_token: int
    cache_per_sequence: int | None


@dataclass(frozen=True, slots=True)
class DegreeRow:
    """One choice of parallel sizes: why it is not possible, or what its stages hold."""

    parallel: Parallel
    problem: str | None
    stages: tuple[Stage, ...] = ()
    room: CacheCapacity | None = None

    @property
    def fullest(self) -> Stage | None:
        """The stage with most weights."""
        return max(self.stages, key=lambda stage: stage.weights, default=None)

    @property
    def cache_per_token(self) -> int:
        """Of the stage that needs most."""
        return max((stage.cache_per_token for stage in self.stages), default=0)


@dataclass(frozen=True, slots=True)
class DegreeReport:
    """The answer for one model and engine."""

    model_type: str
    cache_dtype: DType
    memory: Memory | None
    rows: tuple[DegreeRow, ...]
    assumptions: tuple[str, ...]


def degrees(
    model: Model,
    dtypes: Mapping[str, DType],
    rules_for: RulesFor,
    parallels: Sequence[Parallel],
    *,
    cache_dtype: DType | None = None,
    memory: Memory | None = None,
) -> DegreeReport:
    """What ranks hold at each of the sizes. dtypes: of the canonical tensors, as a conversion would store them.

    Raises: RequestError if the engine does not serve the model at any size.
    """
    own, kinds = cache_dtype or model_dtype(model, dtypes), _kinds_of_layers(model, dtypes)
    measures: dict[tuple[int, int], _Measure] = {}
    rows: list[DegreeRow] = []
    refusal: RequestError | None = None
    rules: EngineRules | None = None
    for parallel in parallels:
        try:
            rules = rules_for(parallel)
        except RequestError as error:
            refusal = refusal or error
            rows.append(DegreeRow(parallel, error.what))
            continue
        if problem := _problem(model, rules, parallel):
            rows.append(DegreeRow(parallel, problem))
            continue
        sizes = (parallel.tp, parallel.ep)
        if sizes not in measures:
            measures[sizes] = _Measure(model, rules, parallel, stored_dtypes(model, rules, dtypes), kinds)
        stages = tuple(_stages(model, rules, parallel, measures[sizes], own, memory))
        rows.append(DegreeRow(parallel, None, stages, _room(stages, memory) if memory else None))
    if refusal is not None and all(row.problem == refusal.what for row in rows):
        raise refusal
    return DegreeReport(model.architecture.model_type, own, memory, tuple(rows), _assumptions(model, own, memory, rules))


def _problem(model: Model, rules: EngineRules, parallel: Parallel) -> str | None:
    """Why the engine would refuse these sizes, with the numbers; None if it would not."""
    try:
        check_degrees(model, rules, parallel)
    except RequestError as error:
        found = degree_problem(model, rules, parallel.tp, parallel.ep)
        return f"{found[1]} ({found[0]})" if found and (parallel.ep == 1 or "experts" in model.dimensions) else error.what
    return None


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes on a rank, and those of them that another rank of the stage has, too."""

    held: int = 0
    replicated: int = 0

    def __add__(self, other: _Bytes) -> _Bytes:
        return _Bytes(self.held + other.held, self.replicated + other.replicated)

    def __sub__(self, other: _Bytes) -> _Bytes:
        return _Bytes(self.held - other.held, self.replicated - other.replicated)


class _Measure:
    """Bytes of the fullest rank at one tensor- and expert-parallel size, of any stage: measured once per kind of layer and of ends."""

    def __init__(self, model: Model, rules: EngineRules, parallel: Parallel, dtypes: Mapping[str, DType], kinds: list[int]) -> None:
        self.model, self.rules, self.parallel, self.dtypes, self.kinds = model, rules, parallel, dtypes, kinds
        self.found: dict[object, _Bytes] = {}

    def stage(self, layers: range, first: bool, last: bool) -> _Bytes:
        return sum((self._layer(layer) for layer in layers), self._ends(first, last))

    def _layer(self, layer: int) -> _Bytes:
        kind = self.kinds[layer]
        if kind not in self.found:
            count = self.model.dimensions["layers"]
            between = self._bytes((layer, 1, count - layer - 1), 1)
            self.found[kind] = between - self._ends(first=False, last=False)
        return self.found[kind]

    def _ends(self, first: bool, last: bool) -> _Bytes:
        """What a stage without layers holds: the tables that it has, as one of its neighbours has all layers."""
        if (first, last) not in self.found:
            before, behind = () if first else (0,), () if last else (0,)
            self.found[first, last] = self._bytes((*before, 0, *behind), len(before))
        return self.found[first, last]

    def _bytes(self, counts: tuple[int, ...], pp_rank: int) -> _Bytes:
        """What the first rank holds of one stage, if the stages had so many layers each."""
        rules = replace(self.rules, partition=lambda layers, pp: counts)
        sizes = replace(self.parallel, pp=len(counts))
        ranks = (Rank(self.model, rules, sizes, tp_rank, pp_rank) for tp_rank in range(min(2, sizes.tp)))
        own, *others = (tuple(rank.tensors(self.dtypes)) for rank in ranks)
        elsewhere = {origin for tensors in others for tensor in tensors for origin, _ in _origins(tensor)}
        replicated = sum(nbytes for tensor in own for origin, nbytes in _origins(tensor) if origin in elsewhere)
        return _Bytes(sum(tensor.nbytes for tensor in own), replicated)


def _origins(tensor: StoredTensor) -> Iterator[tuple[object, int]]:
    """What a stored tensor holds, each with its bytes: boxes of weights, or itself if it holds none. A rank that has a copy of something is
    a neighbour of another one that has it, and two ranks' boxes are equal or disjoint."""
    if not tensor.sections:
        yield tensor.name, tensor.nbytes
    for section in tensor.sections:
        yield (section.name, section.box), section.box.volume * tensor.dtype.itemsize


def _kinds_of_layers(model: Model, dtypes: Mapping[str, DType]) -> list[int]:
    """Per layer the number of its kind: those of one kind have the same weights, of the same shapes and element types."""
    rows: list[list[object]] = [[] for _ in range(model.dimensions["layers"])]
    for weight in model.weights.values():
        if weight.layer is not None and weight.layer < len(rows):
            rows[weight.layer].append((weight.declared.name, weight.shape, weight.name.rpartition(".")[2], dtypes[weight.name]))
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(tuple(row), len(numbers)) for row in rows]


def _stages(
    model: Model, rules: EngineRules, parallel: Parallel, measure: _Measure, cache_dtype: DType, memory: Memory | None
) -> Iterator[Stage]:
    counts = rules.partition(model.dimensions["layers"], parallel.pp)
    kept = kv_cache.windows(model)
    per_layer = kv_cache.layer_elements(model, parallel.tp) * cache_dtype.itemsize
    longest = memory.max_model_len if memory else None
    for pp_rank in range(parallel.pp):
        layers = stage_layers(counts, pp_rank)
        found = measure.stage(layers, first=pp_rank == 0, last=pp_rank == parallel.pp - 1)
        remembered = None if longest is None else sum(min(longest, kept[layer] or longest) for layer in layers)
        yield Stage(
            layers,
            found.held,
            found.replicated,
            cache_per_token=len(layers) * per_layer,
            cache_per_sequence=None if remembered is None else remembered * per_layer,
        )


def _room(stages: Sequence[Stage], memory: Memory) -> CacheCapacity:
    """What fits on the stage where least does; a stage without layers remembers nothing, and sets no limit."""
    rooms = []
    for stage in stages:
        cache = memory.usable - stage.weights
        if cache <= 0:
            return CacheCapacity(cache, 0, None if memory.max_model_len is None else 0)
        if not stage.cache_per_token:
            continue
        if stage.cache_per_sequence is None or memory.max_model_len is None:
            rooms.append(CacheCapacity(cache, cache // stage.cache_per_token, None))
        else:
            tokens = cache * memory.max_model_len // stage.cache_per_sequence
            rooms.append(CacheCapacity(cache, tokens, cache // stage.cache_per_sequence))
    return min(rooms, key=lambda room: room.tokens)


def _assumptions(model: Model, cache_dtype: DType, memory: Memory | None, rules: EngineRules | None) -> tuple[str, ...]:
    said = [f"the KV cache is {cache_dtype.torch}: 2 x head size x KV heads of the rank per layer, one latent vector with MLA"]
    if window := kv_cache.unsaid_window(model):
        said.append(f"the config has a sliding window of {window} and no layer_types: all layers are counted in full")
    elif kept := [each for each in kv_cache.windows(model) if each]:
        said.append(f"{len(kept)} layers keep {max(kept)} tokens of a sequence; what a chunk of a prompt adds for a while is not counted")
    if memory:
        said.append(f"the engine takes {memory.utilization:.0%} of a GPU's {memory.nbytes:,} bytes (--gpu-memory-utilization)")
        said.append(f"{memory.reserve:,} bytes of that are kept for activations and CUDA graphs (--reserve), the rest is weights and cache")
        said.append("tokens are not rounded to the cache's blocks")
    if rules and (names := weights_without_slot(model, rules)):
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said.append(f"{rules.name} has no place for {names[0]}{others}: they are not counted")
    return tuple(said)
