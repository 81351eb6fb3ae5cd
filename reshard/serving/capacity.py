"""The parallel sizes at which an engine serves a model, what each rank holds at each of them, and how many tokens fit beside the weights.

The bytes of weights are the exact sizes of the tensors that the engine's rules lay out for a rank. Layers with equal weights are of one
kind, and each kind is laid out once. The ends are the weights outside of the layers: embeddings, final norm and head.

    bytes of a stage's rank = bytes of the ends on that stage + for each of its layers, the bytes of a layer of that kind

The first rank of a stage holds most: all ranks hold equal amounts, except that the first ranks hold one more expert if ep does not divide
the number of experts.

Elements of the KV cache per token, layer and rank:

    attention             2 x head_dim x KV heads of the rank, max(1, kv_heads / tp): with tp > kv_heads it shrinks no further;
                          head_dim + value_dim, if values have another width
    latent (MLA)          kv_rank + rope_dim: one vector for all heads, the same on every rank
    compressed            cached_dim / compress_rate: such a vector for several tokens; windows and keys of indexers are not counted

A layer with a sliding window caches at most the window's tokens of a sequence. A layer without attention caches nothing for a token.
Source: vLLM 0.32, ModelConfig.get_num_kv_heads and v1/kv_cache_interface.py (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import RequestError, some
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel, stage_layers
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns, StoredTensor
from reshard.geometry.value import Tabular, value
from reshard.models.engine_rules import EngineRules
from reshard.models.model import Model
from reshard.serving.legality import check_degrees, check_stages, degree_problem
from reshard.serving.ranks import EngineRank
from reshard.serving.weights import model_dtype, parts_by_kind, stored_dtypes, weights_without_slot

if TYPE_CHECKING:
    from reshard.geometry.table import Table

RulesFor = Callable[[Parallel], EngineRules]
_MOST_RANKS = 64
"""The tensor-parallel sizes up to which those that the engine takes are named."""


@value
class GpuMemory:
    """The memory of one GPU."""

    JSON = "gpu_memory=nbytes gpu_memory_utilization=utilization reserve usable max_model_len"

    nbytes: int
    """Bytes in all."""
    utilization: float = 0.9
    """The fraction that the engine uses."""
    reserve: int = 0
    """Bytes of that fraction for activations and everything else that is neither weights nor KV cache."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None if it does not matter."""

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise RequestError(f"`gpu_memory_utilization={self.utilization}`: a fraction of 1 is expected, such as 0.9")

    @property
    def usable(self) -> int:
        """Bytes for weights and KV cache."""
        return int(self.nbytes * self.utilization) - self.reserve


@value
class CacheCapacity:
    """What fits beside the weights, on the stage where the fewest tokens fit."""

    JSON = "fits kv_bytes=nbytes tokens sequences"

    nbytes: int
    """Bytes left for the KV cache; negative if the weights do not fit."""
    tokens: int
    """Tokens that fit."""
    sequences: int | None
    """Sequences of the longest length that fit; None if that length is not given."""

    @property
    def fits(self) -> bool:
        """Whether there is any room for a KV cache."""
        return self.nbytes > 0


@value
class Stage:
    """What the fullest rank of one pipeline stage holds."""

    JSON = "layers weights replicated kv_bytes_per_token=cache_per_token kv_bytes_per_sequence=cache_per_sequence"

    layers: range
    """The stage's layers."""
    weights: int
    """Bytes of weights."""
    replicated: int
    """Bytes of weights that another tensor-parallel rank of the stage holds as well."""
    cache_per_token: int
    """Bytes of KV cache for one token."""
    cache_per_sequence: int | None
    """Bytes of KV cache for one sequence of the longest length; None if that length is not given."""


@value
class DegreeRow:
    """One choice of parallel sizes: what its stages hold, or why the engine refuses it."""

    JSON = (
        "tp=parallel.tp pp=parallel.pp ep=parallel.ep gpus legal problem weights=fullest.weights replicated=fullest.replicated "
        "kv_bytes_per_token room=capacity stages"
    )

    parallel: Parallel
    """The sizes."""
    problem: str | None
    """Why the engine refuses them; None if it does not."""
    stages: tuple[Stage, ...] = ()
    """Every pipeline stage; empty if the sizes are refused."""
    capacity: CacheCapacity | None = None
    """What fits beside the weights; None if the GPU's memory is not given."""

    @property
    def fullest(self) -> Stage | None:
        """The stage with most weights; None if the sizes are refused."""
        return max(self.stages, key=lambda stage: stage.weights, default=None)

    @property
    def cache_per_token(self) -> int:
        """Bytes of KV cache for one token, on the stage that needs most."""
        return max((stage.cache_per_token for stage in self.stages), default=0)


