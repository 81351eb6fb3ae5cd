"""A folder with one file per rank: which files belong together, and whether all are there.

    model_world_size_{N}_rank_{r}.pt, optim_world_size_{N}_rank_{r}.pt, pytorch_model_fsdp_{i}_rank{r}.bin, ...rank<r>.pt

Light: a format's `detect` may use it. The checks import what they need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, NoReturn

from reshard.adapter.save_folders import step_of
from reshard.errors import (
    CheckpointError,
    IncompleteError,
    MissingFile,
    MixedSaves,
    RequestError,
    ReshardError,
    TruncatedFile,
    WrongChecksum,
)
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable, value
from reshard.storage.files import Files, files_below

if TYPE_CHECKING:
    from reshard.index.index import Index

# The most missing ranks that a message names.
_NAMED = 8
# Folders of other state of a run: prime-rl's dataloader/rank_0.pt.
_OF_RUN = re.compile(r"rng|random|sched|dataloader|sampler")
# Deeper folders belong to something else; a message needs no more paths.
_DEPTH, _MOST_PATHS = 8, 20_000
# Not those of steps and of element types.
_NUMBER = re.compile(r"(?<!step)(?<!step[-_])(?<!iter_)(?<!checkpoint-)(?<!-ba)(?<!bf)(?<!fp)(?<!\d)(?!\d+-ba\d)\d+")
_PATH = re.compile(r"[\w./*-]*\w")
_OF_RANKS = re.compile(r"rank|expert|consolidated\.|shard-|[^/.\d]_\d+\.(pt|json)$")
_FROM_ONE = re.compile(r"shard-\d|-of-\d")
_SPARSE = re.compile(r"shard-\d|expert")
_RANK = re.compile(r"((?<![a-z])[a-z]{2,3}_)?rank[_.-]?$")
_NAME = re.compile(r"(?P<kind>.*?)(_world_size_(?P<world>\d{1,6}))?[_.-]?rank[_.-]?(?P<rank>\d{1,6})\.(pt|pth|bin|ckpt)")


@mutable
class RankFiles:
    """One file per rank with the same kind of content."""

    kind: str
    """What stands before the rank in the file names: "model", "optim", "pytorch_model_fsdp_0", ..."""
    world: int | None
    """The number of ranks, if the file names tell it."""
    paths: dict[int, str] = field(default_factory=dict)
    """Rank -> path, sorted by rank."""

    @property
    def is_optimizer(self) -> bool:
        """Whether the kind says that the files hold an optimizer's state."""
        return "optim" in self.kind

    @property
    def is_model(self) -> bool:
        """Whether the files may hold a model: the kind names neither an optimizer nor other state of the run."""
        return not self.is_optimizer and not re.search(r"extra|rng|random|sched|data|sampler|train_state", self.kind)

    @property
    def first_item(self) -> tuple[int, str]:
        """The lowest rank that has a file, and its path."""
        return next(iter(self.paths.items()))

    @property
    def first(self) -> str:
        """The path of the lowest rank's file."""
        return self.first_item[1]

    def path_of(self, rank: int) -> str:
        """The path of a rank's file, named as those that are there."""
        folder, slash, name = self.first.rpartition("/")
        match = _NAME.fullmatch(name)
        assert match
        return f"{folder}{slash}{name[: match.start('rank')]}{rank}{name[match.end('rank') :]}"


@value
class RunFiles:
    """All rank files of a folder, which one run has written."""

    model: RankFiles | None
    """The files that hold the model's tensors."""
    optimizer: RankFiles | None
    """The files that hold the optimizer's state."""
    others: tuple[RankFiles, ...]
    """Files with other state of the run: random numbers, schedules."""

    @property
    def with_tensors(self) -> tuple[RankFiles, ...]:
        """The sets that hold tensors of the model or of its optimizer."""
        return tuple(rank_files for rank_files in (self.model, self.optimizer) if rank_files)

    @property
    def other_paths(self) -> tuple[str, ...]:
        """The files of `others`."""
        return tuple(path for rank_files in self.others for path in rank_files.paths.values())

    def paths(self) -> Iterator[str]:
        """All files."""
        for rank_files in self.with_tensors:
            yield from rank_files.paths.values()
        yield from self.other_paths

    def rank_count(self, on_mesh: int) -> int:
        """The number of ranks of the run.

        The file names state it, or it is the larger of `on_mesh`, the ranks of the device mesh, and 1 + the highest rank with a file.
        """
        sets = (*self.with_tensors, *self.others)
        named = next((rank_files.world for rank_files in sets if rank_files.world is not None), None)
        return named or max(on_mesh, 1 + max(rank for rank_files in sets for rank in rank_files.paths))


