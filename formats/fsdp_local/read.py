"""FSDP1's LOCAL_STATE_DICT: each rank's run of the flat parameters, into which every wrapped unit was laid end to end.

    pytorch_model_fsdp_rank{r}.bin   {"[unit.]_flat_param": ShardedTensor of one axis}; buffers as plain tensors
    optimizer_rank{r}.bin            optimizer.state_dict() of that rank: numbers, runs of the same elements, padded at the end

What lies in a flat parameter, in which shapes and order, is not in the files: it comes from the model's config (--model).
With use_orig_params=True there is, beside the flat parameter, each parameter's own run under its name; then only shapes are asked for,
and its optimizer numbers only the parameters of which the rank holds something.
Measured on torch 2.13 (fixtures/fsdp/fsdp1-local, fsdp1-local-orig).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.adapter.flat_parameters import Slot, boxes_of, slots
from reshard.adapter.format import Format, Hints
from reshard.adapter.index_builder import Collector
from reshard.adapter.rank_files import RankFiles, example, missing_ranks, open_folder, step_of
from reshard.adapter.state_dicts import FLAT, group_numbers, has_flat_parameters, model_part, optimizer_part, states
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.canonical.wrappers import unwrapped
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box
from reshard.index.index import Index, ParamGroup, RunFacts, StoredFile
from reshard.models.model import Model
from reshard.storage.files import Files

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of consecutive elements of a flat parameter, or of one parameter, as a rank's file holds it."""

    rank: int
    path: str
    start: int
    count: int
    stored: AnyTensor


@dataclass(slots=True)
class _Flat:
    """A row of elements that the ranks share, and the parameters in it."""

    elements: int
    slots: tuple[Slot, ...] = ()
    runs: list[_Run] = field(default_factory=list)

    def parts(self, runs: list[_Run]) -> Iterator[tuple[Slot, _Run, LocalTensor]]:
        """Each parameter's boxes in each run."""
        for run in runs:
            for slot in self.slots:
                start, stop = max(slot.start, run.start), min(slot.stop, run.start + run.count)
                if start < stop:
                    shards = tuple(boxes_of(slot.shape, start - slot.start, run.stored, start - run.start, stop - start))
                    yield slot, run, LocalTensor(run.stored.dtype, slot.shape, shards)


class FsdpLocal(Format):
    name = "fsdp-local"
    summary = "FSDP1 LOCAL_STATE_DICT: flat parameters, one file per rank (needs --model)"
    owns = ("*_rank[0-9]*.bin",)

    def detect(self, files: Files) -> str | None:
        found = example(files)
        return found if found and has_flat_parameters(files, found) else None

    def read(self, files: Files, hints: Hints) -> Index:
        folder = open_folder(files)
        if folder.model is None:
            raise CheckpointError("there is no file of a rank with the model's flat parameters", where=files.root)
        reading = _Reading(files, _declared(hints, folder.model.first))
        reading.read_model(folder.model)
        if folder.optimizer:
            reading.read_optimizer(folder.optimizer)
        tensors = tuple(reading.collector.tensors(files))
        ranks = folder.ranks(1)
        notes = (*reading.notes, *missing_ranks(folder, ranks, tensors))
        facts = RunFacts("FSDP1 (LOCAL_STATE_DICT)", None, step_of(files.root), {"ranks": ranks}, hints.config, notes)
        stored = tuple(StoredFile(path, files.size(path) or 0) for path in folder.paths())
        objects = tuple(dict.fromkeys(reading.objects))
        return Index(self.name, tensors, stored, facts, objects, param_groups=lambda: reading.groups)


def _declared(hints: Hints, path: str) -> Model:
    """The model whose config was given. Raises RequestError without one."""
    found = hints.model
    if found is None:
        told = "no config.json is known" if hints.config is None else f"the architecture {hints.config.get('model_type')!r} is not declared"
        raise RequestError(
            f"the file holds flat parameters, and {told}",
            where=path,
            why="LOCAL_STATE_DICT keeps the elements of many weights in one row, without their names, shapes and order",
            do="Give the model's config with --model DIR and, if it is not declared, --architecture FILE; or save with SHARDED_STATE_DICT, "
            "which keeps names and shapes",
        )
    return found


