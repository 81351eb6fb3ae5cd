"""Checkpoints of Megatron-FSDP, written: every parameter whole, in rows that `dp` ranks share.

    iter_0000010/__{rank}_0.distcp, .metadata    model, optimizer, and the settings of the run as objects
    latest_checkpointed_iteration.txt

A run of any sizes loads it, as torch.distributed.checkpoint cuts tensors anew. Megatron-FSDP trains the fp32 main weights and stores these
alone. With an optimizer they are its full-precision copies, or the widened weights where there are none; weights alone keep their type.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py and optimizer/distrib_optimizer.py of 0.19.2;
megatron/training/checkpointing.py of core_r0.19. Names and shapes are compared with those of real saves (fixtures/megatron_fsdp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from reshard.adapter.dcp_writer import DcpFile, written_metadata
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value
from reshard.plans.layout import Layout, Sidecar, Target, row_shard

from ..layout.chunks import ChunkTensor, RankView
from ..layout.names import parse_name
from ..layout.parameters import model_tensor
from ..layout.save_folders import DCP_METADATA
from ..layout.stages import ParallelSizes, Rank, split_into_chunks
from ..layout.tensors import is_hybrid
from .save import F32, MegatronSave, begin_save

_Path = tuple[str, ...]
_FORMAT = "fsdp_dtensor"
# A run in bf16 wraps the model three times: the data-parallel wrapper, MegatronFSDP and Float16Module. The model's names have one of them.
_WRAPPERS = 3
_HALVES = ("_w", "_v")
_FC1 = ("mlp.linear_fc1.", "mlp.shared_experts.linear_fc1.", "linear_fc1.")


@value(eq=False)
class _Stored:
    """What is stored of a parameter under one name: all of it, or one of the parts that are stored separately."""

    name: str
    """The name without wrappers."""
    array: Mosaic
    """What it holds."""
    is_parameter: bool
    """Whether the optimizer updates it."""


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of `dp` ranks, and the metadata that make them a checkpoint. `tp` only decides the padding of the vocabulary.

    Raises: RequestError if Megatron cannot hold the model; UnsupportedError for layers whose parts Megatron-FSDP stores as ranks hold them.
    """
    target.parallel.allow("dp", "tp", what="a checkpoint of Megatron-FSDP, which ranks of any parallel sizes load")
    save = begin_save(content, replace(target, parallel=Parallel(tp=target.parallel.tp)))
    if is_hybrid(save.model.model) or save.spec.experts == "grouped":
        raise UnsupportedError(
            "Megatron-FSDP has no experts in two tensors for all" if save.spec.experts == "grouped" else "Mamba layers are not written",
            why="megatron-core 0.19.2 stores them under names that later versions change",
            do="Write `to=megatron-dist`",
        )
    parameters = _parameters(save)
    stored = [part for parameter in parameters for part in _parts(save, parameter)]
    objects, ranks = dict(_objects(save, parameters)), target.parallel.dp
    files, planner = [], dict[str, _Path]()
    for rank in range(ranks):
        file = DcpFile(f"__{rank}_0.distcp")
        for path, entry in objects.items() if rank == 0 else ():
            file.add_object(_fqn(path, planner), entry)
        for part in stored:
            _add_rows(save, file, part, (ranks, rank), planner)
        files.append(file)
    folder = f"{save.name}/"
    metadata = Sidecar(folder + DCP_METADATA, written_metadata(files, planner))
    rank_files = tuple(file.close({"dp": rank} if ranks > 1 else {}, folder=folder) for rank, file in enumerate(files))
    counted = save.optimizer.step_keys if save.has_optimizer else ()
    sidecars = (*companions.sidecars({save.dtype}), metadata, save.tracker)
    return Layout("fsdp-dtensor", rank_files, sidecars, target.parallel, (*save.notes(), *_notes(save)), save.aliases, counted)


def _parameters(save: MegatronSave) -> list[ChunkTensor]:
    """The tensors of the whole model, with the names of a run of one rank, which are global."""
    (chunk,) = split_into_chunks((save.model.layers,), 1)
    entries = RankView(save.model, chunk, ParallelSizes(), Rank(), save.spec).entries()
    # megatron-core 0.19 calls the layer inside of a layer for multi-token prediction so.
    return [replace(tensor, name=name.replace(".transformer_layer.", ".mtp_model_layer.")) for name, tensor in entries if tensor]