@value
class DegreeReport(Tabular):
    """Several choices of parallel sizes for one model and engine."""

    JSON = "model_type kv_dtype=cache_dtype.torch memory degrees=rows assumptions"

    model_type: str
    """The model's type."""
    cache_dtype: DType
    """Element type of the KV cache."""
    memory: GpuMemory | None
    """The GPU's memory, if it is given."""
    rows: tuple[DegreeRow, ...]
    """One row for each choice, in the order of the request."""
    assumptions: tuple[str, ...]
    """What the numbers assume, as sentences."""
    parameters: int | None = None
    """The number of the model's parameters; None if a learned layout says what ranks hold."""
    others: tuple[Parallel, ...] = ()
    """If every choice is refused: the sizes with up to 64 tensor-parallel ranks that are not, at the pipeline sizes of the request."""

    def table(self) -> Table:
        """A row for each choice of sizes: what the fullest rank holds, in bytes, and what fits beside it; or why the engine refuses it."""
        from reshard.geometry.table import Table

        columns = ("tp", "pp", "ep", "gpus", "weights", "replicated", "kv_bytes_per_token", "kv_bytes", "tokens", "sequences", "problem")
        rows = []
        for row in self.rows:
            sizes, fullest, room = row.parallel, row.fullest, row.capacity
            held = (None,) * 3 if fullest is None else (fullest.weights, fullest.replicated, row.cache_per_token)
            left = (None,) * 3 if room is None else (room.nbytes, room.tokens, room.sequences)
            rows.append((sizes.tp, sizes.pp, sizes.ep, sizes.tp * sizes.pp, *held, *left, row.problem))
        return Table(columns, tuple(rows))

    def __repr__(self) -> str:
        best = self.smallest_that_fits
        fits = "" if self.memory is None else f", {best.parallel} fits" if best else ", none fits"
        return f"DegreeReport({self.model_type}, {plural(len(self.rows), 'choice')} of sizes{fits})"

    @property
    def smallest_that_fits(self) -> DegreeRow | None:
        """The sizes with the fewest GPUs at which room for a KV cache is left; None if there are none, or no GPU's memory is given."""
        fitting = [row for row in self.rows if row.capacity is not None and row.capacity.fits]
        return min(fitting, key=lambda row: (row.parallel.tp * row.parallel.pp, row.parallel.pp), default=None)


def degree_report(
    model: Model,
    dtypes: Mapping[str, DType],
    rules_for: RulesFor,
    parallels: Sequence[Parallel],
    *,
    cache_dtype: DType | None = None,
    memory: GpuMemory | None = None,
) -> DegreeReport:
    """What ranks hold at each of the parallel sizes. dtypes: canonical name -> the element type that a conversion would store.

    Raises: RequestError if the engine does not serve the model at any size.
    """
    cache_dtype, kinds = cache_dtype or model_dtype(model, dtypes), _kinds_of_layers(model, dtypes)
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
            measures[sizes] = _Measure(model, rules, stored_dtypes(model, rules, dtypes), kinds)
        stages = tuple(_stages(model, rules, parallel, measures[sizes], cache_dtype, memory))
        rows.append(DegreeRow(parallel, None, stages, _capacity(stages, memory) if memory else None))
    if refusal is not None and all(row.problem == refusal.what for row in rows):
        raise refusal
    others = () if any(row.stages for row in rows) else tuple(_others(model, rules_for, parallels))
    assumptions = _assumptions(model, cache_dtype, memory, rules)
    return DegreeReport(model.architecture.model_type, cache_dtype, memory, tuple(rows), assumptions, others=others)


def _others(model: Model, rules_for: RulesFor, refused: Sequence[Parallel]) -> Iterator[Parallel]:
    """The sizes that the engine takes, where it refuses those of the request."""
    for pp, has_ep in dict.fromkeys((parallel.pp, parallel.ep > 1) for parallel in refused):
        for tp in range(1, _MOST_RANKS + 1):
            parallel = Parallel(tp, pp, tp if has_ep else 1)
            with suppress(RequestError):
                if _problem(model, rules_for(parallel), parallel) is None:
                    yield parallel


