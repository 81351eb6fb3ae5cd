"""TransferPlan: which bytes travel from which source rank to which target rank, for one model and two layouts. It is made once and used for
every update.

    memory of ranks   \\
                       proven plan of a conversion -> boxes that meet -> who sends each -> TransferPlan -> Schedule of a rank
    layout of ranks   /

The plan of a conversion says where each element comes from. Here its files are memories of ranks, and only the bytes travel another way.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import Drawn, value
from reshard.index.index import Index, Tensor
from reshard.live.plan.balance import chosen_holders
from reshard.live.plan.beside import Beside, BesideFiles, Computed, MergedBox
from reshard.live.plan.blocks import is_quantized_here, quantized_boxes
from reshard.live.plan.joining import Forms, Meetings, joined
from reshard.live.plan.merging import is_merged_here, merged_boxes
from reshard.live.plan.report import TransferReport
from reshard.live.plan.schedule import BoxForm, HeldTensor, Schedule, Way
from reshard.plans.layout import Layout
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route
from reshard.storage.output_file import OutputFile

Numbers = npt.NDArray[np.int32]
"""Numbers of forms, ranks and replicas, one for each box: there may be millions."""
# Boxes that several ranks hold are cut, if they are larger, so that each of these ranks sends a part.
_CUT_ABOVE = 1 << 16


@value(slots=False, eq=False)
class RankMemory:
    """The tensors of one rank, in the order of their addresses."""

    tensors: tuple[HeldTensor, ...]
    """The tensors."""
    addresses: Columns
    """[n]: where each starts in the rank's memory, in bytes."""

    def __repr__(self) -> str:
        return f"RankMemory({plural(len(self.tensors), 'tensor')})"