class _Reading:
    def __init__(self, files: Files, model: Model) -> None:
        self._files, self._model = files, model
        self.collector = Collector()
        self.objects: list[str] = []
        self.notes: list[str] = []
        self.groups: tuple[ParamGroup, ...] = ()
        # Tied parameters are in the flat parameter once, under the first name.
        tied = {model.architecture.tied[0]} if model.is_tied else set[str]()
        self._parameters = {name: weight.shape for name, weight in model.weights.items() if name not in tied}
        # What an optimizer's numbers count: flat parameters, or parameters. Ranks in the order of their files.
        self._flats: dict[str, _Flat] = {}
        self._has_names = False

    # ---- the model ----

    def read_model(self, found: RankFiles) -> None:
        ranks = max(found.paths) + 1
        named: dict[str, list[tuple[int, str, AnyTensor]]] = {}
        units: dict[str, _Flat] = {}
        for rank, path in found.paths.items():
            content, beside = model_part(torch_zip.read(self._files, path, locate=False))
            self.objects.extend(beside)
            decoder = Decoder(path)
            for key, value in (content or {}).items():
                name, local = unwrapped(str(key)), decoder.decode(str(key), value)
                if local is None:
                    self.objects.append(name)
                elif name.endswith(FLAT):
                    _add_runs(units.setdefault(name.removesuffix(FLAT), _Flat(math.prod(local.shape))), local, rank, path, name)
                else:
                    named.setdefault(name, []).extend((rank, path, stored) for _, stored in local.shards)
        for name, held in named.items():
            self._add_named(name, held)
        if self._has_names:
            return
        self._flats = units
        for unit, flat in units.items():
            inner = [other for other in units if other != unit and other.startswith(unit)]
            members = [
                (name, shape)
                for name, shape in self._parameters.items()
                if name.startswith(unit) and not any(name.startswith(other) for other in inner)
            ]
            flat.slots = slots(members, flat.elements, ranks, where=f"{unit}{FLAT}")
            for slot, run, local in flat.parts(flat.runs):
                self.collector.add("weight", slot.name, local, run.path, run.rank)

    def _add_named(self, name: str, held: list[tuple[int, str, AnyTensor]]) -> None:
        """A tensor under its own name: a buffer, whole on every rank; or a parameter's runs, which in the order of ranks are all of it."""
        shape = self._parameters.get(name)
        if shape is None and len({stored.shape for _, _, stored in held}) > 1:
            raise CheckpointError(
                "every rank holds a run of it, but the config knows no such weight",
                where=name,
                why="Its shape is in the config only, so the config belongs to another model",
                do="Give the config that the model was trained with by --model DIR",
            )
        if shape is None or (all(stored.shape == shape for _, _, stored in held) and math.prod(shape) > 0 and len(held) > 1):
            for rank, path, stored in held:
                whole = LocalTensor(stored.dtype, stored.shape, ((Box.whole(stored.shape), stored),))
                self.collector.add("weight", name, whole, path, rank)
            return
        self._has_names = True
        elements = sum(math.prod(stored.shape) for _, _, stored in held)
        flat = self._flats[name] = _Flat(math.prod(shape), (Slot(name, shape, 0),))
        if elements > flat.elements:
            raise CheckpointError(
                f"the ranks hold {elements:,} elements of it, the config's shape {list(shape)} has {flat.elements:,}",
                where=name,
                why="The config belongs to another model",
                do="Give the config that the model was trained with by --model DIR",
            )
        start = 0
        for rank, path, stored in sorted(held, key=lambda each: each[0]):
            count = math.prod(stored.shape)
            flat.runs.append(_Run(rank, path, start, count, stored))
            start += count
        for slot, run, local in flat.parts(flat.runs):
            self.collector.add("weight", slot.name, local, run.path, run.rank)

    # ---- the optimizer ----

    def read_optimizer(self, found: RankFiles) -> None:
        numbered = list(self._flats.items())
        kept: list[tuple[int, str, Any, str, LocalTensor]] = []
        sizes: dict[Any, dict[int, int]] = {}
        optimizer: Mapping[str, Any] = {}
        for rank, path in found.paths.items():
            part = optimizer_part(torch_zip.read(self._files, path, locate=False))
            if part is None:
                raise CheckpointError("it holds no optimizer state (state and param_groups)", where=path)
            optimizer, decoder = part, Decoder(path)
            for parameter, kind, value in states(part):
                if local := decoder.decode(f"{parameter}.{kind}", value):
                    kept.append((rank, path, parameter, kind, local))
                    if local.shape:
                        sizes.setdefault(parameter, {})[rank] = math.prod(local.shape)

        # A parameter is recognised by how many elements each rank holds of it.
        def held(flat: _Flat) -> Shape:
            return tuple(sum(run.count for run in flat.runs if run.rank == rank) for rank in found.paths)

        shapes = {each: tuple(by_rank.get(rank, 0) for rank in found.paths) for each, by_rank in sizes.items()} if self._has_names else {}
        names, notes = names_for(optimizer, group_numbers(optimizer), shapes, [(unit, held(flat)) for unit, flat in numbered])
        self.notes.extend(notes)
        self.groups = tuple(
            replace(group, names=tuple(slot.name for unit in group.names for slot in self._flats[unit].slots))
            for group in plain_groups(optimizer["param_groups"], names)
        )
        for rank, path, parameter, kind, local in kept:
            unit = names.get(parameter)
            flat = self._flats.get(unit) if unit is not None else None
            if flat is None or not local.shape:
                for slot_name in [slot.name for slot in flat.slots] if flat else [None]:
                    self.collector.add(*state_kind(slot_name, parameter, kind), local, path, rank)
                continue
            for slot, run, part_of_slot in flat.parts(list(_state_runs(flat, rank, path, local, kind))):
                self.collector.add(*state_kind(slot.name, parameter, kind), part_of_slot, run.path, run.rank)


def _add_runs(flat: _Flat, local: LocalTensor, rank: int, path: str, name: str) -> None:
    if len(local.shape) != 1 or math.prod(local.shape) != flat.elements:
        raise CheckpointError(
            f"the flat parameter has the shape {list(local.shape)}, in an earlier file {flat.elements:,} elements",
            where=f"{name} in {path}",
            why="The files are from different runs",
            do="Keep the files of one save only",
        )
    flat.runs.extend(_Run(rank, path, box.offsets[0], box.sizes[0], stored) for box, stored in local.shards)


def _state_runs(flat: _Flat, rank: int, path: str, local: LocalTensor, kind: str) -> Iterator[_Run]:
    """A rank's run of optimizer state: the elements of its run of parameters, and padding at the end of the last one."""
    stored, count = local.shards[0][1], math.prod(local.shape)
    for run in flat.runs:
        if run.rank == rank:
            if count < run.count:
                raise CheckpointError(f"its {kind} has {count:,} elements, the parameters beside it {run.count:,}", where=path)
            yield _Run(rank, path, run.start, run.count, stored)


FORMAT = FsdpLocal()