def _problem(model: Model, rules: EngineRules, parallel: Parallel) -> str | None:
    """Why the engine would refuse these sizes, with the numbers; None if it would not."""
    try:
        check_degrees(model, rules, parallel)
        check_stages(model, parallel.pp)
    except RequestError as error:
        refused = degree_problem(model, rules, parallel.tp, parallel.ep)
        if refused and (parallel.ep == 1 or "experts" in model.dimensions):
            name, reason = refused
            return f"{reason} ({name})"
        return error.what
    return None


class _Measure:
    """Bytes of the fullest rank of any stage, at one tensor- and expert-parallel size: all of them, and those that another rank of the
    stage holds as well. Each kind of layer and of ends is measured once."""

    def __init__(self, model: Model, rules: EngineRules, dtypes: Mapping[str, DType], kinds: list[int]) -> None:
        self.model, self.rules, self.dtypes, self.kinds = model, rules, dtypes, kinds
        by_kind = parts_by_kind(model, rules).items()
        self.parts = {layer: parts for kind, parts in by_kind for layer in (kind.layers if kind else (None,))}
        self.measured: dict[object, Columns] = {}

    def stage(self, parallel: Parallel, pp_rank: int, layers: range) -> Columns:
        ranks = [EngineRank(self.model, self.rules, parallel, tp_rank, pp_rank) for tp_rank in range(min(2, parallel.tp))]
        ends = self._measured((pp_rank == 0, pp_rank == parallel.pp - 1), ranks, None)
        return sum((self._measured(self.kinds[layer], ranks, layer) for layer in layers), ends)

    def _measured(self, kind: object, ranks: Sequence[EngineRank], layer: int | None) -> Columns:
        """What the first rank holds of a layer (None: outside of the layers). kind: of that layer, or of the stage's ends."""
        if kind not in self.measured:
            first, *others = (tuple(rank.stored(self.parts.get(layer, ()), layer, self.dtypes)) for rank in ranks)
            self.measured[kind] = np.array([sum(tensor.nbytes for tensor in first), sum(_shared_bytes(first, other) for other in others)])
        return self.measured[kind]


def _shared_bytes(first: Sequence[StoredTensor], second: Sequence[StoredTensor]) -> int:
    """The bytes of a rank that its neighbour holds as well: boxes of weights, and tensors that hold none.

    Replicas sit on neighbouring ranks, and the boxes of two ranks are equal or disjoint. So the second rank is enough to find replicas of
    what the first one holds.
    """
    elsewhere = {box for box, _ in _boxes(second)}
    return sum(nbytes for box, nbytes in _boxes(first) if box in elsewhere)


def _boxes(tensors: Sequence[StoredTensor]) -> Iterator[tuple[object, int]]:
    """Each box of a weight in stored tensors, and each tensor that holds none, with its bytes."""
    for tensor in tensors:
        if not tensor.sections:
            yield tensor.name, tensor.nbytes
        names = np.array(tensor.sections.names, object)
        for _, rows, pattern in tensor.sections.pattern.with_ndim():
            boxes = zip(names[rows], map(bytes, pattern.offsets), map(bytes, pattern.sizes), strict=True)
            yield from zip(boxes, (pattern.volumes * tensor.dtype.itemsize).tolist(), strict=True)


def _kinds_of_layers(model: Model, dtypes: Mapping[str, DType]) -> list[int]:
    """The kind of each layer, as an index. Layers of one kind have the same weights, of the same shapes and element types."""
    dtypes_of: list[list[int]] = [[] for _ in range(model.dimensions["layers"])]
    for weight in model.weights.values():
        if weight.layer is not None and weight.layer < len(dtypes_of):
            dtypes_of[weight.layer].append(id(dtypes[weight.name]))
    alike = {layer: number for number, kind in enumerate(model.layer_kinds) for layer in kind.layers}
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault((alike.get(layer), *row), len(numbers)) for layer, row in enumerate(dtypes_of)]


def _stages(
    model: Model, rules: EngineRules, parallel: Parallel, measure: _Measure, cache_dtype: DType, memory: GpuMemory | None
) -> Iterator[Stage]:
    counts = rules.layers_per_stage(model.dimensions["layers"], parallel.pp)
    windows, caching = _windows(model), _caching_layers(model)
    of_layer = {layer: cached_elements(model, layer, parallel.tp) * cache_dtype.itemsize for layer in caching}
    longest = memory.max_model_len if memory else None
    for pp_rank in range(parallel.pp):
        layers = stage_layers(counts, pp_rank)
        weights, replicated = measure.stage(parallel, pp_rank, layers).tolist()
        cached = [layer for layer in layers if layer in caching]
        whole = None if longest is None else sum(of_layer[layer] * min(longest, windows[layer] or longest) for layer in cached)
        yield Stage(layers, weights, replicated, sum(of_layer[layer] for layer in cached), whole)