def _parts(save: MegatronSave, parameter: ChunkTensor) -> Iterator[_Stored]:
    """The names under which a parameter is stored: gate and up of an MLP apart, and the parts of a gated delta net."""
    name, parsed = parameter.name, parse_name(parameter.name).in_model(save.model.layers)
    tensor = model_tensor(save.model, parsed, name)
    if parsed.name.startswith(_FC1) and len(tensor.blocks) == len(_HALVES):
        yield from (_Stored(name + half, block, True) for half, block in zip(_HALVES, tensor.blocks, strict=True))
        return
    yield from (_Stored(key, part.whole, parameter.is_parameter) for key, part in tensor.by_segment(name).items())


def _add_rows(save: MegatronSave, file: DcpFile, part: _Stored, ranks: tuple[int, int], planner: dict[str, _Path]) -> None:
    """A rank's rows of a weight and of its moments. ranks: (number of ranks, this one)."""
    box = row_shard(part.array.shape, *ranks)
    if box is None:
        return
    kinds = save.optimizer.kinds(part.array) if save.has_optimizer and part.is_parameter else ()
    for kind in ("", *kinds):
        path = ("optimizer", "state", _wrapped(save) + part.name, kind) if kind else ("model", f"module.{part.name}")
        array = save.optimizer.state_array(part.array, kind) if kind else part.array
        rows = array.cut(0, box.offsets[0], box.stops[0])
        key = _fqn(path, planner)
        file.add_tensor(key, rows.stored(key, F32 if kind else _dtype(save, part), rows.shape), box.offsets, array.shape)


def _dtype(save: MegatronSave, part: _Stored) -> DType:
    """The type of a weight. A run that goes on has fp32 main weights, unless the user asks for another type; weights alone keep theirs."""
    is_main = save.has_optimizer and save.target.dtype is None
    return F32 if is_main or not part.is_parameter else save.dtype_of(part.array)


def _objects(save: MegatronSave, parameters: Sequence[ChunkTensor]) -> Iterator[tuple[_Path, Any]]:
    """The settings of the run; and with an optimizer the schedule and, for every parameter, the settings of its param group."""
    dtype = save.source_args.get("params_dtype") if isinstance(save.source_args.get("params_dtype"), str) else save.dtype.torch
    root = save.root(ckpt_format=_FORMAT, use_dist_ckpt=True, use_megatron_fsdp=True, use_distributed_optimizer=True, params_dtype=dtype)
    yield from (((key,), entry) for key, entry in root.items())
    if not save.has_optimizer:
        return
    yield from ((("opt_param_scheduler", key), entry) for key, entry in save.scheduler().items())
    trained = [parameter for parameter in parameters if parameter.is_parameter]
    # Experts have no groups of their own: Megatron-FSDP does not mark their parameters.
    for settings, members in save.optimizer.param_groups(trained, is_expert=False):
        for member, setting in product(members, settings):
            yield ("optimizer", "param_to_group_meta", _wrapped(save) + member.name, setting), settings[setting]


def _wrapped(save: MegatronSave) -> str:
    """What precedes the optimizer's names."""
    return "module." * int(save.target.options.get("wrappers", _WRAPPERS))


def _fqn(path: _Path, planner: dict[str, _Path]) -> str:
    """The flat name of a path, which is noted in `planner`."""
    fqn = ".".join(path)
    planner[fqn] = path
    return fqn


def _notes(save: MegatronSave) -> Iterator[str]:
    """What is stored of weights, and how many wrappers the optimizer's names have."""
    if save.has_optimizer and save.target.dtype is None:
        is_master = any(tensor.kind == "master" for tensor in save.content.weights.values())
        held = "masters" if is_master else "weights, widened where they are narrower, as there are no masters"
        yield f"Megatron-FSDP stores fp32 main weights alone: these are the source's {held}"
    if save.has_optimizer:
        yield "the optimizer's names have the wrappers of a run in bf16: a run without Float16Module has one less (`wrappers=2`)"