def rank_file_sets(listing: Sequence[str]) -> list[RankFiles]:
    """The rank files among the paths of one folder, by kind and number of ranks."""
    sets: dict[tuple[str, str | None], RankFiles] = {}
    for path in listing:
        if match := _NAME.fullmatch(path.rpartition("/")[2]):
            world = match["world"]
            rank_files = sets.setdefault((match["kind"], world), RankFiles(match["kind"], int(world) if world else None))
            rank_files.paths[int(match["rank"])] = path
    for rank_files in sets.values():
        rank_files.paths = dict(sorted(rank_files.paths.items()))
    return list(sets.values())


def first_rank_file(files: Files) -> str | None:
    """The lowest rank's file of a model in this folder; else of an optimizer; else of a model in a folder below; else None."""
    here = rank_file_sets(files.list())
    folders = [folder for folder in _folders(files) if not _OF_RUN.search(folder)]
    below = [rank_files for folder in folders for rank_files in rank_file_sets(files.list(folder)) if rank_files.is_model]
    models = [rank_files for rank_files in here if rank_files.is_model]
    candidates = models or [rank_files for rank_files in here if rank_files.is_optimizer] or below
    return candidates[0].first if candidates else None


def run_files(files: Files) -> RunFiles:
    """The rank files of the folder itself.

    Raises: RequestError if the folder has none, or they lie in folders below it; CheckpointError for the files of two runs or two models.
    """
    sets = rank_file_sets(files.list())
    models = [rank_files for rank_files in sets if rank_files.is_model]
    optimizers = [rank_files for rank_files in sets if rank_files.is_optimizer]
    if not models and not optimizers:
        _refuse_without_rank_files(files)
    worlds = sorted({rank_files.world for rank_files in sets if rank_files.world is not None})
    if len(worlds) > 1:
        raise MixedSaves(
            f"there are files of runs with {' and '.join(map(str, worlds))} ranks",
            where=files.root,
            why="A save replaces only the files of its own number of ranks, and the file names do not tell which save is newer",
            do="Move the files of the other run away",
        )
    for same_kind in (models, optimizers):
        if len(same_kind) > 1:
            same_kind[:] = [one for one in same_kind if not all(_is_link_here(files, path) for path in one.paths.values())] or same_kind
        if len(same_kind) > 1:
            _refuse_several_saves(files, same_kind)
            single = all(len(each.paths) == 1 for each in same_kind)
            raise CheckpointError(
                f"there are {len(same_kind)} sets of files, such as {' and '.join(rank_files.first for rank_files in same_kind[:2])}",
                where=files.root,
                why="They are of different models, or of different saves",
                do=f"Give one of the files, such as {same_kind[-1].first}" if single else "Give a directory with the files of one of them",
            )
    for rank_files in sets:
        world = rank_files.world
        if world is not None and (beyond := [path for rank, path in rank_files.paths.items() if rank >= world]):
            raise CheckpointError(f"a run of {world} ranks has no such rank", where=beyond[0], do="Move the file away")
    others = tuple(rank_files for rank_files in sets if not (rank_files.is_model or rank_files.is_optimizer))
    return RunFiles(models[0] if models else None, optimizers[0] if optimizers else None, others)


def _refuse_several_saves(files: Files, sets: Sequence[RankFiles]) -> None:
    """Raises RequestError if the files are of several steps, as their names tell: Composer's ep0-ba4-rank0.pt, ep0-ba8-rank0.pt."""
    steps = sorted((step, one.first) for one in sets if (step := step_of(one.kind)) is not None)
    if len(steps) > 1:
        raise RequestError(
            f"{len(steps)} saves lie here: {', '.join(path for _, path in steps[:4])}{', ...' * (len(steps) > 4)}",
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{steps[-1][1]}",
            id="ambiguous",
        )


def _is_link_here(files: Files, path: str) -> bool:
    """Whether a file is a link to another one of its folder, such as Composer's latest-rank0.pt."""
    place = f"{files.root}/{path}"
    return files.store is None and os.path.islink(place) and not os.path.dirname(os.readlink(place))


def _refuse_without_rank_files(files: Files) -> NoReturn:
    below = [folder for folder in _folders(files) if any(rank_files.is_model for rank_files in rank_file_sets(files.list(folder)))]
    if below:
        raise RequestError(
            f"the rank files lie in folders here: {', '.join(below[:4])}",
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{below[0].rstrip('/')}",
            id="ambiguous" if len(below) > 1 else "not-found",
        )
    raise RequestError("there is no rank's file here", where=files.root, do="Give the directory that holds the ranks' files")