def _capacity(stages: Sequence[Stage], memory: GpuMemory) -> CacheCapacity:
    """What fits on the stage where the fewest tokens fit. A stage without layers caches nothing and sets no limit."""
    capacities = []
    for stage in stages:
        nbytes = memory.usable - stage.weights
        if nbytes <= 0:
            return CacheCapacity(nbytes, 0, None if memory.max_model_len is None else 0)
        if not stage.cache_per_token:
            continue
        if stage.cache_per_sequence is None or memory.max_model_len is None:
            capacities.append(CacheCapacity(nbytes, nbytes // stage.cache_per_token, None))
        else:
            tokens = nbytes * memory.max_model_len // stage.cache_per_sequence
            capacities.append(CacheCapacity(nbytes, tokens, nbytes // stage.cache_per_sequence))
    return min(capacities, key=lambda capacity: capacity.tokens)


def _assumptions(model: Model, cache_dtype: DType, memory: GpuMemory | None, rules: EngineRules | None) -> tuple[str, ...]:
    sentences = [f"the KV cache is {cache_dtype.torch}: per layer 2 x head size x KV heads of the rank; with MLA one latent vector"]
    if "cached_dim" in model.dimensions:
        sentences.append("one vector for as many tokens as a layer compresses; windows and the keys of indexers are not counted")
    if stateful := model.dimensions["layers"] - len(_caching_layers(model)):
        sentences.append(f"{plural(stateful, 'layer')} without keys and values; the states of their sequences are not counted")
    if window := _unassigned_window(model):
        sentences.append(f"the config has a sliding window of {window} and no layer_types: all layers are counted in full")
    elif windows := [window for window in _windows(model) if window]:
        sentences.append(f"{len(windows)} layers with a sliding window cache at most {max(windows)} tokens of a sequence")
        sentences.append("these layers cache more while a chunk of a prompt is processed, which is not counted")
    if memory:
        sentences.append(f"the engine uses {memory.utilization:.0%} of a GPU's {memory.nbytes:,} bytes (`gpu_memory_utilization=`)")
        reserve = f"{memory.reserve:,} bytes of that are for activations and CUDA graphs (`reserve=`)"
        sentences.append(f"{reserve}, the rest for weights and KV cache")
        sentences.append("tokens are not rounded to the blocks of the KV cache")
    if rules and (names := weights_without_slot(model, rules)):
        sentences.append(f"not counted, since {rules.engine} has no slot for them: {some(names, most=1)}")
    return tuple(sentences)


def cached_elements(model: Model, layer: int, tp: int) -> int:
    """Elements that a layer caches per token on one of `tp` ranks."""
    dimensions = model.dimensions_in(layer)
    if "cached_dim" in dimensions:
        return -(-dimensions["cached_dim"] // dimensions["compress_rate"])
    if "kv_rank" in dimensions:
        return dimensions["kv_rank"] + dimensions["rope_dim"]
    key_and_value = dimensions["head_dim"] + dimensions.get("value_dim", dimensions["head_dim"])
    return key_and_value * max(1, dimensions["kv_heads"] // tp)


def _caching_layers(model: Model) -> frozenset[int]:
    """The layers that cache something for each token: those with keys, or that use a block with keys. Linear attention and state-space
    models have a fixed state."""
    keys = {"attention.k", "mla.kv_a"}
    kinds = (kind for kind in model.layer_kinds if any(keys & {weight.role, *weight.declared.fuses} for weight in kind.weights))
    holders = (layer for kind in kinds for layer in kind.layers if layer < model.dimensions["layers"])
    return frozenset(user for layer in holders for user in model.uses_of_blocks.get(layer, {0: layer}).values())


def _windows(model: Model) -> tuple[int | None, ...]:
    """Per layer, the most tokens of a sequence that are cached; None: all. The config's `layer_types` says which layers have a window."""
    layers, window = model.dimensions["layers"], model.count("sliding_window")
    types = model.listed("layer_types")
    if not window or len(types) < layers:
        return (None,) * layers
    return tuple(window if types[layer] == "sliding_attention" else None for layer in range(layers))


def _unassigned_window(model: Model) -> int | None:
    """The config's sliding window if there is no `layer_types` to say which layers have it; otherwise None."""
    window = model.count("sliding_window")
    is_used = model.setting("use_sliding_window") is not False
    return window if window and is_used and not model.listed("layer_types") else None