@value(slots=False, eq=False)
class TransferPlan(Drawn):
    """What travels in one update. n boxes."""

    source: str
    """What the sources are, in words."""
    target: str
    """What the targets are, in words."""
    sources: Sequence[RankMemory]
    """The memory of each source rank."""
    memories: tuple[RankMemory, ...]
    """The memory of each rank of one replica of the target."""
    replicas: int
    """How many replicas of the target there are; the ranks of replica i come after those of replica i - 1."""
    forms: tuple[BoxForm, ...]
    """The forms of the boxes."""
    form: Numbers
    """[n]: the form of each box."""
    source_rank: Numbers
    """[n]: the rank that sends it."""
    source_address: Columns
    """[n]: where it starts in that rank's memory, in bytes."""
    target_rank: Numbers
    """[n]: the rank of a replica that receives it."""
    target_address: Columns
    """[n]: where it starts in that rank's memory, in bytes."""
    replica: Numbers
    """[n]: the replica that receives it; -1: each of them."""
    constants: Mapping[int, Mapping[str, float]]
    """By rank of a replica: its tensors that are one constant, by name. Other elements that no source feeds are zeros."""
    beside_ranks: Mapping[int, Beside]
    """By rank of a replica: what it receives beside its load form."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the plan."""

    @cached_property
    def report(self) -> TransferReport:
        """What travels, in sums."""
        nbytes = np.array([form.nbytes for form in self.forms], np.int64)[self.form]
        shape = len(self.sources), len(self.memories)
        places, flow = self.source_rank * shape[1] + self.target_rank, np.zeros((shape[0], self.replicas, shape[1]), np.int64)
        for replica in range(self.replicas):
            rows = (self.replica < 0) | (self.replica == replica)
            # Sums of integers in float64 are exact up to 2^53.
            flow[:, replica] = np.bincount(places[rows], nbytes[rows], shape[0] * shape[1]).reshape(shape)
        return TransferReport(self.source, self.target, flow, len(self.form), len(self.forms), self._tensors_of, self.fallbacks, self.notes)

    @property
    def nbytes(self) -> int:
        """The bytes that travel in one update."""
        return self.report.nbytes

    def sends(self, rank: int) -> Schedule:
        """What a source rank sends. Raises RequestError if there is no such rank."""
        _check_rank(rank, len(self.sources), "source")
        return self._schedule(rank, self.source_rank == rank, range(self.replicas))

    def receives(self, rank: int, *, named: bool = True) -> Schedule:
        """What a target rank receives. Raises RequestError if there is no such rank.

        named: whether the tensors of the sources are named. A receiving rank does not need them; for hundreds of source ranks they would
        be most of what it is sent.
        """
        _check_rank(rank, len(self.memories) * self.replicas, "target")
        replica, of_replica = divmod(rank, len(self.memories))
        rows = (self.target_rank == of_replica) & ((self.replica < 0) | (self.replica == replica))
        return self._schedule(rank, rows, [replica], named=named)

    def targets(self, rank: int) -> tuple[HeldTensor, ...]:
        """All tensors of a target rank, also those that nothing is sent for."""
        beside = set(map(id, self.beside(rank).tensors))
        return tuple(tensor for tensor in self.memories[rank % len(self.memories)].tensors if id(tensor) not in beside)

    def beside(self, rank: int) -> Beside:
        """What a target rank receives beside its tensors."""
        return self.beside_ranks.get(rank % len(self.memories), Beside())

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """The tensors that are sent whole to the engine's own loader, because their places in it cannot be planned."""
        return tuple(dict.fromkeys(held.name for beside in self.beside_ranks.values() for held in beside.whole))

    def fills(self, rank: int) -> Mapping[str, float]:
        """The tensors of a target rank that are one constant, by name. Other elements that nothing is sent for are zeros."""
        return self.constants.get(rank % len(self.memories), {})

    def _schedule(self, rank: int, chosen: Any, replicas: Iterable[int], *, named: bool = True) -> Schedule:
        rows = np.flatnonzero(chosen)
        used, form = np.unique(self.form[rows], return_inverse=True)
        sources, of_source, source_start = (
            _located(self.sources, self.source_rank[rows], self.source_address[rows])
            if named
            else ((), *np.zeros((2, len(rows)), np.int64))
        )
        targets, of_target, target_start = _located(self.memories, self.target_rank[rows], self.target_address[rows])
        columns = [form.reshape(-1), of_source, source_start, of_target, target_start]
        ways = []
        for replica in replicas:
            here = np.flatnonzero((self.replica[rows] < 0) | (self.replica[rows] == replica))
            pairs = self.source_rank[rows][here] * len(self.memories) + self.target_rank[rows][here]
            order = np.argsort(pairs, kind="stable")
            bounds = np.flatnonzero(np.diff(pairs[order], prepend=-1))
            for start, stop in zip(bounds.tolist(), [*bounds[1:].tolist(), len(order)], strict=True):
                of_way = here[order[start:stop]]
                source_rank, target_rank = divmod(int(pairs[order[start]]), len(self.memories))
                ways.append(Way(source_rank, replica * len(self.memories) + target_rank, *(column[of_way] for column in columns)))
        return Schedule(rank, sources, targets, tuple(self.forms[i] for i in used.tolist()), tuple(ways))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values: its sums, and the bytes from each source rank to each target rank."""
        return self.report.to_json()

    def save(self, path: str) -> int:
        """Write the plan as JSON, with the schedule of each source rank as runs; returns the bytes of the file."""
        document = self.to_json() | {"sends": [self.sends(rank).to_json() for rank in range(len(self.sources))]}
        return OutputFile.at(path).write(json.dumps(document).encode())

    def _tensors_of(self, source_rank: int, target_rank: int) -> int:
        rows = (self.source_rank == source_rank) & (self.target_rank == target_rank)
        addresses = self.memories[target_rank].addresses
        return len(np.unique(np.searchsorted(np.sort(addresses), self.target_address[rows], side="right")))

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        ranks = f"{len(self.sources)} -> {len(self.memories) * self.replicas} ranks"
        sizes = f"{plural(self.nbytes, 'byte')}, {plural(len(self.form), 'box', 'boxes')}"
        return f"TransferPlan({self.source} -> {self.target}, {ranks}, {sizes})"


def transfer_plan(plan: Plan, *, sources: Sequence[RankMemory], replicas: int = 1, whole: Sequence[Tensor] = ()) -> TransferPlan:
    """The transfer that fills the layout of a proven plan from the memory of ranks.

    plan: of a conversion whose source's files are memories of ranks. sources: the tensors in these, in the order of the files. replicas:
    how many engines receive the same. whole: tensors of the source that every target rank receives whole, for the engine's own loader.

    Raises: UnsupportedError, with the names, for values that a live update does not compute.
    """
    if replicas < 1:
        raise RequestError(f"`replicas={replicas}`: at least one is needed")
    _check_computed(plan.routes)
    _check_computed([Route(tensor, tensor) for tensor in whole])
    paths = tuple(file.path for file in plan.source.files)
    forms = Forms()
    beside = BesideFiles(plan.layout.files)
    quantized = quantized_boxes(plan, filter(is_quantized_here, plan.routes), forms, beside)
    merged = merged_boxes(plan, filter(is_merged_here, plan.routes), beside)
    copied = [route for route in plan.routes if not route.source.is_computed]
    copied += [*quantized.routes, *merged.routes, *_whole_routes(whole, plan.layout, beside)]
    meetings = [_cut(meeting, forms) for meeting in (*joined(copied, forms), *quantized.meetings)]
    made = tuple(forms.numbers)
    sizes = np.array([form.nbytes for form in made], np.int64)
    holders = [meeting.source_ranks.reshape(-1, meeting.source_ranks.shape[2]) for meeting in meetings]
    nbytes = [np.tile(sizes[meeting.forms], len(meeting.source_ranks)) for meeting in meetings]
    chosen = chosen_holders(holders, nbytes, len(paths), replicas)
    targets, rank_of, base_of = _targets(plan.layout, beside)
    columns = [_columns(*pair, rank_of, base_of) for pair in zip(meetings, chosen, strict=True)]
    # They are larger than the plan that is made of them.
    del meetings, holders, nbytes, chosen
    form, source_rank, source_address, target_rank, target_address, replica = (np.concatenate(rows) for rows in zip(*columns, strict=True))
    return TransferPlan(
        f"{plural(len(paths), 'rank')} of {plan.source.facts.producer or plan.source.format}",
        f"{plan.layout.format} on {plan.layout.parallel}",
        sources,
        targets,
        replicas,
        made,
        form,
        source_rank,
        source_address,
        target_rank,
        target_address,
        replica,
        _constants(plan, targets, rank_of, base_of),
        _beside_ranks(quantized.computes, merged.merges, {tensor.name for tensor in whole}, beside, rank_of),
        notes=plan.layout.notes,
    )


def memory_of_files(index: Index) -> tuple[RankMemory, ...]:
    """The files of a checkpoint, each as one tensor of bytes: a box starts so many bytes after the start of its file."""
    return tuple(
        RankMemory((HeldTensor(file.path, from_safetensors("U8", where=file.path), (file.nbytes,), (1,)),), np.zeros(1, np.int64))
        for file in index.files
    )


def _held(stored: Any) -> HeldTensor:
    return HeldTensor(stored.name, stored.dtype, stored.shape, row_major(stored.shape))


def _check_computed(routes: Iterable[Route]) -> None:
    """Raises UnsupportedError, with a name, for values that a transfer does not compute."""
    refused = [route.name for route in routes if route.source.is_computed and not (is_merged_here(route) or is_quantized_here(route))]
    if refused:
        raise UnsupportedError(
            f"{plural(len(refused), 'tensor')} of the target would be computed in a way that a live update does not know",
            where=refused[0],
            why="It copies and casts elements, merges LoRA adapters into matrices, and quantizes weights [out, in] to FP8 blocks or MXFP4, "
            "MXFP8 and FP8 by row; the global scale of NVFP4 would follow from weights that several ranks hold",
            do="Serve the model in another form, or `reshard push` a checkpoint, which computes everything that `convert` does",
        )


def _whole_routes(whole: Iterable[Tensor], layout: Layout, beside: BesideFiles) -> Iterator[Route]:
    """Whole tensors, into the memory of each rank: beside the first of its files."""
    firsts = {tuple(sorted(file.ranks.items())): i for i, file in reversed([*enumerate(layout.files)])}.values()
    for tensor in whole:
        box, held = Box.whole(tensor.shape), HeldTensor(tensor.name, tensor.dtype, tensor.shape, row_major(tensor.shape))
        shards = beside.shards(tensor.dtype, [(box, file, beside.add(file, held)) for file in firsts])
        yield Route(tensor, replace(tensor, shards=shards))


def _beside_ranks(
    computes: Mapping[int, tuple[Computed, ...]],
    merges: Mapping[int, tuple[MergedBox, ...]],
    whole: Container[str],
    beside: BesideFiles,
    rank_of: Columns,
) -> dict[int, Beside]:
    by_rank: dict[int, Beside] = {}
    for file, places in beside.tensors.items():
        rank = int(rank_of[file])
        before, own = by_rank.get(rank, Beside()), tuple(held for held, _ in places if held.name in whole)
        by_rank[rank] = Beside((*before.computes, *computes.get(file, ())), (*before.whole, *own), (*before.merges, *merges.get(file, ())))
    return by_rank


def _cut(meetings: Meetings, forms: Forms) -> Meetings:
    """The boxes, of which those that several ranks hold and that are large are cut into one part for each of these ranks."""
    copies, made = meetings.source_ranks.shape[2], tuple(forms.numbers)
    if copies == 1:
        return meetings
    rows, numbers, source_steps, target_steps = [], [], [], []
    for i, number in enumerate(meetings.forms.tolist()):
        form = made[number]
        axis = next((a for a, size in enumerate(form.sizes) if size > 1), None)
        parts = min(copies, form.sizes[axis]) if axis is not None and form.nbytes > _CUT_ABOVE and not form.derived else 1
        for part in range(parts):
            start, stop = (0, 0) if axis is None else (form.sizes[axis] * edge // parts for edge in (part, part + 1))
            cut = form if parts == 1 or axis is None else replace(form, sizes=(*form.sizes[:axis], stop - start, *form.sizes[axis + 1 :]))
            rows.append(i)
            numbers.append(forms.number(cut))
            source_steps.append(0 if axis is None else start * form.source_strides[axis] * form.source.itemsize)
            target_steps.append(0 if axis is None else start * form.target_strides[axis] * form.target.itemsize)
    return Meetings(
        np.array(numbers, np.int64),
        meetings.source_ranks[:, rows],
        meetings.source_addresses[:, rows] + np.array(source_steps, np.int64)[:, None],
        meetings.target_ranks[:, rows],
        meetings.target_addresses[:, rows] + np.array(target_steps, np.int64),
    )


def _columns(meetings: Meetings, chosen: Columns, rank_of: Columns, base_of: Columns) -> tuple[Any, ...]:
    """(form, source rank, source address, target rank, target address, replica) of boxes.

    chosen: [replicas, boxes]: the copy that is sent.
    """
    tensors, boxes, copies = meetings.source_ranks.shape
    count, times = tensors * boxes, 1 if copies == 1 else len(chosen)
    rows, picked = np.tile(np.arange(count), times), chosen[:times].reshape(-1)
    files = meetings.target_ranks.reshape(-1)[rows]
    return (
        np.tile(meetings.forms, tensors * times).astype(np.int32),
        meetings.source_ranks.reshape(count, copies)[rows, picked].astype(np.int32),
        meetings.source_addresses.reshape(count, copies)[rows, picked],
        rank_of[files].astype(np.int32),
        meetings.target_addresses.reshape(-1)[rows] + base_of[files],
        np.repeat(np.arange(times), count).astype(np.int32) if times > 1 else np.full(count, -1, np.int32),
    )


def _targets(layout: Layout, beside: BesideFiles) -> tuple[tuple[RankMemory, ...], Columns, Columns]:
    """The memory of each target rank, with what lies beside its load form; the rank of each file, and where the file starts in the rank's
    memory."""
    ranks = sorted({tuple(sorted(file.ranks.items())) for file in layout.files})
    number = {position: i for i, position in enumerate(ranks)}
    rank_of = np.array([number[tuple(sorted(file.ranks.items()))] for file in layout.files], np.int64)
    base_of, ends = np.zeros(len(layout.files), np.int64), [0] * len(ranks)
    tensors: list[list[HeldTensor]] = [[] for _ in ranks]
    addresses: list[list[int]] = [[] for _ in ranks]
    for i, file in enumerate(layout.files):
        rank = int(rank_of[i])
        base_of[i] = ends[rank]
        tensors[rank] += [_held(item.tensor) for item in file.tensors]
        addresses[rank] += [ends[rank] + item.byte_offset for item in file.tensors]
        for held, address in beside.tensors.get(i, ()):
            tensors[rank].append(held)
            addresses[rank].append(ends[rank] + address)
        ends[rank] += beside.end(i)
    return tuple(RankMemory(tuple(a), np.array(b, np.int64)) for a, b in zip(tensors, addresses, strict=True)), rank_of, base_of


def _constants(plan: Plan, targets: tuple[RankMemory, ...], rank_of: Columns, base_of: Columns) -> dict[int, dict[str, float]]:
    """By rank, the tensors that are one constant. Raises UnsupportedError for a tensor of which a part is a constant other than zero."""
    files = {file.path: i for i, file in enumerate(plan.layout.files)}
    constants: dict[int, dict[str, float]] = {}
    for constant in plan.target_index.constants:
        if any(constant.expected):
            file = files[constant.path]
            memory = targets[int(rank_of[file])]
            address = constant.byte_offset + int(base_of[file])
            held = memory.tensors[int(np.searchsorted(memory.addresses, address, side="right")) - 1]
            if constant.nbytes != held.nbytes:
                raise UnsupportedError("a part of it is a constant other than zero", where=held.name)
            constants.setdefault(int(rank_of[file]), {})[held.name] = held.dtype.decoded(constant.expected)
    return constants


def _located(memories: Sequence[RankMemory], ranks: Numbers, addresses: Columns) -> tuple[tuple[HeldTensor, ...], Columns, Columns]:
    """The tensors in which addresses lie, the number of that of each address, and how many elements after its start it lies."""
    tensors: list[HeldTensor] = []
    numbers, starts = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        memory = memories[rank]
        order = np.argsort(memory.addresses, kind="stable")
        places = order[np.searchsorted(memory.addresses[order], addresses[rows], side="right") - 1]
        used, inverse = np.unique(places, return_inverse=True)
        numbers[rows] = inverse.reshape(-1) + len(tensors)
        chosen = [memory.tensors[i] for i in used.tolist()]
        itemsizes = np.array([tensor.dtype.itemsize for tensor in chosen], np.int64)
        starts[rows] = (addresses[rows] - memory.addresses[places]) // itemsizes[inverse.reshape(-1)]
        tensors += chosen
    return tuple(tensors), numbers, starts


def _check_rank(rank: int, ranks: int, what: str) -> None:
    if not 0 <= rank < ranks:
        raise RequestError(f"there is no {what} rank {rank}", do=f"The {what} has the ranks 0 to {ranks - 1}")