def with_notes_on_missing_ranks(index: Index, run: RunFiles, ranks: int) -> Index:
    """The index, with a note for each set of files in which ranks are missing.

    Raises: CheckpointError if a rank has no file, and a part of a tensor is in no other rank's file.
    """
    from reshard.index.coverage import uncovered

    notes = []
    for rank_files in run.with_tensors:
        if not (missing := first_missing(rank_files.paths, ranks)):
            continue
        paths = set(rank_files.paths.values())
        held = [tensor for tensor in index.tensors if len(tensor.shards) and tensor.shards.path(0) in paths]
        if errors := list(uncovered(held)):
            others = "s" if len(missing) > 2 else ""
            raise MissingFile(
                "the file is not there" + (f", and neither is that of rank{others} {listed(missing[1:])}" if len(missing) > 1 else ""),
                where=rank_files.path_of(missing[0]),
                why=f"{len(errors):,} of {plural(len(held), 'tensor')} lack a part, such as {errors[0].where}: {errors[0].what}",
                do="Copy the missing files from where the checkpoint was written",
            )
        have = f"rank {listed(missing)} of {ranks} has" if len(missing) == 1 else f"ranks {listed(missing)} of {ranks} have"
        copies = "; the files of other ranks hold copies of all their data" if held else ""
        notes.append(f"{have} no file beside {rank_files.first}{copies}")
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, *notes)))


def check_progress(files: Files, others: Sequence[RankFiles]) -> None:
    """Raises CheckpointError if the learning-rate schedules that the ranks save beside their weights are at different steps."""
    from reshard.containers import torch_zip

    for rank_files in others:
        first: tuple[object, str] | None = None
        for path in rank_files.paths.values():
            root = torch_zip.read(files, path, locate=False)
            schedule = root.get("lr_scheduler") if isinstance(root, Mapping) else None
            if not isinstance(schedule, Mapping) or type(step := schedule.get("last_epoch")) is not int:
                break
            first = first or (step, path)
            if step != first[0]:
                raise MixedSaves(
                    f"its learning-rate schedule is at step {step}, the schedule in {first[1]} at step {first[0]}",
                    where=path,
                    why="The ranks' files are from different steps of the run, so their weights are from different moments",
                    do="Keep the files of one save only",
                )


def add_what_is_there(error: CheckpointError, files: Files) -> None:
    """Add to an error about missing or contradicting files which of the ranks' files are there, and which one is not.

    The files are compared with one another by the numbers in their names. Adds nothing where these tell nothing.
    """
    if isinstance(error, TruncatedFile | WrongChecksum):
        return
    paths, is_incomplete = list[str](), isinstance(error, IncompleteError)
    with suppress(ReshardError):  # the first error tells more
        paths = list(islice(files_below(files, "", _DEPTH), _MOST_PATHS))
    families = _families(paths)
    mentioned = set(_PATH.findall(f"{error.where} {error.what} {error.why}"))
    masks = {_mask(path) for path in mentioned}
    lacking = [family for family in families if any(map(family.lacks, mentioned))]
    with_gaps = [family for family in families if family.gaps and (is_incomplete or family.is_line)]
    of_ranks = [family for family in families if is_incomplete and family.is_of_ranks]
    meant = [family for family in of_ranks if _mask(next(iter(family.paths.values()))) in masks]
    if not (chosen := lacking or with_gaps or meant or of_ranks):
        return
    family = chosen[0]
    told = f"{family.told} {'is' if len(family.paths) == 1 else 'are'} there"
    if lacking or not with_gaps:
        told += f", {family.after} is not" if family.is_line and meant and not lacking else ""
        error.why = f"{error.why}; {told}" if error.why else told
        return
    gap, others = family.gaps[0], " and its like" if len(family.gaps) > 1 else ""
    error.why = f"{f'{error.why}. ' if error.why else ''}There is no {gap}; {told}"
    error.do = f"Copy {gap}{others} from where the checkpoint was written"


