"""The pickles of a tag: what the files of every rank, layer and expert hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from reshard.adapter.processes import in_processes
from reshard.adapter.state_dicts import plain_tensors
from reshard.containers import torch_zip
from reshard.containers.recognised_files import EqualFiles, Move
from reshard.containers.torch_zip import AnyTensor, LocatedTensor, is_plain_tensor
from reshard.errors import IncompleteError, MixedSaves
from reshard.geometry.value import value
from reshard.storage.files import Files

from ..layout.states import ModelStates, OptimizerStates, Shape, model_states, optimizer_states
from ..layout.tag import Tag

T = TypeVar("T", ModelStates, OptimizerStates)
Numbers = tuple[int, ...]
"""The numbers in the name of a rank's file."""
# Name -> tensor, from one file.
Tensors = Mapping[str, AnyTensor]


@value(eq=False, repr=False)
class RunStates:
    """What the files of a tag hold, by the numbers in the files' names."""

    tag: Tag
    """The files."""
    models: Mapping[Numbers, ModelStates]
    """Model states by (data-parallel rank, model-parallel rank). Without ZeRO-3 each model-parallel rank has one file, which counts as that
    of data-parallel rank 0. With ZeRO-3 the modules of other data-parallel ranks are dropped, since all are equal."""
    layers: Mapping[Numbers, Tensors] = field(default_factory=dict)
    """The layers of a PipelineModule, by (layer, tensor-parallel rank); empty if the model states hold modules."""
    optimizers: Mapping[Numbers, OptimizerStates] = field(default_factory=dict)
    """ZeRO's optimizer states, by (data-parallel rank, model-parallel rank)."""
    experts: Mapping[Numbers, Tensors] = field(default_factory=dict)
    """The experts, by (layer, expert, model-parallel rank)."""
    expert_optimizers: Mapping[Numbers, Mapping[str, Any]] = field(default_factory=dict)
    """Without ZeRO: the optimizers of expert-parallel ranks, by (expert-parallel rank, model-parallel rank)."""

    @property
    def is_zero3(self) -> bool:
        """Whether the model states are those of ZeRO-3."""
        return bool(self.tag.zero3_models)

    @property
    def is_pipeline_module(self) -> bool:
        """Whether the model is a PipelineModule, which stores its weights in files of its layers."""
        return any(dp == 0 and states.module is None for (dp, _), states in self.models.items())

    @property
    def first_model(self) -> ModelStates:
        """The model states of the first rank, which hold what only one rank writes."""
        return next(iter(self.models.values()))

    @property
    def first_optimizer(self) -> OptimizerStates | None:
        """The optimizer states of the first rank; None without ZeRO."""
        return next(iter(self.optimizers.values()), None)

    def expert_shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors in all experts' files, by name."""
        return {name: tensor.shape for tensors in self.experts.values() for name, tensor in tensors.items()}

    def __repr__(self) -> str:
        return f"<{len(self.models)} model states and {len(self.optimizers)} optimizer states of {self.tag!r}>"


def read_run_states(files: Files, tag: Tag) -> RunStates:
    """What all files of a tag hold.

    Raises: CheckpointError if the files are of two saves, if files with weights are missing, or a file holds something else.
    """
    if tag.models and tag.zero3_models:
        raise MixedSaves(
            f"{next(iter(tag.models.values()))} is from a save without ZeRO-3, {next(iter(tag.zero3_models.values()))} from one with it",
            where=files.root,
            why="Two saves lie under the same tag, and nothing tells which of them is wanted",
            do="Move the files of the older save away",
        )
    states = read_model_files(files, tag)
    if states.is_pipeline_module and not tag.layers:
        raise IncompleteError(
            "it holds no module, and the files of the layers, where PipelineModule stores the weights, are missing",
            where=states.first_model.path,
            do="Copy layer_*-model_states.pt from where the checkpoint was written",
        )
    return replace(
        states,
        optimizers=_read_optimizers(files, tag),
        experts={numbers: _read_tensors(files, path) for numbers, path in tag.experts.items()},
        # DeepSpeed before 0.19 writes these files also beside ZeRO's, where they are empty.
        expert_optimizers={
            numbers: optimizer
            for numbers, path in ({} if tag.optimizers else tag.expert_optimizers).items()
            if isinstance(optimizer := _read_dict(files, path).get("optimizer"), Mapping)
        },
    )


