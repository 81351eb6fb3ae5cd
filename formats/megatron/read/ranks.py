"""The rank files of a legacy save as plain values: the tensors of each rank's chunks, its optimizer, the run's settings and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from reshard.adapter.state_dicts import flat, plain_tensors
from reshard.containers import torch_zip
from reshard.containers.inert_pickle import shown
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, IncompleteError, MissingFile, MixedSaves
from reshard.geometry.value import value
from reshard.storage.files import Files

from ..layout.arguments import MODEL_ARGS, nemo_args, plain_args
from ..layout.names import ParsedName, is_weight_name, parse_name
from ..layout.save_folders import MegatronRankFolder, rank_folders
from ..layout.stages import Args, ParallelSizes

_MODEL = "model"
# Keys of a rank's file that hold counters and the state of the schedule. Other keys belong to the trainer.
_RUN_STATE = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler", "lr_scheduler", "tokens")


@value(eq=False, repr=False)
class MegatronRank:
    """The file of one rank."""

    path: str
    """The file."""
    folder: str
    """The rank's folder, as a prefix of its paths."""
    tp_rank: int
    """Tensor-parallel rank."""
    pp_rank: int
    """Pipeline-parallel rank: its stage."""
    ep_rank: int
    """Expert-parallel rank."""
    chunks: tuple[Mapping[str, AnyTensor], ...]
    """The tensors of each chunk by name, in the order of the file."""
    optimizer: Any
    """The optimizer's part of the file, as stored."""
    args: Args
    """The settings of the run that wrote the file; empty if the file has none."""
    run_state: Mapping[str, Any]
    """Counters and the state of the schedule, as stored."""
    objects: tuple[str, ...]
    """Names of everything else in the file."""

    @property
    def writer(self) -> int | None:
        """The rank of the run that wrote the file, if the file tells it."""
        writer = self.args.get("rank")
        return writer if type(writer) is int else None

    @property
    def iteration(self) -> int | None:
        """The iteration of the save, if the file tells it."""
        iteration = self.run_state.get("iteration")
        return iteration if type(iteration) is int else None

    @property
    def version(self) -> float:
        """The version of the checkpoint's form; files without one are older than version 1."""
        version = self.run_state.get("checkpoint_version", 0)
        return float(version) if isinstance(version, int | float) else 0.0

    def __repr__(self) -> str:
        tensors = sum(map(len, self.chunks))
        return f"<{self.path}: tp rank {self.tp_rank}, stage {self.pp_rank}, ep rank {self.ep_rank}, {tensors} tensors>"


@value(eq=False, repr=False)
class LegacySave:
    """All rank files of a legacy save."""

    args: Args
    """The run's settings; empty if no file has them."""
    sizes: ParallelSizes
    """The run's parallel sizes."""
    ranks: tuple[MegatronRank, ...]
    """The ranks, sorted by stage, expert-parallel rank and tensor-parallel rank."""

    @property
    def first(self) -> MegatronRank:
        return self.ranks[0]

    def tensors(self) -> Iterator[tuple[ParsedName, AnyTensor]]:
        """The tensors of all ranks, by the parts of their names."""
        chunks = (chunk for rank in self.ranks for chunk in rank.chunks)
        return ((parse_name(name), stored) for chunk in chunks for name, stored in chunk.items())

    def __repr__(self) -> str:
        return f"<legacy save: {len(self.ranks)} ranks, {_sizes_text(self.sizes)}>"


