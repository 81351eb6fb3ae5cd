"""StateDictWriter, which users call Writer: `dcp.save` straight into the files of another format.

    planner                which rank writes which box of which tensor; replicas are removed
    prepare_global_plan    the coordinator tells every rank what all of them hold
    write_data             every rank makes the same plan, writes its boxes to their places in the staged files, waits for the others, and
                           digests its share of what all have written
    finish                 the coordinator adds the records and gives the files their final names

The plan is that of a conversion of the checkpoint that `dcp.save` would have written (held.py), so the bytes are the same. The target is
staged as that of a conversion which several processes share (engine/destinations/folder.py): it is whole, or it is not there.
"""

from __future__ import annotations

import io
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from reshard.engine.blocks import block_jobs, digests_by_tensor, fingerprint_of_blocks, widest_element
from reshard.engine.casts import Overflow, overflow, values_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.folder import LocalFolder
from reshard.engine.destinations.journal import RunHeader
from reshard.engine.events import event
from reshard.engine.origins.reader import Tiles, reader
from reshard.engine.record import Provenance, Read, records
from reshard.engine.transfer import Pieces, Worker, strips
from reshard.errors import ReshardError, TargetError, UnsupportedError
from reshard.geometry.boxes import blocks
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.origin import Stored
from reshard.index.shards import primary_rows
from reshard.opening.keywords import ModelOptions, take
from reshard.plans.digests import CURRENT
from reshard.plans.layout import Sidecar, TargetFile
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Route
from reshard.requests.planning import plan_conversion
from reshard.requests.request import ConversionRequest
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.staging import Staging
from reshard.storage.system_calls import is_url
from reshard.torch.asked import state_name
from reshard.torch.held import HeldFiles, HeldItem, HeldState, opened, path_of
from reshard.torch.waiting import Waiting
from reshard.verbs.convert import Existing, may_replace, target_place

PathLike = str | os.PathLike[str]