@value
class _Family:
    """Files whose names differ in their numbers only, in folders and names."""

    paths: dict[tuple[int, ...], str]
    """The numbers -> the path, sorted."""
    last: int = 0
    """The largest number of a rank of this kind in the folder."""
    beside: frozenset[tuple[int, ...]] = frozenset()
    """The numbers of the folders that hold files of another name."""

    @property
    def is_of_ranks(self) -> bool:
        """Whether the numbers are those of ranks, experts or parts, so that the first is 0 or 1."""
        return bool(_OF_RANKS.search(next(iter(self.paths.values()))))

    @property
    def told(self) -> str:
        """The paths: the first ones, and how many others."""
        first = list(self.paths.values())[:_NAMED]
        return ", ".join(first) + (f" and {len(self.paths) - len(first):,} more" if len(self.paths) > len(first) else "")

    @property
    def is_line(self) -> bool:
        """Whether a single number varies, and it is that of a rank."""
        return self.is_of_ranks and sum(len(set(axis)) > 1 for axis in zip(*self.paths, strict=True)) < 2

    @property
    def axis(self) -> int:
        """Which number varies first; the last one, if there is one file."""
        first, last = next(iter(self.paths)), tuple(map(max, zip(*self.paths, strict=True)))
        return next((number for number, pair in enumerate(zip(first, last, strict=True)) if pair[0] != pair[1]), len(first) - 1)

    @property
    def after(self) -> str:
        """The path behind the last one."""
        *_, numbers = self.paths
        return self._path(tuple(number + (at == self.axis) for at, number in enumerate(numbers)))

    @property
    def is_of_folders(self) -> bool:
        """Whether the numbers are those of the folder, a rank's."""
        folder, _, name = next(iter(self.paths.values())).rpartition("/")
        return not _NUMBER.search(name) and "rank" in folder

    @property
    def kind(self) -> tuple[str, str]:
        """The folder, and the name of the number that varies, such as "pp_rank"; the name is empty if the number is not a rank's."""
        folder, _, name = next(iter(self.paths.values())).rpartition("/")
        if self.is_of_folders:
            return _NUMBER.sub("#", folder), ""
        before = _NUMBER.split(name)[max(0, self.axis - len(_NUMBER.findall(folder)))]
        match = _RANK.search(before)
        return folder, match[0] if match else ""

    @property
    def gaps(self) -> tuple[str, ...]:
        """Paths that the others let expect: each number up to the largest if a single one varies, or all combinations of the numbers.

        Not of files that are there only if something is in them: those of DCP, parts of shards, experts of several layers.
        """
        first, at = next(iter(self.paths.values())), self.axis
        axes: list[Sequence[int]] = [sorted(set(axis)) for axis in zip(*self.paths, strict=True)]
        if self.is_line:
            start = min(_FROM_ONE.search(first) is not None, axes[at][0])
            axes[at] = range(start, min(max(axes[at][-1], self.last), start + 2 * len(self.paths)) + 1)
        elif _SPARSE.search(first):
            return ()
        if first.endswith(".distcp") or prod(map(len, axes)) > 2 * len(self.paths):
            return ()
        return tuple(self._path(numbers) for numbers in sorted({*product(*axes), *self.beside}) if numbers not in self.paths)

    def lacks(self, path: str) -> bool:
        """Whether `path` is that of a file of this family that is not there."""
        first = next(iter(self.paths.values()))
        return path not in self.paths.values() and _NUMBER.sub("#", path) == _NUMBER.sub("#", first)

    def _path(self, numbers: tuple[int, ...]) -> str:
        """The path with these numbers, each as long as those of the others."""
        left = iter(numbers)
        return _NUMBER.sub(lambda match: f"{next(left):0{len(match[0])}d}", next(iter(self.paths.values())))


def _mask(path: str) -> str:
    """The name of a file without its numbers."""
    return _NUMBER.sub("*", path.rpartition("/")[2])


def _families(paths: Iterable[str]) -> list[_Family]:
    """The families of numbered files, those with gaps first, then those of ranks."""
    families: dict[str, dict[tuple[int, ...], str]] = {}
    for path in paths:
        if numbers := tuple(map(int, _NUMBER.findall(path))):
            families.setdefault(_NUMBER.sub("#", path), {})[numbers] = path
    listed = [_Family(dict(sorted(family.items()))) for family in families.values()]
    last: dict[tuple[str, str], int] = {}
    folders: dict[str, set[tuple[int, ...]]] = {}
    for family in listed:
        last[family.kind] = max(last.get(family.kind, 0), *(numbers[family.axis] for numbers in family.paths))
        if family.is_of_folders:
            folders.setdefault(family.kind[0], set()).update(family.paths)
    listed = [
        replace(family, last=last[family.kind]) if family.kind[1]
        else replace(family, beside=frozenset(folders[family.kind[0]])) if family.is_of_folders
        else family
        for family in listed
    ]  # fmt: skip
    return sorted(listed, key=lambda family: (not family.gaps, not family.is_of_ranks))


def first_missing(paths: Container[int], ranks: int) -> list[int]:
    """Of the ranks 0..ranks - 1 the first nine that are not in `paths`. A damaged file may claim any number of ranks."""
    return list(islice((rank for rank in range(ranks) if rank not in paths), _NAMED + 1))


def listed(missing: Sequence[int]) -> str:
    """The missing ranks: "1, 3"."""
    return ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")


def _folders(files: Files) -> list[str]:
    return [path for path in files.list() if path.endswith("/")]
