"""Files of one rank each, in one folder: which belong together, and whether all are there.

model_world_size_{N}_rank_{r}.pt, optim_world_size_{N}_rank_{r}.pt, pytorch_model_fsdp_{i}_rank{r}.bin, ..rank<r>.pt
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.containers import torch_zip
from reshard.errors import CheckpointError, RequestError
from reshard.index.index import Tensor, check_coverage
from reshard.storage.files import Files, read_range

_NAME = re.compile(r"(?P<kind>.*?)(_world_size_(?P<world>\d{1,6}))?[_.-]?rank[_.-]?(?P<rank>\d{1,6})\.(pt|pth|bin|ckpt)")
_STEP = re.compile(r"(?:global_)?(?:step|checkpoint|iter)[-_]?(\d+)")


@dataclass(slots=True)
class RankFiles:
    """The files of one kind ("model", "optim", ...) by rank, and the number of ranks that their names tell, if they do."""

    kind: str
    world: int | None
    paths: dict[int, str] = field(default_factory=dict)

    @property
    def is_optimizer(self) -> bool:
        return "optim" in self.kind

    @property
    def is_model(self) -> bool:
        return not self.is_optimizer and not re.search(r"extra|rng|random|sched|data|sampler|train_state", self.kind)

    @property
    def first(self) -> str:
        return next(iter(self.paths.values()))


@dataclass(frozen=True, slots=True)
class RankFolder:
    """All files of ranks in a folder: at most one set for the model and one for its optimizer, and others."""

    model: RankFiles | None
    optimizer: RankFiles | None
    others: tuple[RankFiles, ...]

    @property
    def read(self) -> tuple[RankFiles, ...]:
        """The sets that hold tensors of the model."""
        return tuple(found for found in (self.model, self.optimizer) if found)

    def paths(self) -> Iterator[str]:
        for found in (*self.read, *self.others):
            yield from found.paths.values()

    def ranks(self, on_mesh: int) -> int:
        """How many ranks the run had: by the files' names, or else by its mesh, or by the highest rank that has a file."""
        sets = (*self.read, *self.others)
        named = next((found.world for found in sets if found.world is not None), None)
        return named or max(on_mesh, 1 + max(rank for found in sets for rank in found.paths))


def find(listing: Sequence[str]) -> list[RankFiles]:
    """The sets among the paths of one folder."""
    found: dict[tuple[str, str | None], RankFiles] = {}
    for path in listing:
        if match := _NAME.fullmatch(path.rpartition("/")[2]):
            world = match["world"]
            one = found.setdefault((match["kind"], world), RankFiles(match["kind"], int(world) if world else None))
            one.paths[int(match["rank"])] = path
    for one in found.values():
        one.paths = dict(sorted(one.paths.items()))
    return list(found.values())


def example(files: Files) -> str | None:
    """A file of a rank that holds a model or an optimizer, here or in a folder here; None if there is none."""
    own = find(files.list())
    inner = [found for folder in _folders(files) for found in find(files.list(folder)) if found.is_model]
    sets = [found for found in own if found.is_model] or [found for found in own if found.is_optimizer] or inner
    return sets[0].first if sets else None


def open_folder(files: Files) -> RankFolder:
    """The sets of the folder itself.

    Raises: RequestError if they lie in several folders below it; CheckpointError for files of two runs.
    """
    sets = find(files.list())
    models, optimizers = [found for found in sets if found.is_model], [found for found in sets if found.is_optimizer]
    if not models and not optimizers:
        inner = [folder for folder in _folders(files) if any(found.is_model for found in find(files.list(folder)))]
        raise RequestError(
            f"the files of ranks lie in folders here: {', '.join(inner[:4])}" if inner else "there is no file of a rank here",
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{inner[0].rstrip('/')}" if inner else "Give the directory with them",
        )
    worlds = sorted({found.world for found in sets if found.world is not None})
    if len(worlds) > 1:
        raise CheckpointError(
            f"there are files of runs with {' and '.join(map(str, worlds))} ranks",
            where=files.root,
            why="A save replaces the files of its own number of ranks only; which of them is the newer one cannot be seen",
            do="Move the files of the other run away",
        )
    for same in (models, optimizers):
        if len(same) > 1:
            raise CheckpointError(
                f"there are {len(same)} sets of files, such as {' and '.join(found.first for found in same[:2])}",
                where=files.root,
                why="They are of different models, or of different saves",
                do="Give a directory with the files of one of them",
            )
    for found in sets:
        if found.world is not None and (beyond := [path for rank, path in found.paths.items() if rank >= found.world]):
            raise CheckpointError(f"a run of {found.world} ranks has no such rank", where=beyond[0], do="Move the file away")
    others = tuple(found for found in sets if found not in (*models, *optimizers))
    return RankFolder(models[0] if models else None, optimizers[0] if optimizers else None, others)