class StateDictWriter(StorageWriter):  # type: ignore[misc,unused-ignore]  # torch may not be installed
    """A `StorageWriter` for `dcp.save` and `dcp.async_save`: writes a state dict in the format `to`, as `convert` would.

    path: the directory, on a file system that all ranks see. to: the format, such as "hf", "vllm", "megatron-dist" or "dcp". step: the
    training step; None: that of a name such as step-1000. overwrite: replace a checkpoint that lies there; without it, one that lies there
    is refused, and what an interrupted save has left is removed. digests: record the fingerprint and the digests, for which the ranks read
    the files once more; without them, no reshard.json is written. seconds: how long ranks wait for each other. options: the keywords of
    `plan`, such as `model=DIR`, `tp=8`, `dtype="bf16"`, `optimizer=True`, and those of the format.

    A value that is computed from several tensors, as quantized ones are, is not written: convert what was saved.

    `dcp.save` raises CheckpointException with TargetError if something lies there, RequestError if the model or the sizes do not allow it,
    SystemRefusal if a rank has ended or the disk is full. Then no rank's file has its final name.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        to: str,
        step: int | None = None,
        overwrite: bool = False,
        digests: bool = True,
        seconds: float = 1800,
        **options: Any,
    ) -> None:
        super().__init__()
        self.path, self.to = path, to
        self._step, self._overwrite, self._digests, self._seconds, self._options = step, overwrite, digests, seconds, options
        self._save: _Save | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path can be written: a directory, no URL."""
        return not is_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another path, if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._save = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError for a store, and for a save without collectives, in which no rank knows what the others hold."""
        if is_url(place := target_place(self.path)):
            raise UnsupportedError(
                "a store has no files that several ranks write at once",
                where=place,
                do="Save to a directory that all ranks see, and convert or copy it to the store",
            )
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "the ranks save without collectives, so none knows what the others hold", do="Leave out `use_collectives`"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with what all ranks hold. Raises TargetError if a checkpoint lies there that may not be replaced."""
        destination = LocalFolder(Path(target_place(self.path)))
        if not self._overwrite and (entries := destination.entries()):
            raise TargetError(
                f"the target exists and holds {entries[0]}" + (f" and {len(entries) - 1} more" if len(entries) > 1 else ""),
                where=destination.place,
                why="Nothing was written",
                do="Choose another directory for each step, or say `overwrite=True`",
            )
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise UnsupportedError(
                "the planner has cached its plans and leaves them out",
                do="Use a planner without `enable_plan_caching`, which is the default",
            )
        nested = {name: path for plan in plans for name, path in (plan.planner_data or {}).items()}
        ranks = tuple(tuple(_held(item) for item in plan.items) for plan in plans)
        names = {item.fqn for items in ranks for item in items}
        state = HeldState(secrets.token_hex(8), ranks, nested if names <= nested.keys() else None)
        return [replace(plan, storage_data=(rank, state)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank holds, and digest its share of the files."""
        rank, state = plan.storage_data
        save = self._planned(state, rank, plan, planner)
        destination, self._save = save.destination, save
        waiting = Waiting(Path(destination.place) / WORK_FOLDER, rank, len(state.ranks), self._seconds)
        try:
            with destination.shared(save.header, save.plan, begins=True), waiting.working():
                nbytes, beyond = save.write()
                waiting.meet("written")
                digests = save.digests(len(state.ranks)) if self._digests else {}
        except BaseException:
            # The last rank that gives up removes what was staged.
            with suppress(ReshardError), destination.alone(save.header.identity):
                destination.abandon()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("reshard"), nbytes, (digests, beyond))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the target: its records, and the final names of its files."""
        assert self._save is not None, "every rank writes before the coordinator completes"
        of_ranks = [result.storage_data for results_of_rank in results for result in results_of_rank]
        digests = {key: digest for digests, _ in of_ranks for key, digest in digests.items()}
        beyond = sum((Counter(counts) for _, counts in of_ranks), Counter[str]())
        self._save.complete(digests if self._digests else None, dict(beyond))
        event("saved", f"saved {self.to} to {self._save.destination.place}", target=self._save.destination.place, format=self.to)
        self._save = None

    def _planned(self, state: HeldState, rank: int, plan: SavePlan, planner: SavePlanner) -> _Save:
        """This rank's part of the save."""
        options, place = dict(self._options), target_place(self.path)
        of_model = take(options, ModelOptions)
        request = ConversionRequest.of(self.to, options)
        takes_optimizer = request.selection.optimizer or request.to.keeps_optimizer

        def tensor(number: int) -> torch.Tensor:
            resolved = planner.resolve_data(plan.items[number])
            assert isinstance(resolved, torch.Tensor), "an item with an element type is a tensor"
            return resolved

        held = HeldFiles(state, rank, tensor, _objects(state, planner) if takes_optimizer else {})
        source = opened(held, place, self._step, of_model)
        made = plan_conversion(source, request, request.adapters_for(source))
        if computed := [route.name for route in made.routes if type(route.source.origin) is not Stored]:
            raise UnsupportedError(
                f"its values are computed from other tensors, as are those of {len(computed) - 1} more",
                where=computed[0],
                why="They may lie in the memory of several ranks",
                do="Save without this option, then convert the result with it",
            )
        destination = LocalFolder(Path(place))
        existing: Existing = "overwrite" if self._overwrite or not destination.entries() else "refuse"
        destination = LocalFolder(Path(place), replaces=lambda: may_replace(destination, made, existing))
        return _Save(made, held, rank, destination)


def _held(item: WriteItem) -> HeldItem:
    """What a write item says, as plain values."""
    if item.type == WriteItemType.BYTE_IO:
        return HeldItem(item.index.fqn)
    data = item.tensor_data
    assert data is not None, "torch describes each tensor that is written"
    return HeldItem(item.index.fqn, str(data.properties.dtype), tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _objects(state: HeldState, planner: SavePlanner) -> Mapping[str, bytes]:
    """The settings of the optimizer, as torch.save writes them. Every rank has them.

    Raises: UnsupportedError if this rank has not.
    """
    own: Mapping[str, Any] = getattr(planner, "state_dict", {})
    contents = {}
    for item in (item for items in state.ranks for item in items if not item.dtype and state_name(item.fqn)):
        if item.fqn not in own:
            raise UnsupportedError(
                "this rank does not have a setting of the optimizer that another one has",
                where=item.fqn,
                do="Save the weights alone, or the whole state dict with `dcp.save`, and convert it",
            )
        stream = io.BytesIO()
        torch.save(own[item.fqn], stream)
        contents[item.fqn] = stream.getvalue()
    return contents


@value(slots=False, eq=False)
class _Save:
    """One rank's part of a save."""

    plan: Plan
    """The plan, the same on every rank."""
    held: HeldFiles
    """The state dict."""
    rank: int
    """This rank."""
    destination: LocalFolder
    """What is written."""

    @property
    def header(self) -> RunHeader:
        """What the journal says about the save."""
        nbytes = sum(route.target.nbytes for route in self.plan.routes)
        return RunHeader(self.plan.identity(), (), self.plan.layout.format, nbytes, ())

    def write(self) -> tuple[int, dict[str, int]]:
        """Write what this rank holds. Returns the bytes, and how many values of each tensor became infinite, which the plan allows.

        Raises: ValuesOverflow if it does not allow it; SystemRefusal if the disk is full.
        """
        own = [(route, rows) for route in self.plan.routes if len(rows := self._own_rows(route))]
        paths = {path for route, _ in own for path in route.target.shards.holders}
        staging = Staging(self.destination.place)
        staging.prepare({file.path: file.nbytes for file in self.plan.layout.files if file.path in paths}, resume=True)
        worker, nbytes, beyond = Worker(self.held, widest_element(self.plan), staging), 0, {}
        try:
            for route, rows in own:
                nbytes += sum(route.source.shards.box(int(row)).volume for row in rows) * route.target.dtype.itemsize
                if count := self._write_rows(route, rows, worker):
                    beyond[route.name] = count
            staging.sync()
        finally:
            staging.close()
        if beyond and not self.plan.target.allow_overflow:
            types = {route.name: route.target.dtype for route, _ in own}
            do = "Choose a wider type, such as `dtype='bf16'`, or say `allow_overflow=True`"
            raise overflow(Overflow({(name, types[name]): count for name, count in beyond.items()}), do)
        return nbytes, beyond

    def _own_rows(self, route: Route) -> Columns:
        """The pieces of a tensor that this rank holds."""
        shards = route.source.shards
        return np.flatnonzero(np.isin(shards.files, [number for number, path in enumerate(shards.paths) if path == path_of(self.rank)]))

    def _write_rows(self, route: Route, rows: Columns, worker: Worker) -> int:
        """Write these pieces of a tensor. Returns how many values became infinite.

        Raises: ReplicasDiffer if the tensor is stored under two names, and this rank holds other values under the second.
        """
        shards, target, beyond = route.source.shards, Pieces(route.target), 0
        primary = primary_rows(shards)[rows]
        source = reader(replace(route.source, shards=shards.taken(rows, primary=primary)), route.target.dtype)
        for row in rows[primary].tolist():
            box = shards.box(row)
            for block in blocks(box.sizes):
                for strip, (stored, places) in strips(block.shifted(box.offsets), source, target):
                    values_beyond()
                    values = source.read(worker, stored, strip)
                    beyond += values_beyond()
                    worker.write(values, places, strip)
        return beyond

    def digests(self, ranks: int) -> dict[BlockKey, bytes]:
        """The digests of this rank's share of the blocks, as all ranks have written them: one in so many blocks."""
        worker = Worker(Staging(self.destination.place).files(), widest_element(self.plan))
        jobs = (job for number, job in enumerate(block_jobs(self.plan)) if number % ranks == self.rank)
        return {job.key: worker.digest(job.target, job.box, CURRENT.new()) for job in jobs}

    def complete(self, digests: dict[BlockKey, bytes] | None, beyond: dict[str, int]) -> None:
        """Commit what all ranks have written. digests: of all blocks; None: none are recorded. beyond: the values that became infinite."""
        plan, destination, header = self.plan, self.destination, self.header

        def made(files: Iterable[TargetFile], read: Read) -> Iterator[Sidecar]:
            if digests is None:
                return iter(())
            fingerprint = fingerprint_of_blocks(plan, digests_by_tensor(plan, digests))
            return records(plan, files, header.identity, fingerprint, read, Provenance(overflow=beyond), destination.workers(plan, ()))

        with destination.alone(header.identity):
            destination.begin(header, plan, resume=True)
            for _ in destination.copy(plan, (), frozenset(), Tiles(), Reading(checks=False)):
                pass
            destination.commit(plan, partial(made))