def read_ranks(files: Files, folder: str) -> LegacySave:
    """All rank files of the save in `folder`.

    Raises: CheckpointError if a rank is missing, or if files do not belong to one save of one run.
    """
    folders = rank_folders(files, folder)
    if not folders:
        raise IncompleteError("there is no rank folder with weights here, such as mp_rank_00", where=f"{files.root}/{folder}")
    root = _read_file(files, folders[0])
    args = plain_args(root.get("args")) or nemo_args(files, folder)
    # Where the settings do not tell a size, the folders do.
    stages = 1 + max((rank_folder.numbers[0] for rank_folder in folders if rank_folder.numbers), default=0)
    sizes = ParallelSizes.from_args(args, tp=1 + max(rank_folder.tp_rank for rank_folder in folders), pp=1 if args else stages)
    _check_folders(folders, sizes, files.root)
    # The other files are read only after the folders are known to be complete.
    roots = [root, *(_read_file(files, other) for other in folders[1:])]
    ranks = [_parse_rank(rank_folder, root, sizes) for rank_folder, root in zip(folders, roots, strict=True)]
    ranks.sort(key=lambda rank: (rank.pp_rank, rank.ep_rank, rank.tp_rank))
    _check_writers(ranks, sizes)
    _check_one_save(ranks)
    return LegacySave(args, replace(sizes, vp=len(ranks[0].chunks)), tuple(ranks))


def _read_file(files: Files, folder: MegatronRankFolder) -> Mapping[str, Any]:
    """The root of a rank's file. Raises CheckpointError if the file holds no model."""
    root = torch_zip.read(files, folder.weights, locate=False)
    if not isinstance(root, Mapping) or not any(str(key).startswith(_MODEL) or key == "state_dict" for key in root):
        raise CheckpointError(f"it holds {shown(root)}, not a rank's model", where=folder.weights, do="Copy the file again")
    return root


def _folder_ranks(folder: MegatronRankFolder, sizes: ParallelSizes) -> tuple[int, int, int]:
    """The tensor-, pipeline- and expert-parallel rank of a folder. Its name leaves out the number of an axis with one rank."""
    numbers = list(folder.numbers)
    pp_rank = numbers.pop(0) if numbers and (sizes.pp > 1 or len(numbers) > 1 or sizes.ep == 1) else 0
    return folder.tp_rank, pp_rank, numbers.pop(0) if numbers else 0


def _check_folders(folders: Sequence[MegatronRankFolder], sizes: ParallelSizes, where: str) -> None:
    """Raises CheckpointError if a rank of the run has no folder, or if a folder belongs to no rank of the run."""
    by_ranks = {_folder_ranks(folder, sizes): folder for folder in folders}
    for (tp_rank, pp_rank, ep_rank), folder in by_ranks.items():
        if tp_rank >= sizes.tp or pp_rank >= sizes.pp or ep_rank >= sizes.ep:
            raise CheckpointError(
                f"the run had {_sizes_text(sizes)}, so it had no such rank",
                where=folder.path,
                why="The folder is left over from a save with other sizes, so its values are from another step",
                do="Move it away",
            )
    missing = (
        f"tensor-parallel rank {tp_rank}" + (f" of stage {pp_rank}" if sizes.pp > 1 else "")
        for pp_rank in range(sizes.pp)
        for tp_rank in range(sizes.tp)
        if not any((tp_rank, pp_rank) == ranks[:2] for ranks in by_ranks)
    )
    present = {ep_rank for _, _, ep_rank in by_ranks}
    missing_experts = (f"expert-parallel rank {ep_rank}" for ep_rank in range(sizes.ep) if ep_rank not in present)
    if first := next(chain(missing, missing_experts), None):
        raise MissingFile(
            f"the folder of {first} is not there",
            where=where,
            why=f"The run had {_sizes_text(sizes)}; without this rank a part of the weights would be left unset",
            do="Copy it from where the checkpoint was written",
        )


def _sizes_text(sizes: ParallelSizes) -> str:
    by_kind = {"tensor": sizes.tp, "pipeline": sizes.pp, "expert": sizes.ep}
    return ", ".join(f"{kind}-parallel size {size}" for kind, size in by_kind.items() if size > 1 or kind == "tensor")