def missing_ranks(folder: RankFolder, ranks: int, tensors: Sequence[Tensor]) -> Iterator[str]:
    """A note on ranks without a file whose parts others hold, too. Raises CheckpointError if a part is lost with the file."""
    for found in folder.read:
        if missing := [rank for rank in range(ranks) if rank not in found.paths]:
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            whose = f"rank {some}" if len(missing) == 1 else f"ranks {some}"
            paths = set(found.paths.values())
            for tensor in tensors:
                if len(tensor.shards) and tensor.shards.path(0) in paths:
                    try:
                        check_coverage(tensor)
                    except CheckpointError as error:
                        raise CheckpointError(
                            f"of {ranks} ranks, {whose} {'has' if len(missing) == 1 else 'have'} no file beside {found.first}",
                            where=tensor.name,
                            why=error.what,
                            do="Copy the missing files from where the checkpoint was written",
                        ) from None
            yield f"{whose} {'has' if len(missing) == 1 else 'have'} no file beside {found.first}; others hold copies of all that it held"


def check_steps(files: Files, tensors: Sequence[Tensor]) -> None:
    """Raises CheckpointError if the ranks' optimizers are from different steps: seen in one step count per file."""
    for tensor in tensors:
        if tensor.kind == "step" and not tensor.shape and len(tensor.shards) > 1:
            rows: dict[bytes, int] = {}
            for i in range(len(tensor.shards)):
                extent = tensor.shards.extent(i)
                rows.setdefault(read_range(files, extent.path, extent.byte_offset, extent.dtype.itemsize), i)
            if len(rows) > 1:
                first, second = list(rows.values())[:2]
                raise CheckpointError(
                    f"{tensor.shards.path(first)} and {tensor.shards.path(second)} are from different steps of the run",
                    where=tensor.name,
                    why="Their optimizers have counted different numbers of steps, so the weights beside them are not of one moment",
                    do="Keep the files of one save only",
                )
            return


def check_progress(files: Files, others: Sequence[RankFiles]) -> None:
    """Raises CheckpointError if the ranks' learning-rate schedules are at different steps: what they save beside the weights tells."""
    for found in others:
        first: tuple[object, str] | None = None
        for path in found.paths.values():
            root = torch_zip.read(files, path, locate=False)
            schedule = root.get("lr_scheduler") if isinstance(root, Mapping) else None
            if not isinstance(schedule, Mapping) or type(step := schedule.get("last_epoch")) is not int:
                break
            first = first or (step, path)
            if step != first[0]:
                raise CheckpointError(
                    f"its learning-rate schedule is at step {step}, that of {first[1]} at {first[0]}",
                    where=path,
                    why="The ranks' files are from different steps of the run, so the weights beside them are not of one moment",
                    do="Keep the files of one save only",
                )


def step_of(root: str) -> int | None:
    """The step that a folder's name tells: global_step_20, step-20/actor, checkpoint-20."""
    for part in list(filter(None, root.split("/")))[:-3:-1]:
        if match := _STEP.fullmatch(part):
            return int(match[1])
    return None


def _folders(files: Files) -> list[str]:
    return [path for path in files.list() if path.endswith("/")]
