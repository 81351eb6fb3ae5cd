"""Layout: a checkpoint that does not exist yet. Its files, what each holds where, and so its Index.

Pure functions from a model, parallel sizes and an engine's rules; nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from reshard.architecture import Model, ModelWeight
from reshard.boxes import Box
from reshard.dtypes import DType
from reshard.errors import RequestError
from reshard.extents import Extent, Piece
from reshard.index import Constant, Index, RunFacts, StoredFile, Tensor
from reshard.meshes import chunk
from reshard.mosaics import Mosaic, joined
from reshard.parallel import ONE_RANK, Parallel, stage_layers
from reshard.roles import SPLITS, Heads
from reshard.shards import Shards
from reshard.splits import SplitRules, local_part, problem
from reshard.stored import StoredTensor, constant


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor and the byte of its file that it starts at."""

    tensor: StoredTensor
    byte_offset: int


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written: its length, the framing bytes that are known already, and the tensors between them.

    `ranks` says for whom it is, such as {"pp": 0, "tp": 3}; empty where a file is nobody's in particular.
    """

    path: str
    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    tensors: tuple[Placed, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A small file that goes along: config, tokenizer, index."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All files of a target. `files` hold the weights; `sidecars` are written after them, the last one last.

    copies: canonical tensors that have no place of their own, as another one, which is there once, stands for them; when they are read, all
    must be equal. told: canonical tensors of one element, whose value is part of the framing.
    """

    format: str
    files: tuple[TargetFile, ...]
    sidecars: tuple[Sidecar, ...]
    parallel: Parallel = ONE_RANK
    notes: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def index(self, shapes: Mapping[str, tuple[int, ...]]) -> Index:
        """The index of what will be there; `shapes` are the canonical tensors' global shapes."""
        return index_of(self.format, ((file, placed) for file in self.files for placed in file.tensors), shapes, files=self.files)


def row_shard(shape: tuple[int, ...], ranks: int, rank: int) -> Box | None:
    """The rows of a tensor that one of so many data-parallel ranks holds, as FSDP2 cuts them: runs of ceil(n / ranks), the last ones
    shorter. None where it holds nothing; scalars are the first rank's."""
    if not shape:
        return Box((), ()) if rank == 0 else None
    start, size = chunk(shape[0], ranks, rank)
    box = Box.whole(shape).narrow(0, start, start + size)
    return box if size or (rank == 0 and not shape[0]) else None


def index_of(
    format_name: str,
    placed: Iterator[tuple[TargetFile, Placed]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    files: tuple[TargetFile, ...],
    facts: RunFacts | None = None,
) -> Index:
    """The index of stored tensors: every section becomes a piece of its canonical tensor, every fill a constant."""
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, DType] = {}
    constants: list[Constant] = []
    for file, item in placed:
        stored = item.tensor
        constants.extend(_constants(file.path, item))
        for section in stored.sections:
            extent = Extent(file.path, item.byte_offset + section.start * stored.dtype.itemsize, section.strides, stored.dtype)
            pieces.setdefault(section.name, []).append(Piece(section.box, extent))
            dtypes.setdefault(section.name, stored.dtype)
    tensors = tuple(Tensor(name, dtypes[name], shapes[name], "weight", Shards.of(found)) for name, found in pieces.items())
    stored_files = tuple(StoredFile(file.path, file.nbytes) for file in files)
    return Index(format_name, tensors, stored_files, facts or RunFacts(), constants=tuple(constants))