def _parse_rank(folder: MegatronRankFolder, root: Mapping[str, Any], sizes: ParallelSizes) -> MegatronRank:
    """A rank's file as plain values."""
    keys = _model_keys(root)
    objects = [str(key) for key in root if key not in (*keys, "optimizer", *_RUN_STATE)] if keys else []
    chunks: list[dict[str, AnyTensor]] = []
    for state_dict in [root[key] for key in keys] or [root]:
        entries = dict(flat(state_dict)) if isinstance(state_dict, Mapping) else {}
        weights = {name: entry for name, entry in entries.items() if is_weight_name(name)}
        chunks.append(plain_tensors(weights, folder.weights))
        objects.extend(name for name, entry in entries.items() if entry is not None and name not in chunks[-1])
    return MegatronRank(
        folder.weights,
        folder.path,
        *_folder_ranks(folder, sizes),
        tuple(chunks),
        root.get("optimizer"),
        plain_args(root.get("args")),
        {key: root[key] for key in _RUN_STATE if key in root},
        tuple(objects),
    )


def _model_keys(root: Mapping[str, Any]) -> list[str]:
    """The keys of the chunks in a rank's file, in order; none if the file itself is the one chunk, as NeMo writes it."""
    if _MODEL in root:
        return [_MODEL]
    numbered = [key for key in root if isinstance(key, str) and key.startswith(_MODEL) and key.removeprefix(_MODEL).isdecimal()]
    if numbered:
        return sorted(numbered, key=lambda key: int(key.removeprefix(_MODEL)))
    return ["state_dict"] if "state_dict" in root else []


def _check_writers(ranks: Sequence[MegatronRank], sizes: ParallelSizes) -> None:
    """Raises CheckpointError if a file is a copy of another file, or lies in the folder of another rank.

    A file tells which rank of the run wrote it. Ranks are numbered along the tensor-parallel axis first, and ascend along the others.
    """
    last: dict[tuple[object, ...], tuple[int, str]] = {}
    for rank in ranks:
        if (writer := rank.writer) is None:
            continue
        if writer % sizes.tp != rank.tp_rank:
            raise CheckpointError(
                f"it was written by rank {writer} of the run",
                where=rank.path,
                why=f"The folder is that of tensor-parallel rank {rank.tp_rank} of {sizes.tp}, so files have changed places",
                do="Copy all rank folders again from where the checkpoint was written",
            )
        # The ranks that differ only along the axis, which ascend here.
        for key in (("expert-parallel rank", rank.tp_rank, rank.pp_rank), ("stage", rank.tp_rank, rank.ep_rank)):
            before, path = last.get(key, (-1, ""))
            if before >= writer:
                raise CheckpointError(
                    f"it was written by rank {writer} of the run, and {path}, of a lower {key[0]}, by rank {before}",
                    where=rank.path,
                    why="The ranks of a run ascend along each parallel axis, so files have changed places",
                    do="Copy all rank folders again from where the checkpoint was written",
                )
            last[key] = writer, rank.path


def _check_one_save(ranks: Sequence[MegatronRank]) -> None:
    """Raises MixedSaves if the files come from several saves or runs."""
    first, facts = ranks[0], _facts_of_save(ranks[0])
    for rank in ranks:
        own = _facts_of_save(rank)
        if differing := next((name for name in facts if name in own and own[name] != facts[name]), None):
            raise MixedSaves(
                f"it has {differing}{own[differing]}, {first.path} has {differing}{facts[differing]}",
                where=rank.path,
                why="The folder holds files of several runs or of several saves, which together are not the model at any step",
                do="Keep the folders of one save only",
            )


def _facts_of_save(rank: MegatronRank) -> dict[str, Any]:
    """What the files of all ranks of a save tell alike."""
    of_file = {"iteration ": rank.iteration, "checkpoint version ": rank.version, "chunk count ": len(rank.chunks)}
    return of_file | {f"the setting {key}=": rank.args[key] for key in MODEL_ARGS if key in rank.args}
