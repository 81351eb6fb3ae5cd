"""StateDictReader, which users call Reader: `dcp.load` from every checkpoint that reshard reads, into tensors of any mesh.

    read_metadata         the checkpoint is opened; every name can be asked for, and what it lacks is settled when all names are known
    planner               cuts the requests to the boxes that this rank holds
    prepare_local_plan    which weights this rank asks for
    prepare_global_plan   the coordinator finds the weights that no rank asks for
    read_data             names are compared, then each box is read into the tensor that it belongs to

Measured on torch 2.13. torch's metadata says the size of a tensor and where its stored boxes lie. Here each tensor is one box, whatever
files hold it: which bytes are read follows from the checkpoint's index.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from reshard.canonical.content import Content, Selection
from reshard.canonical.dequantization import with_values
from reshard.canonical.optimizer_state import STEP
from reshard.canonical.renaming import unwrapped
from reshard.engine.checks.reading import Reading
from reshard.engine.events import event
from reshard.engine.origins.on_tensors import torch_type
from reshard.engine.pool import run_jobs
from reshard.engine.views import LazyTensor
from reshard.errors import RequestError, ReshardError
from reshard.geometry.dtypes import from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.sections import StoredTensor, whole
from reshard.index.index import Tensor
from reshard.live.memory.describe import held_box, local_of
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.open import open as open_checkpoint
from reshard.storage.files import Files
from reshard.torch.asked import AskedNames, StateName, about_names, in_form_of, listed_names, state_name
from reshard.torch.fused import fused_tensors

PathLike = str | os.PathLike[str]


class StateDictReader(StorageReader):  # type: ignore[misc,unused-ignore]  # torch may not be installed
    """A `StorageReader` for `dcp.load`: fills the tensors of a state dict from a checkpoint of any format and any parallel sizes.

    optimizer: also the moments, steps and settings of the optimizer, under the names of `get_optimizer_state_dict`. prefix: what the
    trainer puts before the names of the weights; None: roots such as `model.` and wrappers are tried. dequantize: take the values of
    quantized weights. checksums: compare storages that a rank reads whole with the CRC-32 that their file holds. workers: threads of
    this rank; None: its share of the processors, at most 8. options: the keywords of `reshard.open`, such as `model=DIR` and `step=`.

    A parameter in float32 is filled from the optimizer's full-precision copy, if the checkpoint has one. Every rank opens the checkpoint
    and reads the bytes of its own boxes, once: where several ranks have stored copies of them, the copies are not compared.

    `dcp.load` raises CheckpointException with RequestError for names that one side lacks, unless its planner has `allow_partial_load`;
    with CheckpointError if the checkpoint is damaged. ValueError for another shape comes from torch's planner.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        optimizer: bool = False,
        prefix: str | None = None,
        dequantize: bool = False,
        checksums: bool = True,
        workers: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.path = path
        """Where the checkpoint lies."""
        self._options, self._optimizer, self._prefix, self._dequantize = options, optimizer, prefix, dequantize
        self._checksums = checksums
        self._workers = workers or max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._source: _Source | None = None
        self._refusal: ReshardError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path can be asked for: any can."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another path, if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._source = self._refusal = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the checkpoint. A name that it lacks is there as well, as an object, and is refused when all names are known."""
        try:
            self._source = _Source.opened(self.path, self._options, self._optimizer, self._prefix, self._dequantize)
        except ReshardError as error:
            # torch takes an error here for a checkpoint without common metadata, and hides its text. It is raised by the next call.
            self._refusal = error
            return Metadata({})
        return Metadata(_Asked(self._source), planner_data={name: (name,) for name in self._source.content.weights})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what opening the checkpoint raised."""
        if self._refusal is not None:
            raise self._refusal

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan with the weights that this rank asks for."""
        assert self._source is not None, "torch reads the metadata first"
        return replace(plan, storage_data=tuple(self._source.names.asked))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans with the weights that no rank asks for: the ranks of a pipeline ask for different ones."""
        assert self._source is not None, "torch reads the metadata first"
        left = tuple(self._source.names.not_asked_for(name for plan in plans for name in plan.storage_data))
        return [replace(plan, storage_data=left) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. Raises RequestError for names that one side lacks, CheckpointError if a file is damaged."""
        assert self._source is not None, "torch reads the metadata first"
        source, began = self._source, time.monotonic()
        source.check_names(plan, planner)
        reading = Reading(checks=self._checksums)
        files = reading.of(source.checkpoint.files, lambda: source.content.tensors.values())
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]

        def make_worker() -> Callable[[ReadItem], int]:
            def perform(item: ReadItem) -> int:
                target = planner.resolve_tensor(item).detach()
                stored = source.tensor_for(item.storage_index.fqn, target.dtype)
                box = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
                lazy = LazyTensor(whole(stored.name, stored.values_dtype, stored.shape), {stored.name: stored}, files)
                (lazy[box] if box else lazy).read_into(target)
                planner.commit_tensor(item, target)
                return int(target.nbytes)

            return perform

        nbytes = sum(run_jobs(items, make_worker, min(self._workers, len(items)))) + source.fill_fused(plan.items, planner, files)
        kept = source.load_values((item for item in plan.items if item.type == LoadItemType.BYTE_IO), planner)
        Reading.check_unchanged(source.checkpoint.files, source.checkpoint.index, verb="loaded")
        seconds = time.monotonic() - began
        event(
            "loaded",
            f"loaded {plural(len(items), 'box', 'boxes')}, {nbytes:,} bytes, from {source.checkpoint.path} in {seconds:.2f} s"
            + (f"; the trainer keeps {plural(len(kept), 'setting')}, such as {kept[0]}" if kept else ""),
            path=source.checkpoint.path,
            boxes=len(items),
            bytes=nbytes,
            kept=kept,
            seconds=round(seconds, 3),
        )
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Source:
    """An opened checkpoint, asked for by a trainer's names."""

    def __init__(self, checkpoint: Checkpoint, content: Content, prefix: str | None, optimizer: bool) -> None:
        self.checkpoint, self.content = checkpoint, content
        self.names = AskedNames(content, prefix)
        self._optimizer = optimizer
        self._fused: Mapping[str, StoredTensor] | None = None
        self._in_fused: set[str] = set()

    @staticmethod
    def opened(path: PathLike, options: Mapping[str, Any], optimizer: bool, prefix: str | None, dequantize: bool) -> _Source:
        """The checkpoint at a path. Raises: as `reshard.open` does; RequestError if it has no optimizer state, and that is asked for."""
        checkpoint = open_checkpoint(path, **options)
        try:
            content = checkpoint.content(Selection(optimizer=True, masters=True))
        except RequestError:  # there is no optimizer state, or nothing tells the parameters that it belongs to
            if optimizer:
                raise
            content = checkpoint.content()
        if dequantize:
            content = with_values(content, checkpoint.model_files.config)
        return _Source(checkpoint, content, prefix, optimizer)

    def stored(self, name: str) -> Tensor | None:
        """The stored tensor that a trainer's name stands for; None for a setting, a step count, or a name that the checkpoint lacks."""
        state = state_name(name)
        if state is None:
            weight = self.names.weight(name)
            return None if weight is None else self.content.weights[weight]
        is_tensor = self._optimizer and not state.is_setting and state.kind != STEP
        return self.names.state(state) if is_tensor else None

    def tensor_for(self, name: str, dtype: torch.dtype) -> Tensor:
        """The stored tensor from which a tensor of an element type is filled: for float32 the full-precision copy, if there is one.

        Of copies of the same box one is read: of a run with a hundred replicas, a rank would read a hundred times what it holds.
        """
        stored = self.stored(name)
        assert stored is not None, "the plan holds boxes of stored tensors alone"
        if state_name(name) is None and dtype == torch.float32 and (weight := self.names.weight(name)) is not None:
            stored = self.names.master(weight) or stored
        return stored.without_replicas()

    def check_names(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Raises RequestError for names that one side lacks, unless the planner allows it."""
        if getattr(planner, "allow_partial_load", False):
            return
        asked = [item.dest_index.fqn for item in plan.items if item.type == LoadItemType.BYTE_IO]
        missing = [name for name in asked if not self._has_value(name) and self.parts_of(name, planner) is None]
        surplus = [name for name in plan.storage_data if name not in self._in_fused]
        if missing and not self._optimizer and all(state_name(name) for name in missing):
            raise RequestError(
                f"the trainer asks for the state of its optimizer, such as {missing[0]}",
                where=self.checkpoint.path,
                do="Add `optimizer=True` to the Reader, or load a state dict of the model alone",
            )
        if missing or surplus:
            raise about_names(missing, surplus, self.checkpoint.path)

    def parts_of(self, name: str, planner: LoadPlanner) -> tuple[StoredTensor, dict[str, Tensor]] | None:
        """Where published weights, or the state of their parameters, lie in a tensor of the trainer that has another name, and these; None
        if the tensor does not consist of what is stored."""
        asked, held = state_name(name), getattr(planner, "state_dict", {})
        if not isinstance(held.get(name), torch.Tensor) or (asked is not None and (asked.is_setting or not self._optimizer)):
            return None
        if self._fused is None:
            weights = {self.names.own_name(key): tensor for key, tensor in held.items() if is_weight(key, tensor)}
            described = {key: (tuple(tensor.shape), from_torch(str(tensor.dtype), where=key)) for key, tensor in weights.items()}
            self._fused = fused_tensors(self.checkpoint, described)
            self.names.fused = {key: stored.sections[0].name for key, stored in self._fused.items()}
        stored = self._fused.get(self.names.own_name(name) if asked is None else unwrapped(asked.owner))
        parts = {section.name for section in stored.sections} if stored else set()
        masters = asked is None and held[name].dtype == torch.float32
        sources = {part: self.names.part(part, asked.kind if asked else "", masters=masters) for part in parts}
        known = {part: source.without_replicas() for part, source in sources.items() if source is not None}
        if stored is None or len(known) < len(sources):
            return None
        self._in_fused |= parts
        return replace(stored, dtype=next(iter(known.values())).values_dtype), known

    def fill_fused(self, items: Iterable[ReadItem], planner: LoadPlanner, files: Files) -> int:
        """Fill tensors of the trainer that have other names than what is stored. Returns the bytes."""
        nbytes = 0
        for name in (item.dest_index.fqn for item in items if item.type == LoadItemType.BYTE_IO):
            if self._has_value(name) or (parts := self.parts_of(name, planner)) is None:
                continue
            tensor = planner.state_dict[name]  # type: ignore[attr-defined,unused-ignore]
            box, target = held_box(name, tensor).box, local_of(tensor)
            if box.volume:
                LazyTensor(*parts, files)[box.index].read_into(target)
            nbytes += target.nbytes
        return nbytes

    def load_values(self, items: Iterable[ReadItem], planner: LoadPlanner) -> list[str]:
        """Fill step counts and settings. Returns the settings that keep the trainer's value, as the checkpoint has none.

        Raises: RequestError if the checkpoint has several values for the parameters of one of the trainer's groups.
        """
        held: Mapping[str, Any] = getattr(planner, "state_dict", {})
        groups, kept = self.content.param_groups() if self._optimizer else (), []
        for item in items:
            name = item.dest_index.fqn
            asked = state_name(name)
            if asked is None or not self._has_value(name):
                continue  # allowed to be missing
            current = held.get(name)
            if not asked.is_setting:
                self._fill_step(item, asked, current, planner)
                continue
            values = () if asked.kind == "params" else self.names.setting(asked, listed_names(held, asked), groups)
            if len(values) > 1:
                raise RequestError(
                    f"the parameters of this param group have different values of {asked.kind} in the checkpoint: "
                    + ", ".join(map(repr, values)),
                    where=name,
                    why="The trainer's groups are not those of the run that saved",
                    do="Give the optimizer the groups of that run, or leave the group's settings out of what is loaded",
                )
            if values:
                _load(planner, item, current, in_form_of(values[0], current))
            elif asked.kind != "params":
                kept.append(name)
        return kept

    def _fill_step(self, item: ReadItem, asked: StateName, current: Any, planner: LoadPlanner) -> None:
        stored, count = self.names.state(asked), self.names.step(asked)
        if stored is not None:
            lazy = LazyTensor(whole(stored.name, stored.dtype, stored.shape), {stored.name: stored}, self.checkpoint.files)
            count = int(lazy.numpy().reshape(-1)[0])
        assert count is not None, "a name without a value was refused"
        _load(planner, item, torch.tensor(0.0) if current is None else current, count)

    def _has_value(self, name: str) -> bool:
        """Whether the checkpoint has a value for a name that is not that of a stored tensor."""
        asked = state_name(name)
        if asked is None or not self._optimizer:
            return False
        return asked.is_setting or (asked.kind == STEP and (self.names.state(asked) is not None or self.names.step(asked) is not None))


class _Asked(dict[str, Any]):
    """torch's metadata of each tensor by the trainer's names. It has every name: one that the checkpoint lacks is an object here, so that
    all of them can be refused together (`_Source.check_names`)."""

    def __init__(self, source: _Source) -> None:
        super().__init__({name: _metadata(tensor) for name, tensor in source.content.weights.items()})
        self._source = source
        self._known: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            stored = self._source.stored(name)
            self._known[name] = BytesStorageMetadata() if stored is None else _metadata(stored)
        return self._known[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _metadata(tensor: Tensor) -> TensorStorageMetadata:
    """A tensor as one stored box."""
    size = torch.Size(tensor.shape)
    properties = TensorProperties(dtype=torch_type(tensor.values_dtype))
    return TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])


def is_weight(name: str, value: Any) -> bool:
    """Whether an entry of a flat state dict is a tensor of the model."""
    return isinstance(value, torch.Tensor) and state_name(name) is None


def _load(planner: LoadPlanner, item: ReadItem, current: Any, value: Any) -> None:
    """Put a value in the place of the trainer's: into its tensor if it has one."""
    if isinstance(current, torch.Tensor):
        local_of(current).fill_(value)
        return
    stream = io.BytesIO()
    torch.save(type(current)(value) if isinstance(current, int | float) and not isinstance(current, bool) else value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)