def _constants(path: str, item: Placed) -> Iterator[Constant]:
    """The ranges of a stored tensor that hold its fill. Padding lies between and after sections that are whole runs of rows."""
    stored, itemsize = item.tensor, item.tensor.dtype.itemsize
    if not stored.filled:
        return
    fill = stored.fill * itemsize if len(stored.fill) == 1 else stored.fill
    end = 0
    for start, stop in [*sorted((s.start, s.start + s.box.volume) for s in stored.sections), (stored.nbytes // itemsize,) * 2]:
        if start > end:
            yield Constant(stored.name, path, item.byte_offset + end * itemsize, (start - end) * itemsize, fill)
        end = stop


@dataclass(frozen=True, slots=True)
class Fusion:
    """Roles that an engine stores as one tensor, stacked in this order, under `component` in place of their own module's name."""

    roles: tuple[str, ...]
    component: str


@dataclass(frozen=True, slots=True)
class PerLayerConstant:
    """A tensor without weights that an engine demands beside every weight of a role: name from that weight's module."""

    role: str
    name: str
    dtype: DType
    element: bytes


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How a serving engine lays out one rank's weights: data, the same for all architectures.

    partition: (number of layers, pp) -> layers per stage. tied_name_wins: whether a tied table on a stage that holds both ends is stored
    under the head's name.
    """

    name: str
    fusions: tuple[Fusion, ...]
    constants: tuple[PerLayerConstant, ...]
    vocabulary_multiple: int
    partition: Callable[[int, int], tuple[int, ...]]

    def split_rules(self, model: Model) -> SplitRules:
        return SplitRules(model.dimensions, self.vocabulary_multiple)


def check_degrees(model: Model, rules: EngineRules, parallel: Parallel) -> None:
    """Raises RequestError, naming the legal sizes, if the model does not split over `parallel.tp` ranks."""
    found = _first_problem(model, rules, parallel.tp)
    if found:
        name, reason = found
        legal = legal_tensor_parallel_sizes(model, rules)
        raise RequestError(
            f"--tp {parallel.tp} does not fit this model: {reason}",
            where=name,
            why=f"{rules.name} would refuse it, or give ranks parts of a head",
            do=f"Legal tensor-parallel sizes are {', '.join(map(str, legal))}",
        )


def legal_tensor_parallel_sizes(model: Model, rules: EngineRules) -> tuple[int, ...]:
    """The sizes over which every weight of the model splits, in ascending order."""
    heads = model.dimensions["heads"]
    return tuple(tp for tp in range(1, heads + 1) if _first_problem(model, rules, tp) is None)


def _first_problem(model: Model, rules: EngineRules, tp: int) -> tuple[str, str] | None:
    split_rules = rules.split_rules(model)
    # Heads first: that they do not divide is what a person understands best.
    for weight in sorted(_one_per_role(model), key=lambda weight: not isinstance(SPLITS[weight.role], Heads)):
        if reason := problem(SPLITS[weight.role], weight.shape, tp, split_rules):
            return weight.name, reason
    return None


def _one_per_role(model: Model) -> list[ModelWeight]:
    """The first weight of each role and shape: what the legality of a degree depends on."""
    first: dict[tuple[str, tuple[int, ...]], ModelWeight] = {}
    for weight in model.weights.values():
        first.setdefault((weight.role, weight.shape), weight)
    return list(first.values())


def rank_tensors(
    model: Model, dtypes: Mapping[str, DType], rules: EngineRules, parallel: Parallel, tp_rank: int, pp_rank: int
) -> tuple[StoredTensor, ...]:
    """What one rank's state dict holds, in the model's order.

    `dtypes` maps canonical names to the element types to be stored.
    """
    layers = stage_layers(rules.partition(model.dimensions["layers"], parallel.pp), pp_rank)
    first, last = pp_rank == 0, pp_rank == parallel.pp - 1
    held = [w for w in model.weights.values() if _is_on_stage(w, layers, first, last)]
    groups: dict[tuple[int | None, str], dict[str, ModelWeight]] = {}
    for weight in held:
        groups.setdefault(_group(weight), {})[weight.role] = weight
    stored: list[StoredTensor] = []
    fusion_of = {role: fusion for fusion in rules.fusions for role in fusion.roles}
    done: set[str] = set()
    for weight in held:
        fusion = fusion_of.get(weight.role)
        name = _component_replaced(weight.name, fusion.component) if fusion else weight.name
        if name in done:
            continue
        done.add(name)
        group = groups[_group(weight)]
        members = [group[role] for role in fusion.roles if role in group] if fusion else [weight]
        stored.append(_stored(name, members, dtypes, model, rules, parallel.tp, tp_rank))
        stored.extend(_beside(weight, rules))
    return tuple(_with_tied_head(stored, model, dtypes, rules, parallel.tp, tp_rank, first=first, last=last))


def _is_on_stage(weight: ModelWeight, layers: range, first: bool, last: bool) -> bool:
    if weight.layer is not None:
        return weight.layer in layers
    return first if weight.role == "embedding" else last


def _group(weight: ModelWeight) -> tuple[int | None, str]:
    """Weights are fused with weights and biases with biases of the same layer."""
    return weight.layer, weight.name.rpartition(".")[2]


def _stored(
    name: str, members: list[ModelWeight], dtypes: Mapping[str, DType], model: Model, rules: EngineRules, tp: int, tp_rank: int
) -> StoredTensor:
    kinds = {dtypes[member.name] for member in members}
    if len(kinds) > 1:
        raise RequestError(
            f"its parts have different element types: {', '.join(f'{m.name} {dtypes[m.name]}' for m in members)}",
            where=name,
            why=f"{rules.name} stores them as one tensor",
            do="Choose one for all with --dtype",
        )
    split_rules = rules.split_rules(model)
    arrays = []
    for member in members:
        held = local_part(SPLITS[member.role], member.shape, tp, tp_rank, split_rules)
        array = Mosaic.of(member.name, held.box) if held.box else Mosaic(held.shape, ())
        arrays.append(array.padded(0, held.shape[0]))
    return joined(arrays).stored(name, dtypes[members[0].name])


def _beside(weight: ModelWeight, rules: EngineRules) -> Iterator[StoredTensor]:
    if weight.name.endswith(".weight"):
        module = weight.name.removesuffix(".weight").rpartition(".")[0]
        for each in rules.constants:
            if each.role == weight.role:
                yield constant(f"{module}.{each.name}", each.dtype, (), each.element)


def _with_tied_head(
    stored: list[StoredTensor],
    model: Model,
    dtypes: Mapping[str, DType],
    rules: EngineRules,
    tp: int,
    tp_rank: int,
    *,
    first: bool,
    last: bool,
) -> Iterator[StoredTensor]:
    """A tied table under the head's name on the stage that holds the head: alone where the embedding is the same tensor there."""
    if not model.is_tied:
        yield from stored
        return
    head, embedding = model.architecture.tied
    yield from (tensor for tensor in stored if not (last and tensor.name == embedding))
    if last:
        yield _stored(head, [model.weights[embedding]], dtypes, model, rules, tp, tp_rank)


def _component_replaced(name: str, component: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{component}.{kind}"