def read_model_files(files: Files, tag: Tag) -> RunStates:
    """What the files of the model hold: model states, and layers. The files of experts and optimizers are left out.

    Raises: CheckpointError if there are no model states, or a file holds something else.
    """
    states = RunStates(tag, _read_models(files, tag))
    if not states.is_pipeline_module:
        return states
    return replace(states, layers={numbers: _read_tensors(files, path) for numbers, path in tag.layers.items()})


def _read_models(files: Files, tag: Tag) -> dict[Numbers, ModelStates]:
    paths = list(tag.zero3_models.items()) or [((0, *numbers), path) for numbers, path in tag.models.items()]
    if not paths:
        raise IncompleteError(
            "there is no file of model states (mp_rank_.._model_states.pt, or zero_pp_rank_.. with ZeRO-3)",
            where=f"{files.root}/{tag.folder}",
            why="Model states hold the names and shapes of the parameters in the optimizer's files",
            do="Copy the file from where the checkpoint was written",
        )

    def parse(path: str) -> ModelStates:
        return model_states(torch_zip.read(files, path, locate=False), path)

    return _read_ranks(files, paths, parse, lambda numbers, states: states if numbers[0] == 0 else states.without_module())


def _read_ranks(
    files: Files, paths: Sequence[tuple[Numbers, str]], parse: Callable[[str], T], kept: Callable[[Numbers, T], T]
) -> dict[Numbers, T]:
    """What the files of all ranks hold. Files with equal pickles are parsed once; if they are not equal, in several processes.

    kept: what is kept of a file.
    """
    parsed: dict[Numbers, T] = {}
    equal: EqualFiles[T] = EqualFiles(files)

    def moved(numbers: Numbers, states: T, path: str, move: Move) -> T | None:
        return kept(numbers, states).moved(path, move)

    def read(some: Sequence[tuple[Numbers, str]]) -> dict[Numbers, T]:
        return {numbers: kept(numbers, parse(path)) for numbers, path in some}

    for numbers, path in paths:
        if not equal.is_useful:
            break
        parsed[numbers] = kept(numbers, equal.read(path, parse, partial(moved, numbers)))
    if left := paths[len(parsed) :]:
        parsed.update(chain.from_iterable(results.items() for results in in_processes(left, read)))
    return parsed


def _read_optimizers(files: Files, tag: Tag) -> dict[Numbers, OptimizerStates]:
    def parse(path: str) -> OptimizerStates:
        attributes: dict[str, Any] = {}
        return optimizer_states(torch_zip.read(files, path, locate=False, attributes=attributes), path, attributes)

    states_of_ranks = _read_ranks(files, list(tag.optimizers.items()), parse, lambda _, states: states)
    # A swap folder has the number of a global rank. With model parallelism nothing tells which rank that is.
    if not tag.has_swap_files or any(mp for _, mp in tag.optimizers):
        return states_of_ranks
    return {numbers: _with_swap_files(files, states, tag.swap_folder(numbers[0])) for numbers, states in states_of_ranks.items()}


def _with_swap_files(files: Files, states: OptimizerStates, folder: str) -> OptimizerStates:
    """The states with the rows of the swap files in place of the empty rows in the optimizer file.

    An empty master has the name of its swap file as the attribute ds_id; the states of that master are in <kind>-<ds_id>. A swap file
    holds raw elements, padded to a multiple of 1 KiB. Source: deepspeed/runtime/swap_tensor/optimizer_utils.py; measured on 0.19.8.
    """

    def swapped(row: AnyTensor, name: str) -> AnyTensor:
        path = f"{folder}{name}.tensor.swp"
        nbytes = files.size(path)
        if 0 not in row.shape or nbytes is None:
            return row
        return LocatedTensor(path, 0, row.dtype, (nbytes // row.dtype.itemsize,), (1,), name)

    groups = list(states.groups)
    for number, group in enumerate(states.groups):
        # The name comes from the file: it must stay in the folder.
        if (name := group.swap_name) and re.fullmatch(r"[\w-]{1,100}", name):
            rows = {kind: row for kind, row in group.states.items() if is_plain_tensor(row) and len(row.shape) == 1}
            swapped_rows = {kind: swapped(row, f"{kind}-{name}") for kind, row in rows.items()}
            groups[number] = replace(group, master=swapped(group.master, name), states={**group.states, **swapped_rows})
    return replace(states, groups=tuple(groups))


def _read_tensors(files: Files, path: str) -> Tensors:
    return plain_tensors(_read_dict(files, path), path)


def _read_dict(files: Files, path: str) -> Mapping[Any, Any]:
    """The dict at the root of a file; {} if it holds something else."""
    root = torch_zip.read(files, path, locate=False)
    return root if isinstance(root, Mapping) else {}
